"""The agent's settings, from its command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the container that this is: versions 2 and 1."""


LEAST_MIRROR_BANDWIDTH = 16 << 20
"""Bytes a second: with less, pieces of several jobs come so rarely that a living agent seems to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """`host` and `port` are where other agents reach this one, which listens there; `credentials`: a folder with
    `tls.crt`, `tls.key` and `ca.crt`; `limit_bytes`: what other nodes' steps may take here.
    """

    host: str
    port: int
    credentials: Path
    bytes_per_second: int
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How this node's agent runs. Sizes in bytes, times in seconds."""

    socket: Path | None
    memory_dir: Path
    memory_limit_bytes: int
    node: str
    kubelet_dir: Path | None = None
    storage_root: str | None = None
    allowed_storage: tuple[str, ...] = ()
    checkpoint_node: bool = False
    mirrors: MirrorSettings | None = None
    metrics_address: str = "127.0.0.1"
    metrics_port: int | None = None
    metadata_endpoint: str | None = None
    spool_folder: Path | None = None
    flush_timeout_seconds: float = 120.0
    adopt_seconds: float = 3.0  # how long ranks of an earlier agent have to come back before all is flushed
    idle_seconds: float = 600.0  # how long a job that nobody runs any more keeps its memory
    remove_memory: bool = False
    storage_deadline_seconds: float = 30.0  # how long one operation is repeated before its failure is told
    retry_limit_seconds: float = 30.0  # the longest pause between two tries to persist or commit a step
    commit_patience_seconds: float = 60.0  # how long other nodes' parts of a step are waited for once it is overtaken


def parse_config(arguments: Sequence[str]) -> Config:
    """Reads the command line; exits with status 2 and a message when it is wrong."""
    parser = argparse.ArgumentParser(prog="stepfast-agent", description="The node's checkpoint agent.")
    parser.add_argument("--socket", type=Path, help="unix socket to serve, for processes of this user")
    _add_cluster_options(parser)
    _add_mirror_options(parser)
    parser.add_argument("--memory-dir", type=Path, required=True, help="folder of a tmpfs, for this agent alone")
    parser.add_argument(
        "--memory-limit", required=True, metavar="BYTES",
        help="of the memory tier; auto: half of what the folder's file system or this container may hold",
    )  # fmt: skip
    parser.add_argument("--node", default=os.environ.get("NODE_NAME"), help="the node's name (default: $NODE_NAME)")
    parser.add_argument("--metrics-port", type=int, help="serve /metrics, /healthz and /readyz on this port")
    parser.add_argument("--metrics-address", default="127.0.0.1", help="of that port (default: 127.0.0.1)")
    parser.add_argument("--spool-dir", type=Path, help="folder for objects that are fetched (default: the system's)")
    parser.add_argument("--flush-timeout", type=float, default=120.0, metavar="SECONDS", help="at the end")
    parser.add_argument("--adopt-timeout", type=float, default=3.0, metavar="SECONDS", help="for ranks to come back")
    parser.add_argument(
        "--idle-timeout", type=float, default=600.0, metavar="SECONDS",
        help="how long a job that nobody runs any more keeps its memory; its process: a fifth of that (default: 600)",
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
        help="the longest pause between two tries to persist a step while the storage fails, beside the time that it "
        "asks to be left alone (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--commit-patience", type=float, default=60.0, metavar="SECONDS",
        help="how long other nodes' parts of a step are waited for once training has gone past it (default: 60)",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    if parsed.socket is None and parsed.kubelet_dir is None:
        parser.error("one of --socket and --kubelet-dir is needed: whom else would it serve?")
    if parsed.kubelet_dir is not None and not parsed.kubelet_dir.is_absolute():
        parser.error("--kubelet-dir must be the kubelet's own, absolute path")
    if not parsed.node:
        parser.error("--node, or the environment variable NODE_NAME, is needed")
    limit = _memory_limit(parser, parsed.memory_limit, parsed.memory_dir)
    return Config(
        socket=parsed.socket,
        memory_dir=parsed.memory_dir,
        memory_limit_bytes=limit,
        mirrors=_mirrors(parser, parsed, limit),
        kubelet_dir=parsed.kubelet_dir,
        storage_root=parsed.storage_root or None,
        allowed_storage=tuple(parsed.allow_storage),
        checkpoint_node=parsed.checkpoint_node,
        metrics_address=parsed.metrics_address,
        node=parsed.node,
        metrics_port=parsed.metrics_port,
        metadata_endpoint=parsed.eviction_notices,
        spool_folder=parsed.spool_dir,
        flush_timeout_seconds=parsed.flush_timeout,
        adopt_seconds=parsed.adopt_timeout,
        idle_seconds=parsed.idle_timeout,
        remove_memory=parsed.remove_memory,
        storage_deadline_seconds=parsed.storage_deadline,
        retry_limit_seconds=parsed.retry_limit,
        commit_patience_seconds=parsed.commit_patience,
    )


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubelet-dir", type=Path, metavar="FOLDER",
        help="serve this node's kubelet as the CSI driver csi.stepfast.dev: its folder, as /var/lib/kubelet",
    )  # fmt: skip
    parser.add_argument("--storage-root", metavar="URI", help="where jobs in pods may store with this agent's identity")
    parser.add_argument(
        "--allow-storage", action="append", default=[], metavar="URI", help="another such storage (repeatable)"
    )
    parser.add_argument(
        "--eviction-notices", metavar="URL",
        help="ask Azure's metadata service there (http://169.254.169.254) whether the node is about to be taken away, "
        "and flush when it is",
    )  # fmt: skip
    parser.add_argument("--checkpoint-node", action="store_true", help="keep this node's CheckpointNode in the cluster")


