"""Jobs are looked at in turn: how many at a time, and who goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stepfast.errors import StepfastError
from stepfast_operator import turns
from stepfast_operator.turns import (
    LEAST_LAUNCHES,
    POD_REQUESTS,
    PODS_OF_ONE_GANG,
    QUICK_SECONDS,
    SLOW_SECONDS,
    TURNS,
    UNHURRIED_TURNS,
    Lane,
    Turn,
    Turns,
)


class Room:
    """Who has a turn."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, Turn] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def ask(self, *names: str, lane: Lane = Lane.URGENT) -> None:
        for name in names:
            self._asked[name] = self.turns.ask(lane)
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._stay(name))
        await settled()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
        await settled()

    async def hurry(self, name: str) -> None:
        self._asked[name].hurry()
        await settled()

    async def end(self, name: str) -> None:
        self._asked[name].end()
        await settled()

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _stay(self, name: str) -> None:
        async with self._asked[name]:
            self.inside.append(name)
            await self._leave[name].wait()
        self.inside.remove(name)


async def settled() -> None:
    """What can go on at once has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)


def play(scenario: Callable[[Room], Awaitable[None]]) -> None:
    async def run() -> None:
        room = Room()
        try:
            await scenario(room)
        finally:
            await room.close()

    asyncio.run(run())


def numbered(name: str, number: int) -> list[str]:
    return [f"{name}-{index}" for index in range(number)]


def test_only_so_many_have_a_turn_and_whoever_asked_first_has_the_next() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("first", TURNS), "next", "last")
        assert room.inside == numbered("first", TURNS)
        await room.leave("first-3")
        assert room.inside[-1] == "next"
        await room.leave("first-0", "next")
        assert room.inside[-1] == "last"

    play(scenario)


def test_progress_never_has_all_turns_however_slow_the_api_server_is() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("progress", 1000), lane=Lane.PROGRESS)
        assert room.inside == numbered("progress", UNHURRIED_TURNS)
        await room.ask("restart")
        assert room.inside[-1] == "restart"

    play(scenario)


def test_whoever_waits_for_progress_goes_first_once_something_happens() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("progress", 1000), lane=Lane.PROGRESS)
        await room.hurry("progress-999")
        assert room.inside[-1] == "progress-999"
        await room.leave(*numbered("progress", UNHURRIED_TURNS), "progress-999")
        assert len(room.inside) == UNHURRIED_TURNS, "it is counted as what it became"

    play(scenario)


def test_launches_give_way_to_all_that_is_urgent_and_new_jobs_to_gangs_that_trained_before() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("urgent", TURNS))
        await room.ask("first look for progress", lane=Lane.PROGRESS)
        await room.ask("new", lane=Lane.LAUNCH)
        await room.ask("restart", lane=Lane.RELAUNCH)
        await room.ask("last urgent")
        for index, expected in enumerate(("last urgent", "restart", "new", "first look for progress")):
            await room.leave(f"urgent-{index}")
            assert room.inside[-1] == expected

    play(scenario)


@pytest.mark.parametrize("lane", [Lane.LAUNCH, Lane.RELAUNCH, Lane.RETRY])
def test_slow_api_server_has_fewer_gangs_to_launch_at_a_time_and_a_quick_one_more(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LONGEST_LAUNCH_SECONDS", 1e6)

    async def scenario(room: Room) -> None:
        clock = asyncio.get_running_loop()
        now = clock.time()
        clock.time = lambda: now  # type: ignore[method-assign]
        await room.ask(*numbered("launch", 500), lane=lane)

        async def launched(seconds: float) -> int:
            """How many are under way after ten that took so long each."""
            nonlocal now
            for _ in range(10):
                now += seconds
                await room.leave(room.inside[0])
            return len(room.inside)

        assert await launched(2 * SLOW_SECONDS) == LEAST_LAUNCHES[lane]
        between = (QUICK_SECONDS + SLOW_SECONDS) / 2
        assert await launched(between) == LEAST_LAUNCHES[lane]
        # Whoever waited beside others took longer than these ten show: each is measured from when it began.
        assert await launched(0.0) > LEAST_LAUNCHES[lane]
        await launched(0.0)
        assert await launched(0.0) == TURNS

    play(scenario)


@pytest.mark.parametrize("lane", [Lane.LAUNCH, Lane.RELAUNCH, Lane.RETRY])
def test_launches_that_hang_hold_up_nobody(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_LAUNCH_SECONDS", 0.02)

    async def scenario(room: Room) -> None:
        await room.ask(*numbered("hangs", 3 * TURNS), "another", lane=lane)
        async with asyncio.timeout(60):
            while "another" not in room.inside:
                await settled()
        await room.ask("urgent")
        assert room.inside[-1] == "urgent"
        assert len(room.inside) == 3 * TURNS + 2

    play(scenario)


def test_turn_that_ends_before_its_job_does_is_the_next_ones_at_once_and_given_back_once() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("waits for its pods' end", TURNS), "next", "last")
        await room.end("waits for its pods' end-0")
        assert room.inside[-1] == "next"
        await room.leave("waits for its pods' end-0")
        assert "last" not in room.inside
        await room.leave("next")
        assert room.inside[-1] == "last"

    play(scenario)


def test_job_that_goes_while_it_waits_leaves_its_place() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("first", TURNS), "gone", "last")
        await room.give_up("gone")
        await room.leave("first-0")
        assert room.inside[-1] == "last"

    play(scenario)


def test_job_that_goes_in_its_turn_leaves_it_to_the_next() -> None:
    async def scenario(room: Room) -> None:
        await room.ask(*numbered("first", TURNS), "next")
        await room.give_up("first-0")
        assert room.inside[-1] == "next"

    play(scenario)


def test_pods_of_all_gangs_together_are_made_so_many_at_a_time_and_a_large_gang_leaves_room() -> None:
    async def run() -> None:
        turns, under_way, most = Turns(), {"large": 0, "other": 0, "third": 0}, {"large": 0, "all": 0}
        go_on = asyncio.Event()

        async def make(gang: str) -> None:
            under_way[gang] += 1
            most["large"] = max(most["large"], under_way["large"])
            most["all"] = max(most["all"], sum(under_way.values()))
            await go_on.wait()
            under_way[gang] -= 1

        gangs = [asyncio.create_task(turns.each(make, [name] * 1000)) for name in under_way]
        await settled()
        assert under_way["other"] > 0
        go_on.set()
        await asyncio.gather(*gangs)
        assert most == {"large": PODS_OF_ONE_GANG, "all": POD_REQUESTS}

    asyncio.run(run())


def test_pod_that_is_refused_is_told_and_no_more_are_made() -> None:
    async def run() -> list[int]:
        asked = []

        async def make(index: int) -> None:
            asked.append(index)
            if index == 3:
                raise StepfastError("no such image")
            await asyncio.Event().wait()

        with pytest.raises(StepfastError, match="no such image"):
            await Turns().each(make, range(1000))
        return asked

    assert len(asyncio.run(run())) <= PODS_OF_ONE_GANG + 1  # whose place the refused one left
