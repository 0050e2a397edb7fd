"""`stepfast checkpoints list|show|verify`: what they say of whole steps, of damage, and of wrong input."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast.layout import data_path

Invoke = Callable[..., Any]


def flip_byte(folder: Path, position: int = -1) -> Path:
    """Damages the last byte of a step's only data file."""
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    return file


def on_terminal(columns: int, *arguments: str) -> str:
    """What the command writes to a terminal that is so wide."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "stepfast.cli", "checkpoints", *arguments]
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        finally:
            os.close(ours)
        assert process.wait() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r\n", "\n")


# ---------------------------------------------------------------- list


def test_list_shows_each_committed_step_with_size_ranks_and_run(any_job: Any, invoke: Invoke) -> None:
    run = any_job.train(5, 10)

    said = invoke("list", any_job.uri)

    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0].split() == ["STEP", "SIZE", "RANKS", "SAVED", "LAG", "RUN", "STATE"]
    assert [(line.split()[0], line.split()[-2], line.split()[-1]) for line in said.out.splitlines()[1:]] == [
        ("5", run, "committed"),
        ("10", run, "committed"),
    ]


def test_list_as_json_gives_numbers(any_job: Any, invoke: Invoke) -> None:
    run = any_job.train(5)

    (row,) = invoke("list", any_job.uri, "--json").document

    assert (row["step"], row["run"], row["worldSize"], row["state"], row["damage"]) == (5, run, 1, "committed", None)
    assert row["sizeBytes"] > 0
    assert row["committedTime"] >= row["savedTime"] > 0


def test_list_shows_a_damaged_manifest_as_such(job: Any, invoke: Invoke) -> None:
    job.train(5, 10)
    (job.step_folder(5) / "manifest.json").write_text("{}")

    said = invoke("list", job.uri)
    damage = invoke("list", job.uri, "--json").document[0]["damage"]

    assert said.code == 0
    assert "damaged: global_step5/manifest.json" in said.out.splitlines()[1]
    assert "global_step5/manifest.json" in damage


def test_piped_list_has_one_whole_row_a_line_without_tabs(job: Any, invoke: Invoke) -> None:
    job.train(5, 1_000_000_000_000)

    lines = invoke("list", job.uri).out.splitlines()

    assert len(lines) == 3
    assert all(line.isascii() and "\t" not in line and line == line.rstrip() for line in lines)
    starts = [[line.index(cell) for cell in line.split("  ") if cell] for line in lines]
    assert lines[0].index("RUN") == lines[1].index(job.runs[0]) == lines[2].index(job.runs[0])
    assert all(len(row) == 7 for row in starts)


@pytest.mark.parametrize("columns", [80, 200])
def test_no_cell_is_cut_or_wrapped_on_a_terminal(columns: int, job: Any) -> None:
    long = "x" * 60
    run = job.train(5, **{long: torch.zeros(1)})

    listed = on_terminal(columns, "list", job.uri)
    shown = on_terminal(columns, "show", job.uri)

    assert "…" not in listed + shown
    assert re.search(rf"5\b.*\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ.*{run}.*committed", listed)
    assert re.search(rf"model.{long}\W.*F32", shown)
    assert ("┏" in listed) == (columns == 200)


def test_job_that_has_committed_nothing_yet_is_no_error(job: Any, invoke: Invoke) -> None:
    job.step_folder(5).mkdir(parents=True)

    said, document = invoke("list", job.uri), invoke("list", job.uri, "--json").document

    assert (said.code, said.out) == (0, "")
    assert "no committed step" in said.err
    assert document == []


COMMANDS = [
    pytest.param(["list"], [], id="list"),
    pytest.param(["show"], [], id="show"),
    pytest.param(["verify"], [], id="verify"),
    pytest.param(["export"], ["out"], id="export"),
    pytest.param(["rm"], ["5", "--yes"], id="rm"),
    pytest.param(["reinstate"], ["5"], id="reinstate"),
]


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
@pytest.mark.parametrize("level", ["", "/local"])
def test_folder_above_a_job_is_refused_with_the_job_in_question(
    command: list[str], rest: list[str], level: str, any_job: Any, invoke: Invoke
) -> None:
    any_job.train(5)

    said = invoke(*command, f"{any_job.root}{level}", *rest)

    assert (said.code, said.out) == (2, "")
    assert f"did you mean {any_job.uri}?" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_uri_without_any_job_is_refused(command: list[str], rest: list[str], tmp_path: Path, invoke: Invoke) -> None:
    for uri in (tmp_path / "nothing", tmp_path, "memory://nothing-here"):
        said = invoke(*command, uri, *rest)
        assert (said.code, said.out) == (2, "")
        assert f"{uri} holds no job" in said.err


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        pytest.param("{job}/global_step5", "is a step's folder", id="step"),
        pytest.param("{job}/global_step5/", "is a step's folder", id="step-slash"),
        pytest.param("nosuch://somewhere", "nosuch", id="scheme"),
        pytest.param("file://host/path", "no absolute path", id="host"),
        pytest.param("", "is empty", id="empty"),
    ],
)
@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_wrong_uris_are_refused_in_one_line(
    *, command: list[str], rest: list[str], uri: str, said: str, job: Any, invoke: Invoke
) -> None:
    job.train(5)

    result = invoke(*command, uri.format(job=job.uri), *rest)

    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def test_many_jobs_below_are_not_all_named(tmp_path: Path, invoke: Invoke) -> None:
    for index in range(9):
        (tmp_path / "local" / f"job-{index}" / "global_step1").mkdir(parents=True)

    said = invoke("list", tmp_path)

    assert said.err.count("job-") == 5
    assert "4 more" in said.err


# ---------------------------------------------------------------- show


def test_show_names_files_and_tensors_of_the_latest_step(any_job: Any, invoke: Invoke) -> None:
    run = any_job.train(5, 10)

    said = invoke("show", any_job.uri)

    assert said.code == 0
    assert said.out.startswith(f"step 10  run {run}  1 ranks")
    assert data_path(10, run, "state", 0, 1) in said.out
    assert re.search(r"weights +F32 +2x3 +24 B$", said.out, re.MULTILINE)


def test_show_as_json_gives_dtypes_and_shapes(any_job: Any, invoke: Invoke) -> None:
    run = any_job.train(5, 10)

    document = invoke("show", any_job.uri, "--step", 5, "--json").document

    path = data_path(5, run, "state", 0, 1)
    assert (document["step"], document["run"], document["worldSize"]) == (5, run, 1)
    assert [(file["path"], file["rank"]) for file in document["files"]] == [(path, 0)]
    weights = next(spec for name, spec in document["tensors"][path].items() if name.endswith("weights"))
    assert weights == {"dtype": "F32", "shape": [2, 3]}


def test_show_prints_names_as_they_are_but_for_what_would_break_the_line(job: Any, invoke: Invoke) -> None:
    job.train(5, **{"a[red]b": torch.zeros(1), "tab\there\nand there": torch.zeros(1)})

    said = invoke("show", job.uri)

    assert "a[red]b" in said.out
    assert r"tab\there\nand there" in said.out
    assert "\t" not in said.out


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_step_that_is_not_committed_is_refused(command: str, any_job: Any, invoke: Invoke, tmp_path: Path) -> None:
    any_job.train(5)
    target = [tmp_path / "out.pt"] if command == "export" else []

    said = invoke(command, any_job.uri, *target, "--step", 6)

    assert (said.code, said.out) == (2, "")
    assert "step 6 is not committed" in said.err
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_job_without_a_committed_step_is_refused(command: str, job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.step_folder(5).mkdir(parents=True)
    target = [tmp_path / "out.pt"] if command == "export" else []

    said = invoke(command, job.uri, *target)

    assert said.code == 2
    assert "holds no committed step" in said.err


@pytest.mark.parametrize("wrong", ["-1", "five", "1.5"])
def test_step_that_is_no_step_number_is_a_usage_error(wrong: str, job: Any, invoke: Invoke) -> None:
    job.train(5)

    assert invoke("show", job.uri, "--step", wrong).code == 2


def test_show_of_a_damaged_step_names_the_file(job: Any, invoke: Invoke) -> None:
    job.train(5)
    (part,) = job.step_folder(5).glob("part-*.json")
    part.write_text("{}")

    said = invoke("show", job.uri)

    assert (said.code, said.out) == (1, "")
    assert part.name in said.err
    assert len(said.err.splitlines()) == 1


# ---------------------------------------------------------------- verify


def test_verify_finds_whole_steps_whole(any_job: Any, invoke: Invoke) -> None:
    any_job.train(5, 10)

    said = invoke("verify", any_job.uri)
    document = invoke("verify", any_job.uri, "--step", 10, "--json").document

    assert said.code == 0
    assert [line.partition(",")[0] for line in said.out.splitlines()] == ["step 5: whole", "step 10: whole"]
    assert [(row["step"], row["damage"]) for row in document] == [(10, None)]
    assert document[0]["sizeBytes"] > 0


def cut(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    return file


def lengthen(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    with file.open("ab") as out:
        out.write(b"\0")
    return file


def take_away(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    return file


def blank(pattern: str) -> Callable[[Path], Path]:
    def act(folder: Path) -> Path:
        (file,) = folder.glob(pattern)
        file.write_text("{}")
        return file

    return act


DAMAGE = [
    pytest.param(flip_byte, id="byte"),
    pytest.param(cut, id="cut"),
    pytest.param(lengthen, id="longer"),
    pytest.param(take_away, id="missing"),
    pytest.param(blank("part-*.json"), id="part"),
    pytest.param(blank("manifest.json"), id="manifest"),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_names_the_damaged_file_and_goes_on(damage: Callable[[Path], Path], job: Any, invoke: Invoke) -> None:
    job.train(5, 10)
    file = damage(job.step_folder(5))

    said = invoke("verify", job.uri)
    document = invoke("verify", job.uri, "--json")

    assert said.code == document.code == 1
    assert file.name in said.err
    assert "step 10: whole" in said.out
    assert "step 5: whole" not in said.out
    assert [row["damage"] is None for row in document.document] == [False, True]
