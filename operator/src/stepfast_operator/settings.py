"""The operator's settings, from its command line and its environment."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PREFIX = "STEPFAST_OPERATOR_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the operator runs. `namespaces`: none means all of them. A port of None serves nothing."""

    namespaces: tuple[str, ...]
    storage_root: str
    allowed_storage: tuple[str, ...]
    spare_priority_class: str
    metrics_port: int | None
    health_port: int | None
    identity: str
    namespace: str


def parse_settings(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Settings:
    """Options win over STEPFAST_OPERATOR_<OPTION>. Exits with status 2 and a message when one is wrong."""
    given = os.environ if env is None else env
    parser = argparse.ArgumentParser(
        prog="stepfast-operator", description="Reconciles TrainingJobs into gangs of pods."
    )
    parser.add_argument(
        "--watch-namespace", action="append", metavar="NAMESPACE",
        default=[name for name in given.get(f"{_PREFIX}WATCH_NAMESPACE", "").split(",") if name],
        help="reconcile jobs of this namespace alone (repeatable; default: all namespaces)",
    )  # fmt: skip
    parser.add_argument(
        "--storage-root", metavar="URI", default=given.get(f"{_PREFIX}STORAGE_ROOT", ""),
        help="where jobs are saved that name no storageUri: below it <namespace>/<job>/",
    )  # fmt: skip
    parser.add_argument(
        "--allow-storage", action="append", metavar="URI", default=given.get(f"{_PREFIX}ALLOW_STORAGE", "").split(),
        help="another storage that jobs without credentials of their own may name (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--spare-priority-class",
        metavar="NAME",
        default=given.get(f"{_PREFIX}SPARE_PRIORITY_CLASS", ""),
        help="of pods that hold places for gangs to grow into (default: as the job's own pods)",
    )
    parser.add_argument(
        "--metrics-port", type=int, default=given.get(f"{_PREFIX}METRICS_PORT") or None,
        help="serve Prometheus metrics (/metrics)",
    )  # fmt: skip
    parser.add_argument(
        "--health-port", type=int, default=given.get(f"{_PREFIX}HEALTH_PORT") or None,
        help="serve the probes (/healthz, /readyz)",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    return Settings(
        namespaces=tuple(dict.fromkeys(parsed.watch_namespace)),
        storage_root=parsed.storage_root,
        allowed_storage=tuple(parsed.allow_storage),
        spare_priority_class=parsed.spare_priority_class,
        metrics_port=parsed.metrics_port,
        health_port=parsed.health_port,
        identity=given.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        namespace=given.get("POD_NAMESPACE") or "default",
    )
