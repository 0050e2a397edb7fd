"""What a Checkpointer promises to one rank, without an agent and with one."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eventual import files_in
from stepfast.admission import Interval
from stepfast.errors import CheckpointerOpen, CheckpointMismatch, CheckpointNotFound, StepOutOfOrder
from stepfast.torch import Tier, every, join


def numbers(bench: Any) -> list[int]:
    """The job's committed steps."""
    return sorted(
        int(found.parent.name.removeprefix("global_step")) for found in files_in(bench.folder, "*/manifest.json")
    )


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        pytest.param(every(steps=3), [3, 6, 9], id="every three"),
        pytest.param(every(steps=1), list(range(1, 11)), id="every one"),
        pytest.param(every(steps=100), [], id="later than the end"),
        pytest.param(every(seconds=1e-6), list(range(1, 11)), id="every microsecond"),
        pytest.param(every(seconds=1000.0), [], id="every quarter of an hour"),
    ],
)
def test_steps_are_saved_as_the_interval_says(interval: Interval, expected: list[int], any_bench: Any) -> None:
    state = {"step": 0}
    checkpointer = any_bench.make(state=state, interval=interval)
    for step in range(1, 11):
        state["step"] = step
        saved = checkpointer.step(step, metrics={"loss": torch.tensor(1.0), "other": float("nan")})
        assert (saved is not None) is (step in expected)
        if saved is not None:
            saved.wait(timeout_seconds=30.0)

    assert numbers(any_bench) == expected


def test_interval_comes_from_the_launcher_unless_given(bench: Any) -> None:
    told = bench.make(bench.environment(interval=Interval(steps=2)), state={})

    assert [told.step(step) is not None for step in (1, 2, 3, 4)] == [False, True, False, True]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"interval": "often", "state": {}}, id="interval"),
        pytest.param({"replicated": ["nothing"], "state": {}}, id="replicated"),
        pytest.param({"rng": {}}, id="reserved name"),
        pytest.param({"total_steps": 0, "state": {}}, id="no steps in all"),
        pytest.param({"total_steps": True, "state": {}}, id="no number of steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], bench: Any) -> None:
    with pytest.raises(ValueError, match=r"interval|nothing|rng|total_steps"):
        bench.make(**arguments)


def test_object_without_state_is_refused_by_name(bench: Any) -> None:
    with pytest.raises(TypeError, match="sampler is a list"):
        bench.make(sampler=[1])


def test_every_wants_exactly_one_unit() -> None:
    with pytest.raises(ValueError, match="either"):
        every()
    with pytest.raises(ValueError, match="either"):
        every(steps=1, seconds=1.0)
    with pytest.raises(ValueError, match="0 steps"):
        every(steps=0)


def test_training_goes_on_where_it_was(any_bench: Any) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def train(parts: dict[str, Any]) -> None:
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(8, 4)).square().sum().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()

    first = build()
    checkpointer = any_bench.make(**first)
    for _ in range(3):
        train(first)
    checkpointer.save(3).wait(timeout_seconds=30.0)
    train(first)

    second = build()
    assert any_bench.make(**second).restore() == 3
    train(second)

    for name, tensor in first["model"].state_dict().items():
        assert torch.equal(tensor, second["model"].state_dict()[name]), name
    assert first["scheduler"].state_dict() == second["scheduler"].state_dict()
    ours, theirs = (parts["optimizer"].state_dict()["state"] for parts in (first, second))
    assert all(torch.equal(ours[i][key], theirs[i][key]) for i in ours for key in ours[i])


def test_random_generators_continue_identically(any_bench: Any) -> None:
    def draw() -> tuple[float, float, float, float, list[float]]:
        return (
            random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
            torch.randn(3).tolist(),
        )  # fmt: skip

    random.gauss(0, 1)  # the second of a pair is kept for the next call
    np.random.randn()
    any_bench.make(none={}).save(1).wait(timeout_seconds=30.0)
    expected = [draw() for _ in range(3)]
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    any_bench.make(none={}).restore()

    assert [draw() for _ in range(3)] == expected


# ---------------------------------------------------------------- restoring


def test_nothing_to_restore_is_step_zero(any_bench: Any) -> None:
    state = {"untouched": 1}

    assert any_bench.make(state=state).restore() == 0
    assert state == {"untouched": 1}


def test_older_step_is_restored_when_asked_for(any_bench: Any) -> None:
    state = {"step": 0}
    checkpointer = any_bench.make(state=state)
    for step in (2, 4, 6):
        state["step"] = step
        checkpointer.save(step).wait(timeout_seconds=30.0)

    assert [checkpointer.restore(step) for step in (4, 2, 6)] == [4, 2, 6]
    assert checkpointer.restore(step=4) == 4
    assert state == {"step": 4}
    with pytest.raises(CheckpointNotFound, match="step 5"):
        checkpointer.restore(step=5)
    assert state == {"step": 4}


