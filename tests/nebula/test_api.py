"""Nebula's functions one by one, in one process that nobody launched."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepfast import nebula as nm
from stepfast.errors import CheckpointNotFound, SpecError, StateUnsupported, StorageError
from stepfast.nebula import engine
from stepfast.nebula.settings import Settings


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `init` is told to persist; nothing of it is left for the next test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("STEPFAST_STORAGE_URI", "STEPFAST_RUN", "NEBULA_PERSISTENT_STORAGE_PATH"):
        monkeypatch.delenv(name, raising=False)
    nm.init(str(tmp_path / "storage"), persistent_time_interval=0)
    yield tmp_path / "storage"
    nm._shutdown()
    engine.configure(Settings())


def tags() -> list[object]:
    return [found["tag"] for found in nm.list_checkpoints()]


def test_public_names() -> None:
    assert set(nm.__all__) >= {
        "Checkpoint", "_shutdown", "flush_persistence", "get_checkpoint", "get_latest_checkpoint",
        "get_latest_checkpoint_path", "init", "list_checkpoints",
    }  # fmt: skip


def test_there_is_nothing_at_first() -> None:
    assert nm.get_latest_checkpoint() is None
    assert nm.get_checkpoint("global_step1") is None
    assert nm.get_latest_checkpoint_path("checkpoint") is None
    assert nm.list_checkpoints() == []
    assert nm.Checkpoint().tag == ""
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'global_step1'"):
        nm.Checkpoint("global_step1").load("checkpoint")


def test_checkpoint_is_committed_when_its_last_object_is_saved() -> None:
    checkpoint = nm.Checkpoint("global_step1", 2)
    checkpoint.save("model", {"w": torch.ones(3)})
    assert tags() == []
    checkpoint.save("optimizer", {"lr": 0.1})
    nm.flush_persistence("global_step1")
    assert tags() == ["global_step1"]
    with pytest.raises(ValueError, match="is committed"):
        checkpoint.save("more", 1)


def test_commit_says_that_nothing_more_comes() -> None:
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("model", 1)
    assert checkpoint.commit()
    assert checkpoint.commit()
    assert checkpoint.load("model") == 1
    found = nm.get_checkpoint(tag="global_step1")
    assert found is not None
    assert (found.tag, found.load("model")) == ("global_step1", 1)


@pytest.mark.parametrize("what", ["next", "latest", "list", "flush"])
def test_checkpoint_that_nobody_commits_is_committed_by_what_comes_after_it(what: str) -> None:
    nm.Checkpoint("global_step1").save("model", 1)
    match what:
        case "next":
            nm.Checkpoint("global_step2").save("model", 2)
        case "latest":
            assert nm.get_latest_checkpoint() is not None
        case "list":
            nm.list_checkpoints()
        case _:
            nm.flush_persistence()
    found = engine.checkpoints().find("global_step1")
    assert found is not None


def test_first_save_survives_a_storage_that_is_away(storage: Path) -> None:
    storage.symlink_to(storage)  # nothing can be listed or written there
    nm.Checkpoint("global_step1", 1).save("model", 1)
    nm.Checkpoint("global_step2", 1).save("model", 2)
    storage.unlink()
    nm.Checkpoint("global_step3", 1).save("model", 3)
    assert tags() == ["global_step3"]


def test_older_checkpoints_are_listed_while_the_newest_could_not_be_persisted(storage: Path) -> None:
    nm.Checkpoint("global_step1", 1).save("model", 1)
    nm.flush_persistence()
    in_the_way = storage / "local" / "train" / "global_step2"
    in_the_way.write_bytes(b"")
    nm.Checkpoint("global_step2", 1).save("model", 2)
    in_the_way.unlink()
    assert tags() == ["global_step1"]
    latest = nm.get_latest_checkpoint()
    assert latest is not None
    assert latest.tag == "global_step1"
    assert nm.get_checkpoint("global_step2") is None
    with pytest.raises(StorageError):
        nm.flush_persistence()
    nm.Checkpoint("global_step3", 1).save("model", 3)
    assert tags() == ["global_step1", "global_step3"]


def test_checkpoint_of_which_an_object_could_not_be_saved_is_nobodys() -> None:
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("model", 1)
    with pytest.raises(StateUnsupported):
        checkpoint.save("other", lambda: None)
    nm.Checkpoint("global_step2", 1).save("model", 2)
    nm.flush_persistence()
    assert tags() == ["global_step2"]


@pytest.mark.parametrize(
    ("end", "tags_then"),
    [("", ["global_step1"]), ("raise SystemExit(0)", ["global_step1"]), ("raise RuntimeError('no data')", []),
     ("nm._shutdown()", ["global_step1"])],
    ids=["end", "exit", "error", "shutdown"],
)  # fmt: skip
def test_script_that_ends_in_order_has_saved_what_it_saved(end: str, tags_then: list[str], storage: Path) -> None:
    script = f"""
