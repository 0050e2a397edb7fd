"""What happens with staged steps: what is needed is never handed out, and nothing staged is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepfast.slot import SlotRecord, SlotState
from stepfast_sidecar.flow import RunFlow
from stepfast_sidecar.holdings import DropStep, Effect, Freed, Held, Holding, Persist, PersistWindow, StagedTwice

RUN = "uid-1"


def record(rank: int, step: int, seq: int, *, due: bool = True, run: str = RUN, **values: int) -> SlotRecord:
    whole = SlotRecord(
        seq=seq,
        state=SlotState.STAGED,
        run=run,
        step=step,
        name="state",
        rank=rank,
        world_size=2,
        node=0,
        file_bytes=100,
        window_begin=0,
        window_bytes=100,
        files=1,
        saved_time=1.0,
        due=due,
    )
    return replace(whole, **values)  # type: ignore[arg-type]  # sizes only


def flow_of(ranks: int, slots: int = 3) -> RunFlow:
    flow = RunFlow(RUN, ranks)
    for rank in range(ranks):
        for slot in range(slots):
            flow.add_slot(rank, slot)
    return flow


def stage(flow: RunFlow, rank: int, step: int, *, due: bool = True, drop: Iterable[int] = ()) -> list[Effect]:
    reserved, effects = flow.reserve(rank, tuple(drop))
    assert reserved is not None
    return [*effects, *flow.staged(rank, reserved.slot, record(rank, step, reserved.seq, due=due))]


def persists(effects: Iterable[Effect]) -> list[int]:
    return [effect.step for effect in effects if isinstance(effect, Persist)]


def drops(effects: Iterable[Effect]) -> list[int]:
    return [effect.step for effect in effects if isinstance(effect, DropStep)]


def test_step_is_persisted_once_every_rank_has_staged_it() -> None:
    flow = flow_of(2)
    assert persists(stage(flow, 0, 5)) == []
    assert persists(stage(flow, 1, 5)) == [5]
    assert flow.persisting_steps() == (5,)


def test_slot_that_is_being_mirrored_is_the_last_that_a_save_is_given() -> None:
    flow = flow_of(1)
    for step in (1, 2):
        stage(flow, 0, step)
        flow.persisted(step)
    flow.spared = frozenset({(0, holding.slot) for holding in flow.held(1)})
    for step in (3, 4, 5):
        stage(flow, 0, step)
        assert flow.held(1), "others hold nothing that is needed"
        flow.persisted(step)
    for step in (6, 7, 8):
        stage(flow, 0, step)
    assert not flow.held(1), "but no save waits for it"


def test_newest_due_step_is_persisted_next() -> None:
    flow = flow_of(1)
    assert persists(stage(flow, 0, 1)) == [1]
    stage(flow, 0, 2)
    stage(flow, 0, 3)
    assert persists(flow.persisted(1)) == [3]
    assert persists(flow.persisted(3)) == [2]


def test_step_that_is_not_due_stays_in_memory_until_a_flush() -> None:
    flow = flow_of(1)
    assert persists(stage(flow, 0, 1, due=False)) == []
    assert flow.memory_step() == 1
    assert persists(flow.flush()) == [1]


def test_step_that_somebody_waits_for_is_due_and_never_dropped() -> None:
    flow = flow_of(1)
    stage(flow, 0, 1)
    stage(flow, 0, 2)
    flow.want(2)
    stage(flow, 0, 3)
    reserved, effects = flow.reserve(0, (2,))
    assert reserved is None
    assert drops(effects) == []


def test_dropped_step_is_dropped_once_and_on_every_rank() -> None:
    flow = flow_of(2)
    for step in (1, 2, 3):
        for rank in (0, 1):
            stage(flow, rank, step)
    assert drops(flow.reserve(0, (2,))[1]) == [2]
    assert drops(flow.reserve(1, (2,))[1]) == []
    assert all(holding.step != 2 for holding in flow.holdings.values())


def test_decision_to_drop_what_is_persisted_already_comes_too_late() -> None:
    flow = flow_of(1)
    stage(flow, 0, 1)
    stage(flow, 0, 2)
    assert drops(flow.reserve(0, (1,))[1]) == []
    assert persists(flow.persisted(1)) == [2]


@pytest.mark.parametrize("until", ["staged", "persisting", "persisted", "committed"])
def test_step_that_a_rank_stages_again_is_not_taken_again(until: str) -> None:
    flow = flow_of(1)
    stage(flow, 0, 7, due=until != "staged")
    if until in ("persisted", "committed"):
        flow.persisted(7)
    if until == "committed":
        flow.committed(7)
    effects = stage(flow, 0, 7)

    assert persists(effects) == ([7] if until == "staged" else []), "it is due as it is said last"
    assert [effect.holding.slot for effect in effects if isinstance(effect, StagedTwice)] == [1]
    assert Freed(rank=0) in effects
    assert [holding.slot for holding in flow.held(7)] == [0], "what was staged first stands"
    assert flow.reusable_slots(0) == ([1, 2] if until in ("staged", "persisting") else [0, 1, 2])
    if until in ("staged", "persisting"):
        flow.persisted(7)
    flow.committed(7)
    assert flow.pending_steps() == []


def test_window_of_a_step_whose_part_is_written_is_not_stored_again() -> None:
    flow = flow_of(1)
    stage(flow, 0, 7)
    flow.persisted(7)
    reserved, _ = flow.reserve(0, ())
    assert reserved is not None
    window = record(0, 7, reserved.seq, window_bytes=60)
    assert [type(effect) for effect in flow.staged(0, reserved.slot, window)] == [StagedTwice, Freed]


@pytest.mark.parametrize("first", [0, 1])
def test_step_of_which_an_earlier_agent_noted_one_rank_alone_as_persisted_is_persisted(first: int) -> None:
    flow = RunFlow(RUN, 2)
    for rank in (first, 1 - first):
        held = Held.PERSISTED if rank == 0 else Held.STAGED
        flow.adopt(Holding(rank=rank, slot=0, held=held, seq=1, record=record(rank, 7, 1), due=True), parted=rank == 0)
    flow.committed(7)

    assert flow.pending_steps() == []
    assert [flow.reusable_slots(rank) for rank in (0, 1)] == [[0], [0]]
    assert flow.memory_step() == 7


@pytest.mark.parametrize("late", ["persisting", "persisted", "overwritten"])
def test_step_that_the_gang_gave_up_too_late_is_waited_for_by_nobody(late: str) -> None:
    flow = flow_of(1)
    stage(flow, 0, 1)
    stage(flow, 0, 2)
    if late == "overwritten":
        flow.persisted(1)
        stage(flow, 0, 3)
        stage(flow, 0, 4)
    elif late == "persisted":
        flow.persisted(1)
    flow.reserve(0, (1,))
    if late == "persisting":
        flow.persisted(1)
    assert 1 not in flow.pending_steps(), "on another node the decision may have come in time"
    assert flow.uncommitted_parts() == [1]
    flow.committed(1)
    assert flow.is_committed(1), "it came too late on all nodes"


def test_step_that_the_gang_gave_up_is_pending_while_somebody_waits_for_it() -> None:
    flow = flow_of(1)
    stage(flow, 0, 1)
    flow.want(1)
    flow.persisted(1)
    flow.reserve(0, (1,))
    assert flow.pending_steps() == [1]


def test_step_that_the_gang_gave_up_is_pending_again_once_everything_is_flushed() -> None:
    flow = flow_of(1)
    for step in (1, 2):
        stage(flow, 0, step)
    flow.persisted(1)
    flow.reserve(0, (1,))
    flow.flush()
    assert 1 in flow.pending_steps()
    flow.reserve(0, (1,))
    assert 1 in flow.pending_steps(), "a flush needs no decision"


def test_slot_that_is_still_copied_into_is_not_handed_out_again() -> None:
    flow = flow_of(1, slots=3)
    stage(flow, 0, 1, due=False)
    copied, _ = flow.reserve(0, ())
    assert copied is not None
    other, _ = flow.reserve(0, (), (copied.slot,))
    assert other is not None
    assert other.slot != copied.slot
    assert flow.reserve(0, (), (copied.slot, other.slot))[0] is None
    assert flow.reusable_slots(0) == []

    flow.staged(0, copied.slot, record(0, 2, copied.seq, due=False))
    flow.staged(0, other.slot, record(0, 3, other.seq, due=False))
    assert len(flow.reusable_slots(0)) == 2


def test_slot_that_is_still_copied_into_stays_its_ranks_under_a_new_agent() -> None:
    flow = flow_of(1, slots=2)
    chosen, _ = flow.reserve(0, (), (0,))

    assert chosen is not None
    assert chosen.slot == 1


def test_step_that_one_rank_gave_up_is_nobodys_whenever_the_others_stage_it() -> None:
    flow = flow_of(3)
    stage(flow, 0, 5)
    reserved, _ = flow.reserve(1, ())
    assert reserved is not None
    assert drops(flow.rank_gave_up(1, 5)) == [5]
    assert drops(stage(flow, 2, 5)) == [5]

    assert flow.pending_steps() == []
    assert all(len(flow.reusable_slots(rank)) == 3 for rank in range(3))


def test_step_that_a_rank_gave_up_is_whole_when_it_stages_it_after_all() -> None:
    flow = flow_of(1)
    flow.rank_gave_up(0, 5)
    flow.rank_begins(0, 5)

    assert persists(stage(flow, 0, 5)) == [5]


def test_step_that_is_on_its_way_is_not_given_up_by_what_a_rank_says() -> None:
    flow = flow_of(1)
    assert persists(stage(flow, 0, 5)) == [5]

    assert flow.rank_gave_up(0, 5) == []
    assert flow.persisting_steps() == (5,)


def test_newest_whole_step_is_not_dropped_whatever_is_decided() -> None:
    flow = flow_of(1, slots=2)
    stage(flow, 0, 1)
    stage(flow, 0, 2)
    reserved, effects = flow.reserve(0, (1, 2))
    assert reserved is None
    assert effects == []


def test_lost_persister_loses_nothing_that_is_staged() -> None:
    flow = flow_of(2)
    stage(flow, 0, 1)
    stage(flow, 1, 1)
    flow.persister_lost()
    assert flow.pending_steps() == [1]
    assert persists(flow.retry()) == [1]


@pytest.mark.parametrize(("window", "is_last"), [(0, False), (1, True)], ids=["earlier-window", "last-window"])
def test_window_that_goes_with_the_persister_gives_the_step_up_when_it_was_the_last(window: int, is_last: bool) -> None:
    flow = flow_of(1)
    for index in range(window + 1):
        reserved, _ = flow.reserve(0, ())
        assert reserved is not None
        whole = record(0, 1, reserved.seq)
        size = 8 << 20
        flow.staged(0, reserved.slot, replace(whole, file_bytes=2 * size, window_begin=index * size, window_bytes=size))
    assert drops(flow.persister_lost()) == ([1] if is_last else [])
    assert all(holding.held is Held.FREE for holding in flow.holdings.values())
    assert not flow.is_persisting


def test_step_is_pending_while_its_last_window_is_on_its_way() -> None:
    flow, size = flow_of(1), 8 << 20
    for index in range(2):
        reserved, _ = flow.reserve(0, ())
        assert reserved is not None
        window = replace(record(0, 1, reserved.seq), file_bytes=2 * size, window_begin=index * size, window_bytes=size)
        flow.staged(0, reserved.slot, window)
        assert flow.pending_steps() == ([] if index == 0 else [1])
    assert flow.pending_bytes() == 2 * size
    flow.window_persisted(0, 0, file=None)
    assert persists(flow.window_persisted(0, 1, file={"rank": 0})) == [1]
    assert flow.pending_steps() == [1]
    flow.persisted(1)
    flow.committed(1)
    assert flow.pending_steps() == []


def test_rank_that_waits_for_its_only_slot_gets_it_once_what_it_holds_is_persisted() -> None:
    flow = flow_of(1, slots=1)
    stage(flow, 0, 1, due=False)
    assert flow.reserve(0, ())[0] is None
    assert persists(flow.relieve(0)) == [1]
    assert flow.relieve(0) == []
    flow.persisted(1)
    assert flow.reserve(0, ())[0] is not None


@pytest.mark.parametrize("end", ["persist_failed", "persister_lost"])
def test_rank_looks_again_when_a_step_that_it_may_drop_is_no_longer_being_persisted(end: str) -> None:
    flow = flow_of(1, slots=2)
    assert persists(stage(flow, 0, 1)) == [1]
    stage(flow, 0, 2)
    assert flow.reserve(0, (1,))[0] is None
    assert (flow.persist_failed(1) if end == "persist_failed" else flow.persister_lost()) == [Freed(rank=0)]
    assert flow.reserve(0, (1,))[0] is not None


def test_failure_is_tried_again_only_when_it_is_time() -> None:
    flow = flow_of(1)
    stage(flow, 0, 1)
    flow.persist_failed(1)
    assert persists(stage(flow, 0, 2)) == []
    assert persists(flow.retry()) == [2]


def test_slot_of_an_earlier_run_is_no_part_of_this_run() -> None:
    # The first run persisted step 50, was rolled back to 40, and comes to 50 again as the second run.
    flow = flow_of(1)
    old = Holding(rank=0, slot=0, held=Held.PERSISTED, seq=9, record=record(0, 50, 9, run="uid-0"))
    flow.holdings[(0, 0)] = old
    assert flow.memory_step() is None
    (effect,) = stage(flow, 0, 50)
    assert isinstance(effect, Persist)
    assert [holding.record.run for holding in effect.holdings if holding.record] == [RUN]


def stream(flow: RunFlow, rank: int, step: int) -> tuple[dict[str, Any], list[Effect]]:
    """The rank's file of the step goes out in windows; its entry, and what came of the last one."""
    reserved, _ = flow.reserve(rank, ())
    assert reserved is not None
    flow.staged(rank, reserved.slot, record(rank, step, reserved.seq, window_bytes=60))
    file = {"rank": rank, "step": step}
    return file, flow.window_persisted(rank, reserved.slot, file=file)


