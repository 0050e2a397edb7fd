"""The safetensors file format, without tensors: header out, header in.

Owns I3 (design): bytes in a slot are the bytes of the persisted file, a valid safetensors file whose header comes
first and whose data begins on a page. Knows no torch: dtypes are safetensors' own names, tensors are byte ranges.
Source: the format's specification, github.com/huggingface/safetensors (`README.md`, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from stepfast.errors import CheckpointError

PAGE = 4096
CACHE_LINE = 64
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_INTEGERS = frozenset({int})

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class HeaderInvalid(CheckpointError):
    """These bytes are not the header of a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor's name, safetensors dtype and shape, before it has a place in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor and its byte range, `[begin, end)`, counted from the start of the file."""

    spec: TensorSpec
    begin: int
    end: int


class HeaderPlan:
    """The layout of a file whose tensors stay the same while its metadata changes from save to save.

    The tensors' part of the header and the `constant` metadata are encoded once, as `prefix`; only the `tail` is made
    for each save. Room for that is reserved with slack, so that the data does not move when a number grows by a digit.
    """

    def __init__(self, specs: Sequence[TensorSpec], *, constant: Mapping[str, str], variable_bytes: int) -> None:
        # The format forbids holes, so order alone aligns. Whole cache lines first: a copy to anywhere else takes 1.5
        # times as long, and one odd scalar would push all that follow it there. Then the widest elements first:
        # every tensor stays aligned to its element size.
        # Rows of one shape last: what lies together can be copied together.
        ordered = sorted(
            specs, key=lambda spec: (spec.size_bytes % CACHE_LINE != 0, -DTYPE_BITS[spec.dtype], spec.shape[1:])
        )
        entries: list[str] = []
        offset = 0
        ends: list[int] = []
        for spec in ordered:
            end = offset + spec.size_bytes
            entry = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
            entries.append(f"{json.dumps(spec.name)}:{json.dumps(entry, separators=(',', ':'))}")
            ends.append(end)
            offset = end
        fixed = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in constant.items())
        self._separator = b"," if constant else b""
        body = ("{" + "".join(entry + "," for entry in entries) + '"__metadata__":{' + fixed).encode()
        wanted = 8 + len(body) + variable_bytes + variable_bytes // 4 + 1024
        self.data_begin = -(-wanted // PAGE) * PAGE
        if self.data_begin - 8 > MAX_HEADER_BYTES:
            raise CheckpointError(f"the header of this state is {self.data_begin} bytes, over safetensors' limit")
        self.prefix = (self.data_begin - 8).to_bytes(8, "little") + body
        self.size_bytes = self.data_begin + offset
        begins = [0, *ends][: len(ends)]
        self.places: Sequence[TensorPlace] = tuple(
            TensorPlace(spec=spec, begin=self.data_begin + begin, end=self.data_begin + end)
            for spec, begin, end in zip(ordered, begins, ends, strict=True)
        )

    def tail(self, variable: Mapping[str, str]) -> bytes | None:
        """What follows the prefix up to `data_begin`, or None when the metadata outgrew its room."""
        entries = json.dumps(dict(variable), separators=(",", ":")).encode()[1:] + b"}"
        if variable:
            entries = self._separator + entries
        room = self.data_begin - len(self.prefix)
        return entries.ljust(room, b" ") if len(entries) <= room else None


class Header:
    """A parsed header: where the data begins, where each tensor lies, and the metadata.

    Of many thousand tensors a restore wants the byte ranges alone; all else is made when it is asked for.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str], data_begin: int) -> None:
        """Raises HeaderInvalid when the entries are none, or do not follow each other without overlap or hole."""
        self.metadata = metadata
        self._entries = entries
        self.ranges: Mapping[str, tuple[int, int]] = _ranges(entries, data_begin)
        self.size_bytes = _covered(self.ranges, data_begin)

    @property
    def places(self) -> Mapping[str, TensorPlace]:
        """Each tensor by name, with its dtype and shape."""
        return {
            name: TensorPlace(
                spec=TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"])),
                begin=self.ranges[name][0],
                end=self.ranges[name][1],
            )
            for name, entry in self._entries.items()
        }


def header_bytes(first_eight: bytes) -> int:
    """How many bytes header and length prefix take, from the file's first eight bytes. Raises HeaderInvalid."""
    if len(first_eight) != 8:
        raise HeaderInvalid("the file is shorter than eight bytes")
    length = int.from_bytes(first_eight, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise HeaderInvalid(f"a header of {length} bytes cannot be")
    return 8 + length


def parse_header(data: bytes | memoryview) -> Header:
    """Reads a header (`header_bytes()` long, or more). Raises HeaderInvalid."""
    end = header_bytes(bytes(data[:8]))
    if len(data) < end:
        raise HeaderInvalid("the file ends within its header")
    try:
        entries = json.loads(bytes(data[8:end]))
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise HeaderInvalid("the header's metadata is not text by name")
        return Header(entries, metadata, end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HeaderInvalid(f"the header does not parse: {error}") from error


def _ranges(entries: Mapping[str, Mapping[str, Any]], data_begin: int) -> dict[str, tuple[int, int]]:
    """Each entry's bytes, counted from the start of the file. Of many tensors few have a dtype and shape of their own:
    these are looked at once.
    """
    sizes: dict[str, int] = {}
    ranges = {}
    for name, entry in entries.items():
        kind, offsets = f"{entry['dtype']!r}{entry['shape']!r}", entry["data_offsets"]
        size = sizes.get(kind)
        if size is None:
            size = sizes[kind] = _size(name, entry["dtype"], entry["shape"])
        if type(offsets) is not list or len(offsets) != 2:
            raise HeaderInvalid(f"tensor {name!r} has the offsets {offsets!r}")
        begin, end = offsets
        if type(begin) is not int or type(end) is not int:
            raise HeaderInvalid(f"tensor {name!r} has the offsets {offsets!r}")
        if begin < 0 or end - begin != size:
            raise HeaderInvalid(f"tensor {name!r} has offsets {offsets}, which are not those of {kind}")
        ranges[name] = data_begin + begin, data_begin + end
    return ranges


def _size(name: str, dtype: object, shape: object) -> int:
    """The bytes of such a tensor. Raises HeaderInvalid."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise HeaderInvalid(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not _INTEGERS.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise HeaderInvalid(f"tensor {name!r} has the shape {shape!r}")
    return prod(shape) * bits // 8


def _covered(ranges: Mapping[str, tuple[int, int]], data_begin: int) -> int:
    """The file's size; the ranges must follow each other without overlap or hole."""
    reached = data_begin
    for begin, end in sorted(ranges.values()):
        if begin != reached:
            name = next(name for name, found in ranges.items() if found == (begin, end))
            raise HeaderInvalid(f"tensor {name!r} does not begin where the one before it ends")
        reached = end
    return reached
