"""Reads a committed step back, every byte checked (I5): from the node's memory where it is held, else from storage."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from stepfast import catalog
from stepfast.checksum import checksum
from stepfast.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ObjectNotFound,
)
from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_manifest,
    check_part,
    join,
    manifest_path,
)
from stepfast.step import Tier
from stepfast.storage import Store
from stepfast.storage.download import download
from stepfast.storage.localfile import read_at
from stepfast.tensorfile import Header, HeaderInvalid, TensorPlace, header_bytes, parse_header
from stepfast.torch import sharing
from stepfast.torch.dtypes import NATIVE, as_movable, parse_dtype
from stepfast.torch.link import AgentLink
from stepfast.torch.plan import STATE_VERSION, divide, piece_name, row_dimension
from stepfast.torch.sharing import Base
from stepfast.torch.state import rebuild

_AGENT_SECONDS = 60.0
_SUPERSEDE_SECONDS = 120.0
T = TypeVar("T")


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
            )
        )
    return found


def read_record(source: Source, path: str) -> bytes:
    """A manifest or part record, from the persistent tier. Raises ObjectNotFound, StorageError."""
    found = source.fetch(path, refresh=True)
    try:
        return os.pread(found.descriptor, found.size_bytes, found.offset)
    finally:
        os.close(found.descriptor)


class AgentSource:
    """Through the agent, which has the credentials, and the bytes if its memory tier still holds them."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link

    def steps(self) -> Sequence[int]:
        return self._link.client(_AGENT_SECONDS).steps()

    def supersede_after(self, step: int) -> Sequence[int]:
        return self._link.client(_AGENT_SECONDS).supersede_after(step)(_SUPERSEDE_SECONDS)

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

    def fetch(self, path: str, *, refresh: bool) -> Found:
        full = join(self._folder, path)
        descriptor = self._store.open_file(full)
        if descriptor is None:
            with tempfile.TemporaryFile(prefix="stepfast-") as file, ThreadPoolExecutor(4) as threads:
                download(self._store, full, file.fileno(), threads)
                descriptor = os.dup(file.fileno())
        return Found(descriptor=descriptor, offset=0, size_bytes=os.fstat(descriptor).st_size, tier=Tier.PERSISTENT)


class _Mismatch(CheckpointError):
    """Bytes are not those that were saved. Internal: becomes CheckpointDamaged, or another tier is tried."""


class VerifiedFile:
    """One rank's file; a byte is handed out only after its chunk's checksum was found right.

    Chunks are read into private memory first: a slot may be reused, and a disk may fail, between check and copy.
    """

    def __init__(self, found: Found, entry: FileEntry) -> None:
        self.tier = found.tier
        self._entry, self._offset = entry, found.offset
        self._file = open(found.descriptor, "rb", buffering=0)  # noqa: SIM115  # closed with this object
        self._chunk = memoryview(bytearray(min(entry.chunk_bytes, entry.size_bytes)))
        self._held: tuple[int, int] = (-1, 0)  # the chunk that is in memory, and its size
        try:
            if found.size_bytes != entry.size_bytes:
                raise _Mismatch(f"{found.size_bytes} bytes instead of {entry.size_bytes}")
            self.header: Header = parse_header(self._bytes(0, header_bytes(self._bytes(0, 8))))
        except HeaderInvalid as error:
            self._file.close()
            raise _Mismatch(str(error)) from error
        except _Mismatch:
            self._file.close()
            raise

    def tensor(self, place: TensorPlace, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A private copy of a tensor's bytes as that dtype and shape."""
        target = torch.empty(tuple(shape), dtype=dtype)
        if place.end > place.begin:
            flat: Any = target.reshape(-1).view(torch.uint8).numpy()  # a buffer, which numpy's types do not say
            self._read(place.begin, memoryview(flat))
        return target

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()

    def _bytes(self, begin: int, end: int) -> bytes:
        data = bytearray(max(0, min(end, self._entry.size_bytes) - begin))
        self._read(begin, memoryview(data))
        return bytes(data)

    def _read(self, begin: int, target: memoryview) -> None:
        """Fills the target with the file's bytes from `begin` on, verified. Raises _Mismatch."""
        filled, size = 0, self._entry.chunk_bytes
        while filled < len(target):
            index, within = divmod(begin + filled, size)
            chunk = self._verified(index)[within : within + len(target) - filled]
            if not chunk:
                raise _Mismatch(f"it ends before byte {begin + len(target)}")
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)

    def _verified(self, index: int) -> memoryview:
        held, held_bytes = self._held
        if held == index:
            return self._chunk[:held_bytes]
        begin = index * self._entry.chunk_bytes
        chunk = self._chunk[: max(0, min(self._entry.chunk_bytes, self._entry.size_bytes - begin))]
        self._held = (-1, 0)
        try:
            got = read_at(self._file.fileno(), self._offset + begin, chunk)
        except OSError as error:
            raise _Mismatch(f"bytes {begin} to {begin + len(chunk)} cannot be read: {error.strerror}") from error
        if got < len(chunk):
            raise _Mismatch("cut short")
        if len(chunk) and checksum(chunk) != self._entry.checksums[index]:
            raise _Mismatch(f"bytes {begin} to {begin + len(chunk)} are not those that were saved")
        self._held = (index, len(chunk))
        return chunk


