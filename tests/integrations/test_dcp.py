"""torch.distributed.checkpoint: FSDP2 and tensor parallel, killed and resumed, and moved to other world sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from interpreters import TORCH

RUNS_ARE_FORKS_OF = TORCH

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2" / "train.py"
TENSOR = ("--tensor-parallel", "2")


def _train(runs: Any, name: str, *options: str, ranks: int, steps: int) -> dict[str, Any]:
    out = f"{name}.{ranks}.json"
    runs.run(
        "--name", name, "--nproc-per-node", str(ranks), str(SCRIPT), "--steps", str(steps), "--save-every", "1",
        "--final-state", out, *options,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((runs.folder / out).read_text())
    return found


def _files(folder: Path, job: str, step: int) -> Iterator[list[str]]:
    """The names in each rank's file."""
    for path in (folder / ".stepfast" / "checkpoints" / "local" / job / f"global_step{step}").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            yield list(file.keys())


@pytest.mark.parametrize("options", [(), (*TENSOR, "--async")], ids=["saved at once", "tensor parallel, saved async"])
def test_killed_sharded_training_goes_on_bit_for_bit(runs: Any, options: Sequence[str]) -> None:
    undisturbed = _train(runs, "undisturbed", *options, ranks=2, steps=8)
    killed = _train(runs, "killed", *options, "--crash-at-step", "5", ranks=2, steps=8)
    assert runs.summary["restarts"] == 1
    assert 0 < killed["begin"] <= 5
    assert killed["weights"] == undisturbed["weights"]
    for step, loss in killed["losses"].items():
        assert loss == undisturbed["losses"][step], step
    names = Counter(name for file in _files(runs.folder, "killed", 8) for name in file)
    assert len([name for name in names if name.startswith("mean")]) == 1, "what all ranks share is saved once"
    assert max(names.values()) == 1
    assert any("@" in name for name in names), "and the shards of each rank"


def _train_alone(folder: Path, *options: str, ranks: int, steps: int) -> dict[str, Any]:
    """Without a launcher."""
    folder.mkdir(exist_ok=True)
    command = [str(SCRIPT), "--steps", str(steps), "--save-every", "1", "--final-state", "end.json", *options]
    TORCH.output_of_gang(ranks, command, cwd=folder)
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found


def test_a_sharded_step_is_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    whole = _train_alone(tmp_path / "whole", ranks=1, steps=10)
    begin = 0
    for ranks, until, options in [(2, 2, ()), (3, 4, ()), (4, 6, TENSOR), (1, 8, ()), (2, 10, TENSOR)]:
        found = _train_alone(tmp_path / "moving", *options, ranks=ranks, steps=until)
        assert found["begin"] == begin
        assert len(found["losses"]) == until - begin
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(whole["losses"][step], rel=0, abs=1e-6), (ranks, step)
        begin = until
    for name, numbers in whole["weights"].items():
        expected = [float.fromhex(number) for number in numbers]
        assert [float.fromhex(number) for number in found["weights"][name]] == pytest.approx(expected, abs=1e-6)
