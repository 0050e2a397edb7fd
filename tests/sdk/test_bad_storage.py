"""The storage or the agent goes away in the middle of training: training goes on, and saving when they are back."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast.errors import CheckpointNotFound, StorageError, StorageUnavailable
from stepfast.torch import every, saver

SCRIPT = """
import os, sys, torch
from stepfast.torch import Checkpointer, every
ckpt = Checkpointer(state={"a": torch.full((1000,), 5.0)}, interval=every(steps=1))
for step in (1, 2, 3):
    ckpt.step(step)
print("at the end", flush=True)
%s
"""

# What one rank cannot write: a folder stands where its file of step 2 belongs.
UNEVEN = """
import os
from pathlib import Path
import torch.distributed as dist
from stepfast.layout import data_path
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
ckpt = Checkpointer(state={"rank": rank})
ckpt.save(1).wait(timeout_seconds=60.0)
obstacle = Path(os.environ["FOLDER"], data_path(2, os.environ["STEPFAST_RUN"], "state", 1, 2))
if rank == 1:
    (obstacle / "in the way").mkdir(parents=True)
dist.barrier()
ckpt.save(2)
dist.barrier()
ckpt.save(3).wait(timeout_seconds=60.0)
if rank == 0:
    print("steps", [found.step for found in ckpt.steps()], flush=True)
