"""Activations of frozen layers are computed once, by whichever process, and are the same to the bit."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from gangs import be_rank, run_gang, run_gang_that_may_die
from stepfast.torch.elastic_pipeline import ElasticPipeline, split
from stepfast.torch.elastic_pipeline.autocache import AutoCache
from stepfast.torch.elastic_pipeline.cache import RECORD_BYTES, ActivationCache, Memory, OwnMemory, SamplesAreRandom
from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.samples import Samples
from trainings import BATCH, WIDTH, Training, blocks, data, distance, loss, train_alone, train_as_rank

SAMPLES = 50
PAGE = 8
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(SAMPLES, 12, generator=GENERATOR)
torch.manual_seed(5)
LAYERS = [nn.Linear(12, 12) for _ in range(5)]


def memory(rows: int, row_bytes: int = 12 * 4) -> OwnMemory:
    return OwnMemory(rows * (RECORD_BYTES + row_bytes))


class FileMemory(OwnMemory):
    """Of a file, which outlives this process; that may be killed at a write."""

    def __init__(self, path: Path, last_write: int | None = None) -> None:
        super().__init__(path.stat().st_size)
        with path.open("r+b") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0))
        self._left = last_write

    def write(self, begin: int, data: memoryview) -> bool:
        if self._left == 0:
            super().write(begin, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left is not None:
            self._left -= 1
        return super().write(begin, data)


class LostMemory(OwnMemory):
    """Is taken back after so many writes."""

    def __init__(self, size_bytes: int, writes: int) -> None:
        super().__init__(size_bytes)
        self.writes = writes

    def read_into(self, begin: int, target: memoryview) -> bool:
        return super().read_into(begin, target) and self.writes > 0

    def write(self, begin: int, data: memoryview) -> bool:
        self.writes -= 1
        return self.writes >= 0 and super().write(begin, data)


def fetch(numbers: Sequence[int]) -> torch.Tensor:
    return INPUTS[list(numbers)]


def run(begin: int, end: int) -> Any:
    def prefix(value: torch.Tensor) -> torch.Tensor:
        for layer in LAYERS[begin:end]:
            value = torch.tanh(layer(value))
        return value

    return prefix


def begun(rows: int, frozen: int = 3, given: Memory | None = None) -> ActivationCache:
    cache = ActivationCache(memory(rows) if given is None else given, SAMPLES, page_samples=PAGE)
    cache.begin(1, run(0, frozen), fetch)
    return cache


def paged(numbers: Sequence[int], frozen: int = 3) -> torch.Tensor:
    """What a page's batch gives of each sample."""
    rows = []
    for number in numbers:
        first = number // PAGE * PAGE
        with torch.no_grad():
            rows.append(run(0, frozen)(fetch(range(first, min(first + PAGE, SAMPLES))))[number - first])
    return torch.stack(rows)


def test_activations_have_the_same_bits_whichever_batch_asks() -> None:
    numbers = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    one, other = begun(SAMPLES + PAGE), begun(SAMPLES + PAGE)
    whole = one.lookup(numbers, fetch(numbers))
    parts = torch.cat([other.lookup(numbers[i : i + 7], fetch(numbers[i : i + 7])) for i in range(0, SAMPLES, 7)])
    assert torch.equal(whole, parts)
    assert torch.equal(whole, paged(numbers))
    assert one.computed == SAMPLES
    assert torch.equal(one.lookup(numbers, fetch(numbers)), whole)
    assert one.computed == SAMPLES, "what is there is not computed again"


def test_two_processes_share_what_one_has_computed() -> None:
    shared = memory(SAMPLES + PAGE)
    one, other = begun(0, given=shared), begun(0, given=shared)
    numbers = list(range(SAMPLES))
    first = one.lookup(numbers, fetch(numbers))
    assert torch.equal(other.lookup(numbers, fetch(numbers)), first)
    assert (one.computed, other.computed) == (SAMPLES, 0)


