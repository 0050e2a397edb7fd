"""Nebula's functions one by one, in one process that nobody launched."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreters import TORCH
from stepfast import nebula as nm
from stepfast.errors import CheckpointNotFound, SpecError, StateUnsupported, StorageError
from stepfast.nebula import engine
from stepfast.nebula.pending import Moment, Verdict, judge
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
    [("", ["global_step1"]), ("sys.exit(0)", ["global_step1"]), ("raise RuntimeError('no data')", []),
     ("nm._shutdown()", ["global_step1"])],
    ids=["end", "exit", "error", "shutdown"],
)  # fmt: skip
def test_script_that_ends_in_order_has_saved_what_it_saved(end: str, tags_then: list[str], storage: Path) -> None:
    script = f"""
import sys
import stepfast.nebula as nm
nm.init({str(storage)!r})
nm.Checkpoint("global_step1").save("model", 1)
{end}
"""
    Path("train.py").write_text(script)
    TORCH.run(["train.py"], cwd=Path.cwd())
    assert tags() == tags_then


FAILING = """
import sys, traceback
import stepfast.nebula as nm
def main():
    nm.init({storage!r})
    checkpoint = nm.Checkpoint("global_step1")
    checkpoint.save("model", 1)
    raise RuntimeError("before the optimizer was saved")
try:
    main()
except Exception:
    traceback.print_exc()
    {end}
"""


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise SystemExit('no data')", "sys.exit('no data')", "exit(1)"])
def test_script_that_fails_by_its_exit_status_commits_no_half_checkpoint(end: str, storage: Path) -> None:
    Path("train.py").write_text(FAILING.format(storage=str(storage), end=end))
    done = TORCH.run(["train.py"], cwd=Path.cwd())
    assert done.returncode == 1
    assert "'global_step1' is not committed" in done.stderr
    assert "call commit()" in done.stderr
    assert tags() == []


@pytest.mark.parametrize(
    ("names", "end", "tags_then"),
    [(["model", "optimizer"], "", [1, 2, 3]), (["model"], "", [1, 2]), (["model", "optimizer"], "sys.exit(1)", [1, 2]),
     (["model", "optimizer"], "raise SystemExit(0)", [1, 2, 3]), (["model"], "raise SystemExit(0)", [1, 2])],
    ids=["whole", "half", "failed", "whole-and-status-unknown", "half-and-status-unknown"],
)  # fmt: skip
def test_last_checkpoint_of_a_script_is_held_against_the_one_before(
    names: list[str], end: str, tags_then: list[int], storage: Path
) -> None:
    Path("train.py").write_text(f"""
import sys
import stepfast.nebula as nm
nm.init({str(storage)!r}, persistent_time_interval=0)
for step in (1, 2):
    checkpoint = nm.Checkpoint(f"global_step{{step}}", 2)
    checkpoint.save("model", step)
    checkpoint.save("optimizer", step)
