"""AutoCache: activations of the frozen layers, in memory that the processes of a node share.

An activation is always computed in its page, a fixed group of neighbouring samples, as one batch: so it has the same
bits whichever batch asked for it, whichever process computed it, and whether it was computed from the input or from
what the cache held for fewer frozen layers. Which samples are covered follows from the size of the memory alone.

A row of the memory is one sample's. It is written before its record, which says of which generation it is (which
layers are frozen, and since when), from which input it was computed, and the checksum of its bytes; who reads copies
it first and then compares. A half-written row, of a process that was killed or one that is still at it, is never used.
Two processes that compute the same row write the same bytes, so nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from stepfast.torch.elastic_pipeline.values import Value, leaves, mapped, rebuilt, samples_in

PAGE_SAMPLES = 16
_WORDS = 8  # of a record: generation, two of the input's digest, two of the row's checksum; a cache line in all
RECORD_BYTES = 8 * _WORDS
_DIGEST_WORDS = 2

Prefix = Callable[[Value], Value]  # inputs of some samples → their activations
Fetch = Callable[[Sequence[int]], Value]  # numbers of samples → their inputs, as a batch


class SamplesAreRandom(Exception):
    """A sample's input is not what it was when its activation was computed: it cannot be cached."""


@dataclass(frozen=True, slots=True)
class _Looks:
    """Of an activation's tensors: shape of one sample, dtype, and where its bytes are in a row."""

    shape: torch.Size
    dtype: torch.dtype
    begin: int
    end: int


