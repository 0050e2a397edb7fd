"""`stepfast run --anatomy`: a training is measured while it runs, and is none the worse for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stepfast.torch.anatomy import from_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_stdlib" / "train.py"
SMALL = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch-size",
    "8",
    "--eval-every",
    "1000",
]


def test_a_measured_training_tells_what_it_takes_and_ends_bit_for_bit_alike(runs: Any, tmp_path: Path) -> None:
    common = ["--nproc-per-node", "2", str(EXAMPLE), *SMALL, "--steps", "120", "--final-state"]
    plain = runs.start("--name", "plain", *common, str(tmp_path / "plain.pt"))
    assert runs.finish(plain) == 0, runs.log[-6000:]
    assert "anatomy" not in str(runs.summary["trainerStatus"].get("metrics"))

    measured = runs.start("--name", "measured", "--anatomy", *common, str(tmp_path / "measured.pt"))
    assert runs.finish(measured) == 0, runs.log[-6000:]
    told = {each["name"]: each["value"] for each in runs.summary["trainerStatus"]["metrics"]}
    assert float(told["anatomy_step_seconds"]) > 0
    assert float(told["anatomy_samples_per_second"]) > 0
    assert float(told["anatomy_memory_peak_bytes"]) > 0
    assert 0 < float(told["anatomy_goodput_ratio"]) <= 1

    assert "anatomy.json beside the logs" in runs.log
    file = tmp_path / ".stepfast" / "jobs" / "local.measured" / "anatomy.json"
    report = from_json(file.read_text(encoding="utf-8"))
    assert report.kind == "measured"
    assert report.memory.peak_components["weights"] == 4 * report.parameters

    for rank in range(2):
        one, other = (torch.load(tmp_path / f"{name}.pt.rank{rank}") for name in ("plain", "measured"))
        assert repr(one) == repr(other)


def test_a_script_without_a_checkpointer_is_run_as_ever(runs: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    process = runs.start("--anatomy", str(script))
    assert runs.finish(process) == 0, runs.log[-3000:]
    assert "nothing was measured: that takes a Checkpointer" in " ".join(runs.log.split())
