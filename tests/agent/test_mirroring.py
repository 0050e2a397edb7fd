"""Which steps a neighbour is to hold, too, and which it keeps: decisions alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.errors import ProtocolError, SpecError
from stepfast.protocol import encode
from stepfast.slot import SlotRecord, SlotState
from stepfast.step import JobKey
from stepfast_sidecar.bandwidth import Bandwidth
from stepfast_sidecar.gangs import Address, Gang, parse_gang
from stepfast_sidecar.holdings import Held, Holding
from stepfast_sidecar.mirrored import (
    SILENCE_SECONDS,
    Charge,
    MirroredStep,
    Watch,
    abandoned,
    lacks_room,
    outdated,
)
from stepfast_sidecar.mirroring import RETRY_SECONDS, Mirroring, whole_step
from stepfast_sidecar.neighbourwire import PIECE_BYTES, Ask, Greeting, Offer, decode, pieces

RUN = "uid-1"
NEXT, OTHER = Address(host="10.0.0.2", port=9601), Address(host="10.0.0.3", port=9601)


def holding(step: int, rank: int = 0, *, held: Held = Held.STAGED, files: int = 1, name: str = "state") -> Holding:
    record = SlotRecord(
        seq=step, state=SlotState.STAGED, run=RUN, step=step, name=name, rank=rank, world_size=4, node=0,
        file_bytes=100, window_begin=0, window_bytes=100, files=files, saved_time=1.0,
    )  # fmt: skip
    return Holding(rank=rank, slot=step % 3, held=held, seq=step, record=record, due=True)


def newest(step: int) -> tuple[int, tuple[Holding, ...]]:
    return step, (holding(step),)


# ---------------------------------------------------------------- sending


def test_step_that_every_rank_holds_with_all_its_files_can_be_mirrored() -> None:
    held = [holding(5, 1), holding(5, 0, held=Held.PERSISTED)]
    found = whole_step(held)
    assert found == (5, (held[1], held[0]))


@pytest.mark.parametrize(
    "held",
    [[], [holding(5, files=2)], [holding(5), holding(6, 1)], [holding(5, held=Held.RESERVED)]],
    ids=["nothing", "a-file-went-out-in-windows", "two-steps", "being-written"],
)
def test_step_of_which_memory_lacks_a_file_is_not_mirrored(held: list[Holding]) -> None:
    assert whole_step(held) is None


def test_newest_step_is_sent_once_and_a_newer_one_after_it() -> None:
    mirroring = Mirroring()
    mirroring.meet(NEXT)
    send = mirroring.next(newest(1), 0.0)
    assert send is not None
    assert (send.step, send.to) == (1, NEXT)
    assert mirroring.next(newest(2), 0.0) is None, "one at a time"
    mirroring.sent(send)
    assert mirroring.next(newest(1), 0.0) is None
    again = mirroring.next(newest(7), 0.0)
    assert again is not None
    assert again.step == 7


def test_nothing_is_sent_while_nobody_is_to_hold_it() -> None:
    mirroring = Mirroring()
    assert mirroring.next(newest(1), 0.0) is None
    mirroring.meet(NEXT)
    mirroring.meet(None)
    assert mirroring.next(newest(1), 0.0) is None


def test_overtaken_step_is_followed_at_once_by_the_newest() -> None:
    mirroring = Mirroring()
    mirroring.meet(NEXT)
    assert mirroring.next(newest(1), 0.0) is not None
    mirroring.overtaken()
    send = mirroring.next(newest(4), 0.0)
    assert send is not None
    assert send.step == 4


def test_neighbour_that_fails_is_tried_later_and_later_until_it_holds_a_step() -> None:
    mirroring, now = Mirroring(), 0.0
    mirroring.meet(NEXT)
    for pause in (*RETRY_SECONDS, RETRY_SECONDS[-1]):
        assert mirroring.next(newest(1), now) is not None
        mirroring.failed(now)
        assert mirroring.next(newest(2), now + pause - 0.01) is None
        assert mirroring.wait_seconds(now) == pytest.approx(pause)
        now += pause
    send = mirroring.next(newest(2), now)
    assert send is not None
    mirroring.sent(send)
    assert mirroring.next(newest(3), now) is not None
    mirroring.failed(now)
    assert mirroring.wait_seconds(now) == RETRY_SECONDS[0]


def test_what_a_lost_connection_or_another_neighbour_holds_is_not_known() -> None:
    mirroring = Mirroring()
    mirroring.meet(NEXT)
    for forget in (mirroring.lost, lambda: mirroring.meet(OTHER)):
        send = mirroring.next(newest(3), 0.0)
        assert send is not None, "the same step again"
        mirroring.sent(send)
        forget()
    assert mirroring.held_step is None


def test_word_of_a_neighbour_that_is_none_any_more_does_not_count() -> None:
    mirroring = Mirroring()
    mirroring.meet(NEXT)
    send = mirroring.next(newest(3), 0.0)
    assert send is not None
    mirroring.meet(OTHER)
    mirroring.sent(send)
    assert mirroring.next(newest(3), 0.0) is not None


@given(
    rate=st.integers(1, 10**9),
    burst=st.integers(1, 10**8),
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0, 10), min_size=50, max_size=50),
)
def test_no_more_bytes_go_out_than_the_bandwidth_allows(
    rate: int, burst: int, sizes: list[int], pauses: list[float]
) -> None:
    bandwidth, now, total = Bandwidth(rate, burst), 0.0, 0
    for size, pause in zip(sizes, pauses, strict=False):
        now += pause
        now += bandwidth.take(size, now)  # the caller waits, then sends
        total += size
        assert total <= rate * now + burst + 1e-6 * total + 1


# ---------------------------------------------------------------- holding


def mirrored(step: int, *, node: int = 0, run: str = RUN, arrived: float | None = None) -> MirroredStep:
    return MirroredStep(
        run=run, node=node, step=step, arrived_time=float(step) if arrived is None else arrived, size_bytes=100,
        is_whole=True, is_needed=False,
    )  # fmt: skip


def gone(steps: Iterable[MirroredStep]) -> list[tuple[str, int, int]]:
    return [(one.run, one.node, one.step) for one in steps]


def test_newest_whole_step_of_each_node_is_kept_and_what_is_on_its_way_behind_it() -> None:
    steps = [mirrored(1), mirrored(2), mirrored(1, node=1), replace(mirrored(3), is_whole=False)]
    assert gone(outdated(steps, run=RUN, committed=2)) == [(RUN, 0, 1)]


def test_step_that_is_to_be_persisted_is_never_let_go() -> None:
    steps = [replace(mirrored(1), is_needed=True), mirrored(2)]
    assert outdated(steps, run="uid-2", committed=5) == [mirrored(2)]
    assert abandoned([replace(steps[0], is_whole=False)], run=RUN, node=0, step=9) == []


def test_steps_of_an_earlier_run_are_kept_until_the_newest_has_committed_one() -> None:
    steps = [mirrored(9)]
    assert outdated(steps, run="uid-2", committed=None) == []
    assert gone(outdated(steps, run="uid-2", committed=3)) == [(RUN, 0, 9)]


def test_newer_is_what_arrived_later_whatever_its_number() -> None:
    """A job may be rolled back."""
    steps = [mirrored(900, arrived=1.0), mirrored(30, run="uid-2", arrived=2.0)]
    assert gone(outdated(steps, run="uid-2", committed=None)) == [(RUN, 0, 900)]


def test_half_of_a_step_goes_when_its_node_offers_another() -> None:
    half = replace(mirrored(4), is_whole=False)
    others = [mirrored(3), replace(half, node=1), replace(half, step=5)]
    assert abandoned([half, *others], run=RUN, node=0, step=5) == [half]


def test_mirrors_take_no_more_than_their_limit_nor_what_slots_have() -> None:
    assert lacks_room(60, held_bytes=40, limit_bytes=100, free_bytes=60) is None
    assert "more than the 100" in str(lacks_room(61, held_bytes=40, limit_bytes=100, free_bytes=500))
    assert "has 59 bytes left" in str(lacks_room(60, held_bytes=0, limit_bytes=100, free_bytes=59))
    assert "has 0 bytes left" in str(lacks_room(60, held_bytes=0, limit_bytes=100, free_bytes=-5))


# ---------------------------------------------------------------- in another's stead


def test_node_that_lives_persists_its_steps_itself() -> None:
    watch = Watch(0.0)
    assert watch.charge(100.0) is Charge.UNASKED, "silence alone is none of this node's business"
    watch.heard(100.0)
    watch.ask(103.0)
    assert watch.charge(103.0) is Charge.UNSURE, "it may be gone"
    watch.heard(103.1)
    watch.ask(105.0)
    assert watch.charge(105.0) is Charge.ORIGIN


def test_node_that_was_heard_a_moment_before_the_flush_holds_up_nobody() -> None:
    watch = Watch(0.0)
    watch.heard(100.0)
    watch.ask(101.0)
    assert watch.charge(101.0) is Charge.ORIGIN


def test_node_that_falls_silent_is_stood_in_for_once_a_flush_was_asked_for() -> None:
    watch = Watch(0.0)
    watch.ask(10.0)
    assert watch.charge(10.0) is Charge.MIRROR, "it has been silent for long"
    watch.heard(11.0)
    assert watch.charge(11.0) is Charge.MIRROR, "and what was begun is finished"


def test_node_that_dies_in_the_middle_of_its_flush_is_stood_in_for() -> None:
    watch = Watch(0.0)
    watch.ask(0.5)
    watch.heard(1.0)
    assert watch.charge(1.0 + SILENCE_SECONDS - 0.1) is Charge.ORIGIN
    assert watch.charge(1.0 + SILENCE_SECONDS) is Charge.MIRROR


# ---------------------------------------------------------------- words


def test_gang_is_what_the_operator_wrote() -> None:
    entry = {
        "namespace": "team", "name": "train", "run": RUN, "node": 1, "neighbours": ["10.0.0.2:9601", "[fd00::1]:9601"]
    }  # fmt: skip
    gang = parse_gang(entry)
    job = JobKey(namespace="team", name="train")
    ring = (NEXT, Address(host="fd00::1", port=9601))
    assert gang == Gang(job=job, run=RUN, node=1, neighbours=ring)
    assert [str(address) for address in ring] == entry["neighbours"]
    assert gang.mirror == NEXT
    assert gang.is_of(job, f"{RUN}.2")
    assert not gang.is_of(job, "uid-2")
    assert replace(gang, neighbours=()).mirror is None


@pytest.mark.parametrize(
    "change",
    [
        {"node": -1}, {"node": True}, {"run": "../up"}, {"neighbours": ["10.0.0.2"]}, {"neighbours": ["a b:1"]},
        {"neighbours": ["host:0"]}, {"neighbours": ["host:99999"]}, {"namespace": "UP"},
    ],
    ids=str,
)  # fmt: skip
def test_gang_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    entry = {"namespace": "team", "name": "train", "run": RUN, "node": 1, "neighbours": ["10.0.0.2:9601"]}
    with pytest.raises((ValueError, SpecError)):
        parse_gang({**entry, **change})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"type":"Hello"}', "unknown type"),
        (b'{"type":"Greeting","version":2,"node":"n"}', "different versions"),
        (b'{"type":"Ask","job":"ns/job","path":"../../etc/passwd"}', "path"),
        (b'{"type":"Ask","job":"ns/job","path":"global_step5/manifest.json"}', "path"),
        (b'{"type":"Ask","job":"../job","path":"global_step5/s-00000-of-00001-r.safetensors"}', "DNS name"),
        (b'{"type":"Offer","job":"ns/job","run":"uid-1","node":0,"ranks":"0","sharers":"9-1"}', "sharers"),
        (b'{"type":"Offer","job":"ns/job","run":"uid-1","node":0,"ranks":"","sharers":""}', "ranks"),
        (b'{"type":"Refused","refusal":"No","reason":""}', "refusal"),
        (b"[]", "not a JSON object"),
    ],
    ids=["another-protocol", "another-version", "path", "record", "job", "sharers", "ranks", "refusal", "no-object"],
)
def test_word_of_an_agent_that_is_out_of_range_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(body)


def test_words_of_agents_are_read_as_they_were_written() -> None:
    for message in (
        Greeting(version=1, node="node-a"),
        Ask(job="ns/job", path="global_step5/state-00000-of-00002-uid-1.safetensors"),
        Offer(job="ns/job", run=RUN, node=1, ranks="4-7", sharers="0,4-7"),
    ):
        assert decode(encode(message)[4:]) == message


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_pieces_cover_a_file_once(size: int) -> None:
    found = list(pieces(size))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == size
    assert all(0 < end - begin <= PIECE_BYTES for begin, end in found)
