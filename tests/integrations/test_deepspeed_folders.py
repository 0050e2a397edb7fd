"""Which checkpoint is meant by a folder and a tag: with several engines in a process, after several loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from interpreters import DEEPSPEED
from smallengines import BEGIN, found, save_by_deepspeed

RUNS_ARE_FORKS_OF = DEEPSPEED

TWO = """
engine, other = make(1.0, num_of_version_in_retention=2), make(2.0, num_of_version_in_retention=2)
"""

SAVED = """
for step in (1, 2, 3):
    for each, folder in ((engine, "first"), (other, "runs/other/")):
        with torch.no_grad():
            each.module.weight.fill_(10 * step + (each is other))
        each.save_checkpoint(folder, tag=f"global_step{step}")
"""


def test_two_engines_save_the_same_tags_each_in_its_folder(tmp_path: Path) -> None:
    found(tmp_path, TWO + SAVED + "end(None)")
    kept = found(tmp_path, TWO + "end(steps())")  # while a training goes on, removals may be under way
    assert kept == [f"{folder}//global_step{step}" for step in (2, 3) for folder in ("first", "runs/other")]
    load = """
loaded = []
for folder, tag in (("./first", None), ("runs/other", None), ("first", "global_step2"), ("runs/other", "global_step2")):
    each = other if "other" in folder else engine
    each.load_checkpoint(folder, tag)
    loaded.append(weight(each))
end([loaded, other.load_checkpoint("elsewhere")])
"""
    assert found(tmp_path, TWO + load) == [[30.0, 31.0, 20.0, 21.0], [None, None]]


def test_of_two_engines_in_a_gang_each_has_every_checkpoint_persisted(runs: Any) -> None:
    script = BEGIN + TWO.replace("num_of", "persistent_time_interval=3600, num_of") + SAVED
    (runs.folder / "train.py").write_text(script + "end(steps())")
    runs.run("--name", "train", "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    (line,) = (line for line in runs.log.splitlines() if "FOUND" in line)
    assert [f"{folder}//global_step{step}" in line for step in (2, 3) for folder in ("first", "runs/other")] == [
        True
    ] * 4


def test_the_only_engine_takes_the_newest_of_its_folder_or_of_the_job(tmp_path: Path) -> None:
    save = """
engine = make(1.0)
for tag, folder, value in (("a", "checkpoints", 3.0), ("a", "best", 4.0), ("b", "checkpoints", 5.0)):
    with torch.no_grad():
        engine.module.weight.fill_(value)
    engine.save_checkpoint(folder, tag=tag)
end(None)
"""
    found(tmp_path, save)
    load = """
engine, loaded = make(0.0), []
for folder, tag in (("checkpoints", None), ("best", None), ("checkpoints", "a"), ("another", None), ("another", "a")):
    engine.load_checkpoint(folder, tag)
    loaded.append(weight(engine))
end(loaded)
"""
    assert found(tmp_path, load) == [5.0, 4.0, 3.0, 5.0, 4.0]


SIX = """
engine = make(1.0, num_of_version_in_retention=100)
for step in range(1, 7):
    engine.save_checkpoint("checkpoints", tag=f"global_step{step}")
"""


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that has saved six steps."""
    folder = tmp_path_factory.mktemp("six")
    found(folder, SIX + "end(None)")
    return folder


@pytest.mark.parametrize(
    ("loads", "kept"),
    [
        pytest.param([("engine", 6, {}), ("engine", 3, {})], 3, id="what an engine loaded last"),
        pytest.param([("engine", 2, {}), ("other", 5, {})], 5, id="the newest of several engines"),
        pytest.param(
            [("engine", 4, {}), ("other", 6, {"load_module_only": True})], 4, id="not weights alone beside it"
        ),
        pytest.param([("engine", 4, {"load_module_only": True})], 4, id="weights alone if there is nothing else"),
        pytest.param([], 0, id="nothing: training begins anew"),
    ],
)
def test_steps_stay_up_to_the_one_that_training_goes_on_from(
    six: Path, tmp_path: Path, loads: list[Any], kept: int
) -> None:
    folder = shutil.copytree(six, tmp_path / "job")
    script = f"""
engine, other = make(2.0, num_of_version_in_retention=100), make(2.0)
for name, step, how in {loads!r}:
    {{"engine": engine, "other": other}}[name].load_checkpoint("checkpoints", f"global_step{{step}}", **how)
engine.save_checkpoint("checkpoints", tag="new")
end(steps())
"""
    names = [*(f"global_step{step}" for step in range(1, kept + 1)), "new"]
    assert found(folder, script) == [f"checkpoints//{name}" for name in names]


