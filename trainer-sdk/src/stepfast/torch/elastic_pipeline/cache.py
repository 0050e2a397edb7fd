"""AutoCache: activations of the frozen layers, in memory that the processes of a node share.

An activation is always computed in its page, a fixed group of neighbouring samples, as one batch: so it has the same
bits whichever batch asked for it, whichever process computed it, and whether it was computed from the input or from
what the cache held for fewer frozen layers. Which samples are covered follows from the size of the memory alone.

A row of the memory is one sample's. It is written before its record, which says of which generation it is (which
layers are frozen, and since when), from which input it was computed, and the checksum of its bytes; who reads copies
it first and then compares. A half-written row, of a process that was killed or one that is still at it, is never used.
Two processes that compute the same row write the same bytes, so nobody waits for anybody. Memory that was taken back
by whoever lent it is used no more: everything is computed in its batch from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from stepfast.torch.elastic_pipeline.values import Value, leaves, mapped, rebuilt, samples_in
from stepfast.torch.rng import rng_state_kept

log = logging.getLogger("stepfast")

PAGE_SAMPLES = 16
RECORD_BYTES = 64  # generation (8), the input's digest (16), the row's checksum (16); a cache line in all
_GENERATION, _INPUT, _CHECKSUM = slice(0, 8), slice(8, 24), slice(24, 40)

Prefix = Callable[[Value], Value]  # inputs of some samples → their activations
Fetch = Callable[[Sequence[int]], Value]  # numbers of samples → their inputs, as a batch


class SamplesAreRandom(Exception):
    """A sample's input, or the shape of its activation, is not what it is in its page's batch: it cannot be cached."""


class Memory(Protocol):
    """Bytes that are zero where nobody has written; the same ones in all processes of a node."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""

    def read_into(self, begin: int, target: memoryview) -> bool:
        """Fills `target` with those from there on. False: they are lost for ever."""

    def write(self, begin: int, data: memoryview) -> bool:
        """Writes them. False: they are lost for ever, or there is no room any more."""


