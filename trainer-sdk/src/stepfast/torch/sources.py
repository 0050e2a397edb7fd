"""Where a job's committed steps are read from: through the node's agent, or straight from the storage."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from stepfast import catalog
from stepfast.errors import ObjectNotFound
from stepfast.layout import RecordInvalid, check_manifest, join, manifest_path
from stepfast.step import Tier
from stepfast.storage import Store
from stepfast.storage.download import download
from stepfast.storage.localfile import read_at
from stepfast.torch.link import AgentLink
from stepfast.torch.rereading import read_patiently, unreadable

_AGENT_SECONDS = 60.0
_SUPERSEDE_SECONDS = 120.0
_REMOVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object's bytes: in the descriptor's file, from `offset` on. Whoever gets it closes the descriptor."""

    descriptor: int
    offset: int
    size_bytes: int
    tier: Tier


class Source(Protocol):
    """Where a job's steps are read from."""

    def steps(self) -> Sequence[int]:
        """Committed steps, ascending, those with a damaged manifest too: reading one says so. Raises StorageError."""

    def supersede_after(self, step: int) -> Sequence[int]:
        """Marks other runs' committed steps above this one superseded; returns those. Raises StorageError."""

    def set_aside(self, step: int) -> None:
        """Marks a damaged step, it alone, superseded. Raises StorageError."""

    def remove(self, step: int) -> None:
        """Removes a committed step. Raises StorageError."""

    def fetch(self, path: str, *, refresh: bool) -> Found:
        """An object of the job's folder. Raises ObjectNotFound, StorageError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that can be restored: its size in bytes over all ranks, and when it was saved and committed (seconds
    since the epoch).
    """

    step: int
    size_bytes: int
    saved_time: float
    committed_time: float
    tag: str = ""  # what its user calls it; empty: nothing but its number


def committed_steps(source: Source) -> list[CommittedStep]:
    """The steps whose manifest is whole, oldest first. Raises StorageError."""
    found = []
    for step in source.steps():
        try:
            manifest = check_manifest(read_record(source, manifest_path(step)), step)
        except (RecordInvalid, ObjectNotFound):  # damaged, or removed since it was listed
            continue
        found.append(
            CommittedStep(
                step=step,
                size_bytes=manifest.size_bytes,
                saved_time=manifest.saved_time,
                committed_time=manifest.committed_time,
                tag=manifest.tag,
            )
        )
    return found


def read_record(source: Source, path: str) -> bytes:
    """A manifest or part record, from the persistent tier. Raises ObjectNotFound, RecordInvalid when its bytes are
    gone, StorageError.
    """

    def read() -> bytes:
        found = source.fetch(path, refresh=True)
        try:
            record = bytearray(found.size_bytes)
            return bytes(record[: read_at(found.descriptor, found.offset, memoryview(record))])
        except OSError as error:
            raise unreadable(error, f"read {path}") from error
        finally:
            os.close(found.descriptor)

    return read_patiently(read, damage=RecordInvalid)


class AgentSource:
    """Through the agent, which has the credentials, and the bytes if its memory tier still holds them."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link

    def steps(self) -> Sequence[int]:
        return self._link.client(_AGENT_SECONDS).steps()

    def supersede_after(self, step: int) -> Sequence[int]:
        return self._link.client(_AGENT_SECONDS).supersede_after(step)(_SUPERSEDE_SECONDS)

    def set_aside(self, step: int) -> None:
        self._link.client(_AGENT_SECONDS).set_aside(step, _SUPERSEDE_SECONDS)

    def remove(self, step: int) -> None:
        self._link.client(_AGENT_SECONDS).remove(step, _REMOVE_SECONDS)

    def fetch(self, path: str, *, refresh: bool) -> Found:
        fetched, descriptor = self._link.client(_AGENT_SECONDS).fetch(path, refresh=refresh)
        return Found(
            descriptor=descriptor,
            offset=fetched.offset,
            size_bytes=fetched.size_bytes,
            tier=Tier(fetched.tier),
        )


class DirectSource:
    """From the storage."""

    def __init__(self, store: Store, folder: str, *, run: str) -> None:
        self._store, self._folder, self._run = store, folder, run

    def steps(self) -> Sequence[int]:
        return [found.step for found in catalog.committed_steps(self._store, self._folder)]

    def supersede_after(self, step: int) -> Sequence[int]:
        return catalog.supersede_after(self._store, self._folder, step, but_of_run=self._run)

    def set_aside(self, step: int) -> None:
        catalog.set_aside(self._store, self._folder, step)

    def remove(self, step: int) -> None:
        catalog.remove_committed(self._store, self._folder, step)

    def fetch(self, path: str, *, refresh: bool) -> Found:
        full = join(self._folder, path)
        descriptor = self._store.open_file(full)
        if descriptor is None:
            with tempfile.TemporaryFile(prefix="stepfast-") as file, ThreadPoolExecutor(4) as threads:
                download(self._store, full, file.fileno(), threads)
                descriptor = os.dup(file.fileno())
        return Found(descriptor=descriptor, offset=0, size_bytes=os.fstat(descriptor).st_size, tier=Tier.PERSISTENT)