class StepReader:
    """One committed step. Raises CheckpointNotFound and CheckpointDamaged (whose `older_step` the caller fills in)."""

    def __init__(self, source: Source, step: int, *, name: str) -> None:
        self._source, self.step, self._name = source, step, name
        self.manifest = self._read_manifest()
        self._entries: Mapping[int, FileEntry] = {
            file.rank: file for part in self._read_parts() for file in part.files if file.name == name
        }
        self._files: dict[int, VerifiedFile] = {}

    def close(self) -> None:
        """Lets all files go."""
        for file in self._files.values():
            file.close()

    @property
    def tier(self) -> Tier:
        """Memory when every file that was read came from there."""
        is_memory = bool(self._files) and all(file.tier is Tier.MEMORY for file in self._files.values())
        return Tier.MEMORY if is_memory else Tier.PERSISTENT

    def read(self, rank: int, *, weights_only: bool) -> tuple[Any, Mapping[str, Any]]:
        """The state that this rank saved, with the replicated tensors gathered from all files; and the document."""
        try:
            return self._attempt(rank, weights_only=weights_only)
        except _MemoryMismatch:
            # The slot was reused while it was read, or its owner wrote into it: storage decides.
            for source, file in list(self._files.items()):
                if file.tier is Tier.MEMORY:
                    self._files.pop(source).close()
            return self._attempt(rank, weights_only=weights_only, refresh=True)

    def _attempt(self, rank: int, *, weights_only: bool, refresh: bool = False) -> tuple[Any, Mapping[str, Any]]:
        own = self._file(rank, refresh)
        document = self._guard(rank, lambda: json.loads(own.header.metadata["stepfast"]))
        if document["version"] != STATE_VERSION:
            raise CheckpointMismatch(f"step {self.step} has the state version {document['version']}")
        values = json.loads(own.header.metadata["values"])
        shared = document["replicated"]
        found = sharing.from_document(document)
        division = dict(zip(shared, divide([found.bases[i] for i in shared], document["worldSize"]), strict=True))
        bases = []
        for index, base in enumerate(found.bases):
            target = _empty(base)
            rows_of = division.get(index)
            if rows_of is None:
                _fill(target, base, self._piece(rank, base, base.name, refresh))
            else:
                for rows in rows_of:
                    piece = self._piece(rows.rank, base, piece_name(base, rows), refresh)
                    is_whole = piece_name(base, rows) == base.name
                    d = row_dimension(base.shape)
                    _fill(
                        target if is_whole else target.narrow(d, rows.begin, rows.end - rows.begin),
                        base,
                        piece,
                    )
            bases.append(target)
        tensors = sharing.materialise(found, bases)
        return rebuild(document["structure"], tensors, values, weights_only=weights_only), document

    def _piece(self, rank: int, base: Base, name: str, refresh: bool) -> torch.Tensor:
        file = self._file(rank, refresh)
        place = file.header.places.get(name)
        if place is None:
            raise self._damaged(rank, f"tensor {name!r} is not in the file")
        dtype = parse_dtype(base.dtype)
        return self._guard(
            rank, lambda: file.tensor(place, dtype if dtype in NATIVE else torch.uint8, place.spec.shape)
        )

    def _file(self, rank: int, refresh: bool) -> VerifiedFile:
        if rank not in self._files:
            entry = self._entries.get(rank)
            if entry is None:
                raise CheckpointNotFound(f"step {self.step} holds no file {self._name!r} of rank {rank}")
            try:
                found = self._source.fetch(entry.path, refresh=refresh)
            except ObjectNotFound as error:
                raise self._damaged(rank, f"missing ({error})") from error
            tier = found.tier
            try:
                self._files[rank] = VerifiedFile(found, entry)
            except _Mismatch as error:
                if tier is Tier.MEMORY:
                    raise _MemoryMismatch from error
                raise self._damaged(rank, str(error)) from error
        return self._files[rank]

    def _guard(self, rank: int, read: Callable[[], T]) -> T:
        try:
            return read()
        except _Mismatch as error:
            if self._files[rank].tier is Tier.MEMORY:
                raise _MemoryMismatch from error
            raise self._damaged(rank, str(error)) from error

    def _damaged(self, rank: int, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(self._entries[rank].path, self.step, reason)

    def _read_manifest(self) -> Manifest:
        path = manifest_path(self.step)
        try:
            return check_manifest(read_record(self._source, path), self.step)
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"step {self.step} is not committed") from error
        except RecordInvalid as error:
            raise CheckpointDamaged(path, self.step, str(error)) from error

    def _read_parts(self) -> list[Part]:
        parts = []
        for ref in self.manifest.parts:
            try:
                parts.append(check_part(ref, read_record(self._source, ref.path)))
            except (RecordInvalid, ObjectNotFound) as error:
                raise CheckpointDamaged(ref.path, self.step, str(error)) from error
        return parts


class _MemoryMismatch(CheckpointError):
    """The memory tier's bytes are not the step's; the storage's may be."""


def _empty(base: Base) -> torch.Tensor:
    dtype = parse_dtype(base.dtype)
    if base.stride is not None:
        return torch.empty_strided(base.shape, base.stride, dtype=dtype)
    return torch.empty(base.shape, dtype=dtype)


def _fill(target: torch.Tensor, base: Base, piece: torch.Tensor) -> None:
    dtype = parse_dtype(base.dtype)
    if dtype in NATIVE:
        target.copy_(piece)
    elif target.numel():
        movable = as_movable(target)
        movable.copy_(piece.view(movable.dtype).reshape(target.shape))
