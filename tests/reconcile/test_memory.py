"""Whether a job fits its memory: the verdict in words, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast.footprint import Footprint
from stepfast_operator.document import decode, encode
from stepfast_operator.events import EventReason, events_of
from stepfast_operator.local.story import tell
from stepfast_operator.observed import Intent, NodeMemory, Room
from stepfast_operator.record import Condition, ConditionType, FailedReason, State, Status
from stepfast_operator.report import facts_of
from stepfast_operator.spec import TrainingSpec

MakeWorld = Callable[..., Any]
GIB = 1 << 30
BERT = Footprint(
    title="BERT-large",
    device="v100-16gb",
    device_memory_bytes=16160 << 20,
    occupied_bytes=int(14.5 * GIB),
    reserved_bytes=int(13.2 * GIB),
    context_bytes=int(14.5 * GIB) - int(13.2 * GIB),
    peak_bytes=13 * GIB,
    components={"optimizer": int(2.5 * GIB), "activations": 8 * GIB, "weights": int(2.5 * GIB), "buffers": 0},
    checkpoint_bytes=4 * GIB,
)
TOLD = (
    "one rank takes 14.5 GiB (13.2 GiB reserved + 1.3 GiB CUDA context: activations 8.0 GiB, optimizer 2.5 GiB, "
    "weights 2.5 GiB)"
)
SMALL = replace(BERT, device="cpu", device_memory_bytes=None, occupied_bytes=2 * GIB, reserved_bytes=2 * GIB,
                context_bytes=0, peak_bytes=2 * GIB, components={"weights": 2 * GIB})  # fmt: skip
ONE = Room(world_size=1, ranks=1, gpus=1)
REFUSE = {"memoryPolicy": {"action": "Refuse"}}


def gpus(*sizes: float | None, room: Room = ONE) -> Room:
    """Nodes whose GPUs have so many GiB."""
    nodes = [
        NodeMemory(name=f"node-{index}", device_bytes=None if size is None else int(size * GIB))
        for index, size in enumerate(sizes)
    ]
    return replace(room, nodes=nodes)


def slices(*sizes: float, room: Room = ONE) -> Room:
    """Nodes, beside those of the room, whose GPUs are slices that have no more than so many GiB, by their names."""
    nodes = [
        NodeMemory(name=f"node-{index}", device_bytes=int(size * GIB), is_device_most=True, device_name=f"MIG-{size}")
        for index, size in enumerate(sizes)
    ]
    return replace(room, nodes=[*room.nodes, *nodes])


def nodes(*sizes: float, **room: Any) -> Room:
    """Nodes without GPUs that have so many GiB."""
    found = [NodeMemory(name=f"node-{index}", memory_bytes=int(size * GIB)) for index, size in enumerate(sizes)]
    return Room(**{"world_size": 1, "ranks": 1, **room}, nodes=found)


def slots(*sizes: float, **room: Any) -> Room:
    """Nodes with enough memory, whose agents may take so many GiB."""
    found = [
        NodeMemory(name=f"node-{index}", memory_bytes=99 * GIB, slot_bytes=int(size * GIB))
        for index, size in enumerate(sizes)
    ]
    return Room(**{"world_size": 1, "ranks": 1, **room}, nodes=found)


def condition_of(world: Any) -> Condition | None:
    found: Condition | None = world.status.condition(ConditionType.FITS_MEMORY)
    return found


def conclude(make_world: MakeWorld, footprint: Footprint, room: Room, **spec: Any) -> tuple[str, str, str]:
    world = make_world(**spec)
    world.anatomy, world.room, world.generation = footprint.to_json(), room, 1
    world.look()
    condition = condition_of(world)
    assert condition is not None
    return condition.status, condition.reason, condition.message


DEVICE = {"memoryPolicy": {"deviceMemory": "12Gi"}}
VERDICTS: dict[str, tuple[Footprint, Room, dict[str, Any], str, str, str]] = {
    "fits its node": (BERT, gpus(15.8), {}, "True", "Fits", f"{TOLD}; a GPU of node-0 has 15.8 GiB"),
    "fits the smallest node": (BERT, gpus(80, 15.8), {}, "True", "Fits", "; a GPU of node-1 has 15.8 GiB"),
    "fits to the byte": (BERT, gpus(14.5), {}, "True", "Fits", "; a GPU of node-0 has 14.5 GiB"),
    "too large": (BERT, gpus(11), {}, "False", "DeviceTooSmall", f"{TOLD}; a GPU of node-0 has 11.0 GiB: train with a"),
    "too large for all": (BERT, gpus(11, 12), {}, "False", "DeviceTooSmall",
        "; a GPU of node-1 has 12.0 GiB, and no other more: train with a smaller batch"),
    "depends on the node": (BERT, gpus(80, 12), {}, "Unknown", "DependsOnNode",
        "a GPU of node-0 has 80.0 GiB, but a GPU of node-1 has 12.0 GiB: keep the pods off"),
    "fits the largest node to the byte": (BERT, gpus(14.5, 12), {}, "Unknown", "DependsOnNode",
        "a GPU of node-0 has 14.5 GiB, but a GPU of node-1 has 12.0 GiB"),
    "nodes that do not say it": (BERT, gpus(None, 80), {}, "True", "Fits", "; a GPU of node-1 has 80.0 GiB"),
    "nodes go before the policy": (BERT, gpus(80), DEVICE, "True", "Fits", "; a GPU of node-0 has 80.0 GiB"),
    "policy goes before the prediction": (BERT, gpus(None), DEVICE, "False", "DeviceTooSmall",
        "; a GPU has 12.0 GiB (memoryPolicy.deviceMemory): train"),
    "prediction's own device": (BERT, ONE, {}, "True", "Fits",
        "; v100-16gb, which that is predicted for, has 15.8 GiB"),
    "slice by its name": (BERT, slices(20), {}, "Unknown", "MemoryUnknown", f"{TOLD}; a GPU of node-0 has at most "
        "20.0 GiB (MIG-20), and nobody says how much: set spec.memoryPolicy.deviceMemory to what a rank gets"),
    "slice that is too small by its name": (BERT, slices(10), {}, "False", "DeviceTooSmall",
        "; a GPU of node-0 has at most 10.0 GiB (MIG-10): train with a smaller batch"),
    "slice beside a GPU that is too small": (BERT, slices(20, room=gpus(11)), {}, "Unknown", "DependsOnNode",
        "; a GPU of node-0 has at most 20.0 GiB (MIG-20), but a GPU of node-0 has 11.0 GiB: keep"),
    "slice beside a GPU that is large enough": (BERT, slices(20, room=gpus(80)), {}, "Unknown", "MemoryUnknown",
        "; a GPU of node-0 has at most 20.0 GiB (MIG-20), and nobody says"),
    "policy says what a slice has": (BERT, slices(20), {"memoryPolicy": {"deviceMemory": "19Gi"}}, "True", "Fits",
        "; a GPU has 19.0 GiB (memoryPolicy.deviceMemory)"),
    "policy says it of the slice alone": (BERT, slices(20, room=gpus(11)), {"memoryPolicy": {"deviceMemory": "19Gi"}},
        "Unknown", "DependsOnNode", "; a GPU has 19.0 GiB (memoryPolicy.deviceMemory), but a GPU of node-0 has 11.0"),
    "profile, and no node that says it": (BERT, replace(ONE, slice_bytes=20 * GIB), {}, "Unknown", "MemoryUnknown",
        "; a slice of the MIG profile that is asked for has at most 20.0 GiB, and nobody says how much"),
    "profile that is too small": (BERT, replace(gpus(None), slice_bytes=10 * GIB), {}, "False", "DeviceTooSmall",
        "; a slice of the MIG profile that is asked for has at most 10.0 GiB: train"),
    "profile that a node has measured": (BERT, replace(gpus(19.5), slice_bytes=20 * GIB), {}, "True", "Fits",
        "; a GPU of node-0 has 19.5 GiB"),
    "nobody says it": (replace(BERT, device_memory_bytes=None), ONE, {}, "Unknown", "MemoryUnknown",
        "label the nodes (nvidia.com/gpu.memory), or set spec.memoryPolicy.deviceMemory"),
    "ranks that share GPUs": (BERT, gpus(40, room=Room(world_size=8, ranks=8, gpus=3)), {}, "False", "DeviceTooSmall",
        "; 3 ranks share a GPU and take 43.5 GiB; a GPU of node-0 has 40.0 GiB"),
    "another number of ranks": (replace(BERT, world_size=8), gpus(80), {}, "Unknown", "OtherWorldSize",
        "predicted for 8 ranks, and the job has 1: predict anew"),
    "that number of ranks": (replace(BERT, world_size=1), gpus(80), {}, "True", "Fits", ""),
    "no GPUs": (BERT, nodes(1), {}, "Unknown", "OtherDevice", "predicted for v100-16gb, and no GPU is known of"),
    "GPUs, predicted without": (SMALL, gpus(80), {}, "Unknown", "OtherDevice", "predicted for ranks without a GPU"),
    "ranks of a node": (SMALL, nodes(9, world_size=8, ranks=4), {}, "True", "Fits",
        "one rank takes 2.0 GiB (weights 2.0 GiB); the 4 ranks of a node take 8.0 GiB; node-0 has 9.0 GiB"),
    "node too small": (SMALL, nodes(7, 6, world_size=4, ranks=4), {}, "False", "NodeTooSmall",
        "take 8.0 GiB; node-0 has 7.0 GiB, and no other more: train with a smaller batch or fewer ranks a node"),
    "limit": (SMALL, nodes(99, limit_bytes=GIB), {}, "False", "NodeTooSmall", "their limit is 1.0 GiB (limits.memory)"),
    "no node": (SMALL, nodes(), {}, "Unknown", "MemoryUnknown", "nobody says what a node has: set limits.memory in"),
    "three slots": (SMALL, slots(12.1), {}, "True", "Fits", "node-0 has 99.0 GiB"),
    "two slots": (SMALL, slots(99, 11.5), {}, "True", "Fits",
        "checkpoints would take 3 slots × 4.0 GiB = 12.0 GiB of a node, and the agent of node-1 may take 11.5 GiB, "
        "512.0 MiB less: two slots a rank, so that a save may wait for the upload of the one before"),
    "one slot": (SMALL, slots(12, world_size=2, ranks=2), {}, "True", "Fits",
        "3 slots × 2 ranks × 4.0 GiB = 24.0 GiB of a node, and the agent of node-0 may take 12.0 GiB, 12.0 GiB less: "
        "one slot a rank, so that a save may wait for the upload of the one before"),
    "less than a slot": (SMALL, slots(99), {"checkpoint": {"memory": {"sizeLimit": "3Gi"}}}, "True", "Fits",
        "checkpoint.memory.sizeLimit is 3.0 GiB, 9.0 GiB less: they are streamed through two windows of 1.5 GiB a "
        "rank, and training waits for the storage"),
}  # fmt: skip


@pytest.mark.parametrize("row", VERDICTS.values(), ids=VERDICTS)
def test_verdict_has_the_arithmetic_in_words(make_world: MakeWorld, row: tuple[Any, ...]) -> None:
    footprint, room, spec, status, reason, words = row
    told = conclude(make_world, footprint, room, **spec)
    assert told[:2] == (status, reason)
    assert words in told[2]
    assert told[2].endswith(words) or status != "True", "nothing more is said of what fits"


def test_message_stays_one_that_can_be_read(make_world: MakeWorld) -> None:
    parts = {f"part {number}": (12 - number) * GIB for number in range(12)}
    _, _, told = conclude(make_world, replace(BERT, components=parts), gpus(80))
    assert ", part 5 7.0 GiB, part 6 6.0 GiB, others 15.0 GiB); a GPU" in told


def test_job_without_a_prediction_has_no_such_condition(make_world: MakeWorld) -> None:
    world = make_world(**REFUSE)
    world.start()
    assert condition_of(world) is None


def test_prediction_that_cannot_be_read_is_said_and_refuses_nothing(make_world: MakeWorld) -> None:
    world = make_world(**REFUSE)
    world.anatomy = '{"format": 2}'
    world.start()
    condition = condition_of(world)
    assert condition is not None
    assert (condition.status, condition.reason) == ("Unknown", "PredictionUnreadable")
    assert "metadata.annotations[stepfast.dev/anatomy]: is a prediction of another release" in condition.message


@pytest.mark.parametrize(
    ("footprint", "room"),
    [(footprint, room) for footprint, room, _, status, _, _ in VERDICTS.values() if status != "False"],
    ids=[name for name, row in VERDICTS.items() if row[3] != "False"],
)
def test_only_what_is_known_not_to_fit_is_refused(make_world: MakeWorld, footprint: Footprint, room: Room) -> None:
    world = make_world(**REFUSE)
    world.anatomy, world.room, world.generation = footprint.to_json(), room, 1
    world.settle()
    assert len(world.launches) == 1


def unfit(make_world: MakeWorld, *, generation: int | None = 1, **spec: Any) -> Any:
    world = make_world(**spec)
    world.status = Status()
    world.anatomy, world.room, world.generation = BERT.to_json(), gpus(11), generation
    return world


def test_warning_is_written_before_the_gang_is_launched_and_told_once(make_world: MakeWorld) -> None:
    world = unfit(make_world)
    world.start(staged=10)
    first = next(seen for seen in world.passes if seen.after.condition(ConditionType.FITS_MEMORY) is not None)
    assert first.observed.gang is None, "said once pods were there"
    world.fail()
    world.relaunched()
    told = [
        event for seen in world.passes for event in events_of(seen) if event.reason is EventReason.DOES_NOT_FIT_MEMORY
    ]
    assert [event.type for event in told] == ["Warning"]
    assert told[0].message.startswith(f"the job does not fit its memory: {TOLD}; a GPU of node-0 has 11.0 GiB: ")
    lines = [line for seen in world.passes for line in tell(seen) if "fit" in line]
    assert lines == [told[0].message]


def test_verdict_of_a_gang_that_was_launched_stays_what_it_was(make_world: MakeWorld) -> None:
    world = unfit(make_world)
    world.start()
    before = condition_of(world)
    world.room = gpus(80)
    world.settle()
    assert condition_of(world) == before
    world.fail()
    world.relaunched()
    after = condition_of(world)
    assert after is not None
    assert (after.status, after.reason) == ("True", "Fits")


def test_refused_job_gets_no_pods_and_its_status_is_written_once(make_world: MakeWorld) -> None:
    world = unfit(make_world, **REFUSE)
    world.settle()
    written = world.status
    assert world.passes[-1].decision.requeue_seconds == 30
    for _ in range(5):
        world.turn()
    assert world.launches == []
    assert (world.status, world.status.state, world.status.attempt) == (written, State.PENDING, 0)
    condition = condition_of(world)
    assert condition is not None
    assert condition.message.endswith("; no pods are made until it fits (memoryPolicy.action: Refuse)")
    forgotten = decode(Status, json.loads(json.dumps(encode(world.status))), "status")
    assert forgotten == world.status, "a restarted operator would write it anew"


def test_refused_job_uses_up_its_active_deadline_as_pending_pods_do(make_world: MakeWorld) -> None:
    world = unfit(make_world, **REFUSE, activeDeadlineSeconds=100)
    while not world.status.is_terminal:
        world.turn()
    assert world.status.current is not None
    assert world.status.current.fail_reason is FailedReason.DEADLINE_EXCEEDED


MENDS: dict[str, Callable[[Any], None]] = {
    "a larger node": lambda world: setattr(world, "room", gpus(11, 80)),
    "another prediction": lambda world: setattr(world, "anatomy", replace(
        BERT, occupied_bytes=9 * GIB, reserved_bytes=8 * GIB, context_bytes=GIB, peak_bytes=8 * GIB).to_json()),
    "no prediction": lambda world: setattr(world, "anatomy", None),
    "another policy": lambda world: setattr(world, "spec", decode(
        TrainingSpec, {"trainer": {"command": ["torchrun", "train.py"]}}, "spec")),
}  # fmt: skip


@pytest.mark.parametrize("mend", MENDS.values(), ids=MENDS)
def test_refused_job_runs_as_soon_as_it_may(make_world: MakeWorld, mend: Callable[[Any], None]) -> None:
    world = unfit(make_world, **REFUSE)
    world.settle()
    mend(world)
    world.start()
    assert (world.status.attempt, world.status.restarts) == (1, 0)


def test_refused_job_can_be_suspended_and_resumed(make_world: MakeWorld) -> None:
    world = unfit(make_world, **REFUSE)
    world.settle()
    world.intent = Intent.SUSPEND
    world.settle()
    assert world.status.state is State.SUSPENDED
    world.intent = Intent.RUN
    world.settle()
    assert (world.status.state, world.launches) == (State.PENDING, [])


def test_job_that_no_longer_fits_is_not_launched_anew_and_goes_on_when_it_does(make_world: MakeWorld) -> None:
    world = unfit(make_world, **REFUSE)
    world.room = gpus(80)
    world.start(staged=10)
    world.room = gpus(11)
    world.fail()
    world.settle()
    assert (len(world.launches), world.status.state) == (1, State.RESTARTING)
    world.room = gpus(80)
    world.relaunched()
    assert world.launches[-1].resume_step == 10


def test_on_one_machine_a_refused_job_fails_at_once(make_world: MakeWorld) -> None:
    world = unfit(make_world, generation=None, **REFUSE)
    status = world.settle()
    assert world.launches == []
    assert status.current is not None
    assert (status.state, status.current.fail_reason) == (State.FAILED, FailedReason.DOES_NOT_FIT_MEMORY)
    assert status.current.fail_message.endswith("; nothing is started (memoryPolicy.action: Refuse)")
    lines = [line for seen in world.passes for line in tell(seen)]
    assert lines == [f"failed: DoesNotFitMemory: {status.current.fail_message}"]
    assert [name for name, _ in facts_of(status)].count("memory") == 0, "said twice"


def test_report_of_a_job_that_may_have_failed_for_it_says_so(make_world: MakeWorld) -> None:
    world = unfit(make_world, failurePolicy={"maxRestarts": 0})
    world.start()
    shown = dict(facts_of(world.status, world.now))
    assert shown["FitsMemory"].startswith("False for ")
    assert "DeviceTooSmall: one rank takes 14.5 GiB" in shown["FitsMemory"]
    world.fail()
    world.settle()
    assert world.status.is_terminal
    assert dict(facts_of(world.status))["memory"].startswith("too small: one rank takes 14.5 GiB")