def test_training_that_goes_on_from_an_older_step_supersedes_the_newer_ones(
    any_bench: Any, until: Callable[..., Any]
) -> None:
    first, second = {"history": 1}, {"history": 2}
    with any_bench.make(state=first, interval=every(steps=5)) as checkpointer:
        assert [step for step in range(1, 9) if checkpointer.step(step)] == [5]
        for step in (8, 10, 12):
            checkpointer.save(step).wait(timeout_seconds=30.0)
    checkpointer = any_bench.make(state=second, interval=every(steps=5))
    assert checkpointer.restore(step=5) == 5
    until(lambda: numbers(any_bench) == [5, 8, 10, 12], "all commits; who only looks changes nothing")
    second["history"] = 2
    assert [step for step in range(6, 12) if checkpointer.step(step)] == [10]
    checkpointer.save(11).wait(timeout_seconds=30.0)

    until(lambda: numbers(any_bench) == [5, 10, 11], "the commit of the step that was not waited for")
    assert len(list(any_bench.folder.glob("*/manifest-superseded-*.json"))) == 3
    back = {"history": 0}
    assert any_bench.make(state=back).restore() == 11
    assert back == {"history": 2}


def test_training_that_never_restores_begins_a_history_of_its_own(any_bench: Any) -> None:
    with any_bench.make(state={"history": 1}) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step).wait(timeout_seconds=30.0)
    with any_bench.make(state={"history": 2}) as checkpointer:
        checkpointer.save(2).wait(timeout_seconds=30.0)

    assert numbers(any_bench) == [2]
    back = {"history": 0}
    any_bench.make(state=back).restore()
    assert back == {"history": 2}


def test_training_that_goes_on_from_the_latest_step_supersedes_nothing(any_bench: Any) -> None:
    for step in (1, 2, 3):
        with any_bench.make(state={}) as checkpointer:
            assert checkpointer.restore() == step - 1
            checkpointer.save(step)

    assert numbers(any_bench) == [1, 2, 3]


def test_damaged_step_is_saved_anew_when_training_comes_to_it_again(any_bench: Any) -> None:
    state = {"version": 1}
    with any_bench.make(state=state) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait(timeout_seconds=30.0)
    (any_bench.step_folder(2) / "manifest.json").write_text("{}")
    with any_bench.make(state=state) as checkpointer:
        assert checkpointer.restore() == 1
        state["version"] = 2
        checkpointer.save(2)

    assert any_bench.make(state=state).restore(step=2) == 2
    assert state == {"version": 2}


def test_step_before_one_that_this_run_saved_is_refused(any_bench: Any) -> None:
    checkpointer = any_bench.make(state={})
    for step in (1, 5):
        checkpointer.save(step).wait(timeout_seconds=30.0)
    checkpointer.restore(step=1)

    for call in (checkpointer.step, checkpointer.save):
        with pytest.raises(StepOutOfOrder, match="step 2 comes after step 5"):
            call(2)
    assert numbers(any_bench) == [1, 5]


def test_step_zero_is_saved_and_restored_like_any_other(any_bench: Any) -> None:
    any_bench.make(state={"weights": torch.ones(3)}).save(0).wait(timeout_seconds=30.0)
    state = {"weights": torch.zeros(3)}

    assert any_bench.make(state=state).restore() == 0
    assert state["weights"].tolist() == [1.0] * 3


def test_second_checkpointer_of_one_run_is_refused_until_the_first_is_closed(any_bench: Any) -> None:
    environment = any_bench.environment()
    first = any_bench.make(environment, model={})
    with pytest.raises(CheckpointerOpen, match="give all objects to one"):
        any_bench.make(environment, optimizer={})
    first.save(1).wait(timeout_seconds=30.0)
    first.close()
    any_bench.make(environment, model={}).save(2).wait(timeout_seconds=30.0)

    assert numbers(any_bench) == [1, 2]


def test_next_checkpointer_of_a_run_goes_on_from_what_the_first_has_saved(any_bench: Any) -> None:
    any_bench.make(state={}).save(2).wait(timeout_seconds=30.0)
    environment = any_bench.environment(resume_step=2)
    first = any_bench.make(environment, state={})
    assert first.restore() == 2
    first.save(3).wait(timeout_seconds=30.0)
    first.close()

    second = any_bench.make(environment, state={})
    assert second.restore() == 3
    second.save(4).wait(timeout_seconds=30.0)
    assert numbers(any_bench) == [2, 3, 4]


