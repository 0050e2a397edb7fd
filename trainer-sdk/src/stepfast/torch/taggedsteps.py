"""Committed steps as named objects: which there are, and single objects read out of one, wherever its bytes are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from stepfast.errors import CheckpointNotFound
from stepfast.step import Tier
from stepfast.tags import number_in
from stepfast.torch.copying import MapLocation, device_of
from stepfast.torch.reader import StepReader, reading_threads
from stepfast.torch.sources import CommittedStep, Source, committed_steps

FILE_NAME = "state"  # of the file that a rank's objects are in


def newest_of(tag: str, steps: Sequence[CommittedStep]) -> CommittedStep | None:
    """The newest of the steps, oldest first, that has the tag: one that was saved without any goes by its number."""
    tagged = next((found for found in reversed(steps) if found.tag == tag), None)
    return tagged or next((found for found in reversed(steps) if not found.tag and found.step == number_in(tag)), None)


class TaggedSteps:
    """The steps of one job, as `rank` reads them. One step's files stay open until another's are asked for.

    weights_only: True refuses to read objects that only travel pickled, since to read those runs their code.
    """

    def __init__(self, source: Source, *, rank: int, local_world_size: int, weights_only: bool) -> None:
        self._source, self._rank, self._weights_only = source, rank, weights_only
        self._threads = reading_threads(local_world_size)
        self._reader: StepReader | None = None
        self.tier = Tier.PERSISTENT
        """Where the bytes of what was loaded last came from."""

    def steps(self) -> list[CommittedStep]:
        """The steps whose manifest is whole, oldest first. Raises StorageError."""
        found = committed_steps(self._source)
        if self._reader is not None and not any(_is_of(self._reader, step) for step in found):
            self.close()  # it is gone, or another run has saved it anew
        return found

    def latest(self) -> CommittedStep | None:
        """The newest step. Raises StorageError."""
        return max(self.steps(), key=lambda found: found.step, default=None)

    def find(self, tag: str) -> CommittedStep | None:
        """The newest step of that tag. Raises StorageError."""
        return newest_of(tag, self.steps())

    def names(self, step: int) -> list[str]:
        """What this rank saved in the step, or, when it saved nothing, the first rank that did."""
        reader = self._open(step)
        return next((names for rank in self._ranks(reader) if (names := reader.names(rank))), [])

    def ranks(self, step: int) -> Sequence[int]:
        """Those that saved something in the step, ascending."""
        return self._open(step).ranks

    def names_of(self, step: int, rank: int) -> list[str]:
        """What that rank saved in the step."""
        return self._open(step).names(rank)

    def load(self, step: int, name: str, map_location: MapLocation = None, *, weights_only: bool | None = None) -> Any:
        """The object of that name as this rank saved it, or, when it did not, the first rank that has.

        `weights_only`: None: as for all of them. Raises CheckpointNotFound when nobody has, CheckpointDamaged,
        CheckpointUnsafe, StorageError.
        """
        reader = self._open(step)
        rank = next((rank for rank in self._ranks(reader) if name in reader.names(rank)), None)
        if rank is None:
            raise CheckpointNotFound(f"step {step} holds no {name!r}")
        is_careful = self._is_careful(weights_only)
        item = reader.read_objects(rank, [name], device_of(map_location), weights_only=is_careful)[name]
        self.tier = reader.tier
        return item

    def load_from(
        self, step: int, rank: int, names: Collection[str], into: Mapping[str, torch.Tensor], *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What that rank saved under these names, in host memory.

        `into`: tensors that take the bytes of those of their name, and are returned, where they look alike.
        `weights_only`: None: as for all of them. Raises CheckpointNotFound, CheckpointDamaged, CheckpointUnsafe,
        StorageError.
        """
        reader = self._open(step)
        missing = sorted(set(names) - set(reader.names(rank)))
        if missing:
            raise CheckpointNotFound(f"step {step} holds no {missing[0]!r} of rank {rank}")
        is_careful = self._is_careful(weights_only)
        items = reader.read_objects(rank, set(names), device_of("cpu"), weights_only=is_careful, into=into)
        self.tier = reader.tier
        return items

    def close(self) -> None:
        """Lets all files go; what is asked for next opens them again."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _is_careful(self, weights_only: bool | None) -> bool:
        return self._weights_only if weights_only is None else weights_only

    def _ranks(self, reader: StepReader) -> Sequence[int]:
        return sorted(reader.ranks, key=lambda rank: (rank != self._rank, rank))

    def _open(self, step: int) -> StepReader:
        if self._reader is None or self._reader.step != step:
            self.close()
            self._reader = StepReader(self._source, step, name=FILE_NAME, threads=self._threads)
        return self._reader


def _is_of(reader: StepReader, found: CommittedStep) -> bool:
    manifest = reader.manifest
    return (found.step, found.saved_time, found.committed_time) == (
        reader.step, manifest.saved_time, manifest.committed_time,
    )  # fmt: skip
