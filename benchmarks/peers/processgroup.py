"""A process group of one rank, for peers that cannot do without."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


def join_alone() -> None:
    """Makes this process the only rank of a gloo group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", rank=0, world_size=1)