ckpt.close()
dist.destroy_process_group()
"""


def test_agent_that_went_with_its_memory_is_used_again_once_it_is_back(
    bench: Any, start_agent: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent = start_agent()
    checkpointer = bench.make(bench.environment(socket=agent.socket), state={"a": torch.ones(1000)})
    checkpointer.save(1).wait(timeout_seconds=60.0)
    agent.process.terminate()  # in order: all is committed, so its memory is removed
    assert agent.process.wait(60) == 0
    for slot in agent.memory.rglob("slot-*"):
        slot.unlink()
    agent.start()
    for step in (2, 3, 4):
        checkpointer.save(step).wait(timeout_seconds=60.0)

    assert [found.step for found in checkpointer.steps()] == [1, 2, 3, 4]
    assert sum("went away" in record.message for record in caplog.records) == 1


def test_metrics_beyond_what_a_heartbeat_carries_do_not_end_training(
    bench: Any, start_agent: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = bench.make(bench.environment(socket=start_agent().socket), state={})
    for step in (1, 2):
        checkpointer.step(step, metrics={"loss": 0.5, "x" * 100: 1.0, **{f"m{i}": float(i) for i in range(100)}})
    checkpointer.save(2).wait(timeout_seconds=60.0)

    assert sum("metrics" in record.message for record in caplog.records) == 1


def test_storage_that_fails_does_not_end_training(
    any_bench: Any, file_in_the_way: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.zeros(10)}
    checkpointer = any_bench.make(state=state)
    checkpointer.save(1).wait(timeout_seconds=30.0)
    obstacle = file_in_the_way(any_bench.folder)
    obstacle.place()
    with caplog.at_level(logging.ERROR, "stepfast"):
        state["a"].fill_(2.0)
        lost = checkpointer.save(2)
        with pytest.raises((StorageError, CheckpointNotFound), match="step 2"):
            lost.wait(timeout_seconds=2.0)
        checkpointer.step(3)
    obstacle.heal()
    state["a"].fill_(4.0)
    checkpointer.save(4).wait(timeout_seconds=60.0)
    checkpointer.close(timeout_seconds=60.0)

    assert "step 2" in caplog.text
    back: dict[str, Any] = {}
    assert any_bench.make(state=back).restore() == 4
    assert back["a"].tolist() == [4.0] * 10
    assert any_bench.make(state={}).restore(step=1) == 1


def test_rank_that_cannot_write_keeps_no_other_waiting(launcher: Any) -> None:
    done = launcher.run(UNEVEN, ranks=2, FOLDER=str(launcher.bench.folder))
    assert done.code == 0, done.output
    assert "steps [1, 3]" in done.output
    assert "step 2 was not saved" in done.output
    assert "step 2 is not committed so far" in done.output


def test_close_tells_that_the_newest_save_is_not_committed(
    any_bench: Any, file_in_the_way: Callable[[Path], Any]
) -> None:
    checkpointer = any_bench.make(state={"a": torch.zeros(10)})
    checkpointer.save(1).wait(timeout_seconds=30.0)
    obstacle = file_in_the_way(any_bench.folder)
    obstacle.place()
    checkpointer.save(2)

    with pytest.raises((StorageError, CheckpointNotFound), match="step 2"):
        checkpointer.close(timeout_seconds=2.0)
    obstacle.heal()


def test_save_that_failed_long_ago_is_not_taken_for_committed(
    bench: Any, file_in_the_way: Callable[[Path], Any]
) -> None:
    checkpointer = bench.make(bench.environment(max_to_keep=0), state={})
    saves = [checkpointer.save(0)]
    obstacle = file_in_the_way(bench.folder)
    obstacle.place()
    saves.append(checkpointer.save(1))
    obstacle.heal()
    saves += [checkpointer.save(step) for step in range(2, 103)]

    with pytest.raises(CheckpointNotFound, match="step 1 is not committed"):
        saves[1].wait(timeout_seconds=30.0)
    saves[0].wait(timeout_seconds=30.0)
    saves[2].wait(timeout_seconds=30.0)


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize("restored", [None, 1], ids=["from scratch", "from an older step"])
def test_close_tells_that_nothing_was_saved_behind_newer_steps_that_could_not_be_marked(
    restored: int | None, call: str, bench: Any
) -> None:
    with bench.make(state={}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    anew = bench.make(state={}, interval=every(steps=100))
    if restored is not None:
        anew.restore(restored)
    bench.folder.rename(bench.storage / "aside")
    bench.folder.symlink_to(bench.folder)  # whatever is to be listed or written there fails
    getattr(anew, call)(5)
    with pytest.raises(StorageUnavailable, match="step 5, the last, is not saved"):
        anew.close()


def test_agent_killed_in_the_middle_comes_back_and_later_steps_commit(
    start_agent: Callable[..., Any], bench: Any, until: Callable[..., Any]
) -> None:
    agent = start_agent()
    state = {"a": torch.zeros(1000)}
    checkpointer = bench.make(bench.environment(socket=agent.socket), state=state, interval=every(steps=100))
    for step in (1, 2, 3):
        checkpointer.save(step).wait(timeout_seconds=30.0)
    checkpointer.save(4)
    agent.kill()
    for step in range(5, 9):
        assert checkpointer.step(step, metrics={"loss": 1.0}) is None
    agent.start()
    state["a"].fill_(9.0)
    checkpointer.save(9).wait(timeout_seconds=60.0)
    checkpointer.save(10)
    checkpointer.close(timeout_seconds=60.0)

    back: dict[str, Any] = {}
    reader = bench.make(state=back)
    assert reader.restore() == 10
    assert back["a"].tolist() == [9.0] * 1000
    assert {1, 2, 3, 10} <= {committed.step for committed in reader.steps()}


def test_agent_that_stays_away_is_done_without(
    start_agent: Callable[..., Any],
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(saver, "AGENT_AWAY_SECONDS", 0.2)
    agent = start_agent()
    state = {"a": torch.zeros(1000)}
    checkpointer = bench.make(bench.environment(socket=agent.socket), state=state)
    checkpointer.save(1).wait(timeout_seconds=30.0)
    agent.end()
    state["a"].fill_(2.0)
    with caplog.at_level(logging.ERROR, "stepfast"):
        checkpointer.save(2).wait(timeout_seconds=30.0)
        checkpointer.save(3)
        checkpointer.close(timeout_seconds=10.0)

    assert "step 2 goes straight to the storage" in caplog.text
    back: dict[str, Any] = {}
    assert bench.make(state=back).restore() == 3
    assert back["a"].tolist() == [2.0] * 1000


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("", 0, id="falls off the end"),
        pytest.param("sys.exit(3)", 3, id="exits"),
        pytest.param("os._exit(4)", 4, id="exits at once"),
        pytest.param("raise SystemError('on purpose')", 1, id="raises"),
        pytest.param("os.kill(os.getpid(), 9)", -9, id="is killed"),
    ],
)
def test_process_that_ends_without_close_loses_nothing(  # noqa: PLR0917  # fixtures
    ending: str, code: int, shared_agent: Any, bench: Any, until: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT % ending)
    job = f"local/ends-{tmp_path.name[-20:].strip('-_').lower().replace('_', '-')}-{abs(code)}"
    variables = os.environ | {
        "STEPFAST_SOCKET": shared_agent.socket, "STEPFAST_JOB": job, "STEPFAST_RUN": "r-1",
        "STEPFAST_STORAGE_URI": bench.storage.as_uri(), "STEPFAST_SETTINGS": '{"persistIntervalSeconds": 3600}',
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=180, check=False
    )

    assert ended.returncode == code, ended.stderr
    until((bench.storage / job / "global_step3" / "manifest.json").exists, "the commit of step 3")


def test_interpreter_ends_at_once_without_close_or_agent(bench: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT % "")
    variables = os.environ | {
        "STEPFAST_STORAGE_URI": bench.storage.as_uri(),
        "STEPFAST_JOB": "local/training",
    }
    ended = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=180, check=False
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert bench.make(state={}).restore() == 3
