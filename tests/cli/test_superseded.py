"""Steps that were rolled back: listed, removed and brought back by `stepfast checkpoints`."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepfast import catalog
from stepfast.layout import manifest_path, superseded_path

Invoke = Callable[..., Any]


@pytest.fixture
def rolled_back(any_job: Any) -> Any:
    """A job whose first run saved 1 to 4, and whose second went on from 1 to 2."""
    any_job.train(1, 2, 3, 4)
    any_job.train(2, restore=1)
    return any_job


def states(invoke: Invoke, job: Any, *options: str) -> list[tuple[int, int, str]]:
    """Step, the number of the run, and the state of each."""
    rows = invoke("list", job.uri, "--all", "--json", *options).document
    return [(row["step"], job.runs.index(row["run"]) + 1, row["state"]) for row in rows]


BOTH = [
    (1, 1, "committed"),
    (2, 2, "committed"),
    (2, 1, "superseded"),
    (3, 1, "superseded"),
    (4, 1, "superseded"),
]


# ---------------------------------------------------------------- list


def test_list_shows_superseded_steps_only_when_all_are_asked_for(rolled_back: Any, invoke: Invoke) -> None:
    assert [row["step"] for row in invoke("list", rolled_back.uri, "--json").document] == [1, 2]
    assert states(invoke, rolled_back) == BOTH

    plain = invoke("list", rolled_back.uri, "--all")
    assert [line.split()[-1] for line in plain.out.splitlines()[1:]] == [state for _, _, state in BOTH]


def test_superseded_step_is_listed_with_its_size_and_time(rolled_back: Any, invoke: Invoke) -> None:
    rows = invoke("list", rolled_back.uri, "--all", "--json").document
    assert all(row["sizeBytes"] > 0 and row["savedTime"] > 0 and row["worldSize"] == 1 for row in rows)


def test_damaged_mark_is_listed_as_such(rolled_back: Any, invoke: Invoke) -> None:
    rolled_back.open().replace(superseded_path(3, rolled_back.runs[0]), b"{}")

    said = invoke("list", rolled_back.uri, "--all")

    assert "superseded, damaged: global_step3/manifest-superseded-" in said.out
    assert states(invoke, rolled_back) == BOTH


def test_list_hints_at_superseded_steps_where_nothing_else_is(any_job: Any, invoke: Invoke) -> None:
    any_job.train(1, 2)
    catalog.supersede_after(any_job.open(), "", -1)

    said = invoke("list", any_job.uri)

    assert said.code == 0
    assert "2 were rolled back" in said.err
    assert "--all" in said.err


def test_step_whose_roll_back_was_cut_short_is_still_committed(any_job: Any, invoke: Invoke) -> None:
    any_job.train(1)
    store = any_job.open()
    store.create(superseded_path(1, any_job.runs[0]), store.read(manifest_path(1)))

    assert states(invoke, any_job) == [(1, 1, "committed")]


# ---------------------------------------------------------------- rm


def test_rm_takes_the_committed_step_and_leaves_what_is_superseded(rolled_back: Any, invoke: Invoke) -> None:
    said = invoke("rm", rolled_back.uri, 2, "--yes")

    assert (said.code, said.out) == (0, "removed step 2\n")
    assert states(invoke, rolled_back) == [row for row in BOTH if row != (2, 2, "committed")]
    names = [entry.name for entry in rolled_back.open().list("global_step2")]
    assert not any(rolled_back.runs[1] in name for name in names)
    assert invoke("reinstate", rolled_back.uri, 2).code == 0


def test_rm_takes_several_steps_with_all_that_is_theirs(any_job: Any, invoke: Invoke) -> None:
    any_job.train(1, 2, 3)

    assert invoke("rm", any_job.uri, 1, 3, 3, "--yes").out == "removed step 3\nremoved step 1\n"

    assert [entry.name for entry in any_job.open().list("") if entry.is_folder] == ["global_step2"]


def test_rm_takes_a_step_with_a_damaged_manifest(rolled_back: Any, invoke: Invoke) -> None:
    rolled_back.open().replace(manifest_path(2), b"{}")

    assert invoke("rm", rolled_back.uri, 2, "-y").code == 0
    assert states(invoke, rolled_back) == [row for row in BOTH if row != (2, 2, "committed")]


def test_rm_of_a_step_whose_roll_back_was_cut_short_leaves_nothing_of_it(any_job: Any, invoke: Invoke) -> None:
    any_job.train(1, 2, 3)
    any_job.train(2, restore=1)
    store = any_job.open()
    store.create(superseded_path(2, any_job.runs[1]), store.read(manifest_path(2)))

    assert invoke("rm", any_job.uri, 2, "--yes").code == 0

    assert (2, 2, "superseded") not in states(invoke, any_job)


def test_rm_superseded_takes_those_alone(rolled_back: Any, invoke: Invoke) -> None:
    said = invoke("rm", rolled_back.uri, "--superseded", 2, 3, "--yes")

    assert said.code == 0
    assert said.out.splitlines() == [f"removed step {step} of run {rolled_back.runs[0]}" for step in (2, 3)]
    assert states(invoke, rolled_back) == [
        row for row in BOTH if row not in ((2, 1, "superseded"), (3, 1, "superseded"))
    ]
    names = [entry.name for step in (2, 3) for entry in rolled_back.open().list(f"global_step{step}")]
    assert not any(rolled_back.runs[0] in name for name in names)
    assert invoke("verify", rolled_back.uri).code == 0


def test_rm_superseded_without_steps_takes_all_of_them(rolled_back: Any, invoke: Invoke) -> None:
    assert invoke("rm", rolled_back.uri, "--superseded", "--yes").code == 0

    assert states(invoke, rolled_back) == [(1, 1, "committed"), (2, 2, "committed")]


def test_rm_superseded_takes_a_damaged_mark_and_no_file_of_others(rolled_back: Any, invoke: Invoke) -> None:
    rolled_back.open().replace(superseded_path(2, rolled_back.runs[0]), b"{}")

    assert invoke("rm", rolled_back.uri, "--superseded", 2, "--yes").code == 0
    assert (2, 1, "superseded") not in states(invoke, rolled_back)
    assert invoke("verify", rolled_back.uri).code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "name the steps", id="nothing"),
        pytest.param(["7"], "not committed in", id="unknown"),
        pytest.param(["1", "3"], "superseded: 3 (remove those with --superseded)", id="superseded"),
        pytest.param(["--superseded", "1"], "not superseded in", id="committed"),
        pytest.param(["five"], "", id="word"),
    ],
)
def test_rm_of_what_is_not_there_removes_nothing(
    arguments: list[str], said: str, rolled_back: Any, invoke: Invoke
) -> None:
    result = invoke("rm", rolled_back.uri, *arguments, "--yes")

    assert result.code == 2
    assert said in result.err
    assert states(invoke, rolled_back) == BOTH


def test_rm_superseded_where_nothing_is_says_so(any_job: Any, invoke: Invoke) -> None:
    any_job.train(1)

    said = invoke("rm", any_job.uri, "--superseded", "--yes")

    assert said.code == 2
    assert "no step is" in said.err


@pytest.mark.parametrize("answer", [None, "y\n"])
@pytest.mark.parametrize("options", [["1"], ["--superseded"]])
def test_rm_without_a_terminal_needs_yes(
    answer: str | None, options: list[str], rolled_back: Any, invoke: Invoke
) -> None:
    said = invoke("rm", rolled_back.uri, *options, answer=answer)

    assert said.code == 2
    assert "--yes" in said.err
    assert len(said.err.splitlines()) == 1
    assert states(invoke, rolled_back) == BOTH


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("n", False)])
def test_rm_on_a_terminal_asks(answer: str, is_removed: bool, job: Any) -> None:
    job.train(1, 2)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stepfast.cli", "checkpoints", "rm", job.uri, "2"]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True) as process:
            os.write(ours, f"{answer}\n".encode())
            output, _ = process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)

    assert "Remove step 2 for good?" in output
    assert process.returncode == (0 if is_removed else 1)
    assert job.step_folder(2).exists() != is_removed


# ---------------------------------------------------------------- reinstate


def test_reinstated_step_is_committed_and_restored_from_as_it_was(rolled_back: Any, invoke: Invoke) -> None:
    assert rolled_back.restored() == (2, rolled_back.runs[1])

    said = invoke("reinstate", rolled_back.uri, 4)

    assert said.code == 0
    assert said.out == "step 4 is committed again: the next start resumes from it\n"
    assert states(invoke, rolled_back) == [*BOTH[:-1], (4, 1, "committed")]
    assert invoke("verify", rolled_back.uri).code == 0
    assert rolled_back.restored() == (4, rolled_back.runs[0])


def test_reinstated_step_below_the_latest_says_how_to_go_back_to_it(rolled_back: Any, invoke: Invoke) -> None:
    invoke("reinstate", rolled_back.uri, 4)

    said = invoke("reinstate", rolled_back.uri, 3)

    assert said.out.startswith("step 3 is committed again: the latest is 4")
    assert "--resume-from-step 3" in said.out


def test_reinstated_step_can_be_rolled_back_again(rolled_back: Any, invoke: Invoke) -> None:
    invoke("reinstate", rolled_back.uri, 4)
    rolled_back.train(3, restore=2)

    assert (4, 1, "superseded") in states(invoke, rolled_back)
    assert invoke("reinstate", rolled_back.uri, 4).code == 0


def test_committed_step_is_never_replaced_by_a_reinstated_one(rolled_back: Any, invoke: Invoke) -> None:
    said = invoke("reinstate", rolled_back.uri, 2)

    assert said.code == 2
    assert "step 2 is committed" in said.err
    assert "rm 2" in said.err
    assert states(invoke, rolled_back) == BOTH


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["1"], "step 1 is not superseded", id="committed"),
        pytest.param(["7"], "step 7 is not superseded", id="unknown"),
        pytest.param(["3", "--run", "nobody-1"], "of run nobody-1 is not superseded", id="run"),
        pytest.param(["-1"], "", id="negative"),
        pytest.param(["three"], "", id="word"),
        pytest.param([], "", id="nothing"),
    ],
)
def test_what_is_not_superseded_is_not_reinstated(
    arguments: list[str], said: str, rolled_back: Any, invoke: Invoke
) -> None:
    result = invoke("reinstate", rolled_back.uri, *arguments)

    assert result.code == 2
    assert said in result.err
    assert states(invoke, rolled_back) == BOTH


def test_step_that_two_runs_left_behind_needs_the_run(rolled_back: Any, invoke: Invoke) -> None:
    rolled_back.train(5, restore=1)
    first, second, _ = rolled_back.runs

    asked = invoke("reinstate", rolled_back.uri, 2)
    taken = invoke("reinstate", rolled_back.uri, 2, "--run", second)

    assert asked.code == 2
    assert first in asked.err
    assert second in asked.err
    assert taken.code == 0
    assert (2, 2, "committed") in states(invoke, rolled_back)
    assert (2, 1, "superseded") in states(invoke, rolled_back)


def damage_data(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def take_data(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.unlink()


def damage_part(folder: Path) -> None:
    (file,) = folder.glob("part-*.json")
    file.write_text("{}")


def take_part(folder: Path) -> None:
    (file,) = folder.glob("part-*.json")
    file.unlink()


def damage_mark(folder: Path) -> None:
    (file,) = folder.glob("manifest-superseded-*.json")
    file.write_text(file.read_text()[:-20])


def take_mark_of_another_step(folder: Path) -> None:
    (mark,) = folder.glob("manifest-superseded-*.json")
    shutil.copy(folder.parent / "global_step3" / mark.name, mark)


@pytest.mark.parametrize(
    "damage", [damage_data, take_data, damage_part, take_part, damage_mark, take_mark_of_another_step]
)
def test_step_that_is_not_whole_is_not_reinstated(damage: Callable[[Path], None], job: Any, invoke: Invoke) -> None:
    job.train(1, 2, 3, 4)
    job.train(2, restore=1)
    damage(job.step_folder(4))

    said = invoke("reinstate", job.uri, 4)

    assert (said.code, said.out) == (1, "")
    assert "global_step4/" in said.err
    assert not (job.step_folder(4) / "manifest.json").exists()
    assert job.restored() == (2, job.runs[1])


@pytest.mark.parametrize("effect", ["create:before", "create:after", "delete:before", "delete:after"])
def test_reinstating_that_was_killed_is_finished_by_the_next(effect: str, job: Any, invoke: Invoke) -> None:
    from stepfast.storage import open_store

    job.train(1, 2)
    job.train(3, restore=1)

    class Killed(BaseException):
        pass

    def probe(operation: str, path: str) -> None:
        if operation == effect:
            raise Killed

    with pytest.raises(Killed):
        catalog.reinstate(open_store(job.uri, probe=probe), "", 2, job.runs[0])
    is_committed = effect != "create:before"
    assert (2, 1, "committed" if is_committed else "superseded") in states(invoke, job)

    if effect != "delete:after":
        catalog.reinstate(job.open(), "", 2, job.runs[0])
    assert states(invoke, job) == [(1, 1, "committed"), (2, 1, "committed"), (3, 2, "committed")]
    assert not list(job.step_folder(2).glob("manifest-superseded-*"))
