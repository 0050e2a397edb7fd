"""The ranks' shares make one order of batches, whatever the number of ranks, and go on behind what was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from stepfast.torch import GlobalBatchSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the order of batches follows from."""

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def smallest_batch(self) -> int:
        rest = self.length % self.batch_size
        return rest if rest and not self.drop_last else self.batch_size

    def on(self, rank: int, world_size: int) -> GlobalBatchSampler:
        return GlobalBatchSampler(
            self.length, self.batch_size, seed=self.seed, shuffle=self.shuffle, drop_last=self.drop_last, rank=rank,
            world_size=world_size,
        )  # fmt: skip

    def gang(self, world_size: int) -> list[GlobalBatchSampler]:
        return [self.on(rank, world_size) for rank in range(world_size)]

    def batches(self, count: int) -> list[list[int]]:
        """The first ones, as one rank has them."""
        sampler, found = self.on(0, 1), list[list[int]]()
        while len(found) < count:
            for batch in sampler:
                found.append(batch)
                sampler.advance()
        return found[:count]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    length = draw(st.integers(1, 60))
    drop_last = draw(st.booleans())
    batch_size = draw(st.integers(1, length if drop_last else length + 10))
    return Order(
        length=length, batch_size=batch_size, seed=draw(st.integers(0, 5)), shuffle=draw(st.booleans()),
        drop_last=drop_last,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """So many ranks train on so many batches, then save; they draw and train on some more, which is lost."""

    world_size: int
    trained: int
    ahead: int
    lost: int


def attempts(most: int) -> st.SearchStrategy[list[Attempt]]:
    some = st.integers(0, 7)
    one = st.builds(Attempt, world_size=st.integers(1, most), trained=some, ahead=some, lost=some)
    return st.lists(one, min_size=1, max_size=5)


class Drawing:
    """Takes batches of a sampler as a DataLoader does: some ahead of those that it hands out."""

    def __init__(self, sampler: GlobalBatchSampler, ahead: int) -> None:
        self._sampler, self._ahead = sampler, ahead
        self._batches: Iterator[list[int]] = iter(())
        self._waiting: list[list[int]] = []

    def next_batch(self) -> list[int]:
        self._fill()
        if not self._waiting:
            self._batches = iter(self._sampler)
            self._fill()
        return self._waiting.pop(0)

    def _fill(self) -> None:
        while len(self._waiting) <= self._ahead and (batch := next(self._batches, None)) is not None:
            self._waiting.append(batch)


@settings(max_examples=300)
@given(data=st.data(), order=orders())
def test_the_shares_of_all_ranks_are_the_one_global_order(data: st.DataObject, order: Order) -> None:
    steps = data.draw(attempts(most=min(8, order.smallest_batch)))
    state = order.on(0, 1).state_dict()
    committed = []
    for attempt in steps:
        gang = order.gang(attempt.world_size)
        for sampler in gang:
            sampler.load_state_dict(state)
        drawing = [Drawing(sampler, attempt.ahead) for sampler in gang]
        for number in range(attempt.trained + attempt.lost):
            if number == attempt.trained:
                state = gang[0].state_dict()
            parts = [rank.next_batch() for rank in drawing]
            if number < attempt.trained:
                committed.append([index for part in parts for index in part])
            lengths = [len(part) for part in parts]
            assert max(lengths) - min(lengths) <= 1
            assert [sampler.weight for sampler in gang] == pytest.approx(
                [length * attempt.world_size / sum(lengths) for length in lengths]
            )
            for sampler in gang:
                sampler.advance()
        if not attempt.lost:
            state = gang[0].state_dict()
        assert state["position"] == len(committed)
    assert committed == order.batches(len(committed))


@settings(max_examples=100)
@given(order=orders())
def test_an_epoch_has_every_sample_at_most_once_and_all_where_none_is_dropped(order: Order) -> None:
    sampler = order.on(0, 1)
    batches = order.batches(3 * len(sampler))
    for epoch in range(3):
        seen = [index for batch in batches[epoch * len(sampler) : (epoch + 1) * len(sampler)] for index in batch]
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(order.length))
        assert len(seen) == (order.length // order.batch_size * order.batch_size if order.drop_last else order.length)


def test_the_order_is_drawn_from_seed_and_epoch() -> None:
    # What was saved goes on with these numbers: another order would train on some samples twice.
    order = Order(length=10, batch_size=5)
    assert order.batches(4) == [[8, 1, 9, 3, 6], [7, 0, 5, 4, 2], [6, 7, 2, 3, 9], [5, 8, 0, 1, 4]]
    assert len({str(Order(length=10, batch_size=5, seed=seed).batches(2)) for seed in range(5)}) == 5
    assert Order(length=5, batch_size=2, shuffle=False).batches(4) == [[0, 1], [2, 3], [4], [0, 1]]


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


WORKERS: dict[str, dict[str, Any]] = {
    "in the process": {"num_workers": 0},
    "workers": {"num_workers": 2, "prefetch_factor": 4},
    "persistent workers": {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
}


@pytest.mark.parametrize("options", WORKERS.values(), ids=list(WORKERS))
def test_what_a_dataloader_has_drawn_ahead_is_drawn_again(options: dict[str, Any]) -> None:
    order = Order(length=22, batch_size=4)  # six batches an epoch, all of them drawn at its beginning
    state = order.on(0, 1).state_dict()
    seen = []
    for trained, world_size in ((3, 1), (3, 2), (9, 2), (4, 1)):
        gang = order.gang(world_size)
        loaders = [DataLoader(Numbers(22), batch_sampler=sampler, **options) for sampler in gang]
        for sampler in gang:
            sampler.load_state_dict(state)
        for _ in range(trained // len(gang[0]) + 2):
            for parts in zip(*loaders, strict=True):
                seen.append(torch.cat(parts).tolist())
                for sampler in gang:
                    sampler.advance()
                if gang[0].position == state["position"] + trained:
                    break
            else:
                continue
            break
        state = gang[0].state_dict()
    assert state["position"] == len(seen) == 19
    assert seen == order.batches(19)


def test_an_abandoned_iteration_is_gone_on_with(caplog: pytest.LogCaptureFixture) -> None:
    order = Order(length=20, batch_size=4)
    sampler = order.on(0, 1)
    loader = DataLoader(Numbers(20), batch_sampler=sampler)
    seen = []
    for _ in range(3):
        for batch in loader:
            seen.append(batch.tolist())
            sampler.advance()
            if sampler.position % 2 == 0:
                break
    assert seen == order.batches(5)[: len(seen)]
    assert len(seen) == 5
    assert not caplog.records


def test_position_and_epoch_say_what_is_trained_on_next() -> None:
    sampler = Order(length=6, batch_size=2).on(0, 1)
    places = [(sampler.position, sampler.epoch)]
    for _ in range(2):
        for _ in sampler:
            sampler.advance()
            places.append((sampler.position, sampler.epoch))
    assert places == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]
    assert len(sampler) == 3


def test_weighted_gradients_average_to_the_gradient_of_the_whole_batch() -> None:
    values = torch.linspace(-1, 2, 32, dtype=torch.float64)
    order = Order(length=32, batch_size=32)

    def gradient(indices: list[int], weight: float) -> torch.Tensor:
        factor = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = (values[indices] * factor).sin().square().mean() * weight
        (found,) = torch.autograd.grad(loss, factor)
        return found

    gang = order.gang(3)
    shares = [next(iter(sampler)) for sampler in gang]
    assert [len(share) for share in shares] == [11, 11, 10]
    parts = [gradient(share, sampler.weight) for share, sampler in zip(shares, gang, strict=True)]
    assert torch.stack(parts).mean().item() == pytest.approx(gradient(list(range(32)), 1.0).item(), rel=1e-14)


# ---------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer samples than ranks": ({"length": 8, "batch_size": 2, "world_size": 3, "rank": 0}, "a batch has 2 of 8"),
    "too few in the last batch": (
        {"length": 10, "batch_size": 4, "world_size": 3, "rank": 0},
        "last batch of an epoch",
    ),
    "no samples": ({"length": 0, "batch_size": 1}, "make no batch"),
    "not one whole batch": ({"length": 3, "batch_size": 4, "drop_last": True}, "make no batch"),
    "a batch of nothing": ({"length": 3, "batch_size": 0}, "make no batch"),
    "a rank of no gang": ({"length": 3, "batch_size": 1, "rank": 1, "world_size": 1}, "from 0 to 0"),
    "a rank without its gang": ({"length": 3, "batch_size": 1, "rank": 0}, "both"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=list(REFUSED))
def test_batches_that_cannot_be_shared_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(**arguments)


def test_the_last_batch_may_be_dropped_for_ranks_that_could_not_share_it() -> None:
    sampler = GlobalBatchSampler(10, 4, drop_last=True, rank=2, world_size=3)
    assert [len(batch) for batch in sampler] == [1, 1]


@pytest.mark.parametrize("name", ["length", "batch_size", "seed", "shuffle", "drop_last"])
def test_a_position_in_another_order_is_refused(name: str) -> None:
    other = {"length": 11, "batch_size": 3, "seed": 1, "shuffle": False, "drop_last": True}
    saved = GlobalBatchSampler(10, 2, rank=0, world_size=1)
    kept = {"length": 10, "batch_size": 2} | {name: other[name]}
    with pytest.raises(ValueError, match=f"{name}="):
        GlobalBatchSampler(**kept, rank=0, world_size=1).load_state_dict(saved.state_dict())


def test_a_batch_that_was_not_drawn_was_not_trained_on() -> None:
    sampler = Order(length=4, batch_size=2).on(0, 1)
    with pytest.raises(RuntimeError, match="not drawn"):
        sampler.advance()
    next(iter(sampler))
    sampler.advance()
    with pytest.raises(RuntimeError, match="not drawn"):
        sampler.advance()


def test_an_iteration_that_a_restore_overtakes_is_over() -> None:
    sampler = Order(length=8, batch_size=2).on(0, 1)
    batches = iter(sampler)
    next(batches)
    sampler.load_state_dict(sampler.state_dict() | {"position": 2})
    with pytest.raises(RuntimeError, match="restored"):
        next(batches)
    assert next(iter(sampler)) == Order(length=8, batch_size=2).batches(3)[2]


def test_a_loop_that_never_advances_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Order(length=4, batch_size=2).on(0, 1)
    first = list(sampler)
    assert not caplog.records
    assert list(sampler) == first
    assert "advance()" in caplog.text


@pytest.mark.parametrize(("variables", "expected"), [({}, 8), ({"RANK": "1", "WORLD_SIZE": "2"}, 4)], ids=str)
def test_a_ranks_share_is_torchruns_before_there_is_a_group(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert len(next(iter(GlobalBatchSampler(8, 8)))) == expected
