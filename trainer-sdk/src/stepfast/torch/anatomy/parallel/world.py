"""A process group of ranks that are not there: collectives have the right shapes and no contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepfast.errors import AnatomyError


@contextmanager
def imagined_world(world_size: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of `world_size`, and all of them as one mesh. To be entered before tensors are fake.

    Raises AnatomyError in a process that is a rank already.
    """
    if dist.is_available() and dist.is_initialized():
        raise AnatomyError("this process belongs to a process group: predict for several ranks in a process of its own")
    # Registers the backend "fake"; torch keeps it among its tests' tools, and documents it for this use.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        if dist.is_initialized():  # DeepSpeed ends it itself
            dist.destroy_process_group()
