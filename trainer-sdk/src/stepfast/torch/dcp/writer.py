"""Where torch.distributed.checkpoint writes to."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stepfast.torch.dcp.metadata import METADATA, PLANNER_DATA, Place, encode
from stepfast.torch.dcp.stager import StepfastStager
from stepfast.torch.tagged import OpenTag, TaggedCheckpoints
from stepfast.torch.writer import Saved


class StepfastStorageWriter(StepfastStager, StorageWriter):
    """Saves to a job's steps; the `checkpoint_id` is the step's tag.

    It is its own stager: `dcp.async_save` needs no other. `step`: what each save is to become, if that is ahead of all
    that the run has saved; None: what its tag says. `marks`: names that the step has beside those of the state, which
    tell something of it to whoever lists them.
    """

    def __init__(self, checkpoints: TaggedCheckpoints, *, step: int | None = None, marks: Sequence[str] = ()) -> None:
        super().__init__()
        self._checkpoints, self._step, self._marks = checkpoints, step, marks
        self._tag: str | None = None
        self.save_id = _new_id()
        """Of the save that is being made; `read_metadata().storage_meta` tells it."""
        self._is_coordinator = False
        self._opened: OpenTag | None = None  # the coordinator's, until it knows what the others wrote
        self.saved: Saved | None = None
        """This rank's newest save: to wait for, and how long it took."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never: torch makes no writer of this kind by itself."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """What the planner is told."""
        return StorageMeta(checkpoint_id=self._tag, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Before each save."""
        self._tag = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self.save_id = _new_id()
        self._opened = None

    # torch says more only to a method whose parameter is called just that.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for what cannot be saved."""
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False cannot be: a step is whole when all ranks agree what is in it")
        if self._tag is None:
            raise ValueError("give save() a checkpoint_id, which is what the step is called: global_step500")
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are: who saves what is the planner's."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stages this rank's items. The coordinator only reads them: it stages them with what it learns at the end.

        Raises StateUnsupported.
        """
        if self._tag is None:
            raise ValueError("write_data() comes after reset()")
        tag, self._tag = self._tag, None
        rank, names = self._checkpoints.environment.rank, _names(plan.items)
        opened = self._checkpoints.open(tag, step=self._step)
        results = []
        for item, name in zip(plan.items, names, strict=True):
            data = planner.resolve_data(item)
            opened.put(name, data.getvalue() if isinstance(data, io.BytesIO) else data.detach(), copy=False)
            size = len(data.getbuffer()) if isinstance(data, io.BytesIO) else data.nbytes
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=Place(rank, name)))
        if self._is_coordinator:
            self._opened = opened
        else:
            self.saved = opened.commit()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Stages the coordinator's share, with the metadata."""
        opened, self._opened = self._opened, None
        if opened is None:
            raise ValueError("finish() comes after write_data()")
        places: dict[MetadataIndex, Place] = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta(checkpoint_id=opened.tag, save_id=self.save_id)
        for name, item in encode(metadata, places).items():
            opened.put(name, item, copy=False)
        for name in self._marks:
            opened.put(name, True)
        self.saved = opened.commit()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StepfastStorageWriter stays in its process: async_checkpointer_type=THREAD; the agent is one"
        )


def _new_id() -> str:
    return str(uuid.uuid4())


def _names(items: Sequence[WriteItem]) -> list[str]:
    """What each item is called in its rank's file: as in the state, with the offset if it is a part that has one."""
    taken, names = {METADATA, PLANNER_DATA}, []
    for item in items:
        offset = item.index.offset
        name = item.index.fqn
        if offset is not None and any(offset):
            name = f"{name}@{','.join(map(str, offset))}"
        while name in taken:
            name += "'"
        taken.add(name)
        names.append(name)
    return names


__all__ = ["StepfastStorageWriter"]
