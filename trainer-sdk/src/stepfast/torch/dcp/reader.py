"""Where torch.distributed.checkpoint reads from."""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from stepfast.errors import CheckpointMismatch, CheckpointNotFound, CheckpointUnsafe
from stepfast.torch.dcp.metadata import METADATA, Place, decode
from stepfast.torch.tagged import TaggedCheckpoints


class StepfastStorageReader(StorageReader):
    """Loads what `StepfastStorageWriter` saved, on any number of ranks; every byte is checked.

    The step is the newest whose tag is the `checkpoint_id`, or `step`; without both the one to go on from, on all ranks
    the same. Tensors of a state that lie in host memory take the bytes directly.

    weights_only: True refuses objects that run code when loaded; None: as `checkpoints` does.
    """

    def __init__(
        self, checkpoints: TaggedCheckpoints, *, step: int | None = None, weights_only: bool | None = None
    ) -> None:
        self._checkpoints, self._wanted = checkpoints, step
        self._weights_only = checkpoints.weights_only if weights_only is None else weights_only
        self._tag: str | None = None
        self.load_id = str(uuid.uuid4())
        """Of the load that is being made."""
        self._step = -1
        self._metadata: Metadata | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never: torch makes no reader of this kind by itself."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Before each load that names one."""
        self._tag = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    # Were they called kwargs, torch would ask again, for what each rank wrote by itself.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the step holds. Raises CheckpointNotFound, CheckpointMismatch (not saved so), CheckpointDamaged,
        StorageError.
        """
        try:
            self._step = step = self._find()
            with self._checkpoints.reading(step) as steps:
                if not any(METADATA in steps.names_of(step, rank) for rank in steps.ranks(step)):
                    raise CheckpointMismatch(f"step {step} was not saved by torch.distributed.checkpoint")
                metadata = decode(lambda name: steps.load(step, name, weights_only=self._weights_only), step=step)
        except BaseException:
            self._tag = None
            raise
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes what `read_metadata` said."""
        # torch says nothing before a load that names no checkpoint: the name is of this one alone.
        self._metadata, self._tag = metadata, None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all that the plan wants, one rank's file after the other. Raises CheckpointMismatch,
        CheckpointDamaged, CheckpointUnsafe, StorageError.
        """
        if self._metadata is None:
            raise ValueError("read_data() comes after set_up_storage_reader()")
        wanted: dict[int, dict[str, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            place: Place = self._metadata.storage_data[item.storage_index]
            wanted[place.rank][place.name].append(item)
        with self._checkpoints.reading(self._step) as steps:
            for rank, items in sorted(wanted.items()):
                places = {id(item): _target(item, planner) for of_name in items.values() for item in of_name}
                into = {name: target for name, (item, *_) in items.items() if (target := places[id(item)]) is not None}
                found = steps.load_from(self._step, rank, list(items), into, weights_only=self._weights_only)
                for name, of_name in items.items():
                    for item in of_name:
                        self._give(item, found[name], places[id(item)], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _find(self) -> int:
        if self._wanted is not None:
            return self._wanted
        found = self._checkpoints.latest() if self._tag is None else self._checkpoints.find(self._tag)
        if found is None:
            raise CheckpointNotFound("there is no committed step" + (f" {self._tag!r}" if self._tag else ""))
        return found.step

    def _give(self, item: ReadItem, found: Any, target: torch.Tensor | None, planner: LoadPlanner) -> None:
        if target is None:
            planner.load_bytes(item, io.BytesIO(self._checked(found)))
            return
        if found is not target:
            part = _part(found, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise CheckpointMismatch(
                    f"{item.dest_index.fqn} has a part of shape {tuple(target.shape)}, for which step {self._step} "
                    f"holds {tuple(part.shape)}"
                )
            with torch.no_grad():
                target.copy_(part)
        planner.commit_tensor(item, target)

    def _checked(self, data: bytes) -> bytes:
        """torch pickles what is no tensor, and its planners read that without a question."""
        if self._weights_only:
            try:
                torch.load(io.BytesIO(data), weights_only=True)
            except pickle.UnpicklingError as error:
                raise CheckpointUnsafe(f"step {self._step} holds objects that run code when loaded: {error}") from error
        return data


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor | None:
    return None if item.type is LoadItemType.BYTE_IO else planner.resolve_tensor(item).detach()


def _part(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, begin, length)
    return tensor


__all__ = ["StepfastStorageReader"]