@pytest.mark.parametrize("end", ["given up", "persisted"])
def test_files_that_were_streamed_wait_for_the_part_of_their_step_whatever_becomes_of_a_newer_one(end: str) -> None:
    flow = flow_of(2)
    files = [stream(flow, rank, 5)[0] for rank in (0, 1)]
    flow.persist_failed(5)  # its part
    if end == "given up":
        stream(flow, 0, 6)
        flow.rank_gave_up(1, 6)
        effects = flow.retry()
    else:
        newer = [stream(flow, rank, 6)[0] for rank in (0, 1)]
        (persist,) = flow.retry()
        assert isinstance(persist, Persist)
        assert (persist.step, list(persist.streamed)) == (6, newer)
        effects = flow.persisted(6)
    (persist,) = (effect for effect in effects if isinstance(effect, Persist))
    assert (persist.step, list(persist.streamed), persist.ranks) == (5, files, (0, 1))


def test_window_of_a_file_is_no_whole_file() -> None:
    flow = flow_of(2)
    for rank in (0, 1):
        reserved, _ = flow.reserve(rank, ())
        assert reserved is not None
        window = record(rank, 1, reserved.seq, window_bytes=60)
        assert [type(e) for e in flow.staged(rank, reserved.slot, window)] == [PersistWindow]
    assert persists(flow.window_persisted(0, 0, file={"rank": 0})) == []
    assert flow.memory_step() is None
    assert persists(flow.window_persisted(1, 0, file={"rank": 1})) == [1]


