"""What the operator says of a node's slots, before anything is started, is what the node's agent makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepfast.errors import MemoryBudgetTooSmall
from stepfast.footprint import Footprint
from stepfast.sizes import size_text
from stepfast.slot import CONTROL_BYTES
from stepfast.slotplan import LEAST_SHARE_BYTES, SlotPlan
from stepfast.step import JobKey
from stepfast.tensorfile import PAGE, HeaderPlan, TensorSpec
from stepfast_operator.observed import NodeMemory, Room
from stepfast_operator.record import ConditionType
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.slots import RankSlots

MIB = 1 << 20
JOB = JobKey(namespace="team", name="gpt")
# By the slots that the agent makes of a rank's share.
TOLD = {
    3: None,
    2: ": two slots a rank, so that a save may wait for the upload of the one before",
    1: ": one slot a rank, so that a save may wait for the upload of the one before",
}


def condition_message(make_world: Callable[..., Any], limit_bytes: int, ranks: int, checkpoint_bytes: int) -> str:
    """What FitsMemory says of ranks with checkpoints of that size, on a node whose agent may take so much."""
    world = make_world()
    world.anatomy = Footprint(
        title="t", device="cpu", occupied_bytes=1, reserved_bytes=1, context_bytes=0, peak_bytes=1, components={},
        checkpoint_bytes=checkpoint_bytes,
    ).to_json()  # fmt: skip
    node = NodeMemory(name="node-0", memory_bytes=1 << 40, slot_bytes=limit_bytes)
    world.room = Room(world_size=ranks, ranks=ranks, nodes=[node])
    world.look()
    condition = world.status.condition(ConditionType.FITS_MEMORY)
    assert condition is not None
    return str(condition.message)


def slots_made(folder: Path, limit_bytes: int, ranks: int, checkpoint_bytes: int) -> list[tuple[int, SlotPlan]]:
    """Of each rank that saves one tensor of that size: how many slots the agent makes, and its plan."""
    file = HeaderPlan(
        [TensorSpec(name="x", dtype="U8", shape=(checkpoint_bytes,))], constant={}, variable_bytes=0
    ).size_bytes
    memory = MemoryTier(folder, limit_bytes)
    made = []
    for rank in range(ranks):
        slots = RankSlots(JOB, rank, memory)
        plan = asyncio.run(
            slots.prepare(
                file, limit_bytes // ranks, reusable=tuple, added=lambda _: None, removed=lambda _: None,
                reclaim=lambda _: None,
            )
        )  # fmt: skip
        made.append((len(slots.indexes), plan))
    return made


# The node's limit, its ranks, and the bytes of one rank's tensors.
TIERS: dict[str, tuple[int, int, int]] = {
    "three times the tensors, and no more": (3 * MIB, 1, MIB),
    "three times a slot": (3 * (MIB + PAGE + CONTROL_BYTES), 1, MIB),
    "a byte less than three times a slot": (3 * (MIB + PAGE + CONTROL_BYTES) - 1, 1, MIB),
    "tensors that end within a page": (3 * (MIB + 2 * PAGE + CONTROL_BYTES) - 1, 1, MIB + 1),
    "room for four": (5 * MIB, 1, MIB),
    "a rank's share does not divide evenly": (2 * 2 * (MIB + PAGE + CONTROL_BYTES) + 1, 2, MIB),
    "twice the tensors, and no more": (2 * MIB, 1, MIB),
    "one slot": (2 * (MIB + PAGE + CONTROL_BYTES), 2, MIB),
}


@pytest.mark.parametrize(("limit_bytes", "ranks", "checkpoint_bytes"), TIERS.values(), ids=TIERS)
def test_operator_tells_as_many_slots_as_the_agent_makes(
    make_world: Callable[..., Any], tmp_path: Path, limit_bytes: int, ranks: int, checkpoint_bytes: int
) -> None:
    ((slots, plan),) = set(slots_made(tmp_path, limit_bytes, ranks, checkpoint_bytes))
    assert (plan.slots, plan.streamed) == (slots, False)
    told = condition_message(make_world, limit_bytes, ranks, checkpoint_bytes)
    words = TOLD[slots]
    assert told.endswith(words) if words is not None else "slot" not in told


# The node's limit, its ranks, and how many windows there are of each rank's files of 64 MiB.
STREAMED: dict[str, tuple[int, int, str]] = {
    "two windows": (2 * LEAST_SHARE_BYTES, 1, "two windows of 8.0 MiB"),
    "a byte less than two windows": (2 * LEAST_SHARE_BYTES - 1, 1, "one window of 16.0 MiB"),
    "one chunk": (LEAST_SHARE_BYTES, 1, "one window of 8.0 MiB"),
    "as large as the tensors": (64 * MIB, 1, "two windows of 24.0 MiB"),
    "ranks that share": (64 * MIB, 2, "two windows of 8.0 MiB"),
}


@pytest.mark.parametrize(("limit_bytes", "ranks", "windows"), STREAMED.values(), ids=STREAMED)
def test_operator_tells_the_windows_that_the_agent_streams_through(
    make_world: Callable[..., Any], tmp_path: Path, limit_bytes: int, ranks: int, windows: str
) -> None:
    ((made, plan),) = set(slots_made(tmp_path, limit_bytes, ranks, 64 * MIB))
    number = {1: "one window", 2: "two windows"}[made]
    assert (plan.streamed, f"{number} of {size_text(plan.capacity_bytes)}") == (True, windows)
    told = condition_message(make_world, limit_bytes, ranks, 64 * MIB)
    assert told.endswith(f" less: they are streamed through {windows} a rank, and training waits for the storage")


def test_operator_tells_of_a_share_in_which_the_agent_stages_nothing(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    limit = 2 * LEAST_SHARE_BYTES - 1
    with pytest.raises(MemoryBudgetTooSmall):
        slots_made(tmp_path, limit, 2, 64 * MIB)
    told = condition_message(make_world, limit, 2, 64 * MIB)
    assert told.endswith(": a rank's share is less than the 8.0 MiB that it needs, and every save will fail")