def test_rows_grow_with_the_boundary_and_are_those_of_the_input() -> None:
    numbers = list(range(SAMPLES))
    cache = begun(SAMPLES + PAGE)
    cache.lookup(numbers, fetch(numbers))
    fetched = []

    def watched(asked: Sequence[int]) -> torch.Tensor:
        fetched.extend(asked)
        return fetch(asked)

    cache.begin(2, run(0, 5), watched, extend=run(3, 5))
    assert torch.equal(cache.lookup(numbers, fetch(numbers)), paged(numbers, 5))
    assert set(fetched) <= set(range(PAGE)), "but for how a row looks, nothing is computed from inputs"
    cache.begin(3, run(0, 2), fetch)  # fewer layers are frozen again
    assert torch.equal(cache.lookup(numbers, fetch(numbers)), paged(numbers, 2))


@pytest.mark.parametrize("rows", [0, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_what_there_is_no_room_for_is_computed_in_its_batch(rows: int) -> None:
    cache = begun(rows)
    assert cache.covered == rows // PAGE * PAGE
    numbers = [1, 49, 9, 30, 31, 2]
    outside = [number for number in numbers if number >= cache.covered]
    found = cache.lookup(numbers, fetch(numbers))
    with torch.no_grad():
        computed = dict(zip(outside, run(0, 3)(fetch(outside)), strict=True)) if outside else {}
    for number, row in zip(numbers, found, strict=True):
        assert torch.equal(row, computed[number] if number in computed else paged([number])[0])


def test_nests_of_tensors_come_back_as_they_were() -> None:
    def prefix(value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value.double()[:, :3], {"mask": value > 0, "half": value.bfloat16().view(-1, 3, 4)}

    cache = ActivationCache(memory(SAMPLES, 100), SAMPLES, page_samples=PAGE)
    cache.begin(1, prefix, fetch)
    numbers = [7, 3, 20]
    for _ in range(2):
        first, named = cache.lookup(numbers, fetch(numbers))
        wanted, others = prefix(fetch(numbers))
        assert torch.equal(first, wanted)
        assert all(torch.equal(named[name], others[name]) for name in others)


def test_a_sample_that_is_another_one_each_time_is_found_out() -> None:
    cache = begun(SAMPLES + PAGE)
    cache.lookup([1, 2], fetch([1, 2]))
    with pytest.raises(SamplesAreRandom, match="sample 2"):
        cache.lookup([1, 2], fetch([1, 3]))


@pytest.mark.parametrize("writes", range(12))
def test_memory_that_is_taken_back_is_done_without(writes: int) -> None:
    lost = LostMemory((SAMPLES + PAGE) * (RECORD_BYTES + 48), writes)
    cache = begun(0, given=lost)
    for first in range(0, SAMPLES, 10):
        numbers = list(range(first, min(first + 10, SAMPLES)))
        assert torch.allclose(cache.lookup(numbers, fetch(numbers)), paged(numbers), atol=1e-6)
    assert cache.covered == 0


def write_until_killed(path: Path, last: int) -> None:
    """Computes pages into a file, and dies in the middle of that write."""
    begun(0, given=FileMemory(path, last)).lookup(range(SAMPLES), fetch(range(SAMPLES)))


@pytest.mark.parametrize("last", range(6))
def test_what_a_killed_process_had_half_written_is_not_used(last: int, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes((SAMPLES + PAGE) * (RECORD_BYTES + 48)))
    assert run_gang_that_may_die(1, write_until_killed, path, last) is None
    cache = begun(0, given=FileMemory(path))
    numbers = list(range(SAMPLES))
    assert torch.equal(cache.lookup(numbers, fetch(numbers)), paged(numbers))
    assert cache.computed < SAMPLES or last < 3


@pytest.mark.parametrize("options", [{"length": 4}, {"length": 1}, {"length": 2, "schedule": "interleaved"}])
def test_a_training_with_the_cache_is_the_training_without(options: dict[str, Any]) -> None:
    training = Training(
        model=blocks, steps=12, changes={2: 3, 5: 5, 9: 2}, options={**options, "micro_batches": 1, "cache": True}
    )
    expected = train_alone(training)
    for outcome in run_gang(4, train_as_rank, training):
        assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=1e-12)
        assert distance(outcome.weights, expected.weights) < 1e-12


class Counted(Dataset[Any]):
    """Says when it is asked; hidden randomness if that is wanted."""

    def __init__(self, hidden: torch.Generator | None = None) -> None:
        self.inputs, self.targets = data().tensors
        self.hidden = hidden

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        if self.hidden is not None:
            inputs = inputs + torch.randn(WIDTH, generator=self.hidden, dtype=inputs.dtype)
        return inputs, self.targets[index]


def use(samples: Dataset[Any], model: nn.Module, cache: bool | None) -> dict[int, int]:
    """Trains with frozen layers; what was decided."""
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = ElasticPipeline(
        model, optimizer, loss, data=samples, batch_size=BATCH, length=1, micro_batches=1, cache=cache
    )
    pipeline.take(pipeline.shape_for(3))
    for _ in pipeline.epochs(2):
        for _ in pipeline.steps():
            pass
    decided: dict[int, int] = pipeline.state_dict()["cacheCovers"]
    return decided


def rows_computed(folder: Path) -> int:
    """By this rank's frozen layers, of 640 samples in two epochs."""
    be_rank(folder, "cache", 1)
    samples = TensorDataset(*(torch.randn(640, WIDTH, dtype=torch.float64) for _ in range(2)))
    model = blocks().double()
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = ElasticPipeline(
        model, optimizer, loss, data=samples, batch_size=BATCH, length=1, micro_batches=1, cache=True
    )
    pipeline.take(pipeline.shape_for(3))
    count = 0

    def note(module: nn.Module, inputs: Any) -> None:
        nonlocal count
        count += 0 if torch.is_grad_enabled() else len(inputs[0])

    model[0].register_forward_pre_hook(note)
    for _ in pipeline.epochs(2):
        for _ in pipeline.steps():
            pass
    return count


def test_processes_of_a_node_compute_a_sample_once_between_them(tmp_path: Path) -> None:
    rows = run_gang(2, rows_computed, tmp_path)
    # Each alone would come to nearly all of them; two may compute a page at the same moment.
    assert 640 <= sum(rows) < 1.6 * 640, rows
    assert min(rows) > 100, rows


class Endless(Dataset[Any]):
    """More samples than any memory has room for."""

    def __len__(self) -> int:
        return 2**50

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index), dtype=torch.float64), 0


