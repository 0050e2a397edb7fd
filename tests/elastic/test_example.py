"""examples/elastic_pipeline as its users run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from interpreters import TORCH

RUNS_ARE_FORKS_OF = TORCH

FOLDER = Path(__file__).parents[2] / "examples" / "elastic_pipeline"
# What is decided by the clock is given: then a run that was killed ends where one that was not does, to the bit.
ELASTIC = [
    "--nproc-per-node", "2", str(FOLDER / "train.py"), "--rule", "gradients", "--alpha", "0.5", "--epochs", "4",
    "--width", "16", "--micro-batches", "1", "--no-cache", "--save-every", "10",
]  # fmt: skip


def test_killed_it_goes_on_at_its_shape_and_ends_bit_for_bit_where_it_would_have(runs: Any, tmp_path: Path) -> None:
    runs.run("--name", "undisturbed", *ELASTIC, "--save-weights", "one.pt")
    disturbed = ["--crash-at-step", "92", "--crash-rank", "1", "--save-weights", "other.pt", "--history", "h.jsonl"]
    summary = runs.run("--name", "disturbed", *ELASTIC, *disturbed)
    assert (summary["state"], summary["restarts"]) == ("Complete", 1)
    assert summary["checkpoint"]["restoredStep"] == 90
    one, other = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "other.pt")
    assert len(one) > 100
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    rows = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["frozen"] > rows[0]["frozen"] == 0


def test_one_flag_makes_it_plain_data_parallelism(runs: Any) -> None:
    script = [str(FOLDER / "train.py"), "--mode", "ddp", "--task", "text", "--width", "8", "--epochs", "1"]
    summary = runs.run("--nproc-per-node", "2", *script)
    assert (summary["state"], summary["restarts"]) == ("Complete", 0)
    assert "2 x 1 devices" in runs.log