checkpoint = nm.Checkpoint("global_step3")
for name in {names}:
    checkpoint.save(name, 3)
{end}
""")
    TORCH.run(["train.py"], cwd=Path.cwd())
    assert tags() == [f"global_step{step}" for step in tags_then]


def test_exit_is_what_it_was_after_the_shutdown() -> None:
    nm._shutdown()
    before = sys.exit
    nm.list_checkpoints()
    assert sys.exit is not before
    with pytest.raises(SystemExit, match="7"):
        sys.exit(7)
    nm._shutdown()
    assert sys.exit is before


def test_two_checkpoints_may_be_open_when_both_are_committed_explicitly() -> None:
    one, other = nm.Checkpoint("global_step1"), nm.Checkpoint("best")
    one.save("model", 1)
    other.save("model", 1)
    one.save("optimizer", 2)
    other.save("optimizer", 2)
    assert one.commit()
    assert other.commit()
    assert tags() == ["global_step1", "best"]
    for tag in ("global_step1", "best"):
        found = nm.get_checkpoint(tag)
        assert found is not None
        assert found.load("optimizer") == 2


def test_look_at_the_latest_leaves_open_what_the_script_will_commit_itself() -> None:
    one = nm.Checkpoint("global_step1")
    one.save("model", 1)
    one.commit()
    two = nm.Checkpoint("global_step2")
    two.save("model", 2)
    latest = nm.get_latest_checkpoint()
    assert latest is not None
    assert latest.tag == "global_step1"
    two.save("optimizer", 2)
    two.commit()
    assert tags() == ["global_step1", "global_step2"]


def test_checkpoint_that_was_left_half_is_not_committed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    def save(step: int, *names: str) -> None:
        checkpoint = nm.Checkpoint(f"global_step{step}")
        for name in names:
            checkpoint.save(name, step)

    save(1, "model", "optimizer")
    save(2, "model")  # and an exception that the script has caught
    save(3, "model", "optimizer")
    assert tags() == ["global_step1", "global_step3"]
    assert "'global_step2' is not committed" in caplog.text


def test_checkpoints_that_a_script_keeps_are_committed_before_they_fill_the_memory() -> None:
    kept = [nm.Checkpoint(f"global_step{step}") for step in range(1, 7)]
    for checkpoint in kept:
        checkpoint.save("model", 1)
    committed = [found.tag for found in engine.checkpoints().steps()]
    assert committed == ["global_step1", "global_step2", "global_step3"]
    assert tags()[-1] == "global_step6"


@pytest.mark.parametrize(
    ("names", "expected", "moment", "can_grow", "is_said", "verdict"),
    [
        (["m"], None, Moment.NEXT, True, False, Verdict.KEEP),
        (["m"], None, Moment.NEXT, False, False, Verdict.COMMIT),
        (["m"], ["m"], Moment.NEXT, False, True, Verdict.COMMIT),
        (["m"], ["m", "o"], Moment.NEXT, False, True, Verdict.GIVE_UP),
        (["m"], None, Moment.NEXT, False, True, Verdict.GIVE_UP),
        (["m"], None, Moment.LOOK, True, False, Verdict.COMMIT),
        (["m"], ["m"], Moment.LOOK, True, True, Verdict.KEEP),
        (["m"], ["m", "o"], Moment.LOOK, True, False, Verdict.KEEP),
        (["m", "o"], ["m"], Moment.END, True, True, Verdict.COMMIT),
    ],
)
def test_what_nobody_said_is_whole_is_judged_by_what_is_known(  # noqa: PLR0917  # a table's columns
    names: list[str], expected: list[str] | None, moment: Moment, can_grow: bool, is_said: bool, verdict: Verdict
) -> None:
    assert judge(names, expected, moment=moment, can_grow=can_grow, is_said=is_said) is verdict


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
    assert nm.get_checkpoint("global_step1") is None  # and it is not waited for


# ---------------------------------------------------------------- a run that is begun twice


def test_second_init_keeps_what_the_script_has_saved(storage: Path) -> None:
    nm.Checkpoint("global_step1", 1).save("model", 1)
    nm.init(str(storage), persistent_time_interval=1)
    assert engine.checkpoints().environment.persist_interval_seconds == 1
    nm.Checkpoint("global_step2", 1).save("model", 2)
    nm.init(str(storage), persistent_time_interval=1, num_of_version_in_retention=2)
    assert engine.checkpoints().environment.max_to_keep == 2
    assert tags() == ["global_step1", "global_step2"]
    nm.Checkpoint("global_step3", 1).save("model", 3)
    nm.flush_persistence()
    assert tags() == ["global_step2", "global_step3"]


def test_second_init_changes_only_what_it_says(storage: Path) -> None:
    nm.Checkpoint("global_step1", 1).save("model", 1)
    nm.init(persistent_time_interval=1)
    assert engine.checkpoints().environment.storage_uri == storage.as_uri()
    assert tags() == ["global_step1"]


def test_save_after_the_shutdown_goes_on_with_the_run() -> None:
    for step in (5, 6):
        nm.Checkpoint(f"global_step{step}", 1).save("model", step)
        nm._shutdown()
    nm.Checkpoint("best", 1).save("model", "best")
    assert [(found["tag"], found["global_step"]) for found in nm.list_checkpoints()] == [
        ("global_step5", 5), ("global_step6", 6), ("best", 7),
    ]  # fmt: skip


@pytest.mark.parametrize("tag", ["best", "global_step10"])
def test_second_init_under_a_launcher_counts_on(storage: Path, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    nm._shutdown()
    monkeypatch.setenv("STEPFAST_RUN", "abc-1")
    nm.init(str(storage), persistent_time_interval=0)
    nm.Checkpoint("global_step10", 1).save("model", "old")
    nm.init(str(storage), persistent_time_interval=0, num_of_version_in_retention=3)
    nm.Checkpoint(tag, 1).save("model", "new")
    latest, found = nm.get_latest_checkpoint(), nm.get_checkpoint(tag)
    assert latest is not None
    assert found is not None
    assert (latest.load("model"), found.load("model")) == ("new", "new")


def test_storage_that_changes_is_named_and_goes_on_when_it_is_back(
    storage: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nm.Checkpoint("global_step1", 1).save("model", 1)
    nm.init(str(tmp_path / "other"), persistent_time_interval=0)
    assert f"go to {(tmp_path / 'other').as_uri()} from now on; those in {storage.as_uri()}" in caplog.text
    nm.Checkpoint("global_step2", 1).save("model", 2)
    assert tags() == ["global_step2"]
    nm.init(str(storage), persistent_time_interval=0)
    nm.Checkpoint("global_step3", 1).save("model", 3)
    assert tags() == ["global_step1", "global_step3"]


# ---------------------------------------------------------------- another storage


@pytest.mark.parametrize("first", [[], [1]], ids=["nothing-at-first", "saved-anew"])
def test_storage_elsewhere_is_looked_at_again(tmp_path: Path, first: list[int]) -> None:
    other = str(tmp_path / "other")
    code = "import stepfast.nebula as nm; nm.init({!r}); nm.Checkpoint('global_step1', 1).save('model', {})"
    for value in first:
        TORCH.run(["-c", code.format(other, value)], cwd=tmp_path).check_returncode()
    latest = nm.get_latest_checkpoint(persist_path=other)
    assert (latest.load("model") if latest is not None else None) == (first[0] if first else None)
    TORCH.run(["-c", code.format(other, 2)], cwd=tmp_path).check_returncode()
    latest = nm.get_latest_checkpoint(persist_path=other)
    assert latest is not None
    assert latest.load("model") == 2


def test_step_that_was_saved_without_a_tag_is_got_by_the_one_that_is_listed(storage: Path) -> None:
    nm._shutdown()
    code = f"""
import os, sys
os.environ["STEPFAST_STORAGE_URI"], sys.argv = {storage.as_uri()!r}, ["train.py"]
from stepfast.torch import Checkpointer
with Checkpointer(state={{"x": 1}}) as checkpointer:
    checkpointer.save(7).wait()
"""
    TORCH.run(["-c", code], cwd=Path.cwd()).check_returncode()
    (tag,) = tags()
    found = nm.get_checkpoint(str(tag))
    assert found is not None
    assert found.tag == "global_step7"


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


# ---------------------------------------------------------------- memory


def test_last_object_of_a_known_number_is_not_copied_twice() -> None:
    size = 256 << 20
    state = {"w": torch.ones(size, dtype=torch.uint8)}
    before = peak_bytes()
    nm.Checkpoint("global_step1", 1).save("model", state)
    assert peak_bytes() - before < size // 2


def peak_bytes() -> int:
    """Of this process's memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
