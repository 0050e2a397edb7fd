"""How a user reaches a cluster: by a kubeconfig, as kubectl does, else as the pod that the command runs in.

Needs the extra `cluster`. The operator's own way in (`Kube.connect`) prefers its pod, and knows no contexts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import kube_config

from stepfast_operator.jobcommands.errors import ClusterError, ClusterUnknown

_DEFAULT_KUBECONFIG = "~/.kube/config"
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A cluster and who asks it. `context` is None in a pod; `namespace` is the one that is current there."""

    configuration: client.Configuration
    namespace: str
    context: str | None

    @property
    def name(self) -> str:
        """As errors call the cluster."""
        return f"context {self.context}" if self.context is not None else "this pod's cluster"

    @property
    def server(self) -> str:
        return str(self.configuration.host)


async def access_of(context: str | None = None) -> Access:
    """The cluster of that context, else the current one. Raises ClusterError."""
    configuration = client.Configuration()
    text = os.environ.get("KUBECONFIG") or _DEFAULT_KUBECONFIG
    if _is_there(text):
        return await _by_kubeconfig(text, context, configuration)
    return _in_pod(text, context, configuration)


def _is_there(text: str) -> bool:
    return any(Path(path).expanduser().exists() for path in text.split(os.pathsep) if path)


def _in_pod(looked: str, context: str | None, configuration: client.Configuration) -> Access:
    try:
        if context is not None:
            raise config.ConfigException  # a pod knows its own cluster alone
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call] # theirs
    except config.ConfigException:
        raise ClusterUnknown(
            f"no cluster is configured: there is no {looked}. Point KUBECONFIG to a kubeconfig, as for kubectl "
            "(on Azure `az aks get-credentials` writes one)"
        ) from None
    namespace = _POD_NAMESPACE.read_text(encoding="utf-8").strip() if _POD_NAMESPACE.exists() else "default"
    return Access(configuration=configuration, namespace=namespace, context=None)


async def _by_kubeconfig(text: str, context: str | None, configuration: client.Configuration) -> Access:
    with _translated(text):
        merged = kube_config.KubeConfigMerger(text).config  # type: ignore[no-untyped-call] # theirs
        value = merged.value
        contexts = dict(map(_context, value.get("contexts") or ()))
        chosen = context if context is not None else value.get("current-context")
        if not chosen:
            raise ClusterError(f"{text} has no current context: name one with --context; {_known(contexts)}")
        if chosen not in contexts:
            raise ClusterError(f"{text} has no context {chosen}; {_known(contexts)}")
        loader = kube_config.KubeConfigLoader(  # type: ignore[no-untyped-call] # theirs
            config_dict=merged, config_base_path=None, active_context=chosen
        )
        with _heard() as complaints:
            await loader.load_and_set(configuration)  # type: ignore[no-untyped-call] # theirs
        # A login program that fails is only logged there, and the request would go out without a name.
        if complaints and "BearerToken" not in configuration.api_key and not configuration.cert_file:
            raise ClusterError(f"logging in to context {chosen} failed: {'; '.join(complaints)}")
    return Access(configuration=configuration, namespace=contexts[chosen].get("namespace") or "default", context=chosen)


def _context(node: kube_config.ConfigNode) -> tuple[str, dict[str, str]]:
    """Name and content of a context; the merger keeps each in a node of its own."""
    return str(node.value["name"]), dict(node.value.get("context") or {})


def _known(contexts: dict[str, dict[str, str]]) -> str:
    return f"it has: {', '.join(sorted(contexts))}" if contexts else "it has none"


@contextmanager
def _translated(text: str) -> Iterator[None]:
    try:
        yield
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"{text}: {_line(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError, AttributeError, KeyError) as error:
        # The library walks the file as if it were as it should be.
        raise ClusterError(f"{text} is no kubeconfig: {_line(error)}") from error


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the library logs of a login that failed."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(" ".join(record.getMessage().split()))

    log, listener = logging.getLogger(kube_config.__name__), Listener(logging.WARNING)
    before, log.propagate = log.propagate, False
    log.addHandler(listener)
    try:
        yield lines
    finally:
        log.removeHandler(listener)
        log.propagate = before


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
