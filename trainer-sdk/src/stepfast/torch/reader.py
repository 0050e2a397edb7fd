"""Reads a committed step back, from the node's memory where it is held, else from the storage; every byte checked (I5).

Bytes are checked once, where they are delivered, if something can take the place of what was half delivered: what is
held in memory is in the storage too. What only the storage has is checked whole before anything of the caller's is
touched, unless the caller has another step to restore then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from stepfast.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, ObjectNotFound
from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_manifest,
    check_part,
    manifest_path,
    step_folder,
)
from stepfast.references import REFERRING_VERSION, STATE_VERSION, Reference, from_metadata, referred_file
from stepfast.step import Tier
from stepfast.torch import sharing, targets
from stepfast.torch.dtypes import NATIVE, as_movable, parse_dtype
from stepfast.torch.plan import Rows, divide, piece_name, row_dimension
from stepfast.torch.rereading import Unreadable, read_patiently
from stepfast.torch.sharing import Base, Sharing
from stepfast.torch.sources import Source, read_record
from stepfast.torch.state import Json, leaves, rebuild, tensors_in
from stepfast.torch.targets import OwnState
from stepfast.torch.verifiedfile import Extent, FileMismatch, VerifiedFile

_MOST_THREADS = 4  # more do not read a memory faster


def reading_threads(local_world_size: int) -> int:
    """How many threads a rank reads with, of the processors that it shares with the other ranks of its node."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, local_world_size)))


class _Piece(NamedTuple):  # one a tensor: a dataclass is made ten times as slowly
    """Some of a base's bytes, `[begin, end)` of a file: all, or (`rows`) a rank's share of a divided one."""

    base: int
    path: str
    begin: int
    end: int
    rows: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What one rank's file says of its state, and where all of its bytes are."""

    document: Mapping[str, Any]
    values: Sequence[Any]
    found: Sharing
    pieces: Sequence[_Piece]
    pickled: Collection[int]  # the bases that pickled objects are made of
    may_hold_pickles: bool