class OwnMemory:
    """This process' alone."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = memoryview(bytearray(size_bytes))
        self.size_bytes = size_bytes

    def read_into(self, begin: int, target: memoryview) -> bool:
        target[:] = self._bytes[begin : begin + len(target)]
        return True

    def write(self, begin: int, data: memoryview) -> bool:
        self._bytes[begin : begin + len(data)] = data
        return True


@dataclass(frozen=True, slots=True)
class _Looks:
    """Of an activation's tensors: shape of one sample, dtype, and where its bytes are in a row.

    The bytes stand there as they stood in memory: some kernels give other bits when a tensor's dimensions lie in it in
    another order (channels last, a transposition), and rows are extended to what the input would give.
    """

    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int
    order: tuple[int, ...]  # of the dimensions in memory, the samples' first
    is_exact: bool  # False: it was spread in memory; what comes back is not


class ActivationCache:
    """Rows for the first of a data set's samples (`samples`): as many as there is room for."""

    def __init__(self, memory: Memory, samples: int, *, page_samples: int = PAGE_SAMPLES) -> None:
        self._memory, self._samples, self._page_samples = memory, samples, page_samples
        self._generation = self._former = 0
        self._row_bytes = self._room = 0
        self._template: Value = None
        self._looks: list[_Looks] = []
        self.covered = 0
        """Samples that there are rows for: those with smaller numbers."""
        self.computed = 0
        """Activations that this process has computed for rows."""

    def begin(self, generation: int, prefix: Prefix, fetch: Fetch, extend: Prefix | None = None) -> None:
        """From now on rows are `prefix` of the samples' inputs.

        generation: positive; the same in all processes of the node, and of nobody else who ever used this memory.
        extend: makes them out of the rows of the generation before; None: these are of no use.
        """
        self._former, self._former_template, self._former_looks = self._generation, self._template, self._looks
        self._generation, self._prefix, self._fetch = generation, prefix, fetch
        first = _computed(prefix, fetch(self._page(0)))  # what rows look like
        self._template = mapped(first, lambda tensor: None)
        self._looks, row_bytes = _looks_of(leaves(first))
        is_exact = all(look.is_exact for look in self._former_looks)
        self._extend = extend if self._former and row_bytes == self._row_bytes and is_exact else None
        if row_bytes != self._row_bytes:
            self._row_bytes = row_bytes
            rows = self._memory.size_bytes // (RECORD_BYTES + row_bytes)
            self._room = min(rows // self._page_samples * self._page_samples, self._samples)
            self._rows_begin = self._room * RECORD_BYTES
        self.cover(self._room)

    def cover(self, samples: int) -> None:
        """From now on no more than the first of so many are looked up; nor than there is room for."""
        self.covered = min(samples, self._room)

    def lookup(self, numbers: Sequence[int], inputs: Value) -> Value:
        """The activations of these samples, in order, on the host; rows that are missing are computed.

        inputs: of the same samples, on the host. Raises SamplesAreRandom.
        """
        found = torch.empty(len(numbers), self._row_bytes, dtype=torch.uint8)
        self._look_up(numbers, _digests(inputs), found)
        outside = [place for place in range(len(numbers)) if numbers[place] >= self.covered]
        if outside:
            picked = torch.tensor(outside)
            values = _computed(self._prefix, mapped(inputs, lambda tensor: tensor[picked]))
            for place, row in zip(outside, self._packed(values), strict=True):  # in one go it is byte by byte, slowly
                found[place] = row
        return rebuilt(self._template, _parts(found, self._looks))

    def numbers_for_timing(self, count: int) -> Sequence[int]:
        """So many covered samples, of as few pages as there can be: once they are there, to look them up takes what it
        takes later. What nobody has written is not read, and says nothing.
        """
        return [i % self.covered for i in range(count)]

    # ------------------------------------------------------------ rows

    def _look_up(self, numbers: Sequence[int], digests: Sequence[bytes], found: torch.Tensor) -> None:
        missing: dict[int, list[int]] = {}  # places by page
        for place, number in enumerate(numbers):
            if number < self.covered and not self._read(number, digests[place], self._generation, found[place]):
                missing.setdefault(number // self._page_samples, []).append(place)
        for page, places in missing.items():
            if not self.covered:  # lost meanwhile
                return
            rows, inputs = self._compute(page)
            first = page * self._page_samples
            for place in places:
                if inputs[numbers[place] - first] != digests[place]:
                    raise SamplesAreRandom(f"sample {numbers[place]} looks another way each time it is fetched")
                found[place] = rows[numbers[place] - first]

    def _read(self, number: int, digest: bytes | None, generation: int, target: torch.Tensor) -> bool:
        """Copies a row; whether it is one of that generation (and input), and whole."""
        record = bytearray(RECORD_BYTES)  # ahead of the row: what is written after this is not taken
        data = target.numpy().data
        if not self._memory.read_into(number * RECORD_BYTES, memoryview(record)):
            self._lose()
            return False
        if int.from_bytes(record[_GENERATION], "little") != generation:
            return False
        if digest is not None and record[_INPUT] != digest:
            return False
        if not self._memory.read_into(self._rows_begin + number * self._row_bytes, data):
            self._lose()
            return False
        return bool(record[_CHECKSUM] == _digest(data))

    def _compute(self, page: int) -> tuple[torch.Tensor, list[bytes]]:
        """A page's rows, which are written, and the digests of the inputs that they came from."""
        numbers = self._page(page)
        extended = self._extended(numbers)
        if extended is not None:
            rows, digests = extended
        else:
            inputs = self._fetch(numbers)
            digests = _digests(inputs)
            rows = self._packed(_computed(self._prefix, inputs))
        self.computed += len(numbers)
        first, count = numbers[0], min(len(numbers), self._room - numbers[0])
        records = bytearray(count * RECORD_BYTES)
        # Whoever reads now takes neither the old rows nor half of these.
        is_written = self._memory.write(first * RECORD_BYTES, memoryview(bytes(records)))
        data = rows[:count].contiguous().view(-1).numpy().data
        is_written = is_written and self._memory.write(self._rows_begin + first * self._row_bytes, data)
        for i, row in enumerate(rows[:count].numpy()):
            about = self._generation.to_bytes(8, "little") + digests[i] + _digest(row)
            records[i * RECORD_BYTES : i * RECORD_BYTES + len(about)] = about
        if not (is_written and self._memory.write(first * RECORD_BYTES, memoryview(records))):
            self._lose()
        return rows, digests

    def _extended(self, numbers: Sequence[int]) -> tuple[torch.Tensor, list[bytes]] | None:
        """The page out of the rows of the generation before, where all of them are there."""
        if self._extend is None or numbers[-1] >= self._room:
            return None
        rows = torch.empty(len(numbers), self._row_bytes, dtype=torch.uint8)
        records = bytearray(len(numbers) * RECORD_BYTES)
        if not self._memory.read_into(numbers[0] * RECORD_BYTES, memoryview(records)):
            return None
        digests = [bytes(records[i : i + RECORD_BYTES][_INPUT]) for i in range(0, len(records), RECORD_BYTES)]
        known = zip(numbers, digests, rows, strict=True)
        if not all(self._read(number, digest, self._former, row) for number, digest, row in known):
            return None
        values = _computed(self._extend, rebuilt(self._former_template, _parts(rows, self._former_looks)))
        return self._packed(values), digests

    def _packed(self, values: Value) -> torch.Tensor:
        tensors = leaves(values)
        found = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        if found != [(look.shape, look.dtype) for look in self._looks]:
            raise SamplesAreRandom(f"activations are of {found}, the first page's of {self._looks}")
        return _packed(tensors, self._looks)

    def _lose(self) -> None:
        if self._room:
            log.warning("stepfast: the memory for frozen layers' activations is gone: they are computed from now on")
        self.covered = self._room = 0

    def _page(self, page: int) -> Sequence[int]:
        begin = page * self._page_samples
        return range(begin, min(begin + self._page_samples, self._samples))


@torch.no_grad()
def _computed(function: Prefix, inputs: Value) -> Value:
    with rng_state_kept():  # who computes a page is nobody's own choice: what it draws, if anything, is no one's
        return mapped(function(inputs), torch.Tensor.cpu)


def _digests(inputs: Value) -> list[bytes]:
    """Of each sample's input."""
    rows = _packed(leaves(inputs))
    return [_digest(row) for row in rows.numpy()] if rows.shape[1] else [b"\0" * 16] * samples_in(inputs)


def _digest(row: Any) -> bytes:
    return xxhash.xxh3_128_digest(row)


def _packed(tensors: Sequence[torch.Tensor], looks: Sequence[_Looks] = ()) -> torch.Tensor:
    """The samples' bytes, a row each; in the order of `looks`, or as tensors read."""
    orders = [look.order for look in looks] if looks else [tuple(range(tensor.dim())) for tensor in tensors]
    inner = [tensor.detach().permute(*order).contiguous() for tensor, order in zip(tensors, orders, strict=True)]
    flat = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in inner]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _looks_of(tensors: Sequence[torch.Tensor]) -> tuple[list[_Looks], int]:
    found, begin = [], 0
    for tensor in tensors:
        size = tensor[0].nbytes
        order = _order_in_memory(tensor)
        is_exact = tensor.permute(*order).is_contiguous()
        plain = tuple(range(tensor.dim()))
        found.append(
            _Looks(tensor.shape[1:], tensor.dtype, begin, begin + size, order if is_exact else plain, is_exact)
        )
        begin += size
    return found, begin


def _order_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return (0, *sorted(range(1, tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _parts(rows: torch.Tensor, looks: Sequence[_Looks]) -> list[torch.Tensor]:
    found = []
    for look in looks:
        flat = rows[:, look.begin : look.end].contiguous().view(look.dtype)
        inner = flat.view(len(rows), *(look.shape[dim - 1] for dim in look.order[1:]))
        found.append(inner.permute(*(look.order.index(dim) for dim in range(len(look.order)))))
    return found