class ActivationCache:
    """Rows for the first of a data set's samples: as many as there is room for.

    memory: uint8, one dimension, zero at first; the same in all processes of the node. samples: of the data set.
    """

    def __init__(self, memory: torch.Tensor, samples: int, *, page_samples: int = PAGE_SAMPLES) -> None:
        self._memory, self._samples, self._page_samples = memory, samples, page_samples
        self._generation = self._former = 0
        self._row_bytes = 0
        self._template: Value = None
        self._looks: list[_Looks] = []
        self.covered = 0
        """Samples that there are rows for: those with smaller numbers."""
        self.computed = 0
        """Activations that this process has computed for rows."""

    def begin(self, generation: int, prefix: Prefix, fetch: Fetch, extend: Prefix | None = None) -> None:
        """From now on rows are `prefix` of the samples' inputs.

        generation: positive, larger than those before, of whichever process. extend: makes them out of the rows of
        the generation before; None: these are of no use.
        """
        self._former, self._former_template, self._former_looks = self._generation, self._template, self._looks
        self._generation, self._prefix, self._fetch = generation, prefix, fetch
        first = _computed(prefix, fetch(self._page(0)))  # what rows look like
        self._template = mapped(first, lambda tensor: None)
        self._looks, row_bytes = _looks_of(leaves(first))
        self._extend = extend if self._former and row_bytes == self._row_bytes else None
        if row_bytes != self._row_bytes:
            self._lay_out(row_bytes)

    def _lay_out(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        rows = self._memory.numel() // (RECORD_BYTES + row_bytes)
        self.covered = min(rows // self._page_samples * self._page_samples, self._samples)
        records = self._memory[: self.covered * RECORD_BYTES]
        self._records = records.view(torch.int64).view(self.covered, _WORDS)
        begin = self.covered * RECORD_BYTES
        self._rows = self._memory[begin : begin + self.covered * row_bytes].view(self.covered, row_bytes)

    def lookup(self, numbers: Sequence[int], inputs: Value) -> Value:
        """The activations of these samples, in order, on the host; rows that are missing are computed.

        inputs: of the same samples, on the host. Raises SamplesAreRandom.
        """
        inside = [place for place, number in enumerate(numbers) if number < self.covered]
        digests = _digests(inputs)
        found = torch.empty(len(numbers), self._row_bytes, dtype=torch.uint8)
        self._read_all([numbers[place] for place in inside], [digests[place] for place in inside], found, inside)
        outside = [place for place in range(len(numbers)) if numbers[place] >= self.covered]
        if outside:
            picked = torch.tensor(outside)
            values = _computed(self._prefix, mapped(inputs, lambda tensor: tensor[picked]))
            found[picked] = _packed(leaves(values))
        return self._unpacked(found)

    def read_for_timing(self, numbers: Sequence[int], inputs: Value) -> None:
        """Does what `lookup` does where all rows are there."""
        _digests(inputs)
        inside = [number for number in numbers if number < self.covered]
        rows = self._rows.index_select(0, torch.tensor(inside, dtype=torch.int64))
        list(map(_digest, rows.numpy()))

    # ------------------------------------------------------------ rows

    def _read_all(
        self, numbers: Sequence[int], digests: Sequence[bytes], found: torch.Tensor, places: Sequence[int]
    ) -> None:
        rows, are_valid = self._read(numbers, digests, self._generation)
        if places:
            found[torch.tensor(places)] = rows
        missing = [i for i, is_valid in enumerate(are_valid) if not is_valid]
        pages: dict[int, list[int]] = {}
        for i in missing:
            pages.setdefault(numbers[i] // self._page_samples, []).append(i)
        for page, asked in pages.items():
            computed, inputs = self._compute(page)
            first = page * self._page_samples
            for i in asked:
                if inputs[numbers[i] - first] != digests[i]:
                    raise SamplesAreRandom(f"sample {numbers[i]} looks another way each time it is fetched")
                found[places[i]] = computed[numbers[i] - first]

    def _read(
        self, numbers: Sequence[int], digests: Sequence[bytes] | None, generation: int
    ) -> tuple[torch.Tensor, list[bool]]:
        """Copies of the rows, and which of them are of that generation (and input), and whole."""
        picked = torch.tensor(numbers, dtype=torch.int64)
        records = self._records.index_select(0, picked)  # ahead of the rows: what is written after this is not taken
        rows = self._rows.index_select(0, picked)
        about = records.numpy().view("u1").reshape(len(numbers), RECORD_BYTES)
        are_valid = []
        for i, row in enumerate(rows.numpy()):
            is_ours = int(records[i, 0]) == generation
            is_input = digests is None or about[i, 8:24].tobytes() == digests[i]
            are_valid.append(is_ours and is_input and about[i, 24:40].tobytes() == _digest(row))
        return rows, are_valid

    def _compute(self, page: int) -> tuple[torch.Tensor, list[bytes]]:
        """A page's rows, which are written, and the digests of the inputs that they came from."""
        numbers = self._page(page)
        extended = self._extended(numbers)
        if extended is not None:
            rows, digests = extended
        else:
            inputs = self._fetch(numbers)
            digests = _digests(inputs)
            rows = _packed(leaves(_computed(self._prefix, inputs)))
        self.computed += len(numbers)
        first, count = numbers[0], min(len(numbers), self.covered - numbers[0])
        records = torch.zeros(count, RECORD_BYTES, dtype=torch.uint8)
        for i, row in enumerate(rows[:count].numpy()):
            about = self._generation.to_bytes(8, "little") + digests[i] + _digest(row)
            records[i, : len(about)] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
        self._records[first : first + count, 0] = 0  # whoever reads now takes neither the old row nor half of this
        self._rows[first : first + count] = rows[:count]
        self._records[first : first + count] = records.view(torch.int64)
        return rows, digests

    def _extended(self, numbers: Sequence[int]) -> tuple[torch.Tensor, list[bytes]] | None:
        """The page out of the rows of the generation before, where all of them are there."""
        if self._extend is None or numbers[-1] >= self.covered:
            return None
        first = numbers[0]
        about = self._records[first : first + len(numbers)].clone().numpy().view("u1").reshape(len(numbers), -1)
        rows, are_valid = self._read(numbers, None, self._former)
        if not all(are_valid):
            return None
        values = _computed(self._extend, rebuilt(self._former_template, _parts(rows, self._former_looks)))
        return _packed(leaves(values)), [about[i, 8:24].tobytes() for i in range(len(numbers))]

    def _unpacked(self, rows: torch.Tensor) -> Value:
        return rebuilt(self._template, _parts(rows, self._looks))

    def _page(self, page: int) -> Sequence[int]:
        begin = page * self._page_samples
        return range(begin, min(begin + self._page_samples, self._samples))


@torch.no_grad()
def _computed(function: Prefix, inputs: Value) -> Value:
    return mapped(function(inputs), torch.Tensor.cpu)


def _digests(inputs: Value) -> list[bytes]:
    """Of each sample's input."""
    rows = _packed(leaves(inputs))
    return [_digest(row) for row in rows.numpy()] if rows.shape[1] else [b"\0" * 16] * samples_in(inputs)


def _digest(row: Any) -> bytes:
    return xxhash.xxh3_128_digest(row)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The samples' bytes, a row each."""
    flat = [tensor.detach().contiguous().view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _looks_of(tensors: Sequence[torch.Tensor]) -> tuple[list[_Looks], int]:
    found, begin = [], 0
    for tensor in tensors:
        size = tensor[0].nbytes
        found.append(_Looks(tensor.shape[1:], tensor.dtype, begin, begin + size))
        begin += size
    return found, begin


def _parts(rows: torch.Tensor, looks: Sequence[_Looks]) -> list[torch.Tensor]:
    return [rows[:, look.begin : look.end].contiguous().view(look.dtype).view(len(rows), *look.shape) for look in looks]


__all__ = ["PAGE_SAMPLES", "RECORD_BYTES", "ActivationCache", "Fetch", "Prefix", "SamplesAreRandom"]