import stepfast.nebula as nm
nm.init({str(storage)!r})
nm.Checkpoint("global_step1").save("model", 1)
{end}
"""
    Path("train.py").write_text(script)
    subprocess.run([sys.executable, "train.py"], check=False, capture_output=True, timeout=120)
    assert tags() == tags_then


def test_tags_that_name_no_step_are_listed_in_their_order() -> None:
    for tag in ("global_step10", "best", "epoch=3", "best"):
        nm.Checkpoint(tag, 1).save("model", tag + "!")
    listed = nm.list_checkpoints()
    assert json.loads(json.dumps(listed)) == listed
    assert [(found["tag"], found["global_step"]) for found in listed] == [
        ("global_step10", 10), ("best", 11), ("epoch=3", 12), ("best", 13),
    ]  # fmt: skip
    latest = nm.get_latest_checkpoint()
    assert latest is not None
    assert (latest.tag, latest.load("model")) == ("best", "best!")


def test_as_many_versions_are_kept_as_init_was_told(storage: Path) -> None:
    nm.init(str(storage), persistent_time_interval=0, num_of_version_in_retention=2)
    for step in range(1, 6):
        nm.Checkpoint(f"global_step{step}", 1).save("model", step)
        nm.flush_persistence()
    assert tags() == ["global_step4", "global_step5"]


# ---------------------------------------------------------------- another storage


def test_checkpoints_of_another_storage_are_found_by_its_path(storage: Path, tmp_path: Path) -> None:
    nm.Checkpoint("global_step7", 1).save("model", 7)
    nm.flush_persistence()
    nm.init(str(tmp_path / "other"))
    assert nm.get_latest_checkpoint() is None
    for path in (storage, storage / "local" / "train"):
        latest = nm.get_latest_checkpoint(persist_path=str(path))
        assert latest is not None
        assert (latest.tag, latest.load("model")) == ("global_step7", 7)
        found = nm.get_checkpoint("global_step7", persist_path=str(path))
        assert found is not None
        path_of = nm.get_latest_checkpoint_path("model", str(path))
        assert path_of is not None
        assert torch.load(path_of) == 7
    assert nm.get_latest_checkpoint(persist_path=str(tmp_path / "nowhere")) is None
    own = nm.get_latest_checkpoint(persist_path=str(tmp_path / "other"))
    assert own is None


def test_storage_of_several_other_jobs_does_not_guess(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one.py", "two.py"):
        monkeypatch.setattr(sys, "argv", [name])
        nm.init(str(storage), persistent_time_interval=1)
        nm.Checkpoint("global_step7", 1).save("model", name)
        nm._shutdown()
    monkeypatch.setattr(sys, "argv", ["three.py"])
    nm.init(str(tmp_path / "other"))
    with pytest.raises(StorageError, match="local/one, local/two"):
        nm.get_latest_checkpoint(persist_path=str(storage))
    latest = nm.get_latest_checkpoint(persist_path=str(storage / "local" / "two"))
    assert latest is not None
    assert latest.load("model") == "two.py"


# ---------------------------------------------------------------- settings


def test_environment_says_what_init_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(tmp_path / "environment"))
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "7.5")
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "200000000")
    nm.init()
    environment = engine.checkpoints().environment
    assert environment.storage_uri == (tmp_path / "environment").as_uri()
    assert (environment.persist_interval_seconds, environment.memory_bytes) == (7.5, 200_000_000)
    nm.init(str(tmp_path / "argument"), persistent_time_interval=1)
    environment = engine.checkpoints().environment
    assert environment.storage_uri == (tmp_path / "argument").as_uri()
    assert environment.persist_interval_seconds == 1


def test_tuple_of_the_documentations_own_example_is_taken_and_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="stepfast"):
        nm.init((str(tmp_path / "slip"),), persistent_time_interval=2)
    assert "a comma behind it?" in caplog.text
    assert engine.checkpoints().environment.storage_uri == (tmp_path / "slip").as_uri()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"persistent_storage_path": 7}, "persistent_storage_path"),
        ({"persistent_storage_path": ()}, "persistent_storage_path"),
        ({"persistent_storage_path": ("a", "b")}, "persistent_storage_path"),
        ({"persistent_storage_path": ""}, "persistent_storage_path"),
        ({"persistent_time_interval": "soon"}, "persistent_time_interval"),
        ({"persistent_time_interval": -1}, "persistent_time_interval"),
        ({"persistent_time_interval": float("nan")}, "persistent_time_interval"),
        ({"num_of_version_in_retention": 0}, "num_of_version_in_retention"),
    ],
    ids=str,
)
def test_setting_that_cannot_be_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        nm.init(**arguments)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_number_of_files_that_cannot_be_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="num_of_files"):
        nm.Checkpoint("global_step1", number)
