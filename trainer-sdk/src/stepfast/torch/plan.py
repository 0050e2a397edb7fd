"""What goes into a rank's file and where: built once, used again while names, shapes and dtypes stay.

Replicated tensors are divided over the ranks by bytes, so that N ranks stage 1/N each: every rank computes the same
division from names, shapes and dtypes alone, without a word to the others. All else is each rank's own.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

import torch

from stepfast.references import REFERRED, REFERRING_VERSION, STATE_VERSION, Reference, steps_of, to_text
from stepfast.tensorfile import HeaderPlan, TensorSpec
from stepfast.torch import sharing
from stepfast.torch.dtypes import NATIVE, as_stored, parse_dtype, stored_form
from stepfast.torch.pickled import Skeletons
from stepfast.torch.retrace import Retrace
from stepfast.torch.sharing import Base, Sharing
from stepfast.torch.state import Collected, Found, Json

_shape, _dtype, _pointer = attrgetter("shape"), attrgetter("dtype"), torch.Tensor.data_ptr
_MIN_CUT_BYTES = 64 * 1024  # smaller tensors are not cut into rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows `[begin, end)` of a base, counted along its first dimension that is longer than one."""

    rank: int
    begin: int
    end: int


def divide(bases: Sequence[Base], world_size: int) -> list[list[Rows]]:
    """For each replicated base, which rank saves which of its rows. Deterministic; the same on all ranks."""
    total = sum(_base_bytes(base) for base in bases)
    owned: list[list[Rows]] = []
    reached = 0
    for base in bases:
        size, rows = _base_bytes(base), _row_count(base)
        if size < _MIN_CUT_BYTES or rows <= 1 or world_size == 1:
            middle = reached + size // 2
            rank = min(world_size - 1, middle * world_size // total) if total else 0
            owned.append([Rows(rank=rank, begin=0, end=rows)])
        else:
            row_bytes = size // rows
            cuts = [0]
            for rank in range(1, world_size):
                border = total * rank // world_size - reached
                cuts.append(min(rows, max(cuts[-1], round(border / row_bytes))))
            cuts.append(rows)
            owned.append(
                [
                    Rows(rank=rank, begin=cuts[rank], end=cuts[rank + 1])
                    for rank in range(world_size)
                    if cuts[rank] < cuts[rank + 1]
                ]
            )
        reached += size
    return owned


def piece_name(base: Base, rows: Rows) -> str:
    """The tensor's name in the file of the rank that saves these rows of it."""
    return base.name if rows.end - rows.begin == _row_count(base) else f"{base.name}#rows={rows.begin}:{rows.end}"


def row_dimension(shape: Sequence[int]) -> int:
    """The dimension along which rows are counted."""
    return next((d for d, size in enumerate(shape) if size > 1), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One entry of this rank's file: all of a base, or some rows of it."""

    base: int
    name: str
    rows: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What an entry of the file is made of: which collected tensor (-1: a span of some), and in what form its bytes are
    written: two entries of one tensor in the same form are the same bytes.
    """

    tensor: int
    form: tuple[str, tuple[int, ...], Rows | None]  # dtype, shape of the whole, which rows of it
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Where a file's entries are, in the order of the plan's sources. One value, which another thread finds whole."""

    header: HeaderPlan
    ranges: Sequence[tuple[int, int]]


class SavePlan:
    """The file of one rank for states of one structure."""

    def __init__(
        self, root: object, collected: Collected, structure: Json, names: Sequence[str], replicated: Sequence[bool], *,
        rank: int, world_size: int, replicated_objects: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._tokens = collected.tokens
        # First, as it refuses tensors that have no plain bytes.
        self._sharing = sharing.find_sharing(collected.tensors, names)
        self._signature = Signature(collected.tensors, self._sharing)
        self._retrace = Retrace(root, collected.objects)
        self._rooms = [collected.tensors[placed.skeleton].numel() for placed in collected.objects]
        shared = _replicated_bases(self._sharing, replicated) if world_size > 1 else []
        division = divide([self._sharing.bases[i] for i in shared], world_size)
        self._pieces = _own_pieces(self._sharing, shared, division, rank)
        self.replicated_digest = _digest(self._sharing, shared, world_size) if shared else ""
        document = {
            "version": STATE_VERSION, "worldSize": world_size, "replicated": shared,
            "replicatedObjects": list(replicated_objects),
            "structure": structure,
            **sharing.to_document(self._sharing),
        }  # fmt: skip
        self._document = document
        self._constant = {"stepfast": json.dumps(document, separators=(",", ":"))}
        self.refers: tuple[int, ...] = ()  # older steps whose files hold what this one leaves out
        self._prepare()
        self._lay_out(1024 + 64 * len(collected.values))

    def without(self, references: Mapping[int, Reference]) -> SavePlan:
        """The file that leaves these entries out, by their numbers, and says where they are."""
        plan = copy.copy(self)
        left = {self._pieces[index].name: reference for index, reference in references.items()}
        plan._pieces = [piece for index, piece in enumerate(self._pieces) if index not in references]
        document = {**self._document, "version": REFERRING_VERSION}
        plan._constant = {"stepfast": json.dumps(document, separators=(",", ":")), REFERRED: to_text(left)}
        plan.refers = steps_of(references.values())
        plan._prepare()
        plan._lay_out(self._variable_bytes)
        return plan

    def _prepare(self) -> None:
        self._specs = [self._spec(piece) for piece in self._pieces]
        # Most pieces are collected tensors as they are; only the others are made at each save.
        self._made = [(index, piece) for index, piece in enumerate(self._pieces) if not self._is_as_collected(piece)]
        self._taken = [max(0, self._sharing.bases[piece.base].tensor) for piece in self._pieces]

    def _lay_out(self, variable_bytes: int) -> None:
        self._variable_bytes = variable_bytes
        header = HeaderPlan(self._specs, constant=self._constant, variable_bytes=variable_bytes)
        places = {place.spec.name: place for place in header.places}
        ranges = [(places[piece.name].begin, places[piece.name].end) for piece in self._pieces]
        self.layout = Layout(header=header, ranges=ranges)  # views of slots are made anew when this changes

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.layout.header.size_bytes

    @property
    def header_prefix(self) -> bytes:
        """The file's first bytes, which stay while `layout` does."""
        return self.layout.header.prefix

    def header_tail(self, variable: Mapping[str, str]) -> bytes:
        """What follows them up to the data; makes more room, and a new layout, when the values outgrew theirs."""
        tail = self.layout.header.tail(variable)
        if tail is None:
            self._lay_out(sum(len(json.dumps(value)) for value in variable.values()) + 1024)
            tail = self.layout.header.tail(variable)
        if tail is None:
            raise AssertionError("a layout made to measure does not fit")
        return tail

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to copy, in the order of `layout.ranges`, each as its file shows it."""
        taken: list[torch.Tensor] = list(map(tensors.__getitem__, self._taken))
        for index, piece in self._made:
            taken[index] = self._stored(piece, self._sharing.source(piece.base, tensors))
        return taken

    @property
    def names(self) -> list[str]:
        """The name of each source in the file."""
        return [piece.name for piece in self._pieces]

    @property
    def entries(self) -> list[Entry]:
        """The entries of the file, in the order of `names`."""
        bases = [self._sharing.bases[piece.base] for piece in self._pieces]
        return [
            Entry(tensor=base.tensor, form=(base.dtype, base.shape, piece.rows), size_bytes=spec.size_bytes)
            for base, piece, spec in zip(bases, self._pieces, self._specs, strict=True)
        ]

    def stored_forms(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each source."""
        forms = []
        for piece, spec in zip(self._pieces, self._specs, strict=True):
            dtype = parse_dtype(self._sharing.bases[piece.base].dtype)
            forms.append((dtype if dtype in NATIVE else torch.uint8, spec.shape))
        return forms

    def make_skeletons(self) -> Skeletons:
        """For the next state's objects that only travel pickled, in the room that the layout has for them."""
        return Skeletons(self._rooms)

    def retrace(self, root: object, skeletons: Skeletons) -> Found | None:
        """What another state holds, found quickly, if it is laid out as the plan's; None: collect it to know."""
        found = self._retrace.collect(root, skeletons)
        return found if found is not None and self._signature.holds_for(found.tensors) else None

    def fits(self, collected: Collected) -> bool:
        """Whether the plan holds for another walk's state."""
        return collected.tokens == self._tokens and self._signature.holds_for(collected.tensors)

    def _is_as_collected(self, piece: Piece) -> bool:
        base = self._sharing.bases[piece.base]
        dtype = parse_dtype(base.dtype)
        return piece.rows is None and base.tensor >= 0 and dtype in NATIVE and not dtype.is_complex

    def _stored(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        if piece.rows is not None:
            length = piece.rows.end - piece.rows.begin
            tensor = tensor.narrow(row_dimension(tensor.shape), piece.rows.begin, length)
        return as_stored(tensor)

    def _spec(self, piece: Piece) -> TensorSpec:
        base = self._sharing.bases[piece.base]
        shape = base.shape
        if piece.rows is not None:
            d = row_dimension(shape)
            shape = (*shape[:d], piece.rows.end - piece.rows.begin, *shape[d + 1 :])
        dtype, stored_shape = stored_form(parse_dtype(base.dtype), shape, prod(shape))
        return TensorSpec(name=piece.name, dtype=dtype, shape=stored_shape)


class Signature:
    """What must stay for a plan to hold: shapes, dtypes, and which tensors share memory. Looked at in C, list by list:
    it is part of every save.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], found: Sharing) -> None:
        self._sharing, self._views = found, found.views
        self._shapes, self._dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
        pointers = list(map(_pointer, tensors))
        self._distinct = len(set(pointers))
        first: dict[int, int] = {}
        begun = [first.setdefault(pointer, index) for index, pointer in enumerate(pointers)]
        self._alike = [(index, earlier) for index, earlier in enumerate(begun) if index != earlier]

    def holds_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are laid out as those that it was made of."""
        try:
            if list(map(_shape, tensors)) != self._shapes or list(map(_dtype, tensors)) != self._dtypes:
                return False
            pointers = list(map(_pointer, tensors))
        except RuntimeError:
            return False  # sparse and nested tensors have no shape or address; the next plan refuses them by name
        # The same tensors begin together, and no others: had one more pair met, there would be one address less.
        if len(set(pointers)) != self._distinct or any(pointers[i] != pointers[j] for i, j in self._alike):
            return False
        return all(self._sharing.is_still(view, tensors[index], tensors) for index, view in self._views)


def _replicated_bases(found: Sharing, replicated: Sequence[bool]) -> list[int]:
    """Bases all of whose tensors are replicated."""
    own = {
        place if isinstance(place, int) else place.base
        for place, is_replicated in zip(found.places, replicated, strict=True)
        if not is_replicated
    }
    return [index for index in range(len(found.bases)) if index not in own]


def _own_pieces(found: Sharing, shared: Sequence[int], division: Sequence[Sequence[Rows]], rank: int) -> list[Piece]:
    rows_of = dict(zip(shared, division, strict=True))
    pieces = []
    for index, base in enumerate(found.bases):
        if index not in rows_of:
            pieces.append(Piece(base=index, name=base.name, rows=None))
            continue
        for rows in rows_of[index]:
            if rows.rank == rank:
                is_whole = rows.end - rows.begin == _row_count(base)
                pieces.append(Piece(base=index, name=piece_name(base, rows), rows=None if is_whole else rows))
    return pieces


def _digest(found: Sharing, shared: Sequence[int], world_size: int) -> str:
    layout: list[Any] = [world_size]
    layout += [(base.name, base.dtype, list(base.shape)) for base in (found.bases[i] for i in shared)]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:32]


def _base_bytes(base: Base) -> int:
    return prod(base.shape) * parse_dtype(base.dtype).itemsize


def _row_count(base: Base) -> int:
    if parse_dtype(base.dtype) not in NATIVE:
        return 1  # stored as flat bytes: not cut
    return base.shape[row_dimension(base.shape)] if base.shape else 1