def _add_mirror_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mirror-port", type=int,
        help="take steps of other nodes of a gang on this port, and have theirs taken by others (default: neither)",
    )  # fmt: skip
    parser.add_argument("--mirror-host", metavar="ADDRESS", help="where others reach this agent (default: $POD_IP)")
    parser.add_argument(
        "--mirror-credentials", type=Path, metavar="FOLDER",
        help="tls.crt, tls.key and ca.crt, by which agents know each other",
    )  # fmt: skip
    parser.add_argument(
        "--mirror-bandwidth", type=int, default=256 << 20, metavar="BYTES",
        help="a second that may go out to others (default: 256 MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--mirror-memory", type=int, metavar="BYTES",
        help="that steps of other nodes may take of the memory tier (default: half of it)",
    )  # fmt: skip


def _mirrors(parser: argparse.ArgumentParser, parsed: argparse.Namespace, memory_limit: int) -> MirrorSettings | None:
    if parsed.mirror_port is None:
        return None
    host = parsed.mirror_host or os.environ.get("POD_IP")
    if not host or parsed.mirror_credentials is None:
        parser.error("--mirror-port needs --mirror-credentials, and --mirror-host or the environment variable POD_IP")
    if parsed.mirror_bandwidth < LEAST_MIRROR_BANDWIDTH:
        parser.error(f"--mirror-bandwidth: at least {LEAST_MIRROR_BANDWIDTH} bytes a second")
    limit = memory_limit // 2 if parsed.mirror_memory is None else parsed.mirror_memory
    return MirrorSettings(
        host=host,
        port=parsed.mirror_port,
        credentials=parsed.mirror_credentials,
        bytes_per_second=parsed.mirror_bandwidth,
        limit_bytes=min(limit, memory_limit),
    )


def _memory_limit(parser: argparse.ArgumentParser, text: str, memory_dir: Path) -> int:
    if text == "auto":
        return automatic_limit(memory_dir)
    if not text.isascii() or not text.isdigit():
        parser.error(f"--memory-limit: {text!r} is neither a number of bytes nor auto")
    return int(text)


def automatic_limit(memory_dir: Path, cgroup_files: Sequence[Path] = CGROUP_LIMITS) -> int:
    """Half of what the folder's file system or this process's cgroup may hold, whichever is less.

    Half, because the memory tier's pages count towards both, as do the agent's processes and whatever else is there.
    """
    memory_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    system = os.statvfs(memory_dir)
    limits = [system.f_blocks * system.f_frsize]
    for path in cgroup_files:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max": none
            limits.append(int(text))
    return min(limits) // 2