def test_steps_that_were_in_memory_alone_are_forgotten() -> None:
    flow = flow_of(1)
    for step in range(500):
        stage(flow, 0, step, due=False)
    assert len(flow._steps) <= 4


class FlowMachine(RuleBasedStateMachine):
    """Two ranks with three slots each; a model of what must not be lost stands beside the flow."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = flow_of(2)
        self.next_step = {0: 1, 1: 1}
        self.due: dict[int, bool] = {}
        self.persisting: list[Persist] = []
        self.dropped: set[int] = set()
        self.flushed = False
        self.parted: set[int] = set()
        self.wanted: set[int] = set()
        self.blocked = False

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DropStep):
                assert effect.step not in self.wanted
                assert not self.flushed
                assert effect.step not in self.dropped
                self.dropped.add(effect.step)
            elif isinstance(effect, Persist):
                assert not self.blocked
                assert not self.persisting
                assert sorted(h.rank for h in effect.holdings) == [0, 1]
                assert {h.step for h in effect.holdings} == {effect.step}
                ready = self._whole_due() - self.parted
                assert effect.step == max(ready | {effect.step})
                self.persisting.append(effect)

    def _whole_due(self) -> set[int]:
        held = [{h.step for h in self.flow.slots_of(r) if h.held is Held.STAGED and h.due} for r in (0, 1)]
        return {step for step in held[0] & held[1] if step is not None}

    @rule(rank=st.integers(0, 1), due=st.booleans(), drop=st.sets(st.integers(1, 12), max_size=3))
    def save(self, rank: int, due: bool, drop: set[int]) -> None:
        before = {h.slot: h for h in self.flow.slots_of(rank)}
        newest = max((h.step for h in before.values() if h.step is not None), default=None)
        # The gang drops only what all of it has overtaken.
        reserved, effects = self.flow.reserve(rank, sorted(s for s in drop if s < min(self.next_step.values()) - 1))
        self._take(effects)
        if reserved is None:
            return
        taken = before[reserved.slot]
        assert taken.held is not Held.PERSISTING
        assert reserved.seq > taken.seq
        if taken.held is Held.STAGED:
            assert taken.step != newest
            assert taken.step not in self.wanted
            assert not taken.due or taken.step in self.dropped
        step = self.next_step[rank]
        self.next_step[rank] += 1
        is_due = self.due.setdefault(step, due)
        self._take(self.flow.staged(rank, reserved.slot, record(rank, step, reserved.seq, due=is_due)))

    @rule(rank=st.integers(0, 1), due=st.booleans())
    def save_again(self, rank: int, due: bool) -> None:
        step = self.next_step[rank] - 1
        reserved = self.flow.reserve(rank, ())[0] if step > 0 and step not in self.dropped else None
        if reserved is None:
            return
        before = [h for h in self.flow.slots_of(rank) if h.step == step and h.held is not Held.STAGED]
        self._take(self.flow.staged(rank, reserved.slot, record(rank, step, reserved.seq, due=due)))
        held = [h for h in self.flow.slots_of(rank) if h.step == step]
        assert len(held) <= 1
        assert held == before or not before

    @precondition(lambda self: self.persisting)
    @rule(fails=st.booleans())
    def persist_ends(self, fails: bool) -> None:
        step = self.persisting.pop().step
        if fails:
            self.blocked = True
            self._take(self.flow.persist_failed(step))
            return
        self.parted.add(step)
        self.blocked = False
        self._take(self.flow.persisted(step))

    @rule()
    def persister_dies(self) -> None:
        held = {(h.rank, h.slot): h.step for h in self.flow.holdings.values()}
        self.persisting.clear()
        self.blocked = True
        self._take(self.flow.persister_lost())
        assert held == {(h.rank, h.slot): h.step for h in self.flow.holdings.values()}

    @rule()
    def retry(self) -> None:
        self.blocked = False
        self._take(self.flow.retry())

    @rule(step=st.integers(1, 12))
    def want(self, step: int) -> None:
        if step not in self.dropped | self.parted:
            self.wanted.add(step)
            self._take(self.flow.want(step))

    @rule()
    def flush(self) -> None:
        self.flushed = True
        self._take(self.flow.flush())
        assert all(h.due for h in self.flow.holdings.values() if h.held is Held.STAGED)

    @rule()
    def end_flush(self) -> None:
        due = {key for key, held in self.flow.holdings.items() if held.due}
        self.flushed = False
        self.flow.end_flush()
        assert {key for key, held in self.flow.holdings.items() if held.due} == due

    @precondition(lambda self: self.parted)
    @rule()
    def commit(self) -> None:
        step = min(self.parted)
        self.flow.committed(step)
        self.wanted.discard(step)

    @invariant()
    def newest_step_of_each_rank_is_held(self) -> None:
        for rank in (0, 1):
            staged = self.next_step[rank] - 1
            held = {h.step for h in self.flow.slots_of(rank)}
            assert staged == 0 or staged in held | self.parted

    @invariant()
    def step_on_its_way_is_whole_and_marked(self) -> None:
        for effect in self.persisting:
            for holding in effect.holdings:
                now = self.flow.holdings[(holding.rank, holding.slot)]
                assert (now.held, now.step, now.seq) == (Held.PERSISTING, effect.step, holding.seq)

    @invariant()
    def nothing_due_lies_idle(self) -> None:
        if not self.persisting and not self.blocked:
            assert self._whole_due() - self.parted == set()


FlowMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestFlowKeepsItsPromises = FlowMachine.TestCase