def bytes_asked_for() -> list[int]:
    asked: list[int] = []
    cache = AutoCache(
        split(blocks().double()), Samples(Endless(), seed=0), Messages(), policy=True, memory=asked.append,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.freeze(3)
    assert not cache.is_used([0, 1], torch.zeros(2, WIDTH, dtype=torch.float64), is_first=True)
    return asked


def test_no_more_memory_is_asked_for_than_there_may_be() -> None:
    assert run_gang(1, bytes_asked_for) == [[2**44]]


class Noisy(nn.Module):
    """Random in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + torch.randn_like(x)
        return y


def decide(kind: str) -> Any:
    torch.manual_seed(dist.get_rank())
    match kind:
        case "plain":
            return use(Counted(), blocks().double(), True)
        case "off":
            return use(Counted(), blocks().double(), False)
        case "augmented":
            from trainings import Augmented

            return use(Augmented(), blocks().double(), True)
        case "random layers":
            return use(Counted(), nn.Sequential(*(Noisy() for _ in range(5))).double(), True)
        case _:
            with pytest.raises(RuntimeError, match="looks another way each time") as raised:
                use(Counted(torch.Generator().manual_seed(9)), blocks().double(), True)
            return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("plain", {3: 44}), ("off", {3: 0}), ("augmented", {3: 0}), ("random layers", {3: 0})],
)
def test_what_is_random_is_not_cached(kind: str, expected: dict[int, int]) -> None:
    assert run_gang(2, decide, kind) == [expected] * 2


def test_hidden_randomness_is_an_error_that_says_what_to_do() -> None:
    assert all("give cache=False" in text for text in run_gang(2, decide, "hidden"))
