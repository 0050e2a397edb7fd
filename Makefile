# Everything that a fresh clone needs: `make demo` and `make test` set themselves up.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := .stepfast/demo

.PHONY: venv bytecode demo test test-thorough test-cluster programs images check lint bench bench-core bench-quick bench-frameworks bench-anatomy bench-elastic simulate bench-cluster bench-scale chaos chaos-cluster soak constraints crds protos reference clean

venv: $(READY)

# DeepSpeed builds its operators when they are used. Bytecode is made at once: where nothing may write it later, each
# process of a gang would compile all of torch anew.
$(READY): constraints.txt requirements-dev.in trainer-sdk/pyproject.toml sidecar/pyproject.toml operator/pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	DS_BUILD_OPS=0 VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --constraint constraints.txt \
		--build-constraint constraints.txt -r requirements-dev.in
	@touch $(READY)

# Of ours, too, which the tests' many processes share.
bytecode: venv
	@$(BIN)/python -m compileall -q operator/src sidecar/src trainer-sdk/src

# Trains a small GPT on two ranks, kills one half-way, and shows that nothing is lost.
demo: venv
	@rm -rf $(DEMO)
	@$(BIN)/stepfast run --name demo --nproc-per-node 2 --storage $(DEMO)/checkpoints --summary $(DEMO)/summary.json \
		examples/gpt_stdlib/train.py --steps 300 --save-every 10 --eval-every 100 --crash-at-step 155 --crash-rank 1
	@$(BIN)/stepfast checkpoints list $(DEMO)/checkpoints/local/demo
	@$(BIN)/stepfast checkpoints verify $(DEMO)/checkpoints/local/demo

# Two workers, because most of the suite waits; a file's tests stay together, in their order, and the files in theirs: those
# of few tests that take minutes would else come last. A thread for each: two that spin for work on a processor that they
# share take it from each other.
PYTEST := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: bytecode
	$(NICE) $(PYTEST)

# Cases that take long and vary others (tests/thorough.txt).
test-thorough: bytecode programs images
	$(PYTEST) --thorough
	$(BIN)/python -m pytest tests/cluster --thorough

# On a real Kubernetes: pods, nodes that are lost, the chart and the images. Needs root and Debian's containerd (.ci/run).
test-cluster: bytecode programs images
	$(BIN)/python -m pytest tests/cluster

# Kubernetes and helm, built from Go modules: minutes once, then from the cache. Where that cannot be, tests say so.
programs: venv
	@$(BIN)/python tests/cluster/cluster.py build || [ -z "$$CI" ]

# The images that tests/cluster installs.
images: venv
	@$(BIN)/python tests/cluster/cluster.py build-images || [ -z "$$CI" ]

# What CI runs. A cluster's tests wait most of the time, and so does the making of its images: the others run beside them, and
# give way to them. What takes long is told, for whoever has to make it shorter.
check: venv
	$(MAKE) --jobs 2 lint programs
	PYTEST_ADDOPTS="--durations 40 --durations-min 20 --costs 40" $(MAKE) --jobs 2 --keep-going --output-sync NICE="nice -n 5" test test-cluster

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p stepfast -p stepfast_sidecar -p stepfast_operator -p testcluster -p testcrds -p testchart -p testoperator -p testjobs -p testqueues -p testscale -p testsoak -p benchmarks -m backendcontract -m chaospage
	$(BIN)/lint-imports

# All that docs/performance.md says, measured again beside its peers and limits: hours. Root drops caches for cold reads.
bench: venv
	$(BIN)/python -m benchmarks.suite
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.report

# The main cells alone, beside the strongest peers: about half an hour.
bench-core: venv
	$(BIN)/python -m benchmarks.suite --core
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.report

# Whether all of that works, not how fast: small sizes, results of their own, the page beside them.
bench-quick: venv
	$(BIN)/python -m benchmarks.suite --quick --results .stepfast/bench/quick.jsonl
	$(BIN)/python -m benchmarks.report --results .stepfast/bench/quick.jsonl --out .stepfast/bench/performance.md

# What a save costs in each framework, beside its own ways; written to docs/bench-frameworks.md.
bench-frameworks: venv
	$(BIN)/python -m benchmarks.frameworks

# What estimates of a step's memory are worth, beside the allocator's own peak; written to docs/bench-anatomy.md.
bench-anatomy: venv
	$(BIN)/python -m benchmarks.anatomy

# The elastic pipeline beside a plain one and plain DDP, part by part; written to docs/bench-elastic.md.
bench-elastic: venv
	$(BIN)/python -m benchmarks.elastic

# Goodput of intervals under failure traces, and the traffic of 1,000 and 10,000 nodes: simulated.
simulate: venv
	$(BIN)/python -m benchmarks.simulation

# What a recovery on a real Kubernetes is made of; written to docs/recovery.md.
bench-cluster: venv programs images
	$(BIN)/python -m pytest tests/cluster/bench_recovery.py --timeout 3000

# A thousand jobs with ten thousand pods on nodes that KWOK plays; written to docs/scale.md. Fails when a goal is missed.
bench-scale: venv programs
	PYTHONPATH=tests/chart:tests/contracts $(BIN)/python tests/cluster/bench_scale.py

# 200 seeded kills at random moments and at every effect of a commit; printed, and written into their part of docs/chaos.md.
chaos: venv
	$(BIN)/python tests/chaos/campaign.py --trials 200 --report docs/chaos.md

# The failure matrix on a real Kubernetes, thorough rows and all: hours; written to docs/chaos.md. ROWS="-k network" runs some
# of them; the page keeps what earlier runs in this checkout found of the others.
chaos-cluster: venv programs images
	$(BIN)/python -m pytest tests/cluster/matrix --everything --chaos-page docs/chaos.md $(ROWS)

# Ten jobs for two hours, a random fault a minute: no leak, no lost step; written to docs/soak.md.
soak: venv programs images
	$(BIN)/python -m pytest tests/cluster/soak.py --timeout 0

# Makes docs/api.md out of the CRDs.
reference: venv
	$(BIN)/python docs/reference.py

# What the agent exchanges with the kubelet, from the .proto files beside the code that is made.
protos: venv
	cd sidecar/src && $(abspath $(BIN))/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. stepfast_sidecar/protos/*.proto

# Helm takes CRDs from the chart's own folder: a copy, which a test holds to be one.
crds:
	cp crds/*.yaml charts/stepfast/crds/

# Resolves every pinned version anew.
constraints:
	{ echo "# Every version this workspace is built and tested with. Made by \`make constraints\`; names no address."; \
	  DS_BUILD_OPS=0 $(BIN)/uv pip compile --quiet --no-emit-index-url --no-annotate --no-header --python-version 3.11 --upgrade \
	    --no-emit-package stepfast --no-emit-package stepfast-sidecar --no-emit-package stepfast-operator \
	    requirements-dev.in; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .stepfast build dist
