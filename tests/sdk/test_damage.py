"""Every file of a committed step, damaged in every way: a named error and the next older step (I5)."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventual import files_in
from stepfast.errors import CheckpointDamaged, CheckpointNotFound
from stepfast.slot import CONTROL_BYTES
from stepfast.step import JobKey

# Two steps of two ranks. All of it is replicated, so that one process reads every file of the step.
TWO_RANKS = """
import torch, torch.distributed as dist
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
state = {"big": torch.zeros(100_000), "small": torch.zeros(3)}
ckpt = Checkpointer(state=state, replicated=["state"])
for step in (5, 10):
    state["big"].fill_(step)
    state["small"].fill_(step)
    ckpt.save(step).wait(timeout_seconds=60)
ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""

# Each rank restores what is its own; only rank 1's is damaged.
OWN_STATE = """
import sys, torch, torch.distributed as dist
from stepfast.errors import CheckpointDamaged
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"own": torch.zeros(100_000)}
ckpt = Checkpointer(state=state)
if sys.argv[1] == "save":
    for step in (5, 10):
        state["own"].fill_(step + rank)
        ckpt.save(step).wait(timeout_seconds=60)
else:
    try:
        ckpt.restore(step=10)
    except CheckpointDamaged as error:
        print(f"rank {rank}: {error}", flush=True)
    print(f"rank {rank} restored {ckpt.restore()} {state['own'][0].item()}", flush=True)
ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""

FILES = ["manifest.json", "part-100000-*", "part-100001-*", "state-00000-*", "state-00001-*"]
WAYS = ["flipped in the middle", "flipped in the header", "cut short", "empty", "missing", "another step's"]


def damage(file: Path, way: str) -> None:
    """Harms one file of step 10."""
    data = bytearray(file.read_bytes())
    match way:
        case "missing":
            file.unlink()
            return
        case "another step's":
            data = bytearray(next(file.parent.with_name("global_step5").glob(file.name)).read_bytes())
        case "flipped in the middle":
            data[len(data) // 2] ^= 1
        case "flipped in the header":
            data[20] ^= 1
        case "cut short":
            del data[len(data) * 2 // 3 :]
        case "empty":
            data.clear()
    file.write_bytes(data)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, make_launcher: Callable[..., Any]) -> Iterator[Path]:
    """A job's folder with two committed steps of two ranks."""
    launcher = make_launcher(tmp_path_factory.mktemp("template"))
    finished = launcher.run(TWO_RANKS, ranks=2)
    assert finished.code == 0, finished.output
    return launcher.bench.folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_older_step_restored(
    name: str, way: str, any_bench: Any, template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(template, any_bench.folder)
    (file,) = any_bench.step_folder(10).glob(name)
    damage(file, way)
    state: dict[str, Any] = {"untouched": 1}
    checkpointer = any_bench.make(state=state, replicated=["state"])

    if (name, way) == ("manifest.json", "missing"):
        with pytest.raises(CheckpointNotFound, match="step 10"):  # a step exists if and only if its manifest does
            checkpointer.restore(step=10)
        assert checkpointer.restore() == 5
        return
    with pytest.raises(CheckpointDamaged) as caught:
        checkpointer.restore(step=10)
    assert (caught.value.step, caught.value.older_step) == (10, 5)
    assert caught.value.path.endswith(f"global_step10/{file.name}")
    assert "Restore the next older committed step instead: 5" in str(caught.value)
    assert state == {"untouched": 1}
    caplog.clear()
    with caplog.at_level(logging.ERROR, "stepfast"):
        assert any_bench.make(state=state, replicated=["state"]).restore() == 5
    assert file.name in caplog.text
    assert (state["big"] == 5.0).all()
    assert state["small"].tolist() == [5.0] * 3


@pytest.mark.parametrize("way", ["flipped in the middle", "cut short", "missing"])
def test_step_zero_is_restored_when_every_step_is_damaged(
    way: str, bench: Any, template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(template, bench.folder)
    for step in (10, 5):
        (file,) = bench.step_folder(step).glob("state-00001-*")
        damage(file, way)
    state: dict[str, Any] = {"untouched": 1}
    with caplog.at_level(logging.ERROR, "stepfast"):
        assert bench.make(state=state, replicated=["state"]).restore() == 0

    assert [record.message.split(":")[1].strip() for record in caplog.records] == [
        "step 10 is damaged", "step 5 is damaged",
    ]  # fmt: skip
    assert all(".safetensors: " in record.message for record in caplog.records)
    assert state == {"untouched": 1}
    with pytest.raises(CheckpointDamaged, match="no older committed step"):
        bench.make(state=state, replicated=["state"]).restore(step=5)


def test_all_ranks_go_back_together_when_one_finds_damage(launcher: Any) -> None:
    script = launcher.write(OWN_STATE)
    assert launcher.run(script, "save", ranks=2).code == 0
    (file,) = launcher.bench.step_folder(10).glob("state-00001-*")
    damage(file, "flipped in the middle")
    finished = launcher.run(script, "restore", ranks=2, attempt=2)

    assert finished.code == 0, finished.output
    for rank in (0, 1):
        assert f"rank {rank}: step 10 is damaged: global_step10/{file.name}" in finished.output
        assert f"rank {rank} restored 5 {5.0 + rank}" in finished.output


# ---------------------------------------------------------------- the memory tier


@pytest.fixture
def held(start_agent: Callable[..., Any], bench: Any) -> tuple[Any, Any]:
    """An agent that holds step 2 in memory, committed too; the bench talks to it."""
    agent = start_agent()
    bench.job, bench.socket = JobKey(namespace="local", name=f"held-{uuid.uuid4().hex[:8]}"), agent.socket
    state = {"a": torch.arange(100_000.0)}
    with bench.make(state=state) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait(timeout_seconds=30.0)
    return agent, bench


def slots(agent: Any) -> list[Path]:
    return files_in(agent.memory, "*/*/*/slot-*")


@pytest.mark.parametrize("place", [CONTROL_BYTES + 50, CONTROL_BYTES + 100_000, -1], ids=["header", "data", "cut"])
def test_damaged_slot_gives_way_to_the_storage(
    place: int, held: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent, bench = held
    for slot in slots(agent):
        with slot.open("r+b") as file:
            if place < 0:
                file.truncate(CONTROL_BYTES + 100_000)
                continue
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    state: dict[str, Any] = {}

    assert bench.make(state=state).restore() == 2
    assert torch.equal(state["a"], torch.arange(100_000.0))


def test_slot_that_was_cut_short_is_made_anew_for_the_next_save(held: tuple[Any, Any]) -> None:
    agent, bench = held
    for slot in slots(agent):
        os.truncate(slot, CONTROL_BYTES + 100_000)
    state = {"a": torch.arange(100_000.0)}

    with bench.make(state=state) as checkpointer:
        assert checkpointer.restore() == 2
        state["a"] += 1
        checkpointer.save(3).wait(timeout_seconds=30.0)

    assert min(slot.stat().st_size for slot in slots(agent)) > state["a"].nbytes
    assert bench.make(state=state).restore() == 3
    assert torch.equal(state["a"], torch.arange(100_000.0) + 1)


def test_step_is_restored_from_memory_without_the_storages_bytes(held: tuple[Any, Any]) -> None:
    agent, bench = held
    (file,) = bench.step_folder(2).glob("state-*")
    file.write_bytes(b"")
    state: dict[str, Any] = {}

    assert slots(agent)
    assert bench.make(state=state).restore() == 2
    assert torch.equal(state["a"], torch.arange(100_000.0))


def test_damage_of_both_tiers_is_named(held: tuple[Any, Any]) -> None:
    agent, bench = held
    (file,) = bench.step_folder(2).glob("state-*")
    damage(file, "cut short")
    for slot in slots(agent):
        with slot.open("r+b") as memory:
            memory.seek(CONTROL_BYTES + 100_000)
            memory.write(b"\xff" * 8)
    state: dict[str, Any] = {}

    with pytest.raises(CheckpointDamaged, match=file.name):
        bench.make(state=state).restore(step=2)
    assert bench.make(state=state).restore() == 1
