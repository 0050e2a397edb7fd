"""The agent's settings, from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How this node's agent runs. Sizes in bytes, times in seconds."""

    socket: Path
    memory_dir: Path
    memory_limit_bytes: int
    node: str
    metrics_port: int | None = None
    spool_folder: Path | None = None
    flush_timeout_seconds: float = 120.0
    adopt_seconds: float = 3.0  # how long ranks of an earlier agent have to come back before all is flushed
    idle_seconds: float = 600.0  # how long a job that nobody runs any more keeps its memory and its persister
    remove_memory: bool = False
    storage_deadline_seconds: float = 30.0  # how long one operation is repeated before its failure is told
    retry_limit_seconds: float = 30.0  # the longest pause between two tries to persist or commit a step
    commit_patience_seconds: float = 60.0  # how long other nodes' parts of a step are waited for once it is overtaken


def parse_config(arguments: Sequence[str]) -> Config:
    """Reads the command line; exits with status 2 and a message when it is wrong."""
    parser = argparse.ArgumentParser(prog="stepfast-agent", description="The node's checkpoint agent.")
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to serve")
    parser.add_argument("--memory-dir", type=Path, required=True, help="folder of a tmpfs, for this agent alone")
    parser.add_argument("--memory-limit", type=int, required=True, metavar="BYTES", help="of the memory tier")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port of 127.0.0.1")
    parser.add_argument("--spool-dir", type=Path, help="folder for objects that are fetched (default: the system's)")
    parser.add_argument("--flush-timeout", type=float, default=120.0, metavar="SECONDS", help="at the end")
    parser.add_argument("--adopt-timeout", type=float, default=3.0, metavar="SECONDS", help="for ranks to come back")
    parser.add_argument(
        "--idle-timeout", type=float, default=600.0, metavar="SECONDS",
        help="how long a job that nobody runs any more keeps its memory and its persister (default: 600)",
    )  # fmt: skip
    parser.add_argument(
        "--remove-memory",
        action="store_true",
        help="remove the memory folder at the end, once all is persisted",
    )
    parser.add_argument(
        "--storage-deadline", type=float, default=30.0, metavar="SECONDS",
        help="how long a failing storage operation is repeated before the job's status says why (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-limit", type=float, default=30.0, metavar="SECONDS",
        help="the longest pause between two tries to persist a step while the storage fails (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--commit-patience", type=float, default=60.0, metavar="SECONDS",
        help="how long other nodes' parts of a step are waited for once training has gone past it (default: 60)",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    if parsed.memory_limit < 0:
        parser.error("--memory-limit must not be negative")
    return Config(
        socket=parsed.socket,
        memory_dir=parsed.memory_dir,
        memory_limit_bytes=parsed.memory_limit,
        node=parsed.node,
        metrics_port=parsed.metrics_port,
        spool_folder=parsed.spool_dir,
        flush_timeout_seconds=parsed.flush_timeout,
        adopt_seconds=parsed.adopt_timeout,
        idle_seconds=parsed.idle_timeout,
        remove_memory=parsed.remove_memory,
        storage_deadline_seconds=parsed.storage_deadline,
        retry_limit_seconds=parsed.retry_limit,
        commit_patience_seconds=parsed.commit_patience,
    )
