"""`stepfast checkpoints export`: what comes out, where it may go, and that a failed or killed one leaves nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from stepfast.commit import FileUpload, try_commit, write_part
from stepfast.layout import Part, data_path
from stepfast.storage import Store

Invoke = Callable[..., Any]
RUN = "0123456789ab-1"


def commit_two_nodes(store: Store, step: int = 7) -> dict[str, bytes]:
    """A step of two ranks on two nodes; returns its files."""
    files = {}
    for rank in range(2):
        path = data_path(step, RUN, "state", rank, 2)
        data = safetensors.torch.save({"weights": torch.full((4,), float(rank))})
        upload = FileUpload(store, "", path, name="state", rank=rank, size_bytes=len(data))
        upload.put(0, memoryview(data))
        part = Part(
            step=step, run=RUN, node=rank, world_size=2, ranks=(rank,), files=(upload.finish(),), saved_time=1.0,
            persisted_time=2.0,
        )  # fmt: skip
        write_part(store, "", part)
        files[path.partition("/")[2]] = data
    assert try_commit(store, "", step, RUN) is not None
    return files


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "stepfast.cli", "checkpoints", "export", *map(str, arguments)]


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".PT"])
def test_torch_file_holds_the_state_as_torch_load_reads_it(
    suffix: str, any_job: Any, invoke: Invoke, tmp_path: Path
) -> None:
    run = any_job.train(5, 10)
    target = tmp_path / f"state{suffix}"

    said = invoke("export", any_job.uri, target)

    assert (said.code, said.out) == (0, f"step 10 is in {target}\n")
    state = torch.load(target, weights_only=True)
    assert torch.equal(state["model"]["weights"], torch.arange(6.0).reshape(2, 3))
    assert state["model"]["run"] == run


def test_older_step_is_taken_when_named(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5, 10)

    assert invoke("export", job.uri, tmp_path / "a.pt", "--step", 5).out.startswith("step 5 is in")


def test_folder_holds_all_ranks_files_as_they_are(any_job: Any, invoke: Invoke, tmp_path: Path) -> None:
    files = commit_two_nodes(any_job.open())

    assert invoke("export", any_job.uri, tmp_path / "out").code == 0

    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files


def test_checkpointer_of_another_name_is_exported_too(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5, name="trainer")

    assert invoke("export", job.uri, tmp_path / "a.pt").code == 0


def test_pickled_state_is_exported_only_when_that_is_asked_for(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5, odd=Fraction(1, 3))

    refused = invoke("export", job.uri, tmp_path / "a.pt")
    assert refused.code == 1
    assert "--no-weights-only" in refused.err
    assert not (tmp_path / "a.pt").exists()

    assert invoke("export", job.uri, tmp_path / "a.pt", "--no-weights-only").code == 0
    assert torch.load(tmp_path / "a.pt", weights_only=False)["model"]["odd"] == Fraction(1, 3)


# ---------------------------------------------------------------- where it may go


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_missing_parents_are_made(name: str, job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5)
    target = tmp_path / "new" / "deeper" / name

    assert invoke("export", job.uri, target).code == 0
    assert target.exists()


def test_existing_file_is_replaced_only_by_force(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5)
    target = tmp_path / "a.pt"
    target.write_text("precious")

    refused = invoke("export", job.uri, target)
    assert (refused.code, target.read_text()) == (2, "precious")
    assert "--force" in refused.err
    assert len(refused.err.splitlines()) == 1

    assert invoke("export", job.uri, target, "--force").code == 0
    assert "model" in torch.load(target)


def test_existing_export_is_replaced_as_a_whole_only_by_force(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5, 10)
    target = tmp_path / "out"
    invoke("export", job.uri, target, "--step", 5)
    before = [file.name for file in target.iterdir()]

    refused = invoke("export", job.uri, target)
    assert refused.code == 2
    assert "--force" in refused.err
    assert [file.name for file in target.iterdir()] == before

    job.train(11, name="other")
    assert invoke("export", job.uri, target, "--force").code == 0
    (file,) = target.iterdir()
    assert file.name.startswith("other-")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_folder_with_anything_else_in_it_is_never_replaced(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5)
    target = tmp_path / "home"
    (target / "photos").mkdir(parents=True)

    said = invoke("export", job.uri, target, "--force")

    assert said.code == 2
    assert "photos" in said.err
    assert (target / "photos").is_dir()


def test_empty_folder_is_taken_as_it_is(job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5)
    (tmp_path / "out").mkdir()

    assert invoke("export", job.uri, tmp_path / "out").code == 0
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        pytest.param("a.safetensors", [], "one safetensors file a rank", id="safetensors"),
        pytest.param("a.zip", [], ".zip is nothing that can be exported", id="suffix"),
        pytest.param("step-1.5", [], ".5 is nothing", id="dot-in-folder"),
        pytest.param("folder.pt", [], "is a folder", id="folder-named-as-file"),
        pytest.param("folder.pt", ["--force"], "is a folder", id="folder-by-force"),
        pytest.param("file", [], "is a file", id="file-named-as-folder"),
        pytest.param("file", ["--force"], "is a file", id="file-by-force"),
        pytest.param("out", ["--rank", "0"], "--rank: goes with a torch file", id="rank-of-a-folder"),
        pytest.param("a.pt", ["--rank", "1"], "rank 1", id="rank"),
        pytest.param("a.pt", ["--rank", "-1"], "--rank", id="negative-rank"),
    ],
)
def test_wrong_targets_are_refused(
    *, name: str, options: list[str], said: str, job: Any, invoke: Invoke, tmp_path: Path
) -> None:
    job.train(5)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder.pt").mkdir()
    before = sorted(tmp_path.iterdir())

    result = invoke("export", job.uri, tmp_path / name, *options)

    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("name", ["a.pt", "out"])
def test_parent_that_is_a_file_is_an_error_in_one_line(name: str, job: Any, invoke: Invoke, tmp_path: Path) -> None:
    job.train(5)
    (tmp_path / "file").write_text("precious")

    said = invoke("export", job.uri, tmp_path / "file" / name)

    assert (said.code, said.out) == (1, "")
    assert len(said.err.splitlines()) == 1
    assert "a directory" in said.err or "exists" in said.err


# ---------------------------------------------------------------- what fails, and what is killed


@pytest.mark.parametrize("name", ["a.pt", "out"])
def test_damage_found_half_way_leaves_nothing(name: str, any_job: Any, invoke: Invoke, tmp_path: Path) -> None:
    store = any_job.open()
    commit_two_nodes(store)
    last = data_path(7, RUN, "state", 1, 2)
    size = len(store.read(last))
    store.replace(last, b"\0" * size)
    before = sorted(tmp_path.iterdir())

    said = invoke("export", any_job.uri, tmp_path / name, *(["--rank", 1] if name == "a.pt" else []))

    assert (said.code, said.out) == (1, "")
    assert last in said.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["a.pt", "out"])
def test_write_that_fails_is_an_error_in_one_line_and_leaves_nothing(name: str, job: Any, tmp_path: Path) -> None:
    job.train(5, large=torch.zeros(1 << 18))
    before = sorted(tmp_path.iterdir())

    done = subprocess.run(
        command(job.uri, tmp_path / name), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert name in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("effect", ["fsync", "link", "replace", "rename"])
@pytest.mark.parametrize("name", ["a.pt", "out"])
def test_killed_export_leaves_nothing_under_the_targets_name(effect: str, name: str, job: Any, tmp_path: Path) -> None:
    job.train(5)
    forced = effect == "replace"
    program = "import os, sys; from stepfast.cli import main"
    program += f"; os.{effect} = lambda *a, **k: os.kill(os.getpid(), 9); main()"
    arguments = command(job.uri, tmp_path / name)[3:] + (["--force"] if forced else [])

    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=False)

    meets = effect in {"a.pt": ("fsync", "link", "replace"), "out": ("fsync", "rename")}[name]
    assert done.returncode == (-9 if meets else 0), done.stderr
    assert (tmp_path / name).exists() != meets
    left = [entry.name for entry in tmp_path.iterdir() if entry.name not in ("storage", name)]
    assert all(entry.startswith(".") and entry.endswith(".tmp") for entry in left)
    assert os.path.lexists(tmp_path / "storage")