def test_relative_storage_is_a_folder_from_here_with_an_agent_too(
    any_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    any_bench.make(storage_uri="from here", state={}).save(1).wait(timeout_seconds=30.0)

    assert len(list((tmp_path / "from here").rglob("manifest.json"))) == 1


def test_launcher_fixes_the_first_restore_alone(bench: Any) -> None:
    checkpointer = bench.make(state={})
    for step in (1, 2, 3):
        checkpointer.save(step)

    later = bench.make(bench.environment(resume_step=2), state={})
    assert later.restore() == 2
    assert later.restore() == 3
    assert bench.make(bench.environment(resume_step=0), state={}).restore() == 0


def test_plain_dicts_are_restored_in_place(bench: Any) -> None:
    saved = {
        "tensor": torch.arange(3.0),
        "parameter": nn.Parameter(torch.ones(2)), "leaf": torch.ones(2, requires_grad=True),
        "nested": {"deep": torch.arange(4)}, "list": [torch.ones(2), {"in": torch.zeros(2)}], "new": 1, "number": 7,
    }  # fmt: skip
    bench.make(state=saved).save(1)

    tensor, deep, listed, inner = (
        torch.zeros(3),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(2),
        torch.ones(2),
    )
    parameter, leaf = nn.Parameter(torch.zeros(2)), torch.zeros(2, requires_grad=True)
    nested = {"deep": deep, "stale": 1}
    mine = {
        "tensor": tensor, "parameter": parameter, "leaf": leaf, "nested": nested, "list": [listed, {"in": inner}],
        "stale": torch.ones(1), "number": 1,
    }  # fmt: skip
    bench.make(state=mine).restore()

    assert list(mine) == ["tensor", "parameter", "leaf", "nested", "list", "number", "new"]
    assert mine["tensor"] is tensor
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert mine["parameter"] is parameter
    assert mine["leaf"] is leaf
    assert parameter.tolist() == leaf.tolist() == [1.0, 1.0]
    assert mine["nested"] is nested
    assert nested == {"deep": deep}
    assert deep.tolist() == [0, 1, 2, 3]
    assert mine["list"][0] is listed
    assert mine["list"][1]["in"] is inner
    assert (listed.tolist(), inner.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert (mine["number"], mine["new"]) == (7, 1)


def test_tensor_that_does_not_fit_is_replaced_in_a_dict(bench: Any) -> None:
    bench.make(state={"a": torch.ones(3), "b": OrderedDict(x=1)}).save(1)
    state: dict[str, Any] = {"a": torch.zeros(2), "b": 5}
    bench.make(state=state).restore()

    assert state["a"].tolist() == [1.0] * 3
    assert state["b"] == OrderedDict(x=1)


def test_missing_object_is_a_mismatch_that_names_it(any_bench: Any) -> None:
    any_bench.make(model=nn.Linear(2, 2), extra={}).save(3).wait(timeout_seconds=30.0)

    with pytest.raises(CheckpointMismatch, match=r"step 3 .*optimizer"):
        any_bench.make(model=nn.Linear(2, 2), optimizer={}).restore()
    assert any_bench.make(model=nn.Linear(2, 2)).restore() == 3


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param(nn.Linear(2, 2), nn.Linear(2, 3), id="shape"),
        pytest.param(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), id="name"),
        pytest.param({"weight": torch.ones(2)}, nn.Linear(2, 2), id="dict into a model"),
        pytest.param(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), id="model into optimizer"),
    ],
)
def test_state_that_does_not_fit_is_a_mismatch_that_names_the_object(saved: Any, wanted: Any, bench: Any) -> None:
    bench.make(thing=saved).save(1)

    with pytest.raises(CheckpointMismatch, match=r"thing .* step 1"):
        bench.make(thing=wanted).restore()


def test_object_of_another_kind_is_a_mismatch_for_a_dict(bench: Any) -> None:
    class Counting:
        def state_dict(self) -> list[int]:
            return [1, 2]

        def load_state_dict(self, state: list[int]) -> None:
            raise AssertionError

    bench.make(thing=Counting()).save(1)

    with pytest.raises(CheckpointMismatch, match=r"thing .* step 1"):
        bench.make(thing={}).restore()


