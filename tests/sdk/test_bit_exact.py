"""A run that is killed and launched again ends exactly as one that nobody disturbed: the examples, two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventual import files_in

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES: dict[str, list[str]] = {
    "gpt_stdlib": ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch-size", "8"],
    "vit_digits": ["--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "16"],
}


def equal(a: Any, b: Any, where: str) -> None:
    """Every tensor and value of two final states."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            equal(one, other, f"{where}[{index}]")
    else:
        assert a == b, where


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no agent"])
@pytest.mark.parametrize("example", SIZES)
def test_killed_and_resumed_run_ends_as_the_undisturbed_one(  # noqa: PLR0917  # fixtures
    example: str,
    with_agent: bool,
    start_agent: Callable[..., Any],
    make_launcher: Callable[..., Any],
    until: Callable[..., Any],
    tmp_path: Path,
) -> None:
    script = EXAMPLES / example / "train.py"
    agents = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        agents.append(start_agent() if with_agent else None)
    arguments = ["--steps", "24", "--save-every", "5", "--eval-every", "0", *SIZES[example]]
    undisturbed, killed = make_launcher(tmp_path / "undisturbed"), make_launcher(tmp_path / "killed")

    whole = undisturbed.run(script, *arguments, "--final-state", str(tmp_path / "a"), ranks=2, agent=agents[0])
    assert whole.code == 0, whole.output
    crash = ["--crash-at-step", "17", "--crash-rank", "1"]
    first = killed.run(script, *arguments, *crash, ranks=2, agent=agents[1])
    assert first.code != 0
    assert "kills itself after step 17" in first.output
    # A launcher waits for the flush; here the second may be faster than it.
    until(lambda: files_in(killed.bench.folder, "*/manifest.json"), "a commit of what the first has saved")
    second = killed.run(
        script, *arguments, *crash, "--final-state", str(tmp_path / "b"), ranks=2, agent=agents[1], attempt=2
    )
    assert second.code == 0, second.output

    assert any(f"continuing after step {step}" in second.output for step in (5, 10, 15)), second.output
    if not with_agent:
        assert "continuing after step 15" in second.output
    for rank in (0, 1):
        states = [torch.load(tmp_path / f"{name}.rank{rank}", weights_only=False) for name in ("a", "b")]
        assert {"model", "optimizer", "scheduler", "sampler", "rng"} <= set(states[0])
        equal(states[0], states[1], f"rank {rank}")
