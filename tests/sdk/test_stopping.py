"""Ranks that are to be stopped do so behind the same step, whichever of them is told first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from stepfast.torch.gang import Alone, StoreGang
from stepfast.torch.stopping import Stopping, next_stride


@pytest.mark.parametrize(
    ("stride", "seconds", "expected"),
    [
        pytest.param(1, 5.0, 1, id="slow steps"),
        pytest.param(1, 0.01, 2, id="quick steps: twice as many, not a hundred"),
        pytest.param(64, 0.8, 80, id="about a second"),
        pytest.param(64, 6.4, 10, id="steps became slower"),
        pytest.param(8, 0.0, 16, id="no time at all"),
    ],
)
def test_ranks_meet_about_once_a_second(stride: int, seconds: float, expected: int) -> None:
    assert next_stride(stride, seconds) == expected


def test_rank_alone_stops_behind_the_step_in_which_it_is_told() -> None:
    link: Any = SimpleNamespace(save_requested=False)
    stopping = Stopping(Alone(), link)
    assert [stopping.is_last(step) for step in (1, 2)] == [False, False]
    link.save_requested = True
    assert [stopping.is_last(step) for step in (3, 3, 4)] == [True, True, True]


def test_a_training_whose_steps_count_from_the_beginning_again_stops_where_it_is_told() -> None:
    link: Any = SimpleNamespace(save_requested=False)
    stopping = Stopping(Alone(), link)
    assert not any(stopping.is_last(step) for step in (*range(1, 101), 1, 2))
    link.save_requested = True
    assert stopping.is_last(1)


def test_ranks_that_begin_another_training_stop_behind_its_first_step() -> None:
    store, all_trained = HashStore(), Barrier(2)

    def train(rank: int) -> list[bool]:
        link: Any = SimpleNamespace(save_requested=False)
        stopping = Stopping(StoreGang(store, rank=rank, world_size=2), link)
        assert not any(stopping.is_last(step) for step in range(1, 101))
        all_trained.wait(60)
        link.save_requested = rank == 0
        return [stopping.is_last(step) for step in (1, 2)]

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(train, range(2))) == [[True, True]] * 2


def test_without_an_agent_no_step_is_the_last() -> None:
    assert not Stopping(Alone(), None).is_last(1)


@pytest.mark.parametrize("agents", [{0, 1}, {0}, {1}], ids=["agents", "rank-0s-agent", "rank-1s-agent"])
@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_stop_behind_the_same_step(told: int, agents: set[int]) -> None:
    store = HashStore()
    told = told if told in agents else next(iter(agents))

    def train(rank: int) -> int:
        link: Any = SimpleNamespace(save_requested=False) if rank in agents else None
        stopping = Stopping(StoreGang(store, rank=rank, world_size=2), link)
        for step in range(1, 10_000):
            if step == 7 and rank == told:
                link.save_requested = True
            if stopping.is_last(step):
                return step
        raise AssertionError(f"rank {rank} was never told")

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(train, range(2))
    assert first == second >= 7


def test_ranks_of_which_none_has_an_agent_do_not_consult() -> None:
    store = HashStore()

    def ask(rank: int) -> bool:
        gang = StoreGang(store, rank=rank, world_size=2)
        gang.consult = None  # type: ignore[assignment, method-assign] # nobody calls it
        return Stopping(gang, None).is_last(1)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(ask, range(2))) == [False, False]
