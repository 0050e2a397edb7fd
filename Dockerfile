# The images of the cluster:
#
#     docker build --target operator -t stepfast/operator:0.1.0 .
#     docker build --target sidecar -t stepfast/sidecar:0.1.0 .
#
# Both hold one virtual environment and no compiler, package cache or torch. They run with a read-only root; /tmp is the one
# folder that they expect to be writable, and the agent its spool and memory folders.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY constraints.txt ./
# Of its own, because Debian's Python takes no packages. --no-build-isolation below: the builder is the pinned one, too.
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --quiet hatchling editables
COPY trainer-sdk trainer-sdk
COPY sidecar sidecar
COPY operator operator
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels ./trainer-sdk ./sidecar ./operator
# Files of the wheels, so that no index is asked for our names. Bytecode is made here: at run time nothing could write it. It is
# not checked against the sources' times, which copying between layers may change.
RUN printf '%s\n' 'set -eu' \
      'python3 -m venv --without-pip /opt/stepfast' \
      '/opt/build/bin/pip --python /opt/stepfast/bin/python3 install --quiet --no-compile "$@"' \
      '/opt/stepfast/bin/python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/stepfast/lib' > /install.sh

FROM build AS operator-environment
RUN sh /install.sh "$(echo /wheels/stepfast-*.whl)[storage,azure]" "$(echo /wheels/stepfast_operator-*.whl)[cluster]"

FROM build AS sidecar-environment
RUN sh /install.sh "$(echo /wheels/stepfast-*.whl)[storage,azure]" "$(echo /wheels/stepfast_sidecar-*.whl)[azure,cluster]"

FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
# HOME: libraries look for their settings there, and the users have none.
ENV PATH=/opt/stepfast/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS operator
LABEL org.opencontainers.image.title="stepfast operator" \
      org.opencontainers.image.description="Reconciles TrainingJobs into gangs of torchrun pods that survive failures."
COPY --from=operator-environment /opt/stepfast /opt/stepfast
USER 65532:65532
ENTRYPOINT ["stepfast-operator"]

FROM runtime AS sidecar
LABEL org.opencontainers.image.title="stepfast sidecar" \
      org.opencontainers.image.description="The node's checkpoint agent: memory tier, asynchronous persistence, commits."
COPY --from=sidecar-environment /opt/stepfast /opt/stepfast
# Root without capabilities: the kubelet's folders, where pods' sockets are put, are root's.
USER 0:0
ENTRYPOINT ["stepfast-agent"]