class StepReader:
    """One committed step, and of older ones what it refers to. Raises CheckpointNotFound and CheckpointDamaged (whose
    `older_step` the caller fills in).
    """

    def __init__(self, source: Source, step: int, *, name: str, threads: int = 1) -> None:
        self._source, self.step, self._name = source, step, name
        self.manifest = self._read_manifest()
        files = [file for part in self._read_parts() for file in part.files if file.name == name]
        self._paths: Mapping[int, str] = {file.rank: file.path for file in files}
        self._entries: dict[str, FileEntry] = {file.path: file for file in files}
        self._files: dict[str, VerifiedFile] = {}
        self._references: dict[str, Mapping[str, Reference]] = {}  # by the file that leaves them out
        self._records: dict[str, bytes] = {}  # older steps'
        self._contents: dict[int, _Contents] = {}
        self.has_touched = False
        """Whether the caller's own tensors were written to: they are undefined when `read` failed since."""
        self._is_refreshed = False  # whether the memory tier was found wrong, and is not asked again
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="stepfast-read") if threads > 1 else None

    def close(self) -> None:
        """Lets all files go."""
        for file in self._files.values():
            file.close()
        if self._threads is not None:
            self._threads.shutdown()

    @property
    def tier(self) -> Tier:
        """Memory when every file that was read came from there."""
        return Tier.MEMORY if self._files and self.is_in_memory else Tier.PERSISTENT

    def document(self, rank: int) -> Mapping[str, Any]:
        """What the rank's file says of its state; after `check`."""
        return self._open(rank).document

    def prepare(self, rank: int, *, weights_only: bool) -> None:
        """Opens all that `read` will need, and checks what says where it is. Raises CheckpointUnsafe, too."""
        try:
            self._prepare(rank, weights_only=weights_only)
        except _MemoryMismatch:
            self._leave_memory()
            self._prepare(rank, weights_only=weights_only)

    @property
    def is_in_memory(self) -> bool:
        """Whether the memory tier holds all that was opened."""
        return all(file.tier is Tier.MEMORY for file in self._files.values())

    def check(self, rank: int) -> None:
        """After `prepare`: reads every byte that only the storage has, and delivers none."""
        for source, pieces in _by_path(self._open(rank).pieces).items():
            file, ranges = self._files[source], [(piece.begin, piece.end) for piece in pieces]
            if file.tier is not Tier.MEMORY:
                self._guard(source, partial(VerifiedFile.check, ranges=ranges, threads=self._threads))

    def read(self, rank: int, own: Mapping[str, OwnState], *, weights_only: bool) -> dict[str, Any]:
        """The state that this rank saved, with the replicated tensors gathered from all files.

        Tensors of `own`, the caller's states by object, take their bytes directly where they can: last, so that all
        else that can go wrong has done so by then. What fails after that leaves them undefined (`has_touched`).
        """
        try:
            return self._read(rank, own, weights_only=weights_only)
        except _MemoryMismatch:
            self._leave_memory()
            self._prepare(rank, weights_only=weights_only)
            return self._read(rank, own, weights_only=weights_only)

    @property
    def ranks(self) -> Sequence[int]:
        """Those that have a file in the step, ascending."""
        return sorted(self._paths)

    def names(self, rank: int) -> list[str]:
        """What the rank's state is made of; nothing when it has no file."""
        return [name for name, _ in self._children(rank)] if rank in self._paths else []

    def read_objects(
        self, rank: int, names: Collection[str], device_of: Callable[[str], str], *, weights_only: bool,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Some objects of what this rank saved, which all is read for that they are made of, and no more.

        `into`: for objects that are a tensor the caller's own, which takes the bytes directly, and is returned, where
        it looks alike; it is undefined when reading fails.
        """
        own = {name: OwnState(state=tensor, keeps_flags=True) for name, tensor in (into or {}).items()}
        try:
            return self._read_objects(rank, names, device_of, own, weights_only=weights_only)
        except _MemoryMismatch:
            self._leave_memory()
            return self._read_objects(rank, names, device_of, own, weights_only=weights_only)

    def _children(self, rank: int) -> Sequence[tuple[str, Any]]:
        try:
            contents = self._open(rank)
        except _MemoryMismatch:
            self._leave_memory()
            contents = self._open(rank)
        return [(str(name), child) for name, child in contents.document["structure"][1]]

    def _read_objects(
        self, rank: int, names: Collection[str], device_of: Callable[[str], str], own: Mapping[str, OwnState], *,
        weights_only: bool,
    ) -> dict[str, Any]:  # fmt: skip
        contents = self._open(rank)
        found, values = contents.found, contents.values
        structures = {key: child for key, child in self._children(rank) if key in names}
        if weights_only:
            nothing = [torch.empty(0, dtype=torch.uint8)] * len(found.places)
            for structure in structures.values():
                rebuild(structure, nothing, values, weights_only=True)
        places = [found.places[number] for structure in structures.values() for number in tensors_in(structure)]
        wanted = {place if isinstance(place, int) else place.base for place in places}
        chosen = targets.choose(contents.document["structure"], found, own, contents.pickled)
        bases = {i: chosen[i] if i in chosen else targets.empty(found.bases[i]) for i in wanted}
        self.has_touched = self.has_touched or bool(chosen)
        self._deliver([piece for piece in contents.pieces if piece.base in wanted], bases, found)
        if chosen:
            torch.autograd.graph.increment_version(list(chosen.values()))
        tensors = sharing.materialise(found, bases, chosen, device_of)
        return {
            name: rebuild(structure, tensors, values, weights_only=weights_only)
            for name, structure in structures.items()
        }

    def _leave_memory(self) -> None:
        """The slot was used again while it was read, or its owner wrote into it: the storage decides."""
        self._is_refreshed = True
        self._contents.clear()
        for source, file in list(self._files.items()):
            if file.tier is Tier.MEMORY:
                self._files.pop(source).close()

    # ------------------------------------------------------------ what there is

    def _open(self, rank: int) -> _Contents:
        if rank not in self._contents:
            own = self._file(self._path(rank))
            about, values = own.header.metadata["stepfast"], own.header.metadata["values"]
            document = json.loads(about)
            if document["version"] not in (STATE_VERSION, REFERRING_VERSION):
                raise CheckpointMismatch(f"step {self.step} has the state version {document['version']}")
            found = sharing.from_document(document)
            self._contents[rank] = _Contents(
                document=document,
                values=json.loads(values),
                found=found,
                pieces=self._pieces(rank, document, found),
                pickled=_pickled_bases(document["structure"], found) if '["p",' in about else (),
                may_hold_pickles='["p",' in about or '["pickle",' in about + values,
            )
        return self._contents[rank]

    def _pieces(self, rank: int, document: Mapping[str, Any], found: Sharing) -> list[_Piece]:
        own = self._path(rank)
        shared, ranges = document["replicated"], self._file(own).header.ranges
        division = dict(zip(shared, divide([found.bases[i] for i in shared], document["worldSize"]), strict=True))
        pieces = []
        for index, base in enumerate(found.bases):
            if index not in division:
                span = ranges.get(base.name)
                path, begin, end = (own, *span) if span is not None else self._elsewhere(own, base.name)
                pieces.append(_Piece(index, path, begin, end, None))
                continue
            for rows in division[index]:
                name, path = piece_name(base, rows), self._path(rows.rank)
                span = self._file(path).header.ranges.get(name)
                path, begin, end = (path, *span) if span is not None else self._elsewhere(path, name)
                pieces.append(_Piece(index, path, begin, end, None if name == base.name else rows))
        return pieces

    def _elsewhere(self, path: str, name: str) -> tuple[str, int, int]:
        """Where a tensor is that the file leaves out: another file, and its range there."""
        if path not in self._references:
            try:
                self._references[path] = from_metadata(self._files[path].header.metadata)
            except RecordInvalid as error:
                raise self._damaged(path, str(error)) from error
        reference = self._references[path].get(name)
        if reference is None:
            raise self._damaged(path, f"tensor {name!r} is not in the file")
        if reference.path not in self._entries:
            self._entries[reference.path] = self._referred_entry(reference.path)
        found = self._file(reference.path).header.ranges.get(reference.name)
        if found is None:
            raise self._damaged(reference.path, f"tensor {reference.name!r} is not in the file")
        return (reference.path, *found)

    def _referred_entry(self, path: str) -> FileEntry:
        try:
            return referred_file(path, self.manifest, self._record)
        except RecordInvalid as error:
            raise self._damaged(path, str(error)) from error

    def _record(self, path: str) -> bytes:
        """An older step's manifest or part, read once."""
        if path not in self._records:
            try:
                self._records[path] = read_record(self._source, path)
            except ObjectNotFound as error:
                raise self._damaged(path, str(error)) from error
        return self._records[path]

    def _prepare(self, rank: int, *, weights_only: bool) -> None:
        contents = self._open(rank)
        if weights_only and contents.may_hold_pickles:
            nothing = [torch.empty(0, dtype=torch.uint8)] * len(contents.found.places)
            rebuild(contents.document["structure"], nothing, contents.values, weights_only=True)

    # ------------------------------------------------------------ what it holds

    def _read(self, rank: int, own: Mapping[str, OwnState], *, weights_only: bool) -> dict[str, Any]:
        contents = self._open(rank)
        found, structure = contents.found, contents.document["structure"]
        chosen = targets.choose(structure, found, own, contents.pickled)
        bases = {i: chosen[i] if i in chosen else targets.empty(base) for i, base in enumerate(found.bases)}
        self._deliver([piece for piece in contents.pieces if piece.base not in chosen], bases, found)
        tensors = sharing.materialise(found, bases, chosen)
        root: dict[str, Any] = rebuild(structure, tensors, contents.values, weights_only=weights_only)
        self.has_touched = self.has_touched or bool(chosen)
        self._deliver([piece for piece in contents.pieces if piece.base in chosen], bases, found)
        if chosen:
            torch.autograd.graph.increment_version(list(chosen.values()))
        return root

    def _deliver(self, pieces: Sequence[_Piece], bases: Mapping[int, torch.Tensor], found: Sharing) -> None:
        for path, its_pieces in _by_path(pieces).items():
            self._deliver_of(path, its_pieces, bases, found)

    def _deliver_of(
        self, path: str, pieces: Sequence[_Piece], bases: Mapping[int, torch.Tensor], found: Sharing
    ) -> None:
        """Reads the pieces that one file holds: to their places, or beside them where a place has gaps."""
        extents, beside = [], []
        for piece in pieces:
            size = piece.end - piece.begin
            target = bases[piece.base]
            if piece.rows is not None:
                target = target.narrow(row_dimension(target.shape), piece.rows.begin, piece.rows.end - piece.rows.begin)
            if size != target.nbytes:  # nothing is ever written beyond a tensor
                raise self._damaged(path, f"tensor {found.bases[piece.base].name!r} has {size} bytes")
            if not size:
                continue
            if not target.is_contiguous():
                read = torch.empty(size, dtype=torch.uint8)
                beside.append((target, found.bases[piece.base], read))
                target = read
            extents.append(Extent(piece.begin, piece.end, target.data_ptr()))
        self._guard(path, lambda file: file.read(extents, self._threads))
        for target, base, read in beside:
            _fill(target, base, read)

    def _path(self, rank: int) -> str:
        path = self._paths.get(rank)
        if path is None:
            raise CheckpointNotFound(f"step {self.step} holds no file {self._name!r} of rank {rank}")
        return path

    def _file(self, path: str) -> VerifiedFile:
        if path not in self._files:
            self._guard(path, lambda file: None)
        return self._files[path]

    def _guard(self, path: str, read: Callable[[VerifiedFile], None]) -> None:
        """Has the file read, which is opened for it, and opened anew when the system cannot read it."""

        def attempt() -> None:
            try:
                read(self._opened(path))
            except Unreadable:
                if path in self._files:
                    self._files.pop(path).close()
                raise

        try:
            read_patiently(attempt, damage=FileMismatch)
        except FileMismatch as error:
            if path in self._files and self._files[path].tier is Tier.MEMORY:
                raise _MemoryMismatch from error
            raise self._damaged(path, str(error)) from error

    def _opened(self, path: str) -> VerifiedFile:
        if path not in self._files:
            try:
                found = self._source.fetch(path, refresh=self._is_refreshed)
            except ObjectNotFound as error:
                raise self._damaged(path, f"missing ({error})") from error
            try:
                self._files[path] = VerifiedFile(found, self._entries[path])
            except FileMismatch as error:
                if found.tier is Tier.MEMORY:
                    raise _MemoryMismatch from error
                raise
        return self._files[path]

    def _damaged(self, path: str, reason: str) -> CheckpointDamaged:
        """The damage of a file; of an older step's it says why that is this one's."""
        if not path.startswith(f"{step_folder(self.step)}/"):
            reason = f"{reason} (step {self.step} refers to it)"
        return CheckpointDamaged(path, self.step, reason)

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


def _pickled_bases(structure: Json, found: Sharing) -> set[int]:
    numbers = [number for tag, content in leaves(structure) if tag == "p" for number in content[1]]
    return {place if isinstance(place, int) else place.base for place in map(found.places.__getitem__, numbers)}


def _by_path(pieces: Sequence[_Piece]) -> dict[str, list[_Piece]]:
    by_path: dict[str, list[_Piece]] = {}
    for piece in pieces:
        by_path.setdefault(piece.path, []).append(piece)
    return by_path


def _fill(target: torch.Tensor, base: Base, read: torch.Tensor) -> None:
    """Gives a tensor with gaps the row-major bytes that the file has of it."""
    dtype = parse_dtype(base.dtype)
    movable = target if dtype in NATIVE else as_movable(target)
    with torch.no_grad():
        movable.copy_(read.view(movable.dtype).view(target.shape))