RATES = """
often = engine = make(1.0, num_of_version_in_retention=2)
seldom = make(2.0, num_of_version_in_retention=2)
seldom.save_checkpoint("seldom", tag="epoch1")
for step in range(1, 6):
    often.save_checkpoint("often", tag=f"global_step{step}")
end(None)
"""


def test_of_several_engines_each_folder_keeps_its_newest(tmp_path: Path) -> None:
    found(tmp_path, RATES)
    kept = found(tmp_path, "engine = make(0.0)\nend(steps())")
    assert "seldom//epoch1" in kept, kept
    assert [tag for tag in kept if tag.startswith("often")] == ["often//global_step4", "often//global_step5"], kept


def test_real_files_in_the_folder_that_was_asked_for_go_before_another_folders_step(tmp_path: Path) -> None:
    save_by_deepspeed(tmp_path, "pretrained", "global_step3")
    found(
        tmp_path,
        """
engine = make(1.0)
engine.save_checkpoint("checkpoints", tag="global_step3")
end(None)
""",
    )
    loaded = found(
        tmp_path,
        """
engine = make(0.0)
engine.load_checkpoint("pretrained", "global_step3", load_module_only=True)
end(weight(engine))
""",
    )
    assert loaded == 7.0


def test_loading_a_folder_of_real_files_leaves_it_as_it_is(tmp_path: Path) -> None:
    """In the first attempt as in those after it."""
    save_by_deepspeed(tmp_path, "pretrained", "base")
    script = """
engine = make(0.0)
before = sorted(str(p) for p in __import__("pathlib").Path("pretrained").rglob("*"))
engine.load_checkpoint("pretrained", load_module_only=True)
loaded = weight(engine)
engine.save_checkpoint("checkpoints", tag="global_step3")
end([loaded, before == sorted(str(p) for p in __import__("pathlib").Path("pretrained").rglob("*"))])
"""
    assert found(tmp_path, script) == [7.0, True]
    assert found(tmp_path, script.replace("make(0.0)", "make(1.0)")) == [7.0, True]


def test_real_files_under_a_tag_that_is_saved_anew_are_emptied(tmp_path: Path) -> None:
    save_by_deepspeed(tmp_path, "checkpoints", "global_step3")
    size = found(
        tmp_path,
        """
engine = make(1.0)
engine.save_checkpoint("checkpoints", tag="global_step3")
end(os.path.getsize("checkpoints/global_step3/mp_rank_00_model_states.pt"))
""",
    )
    assert size == 0


def test_an_engine_that_names_another_storage_than_the_first_is_refused(tmp_path: Path) -> None:
    script = """
from stepfast.errors import SpecError
engine = make(1.0, persistent_storage_path="one")
try:
    make(2.0, persistent_storage_path="two")
except SpecError as error:
    end(str(error))
"""
    assert "persistent_storage_path" in found(tmp_path, script)


def test_a_tag_with_two_slashes_is_found_again(tmp_path: Path) -> None:
    found(tmp_path, 'engine = make(3.0)\nengine.save_checkpoint("checkpoints", tag="a//b")\nend(None)')
    assert (
        found(tmp_path, 'engine = make(0.0)\nengine.load_checkpoint("checkpoints", "a//b")\nend(weight(engine))') == 3.0
    )


def test_from_scratch_loads_nothing_that_the_disk_still_names(tmp_path: Path) -> None:
    """The launcher says so (STEPFAST_RESUME_STEP=0); what the disk's `latest` names must not be loaded instead."""
    found(tmp_path, 'engine = make(3.0)\nengine.save_checkpoint("checkpoints", tag="global_step3")\nend(None)')
    script = """
os.environ["STEPFAST_RESUME_STEP"] = "0"
engine = make(0.0)
path, _ = engine.load_checkpoint("checkpoints")
end([path, weight(engine)])
"""
    assert found(tmp_path, script) == [None, 0.0]


def test_an_engine_that_was_destroyed_does_not_count(tmp_path: Path) -> None:
    found(tmp_path, 'engine = make(3.0)\nengine.save_checkpoint("a", tag="global_step3")\nend(None)')
    script = """
first = make(0.0)
first.destroy()
del first
engine = make(0.0)
engine.load_checkpoint("b")
end(weight(engine))
"""
    assert found(tmp_path, script) == 3.0
