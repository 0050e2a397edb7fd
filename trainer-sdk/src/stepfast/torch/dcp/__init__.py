"""torch.distributed.checkpoint with Stepfast's steps: FSDP, tensor parallel and any other sharded state.

    checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK)
    writer, reader = StepfastStorageWriter(checkpoints), StepfastStorageReader(checkpoints)

    if checkpoints.latest() is not None:
        dcp.load(state, storage_reader=reader)
    ...
    dcp.save(state, checkpoint_id=f"global_step{step}", storage_writer=writer)

Each rank's shards go through its slot as they are, what all ranks share by one of them; a step is loaded on any number
of ranks. `dcp.save` returns when the bytes are in memory; `dcp.async_save` returns when they are copied, before the
ranks have agreed on anything.
"""

from __future__ import annotations

from stepfast.torch.dcp.reader import StepfastStorageReader
from stepfast.torch.dcp.stager import StepfastStager
from stepfast.torch.dcp.writer import StepfastStorageWriter
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

__all__ = ["Sharing", "StepfastStager", "StepfastStorageReader", "StepfastStorageWriter", "TaggedCheckpoints"]