def test_state_dict_that_is_a_tensor_is_saved_whatever_its_name(bench: Any) -> None:
    class Bare:
        value = torch.arange(3.0)

        def state_dict(self) -> torch.Tensor:
            return self.value

        def load_state_dict(self, state: torch.Tensor) -> None:
            self.value = state

    bench.make(**{"__metadata__": Bare(), "": {"": torch.ones(1)}}).save(1)
    back = Bare()
    back.value = torch.zeros(1)
    empty: dict[str, Any] = {}
    bench.make(**{"__metadata__": back, "": empty}).restore()

    assert back.value.tolist() == [0.0, 1.0, 2.0]
    assert empty[""].tolist() == [1.0]


# ---------------------------------------------------------------- saving


def test_step_saved_twice_stays_what_it_was_first(any_bench: Any) -> None:
    state = {"version": torch.zeros(1000)}
    checkpointer = any_bench.make(state=state, interval=every(steps=1))
    first = checkpointer.step(1)
    state["version"].fill_(1.0)
    second = checkpointer.save(1)
    first.wait(timeout_seconds=30.0)
    state["version"].fill_(2.0)
    third = checkpointer.save(1)
    for saved in (second, third):
        saved.wait(timeout_seconds=30.0)
    state["version"].fill_(3.0)
    checkpointer.save(2)
    checkpointer.close()

    back: dict[str, Any] = {}
    assert any_bench.make(state=back).restore(step=1) == 1
    assert (back["version"] == 0.0).all()
    assert any_bench.make(state=back).restore() == 2
    assert (back["version"] == 3.0).all()


def test_close_saves_the_last_step_that_the_interval_left_out(any_bench: Any) -> None:
    state = {"step": 0}
    with any_bench.make(any_bench.environment(on_busy="Skip"), state=state, interval=every(steps=4)) as checkpointer:
        for step in range(1, 8):
            state["step"] = step
            checkpointer.step(step)

    assert numbers(any_bench)[-1] == 7
    back = {"step": 0}
    assert any_bench.make(state=back).restore() == 7
    assert back == {"step": 7}


def test_training_that_fails_saves_nothing_on_its_way_out(any_bench: Any) -> None:
    def train() -> None:
        with any_bench.make(state={}, interval=every(steps=4)) as checkpointer:
            checkpointer.step(1)
            raise RuntimeError("the script fails")

    with pytest.raises(RuntimeError, match="the script fails"):
        train()

    assert numbers(any_bench) == []


def test_close_commits_the_newest_save(any_bench: Any) -> None:
    environment = any_bench.environment(persist_interval_seconds=3600.0)
    checkpointer = any_bench.make(environment, state={})
    for step in (1, 2, 3, 4):
        checkpointer.save(step)
    checkpointer.close(timeout_seconds=30.0)
    checkpointer.close()

    assert numbers(any_bench)[-1] == 4


def test_older_steps_are_removed_as_the_launcher_says(any_bench: Any, until: Callable[..., Any]) -> None:
    with any_bench.make(any_bench.environment(max_to_keep=2), state={}) as checkpointer:
        for step in (1, 2, 3, 4, 5):
            checkpointer.save(step).wait(timeout_seconds=30.0)

    until(lambda: numbers(any_bench) == [4, 5], "retention")


def test_saved_tells_what_it_cost(any_bench: Any) -> None:
    saved = any_bench.make(state={"a": torch.ones(10)}).save(7)

    assert (saved.step, saved.saved) == (7, True)
    assert 0.0 < saved.stall_seconds < 30.0
    saved.wait(Tier.MEMORY)
    saved.wait(timeout_seconds=30.0)


def test_forked_child_leaves_the_connection_alone(any_bench: Any) -> None:
    state = {"a": torch.ones(10)}
    checkpointer = any_bench.make(state=state)
    checkpointer.save(1).wait(timeout_seconds=30.0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    checkpointer.save(2).wait(timeout_seconds=30.0)

    assert numbers(any_bench) == [1, 2]


def test_data_loader_workers_leave_the_connection_alone(any_bench: Any) -> None:
    checkpointer = any_bench.make(state={"a": torch.ones(10)})
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
    for step, _ in enumerate(loader, start=1):
        checkpointer.save(step).wait(timeout_seconds=30.0)
    checkpointer.save(100).wait(timeout_seconds=30.0)

    assert numbers(any_bench) == [*range(1, 9), 100]


def test_absent_agent_is_told_once_and_saves_go_to_the_storage(
    bench: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "AGENT_START_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "stepfast"):
        checkpointer = bench.make(bench.environment(socket="/nowhere/agent.sock"), state={})
        checkpointer.save(1)
        checkpointer.save(2)

    assert [record.message.count("/nowhere/agent.sock") for record in caplog.records] == [1]
    assert numbers(bench) == [1, 2]
    assert "numpy" in sys.modules
