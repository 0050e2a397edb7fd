"""Each configuration of examples/deepspeed: killed, and gone on from its latest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interpreters import DEEPSPEED

RUNS_ARE_FORKS_OF = DEEPSPEED

FOLDER = Path(__file__).parents[2] / "examples" / "deepspeed"
GPU = {"fp16"}
CONFIGURATIONS = sorted(path.stem for path in FOLDER.glob("*.json"))


def arguments(name: str) -> list[str]:
    script = str(FOLDER / "train.py")
    return ["--nproc-per-node", "2", script, "--config", f"{name}.json", "--steps", "24", "--save-every", "6"]


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in GPU])
def test_example_is_killed_and_goes_on(runs: Any, name: str) -> None:
    summary = runs.run(*arguments(name), "--crash-at-step", "15")
    assert (summary["state"], summary["restarts"]) == ("Complete", 1)
    assert f"{name}.json: from step 13" in runs.log, runs.log[-3000:]
    assert runs.log.count(f"{name}.json: done") == 1


def test_example_goes_on_bit_for_bit(runs: Any, tmp_path: Path) -> None:
    runs.run("--name", "undisturbed", *arguments("zero3"), "--losses", "one", "--checkpoints", "a")
    disturbed = ["--losses", "other", "--checkpoints", "b", "--crash-at-step", "15"]
    runs.run("--name", "disturbed", *arguments("zero3"), *disturbed)
    for rank in range(2):
        one, other = (json.loads((tmp_path / f"{which}.rank{rank}").read_text()) for which in ("one", "other"))
        assert other == {step: one[step] for step in map(str, range(13, 25))}


def test_example_that_needs_a_gpu_says_so(runs: Any) -> None:
    process = runs.start("--max-restarts", "0", str(FOLDER / "train.py"), "--config", "fp16.json")
    assert runs.finish(process) == 1
    assert "which DeepSpeed does on a GPU alone, and there is none: try bf16.json" in runs.log
