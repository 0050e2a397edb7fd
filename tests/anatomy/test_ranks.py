"""What one of several ranks takes is predicted by one process, and agrees with two real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from families import WIDE_GPT
from rank import BATCH_SIZE, STEPS, ZERO
from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import Parallel, Sharing, predict

RANK = Path(__file__).with_name("rank.py")
WORLD_SIZE = 2


def real_peak_bytes(sharing: str, precision: str, folder: Path) -> int:
    """Of the rank that was seen best: what a rank seems to have had may be too much, never too little."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", RANK, sharing, precision, folder / "store", str(rank), str(WORLD_SIZE)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        texts = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(texts)
    lines = [next(line for line in text.splitlines() if line.startswith("peak bytes")) for text in texts]
    return min(max(map(int, line.partition(":")[2].split())) for line in lines)


@pytest.mark.parametrize(
    ("sharing", "precision"),
    [
        ("ddp", "fp32"),
        ("fsdp2", "fp32"),
        ("fsdp2", "bf16-mixed"),
        ("zero1", "fp32"),
        ("zero1", "bf16-mixed"),
        ("zero2", "fp32"),
        ("zero3", "fp32"),
        ("zero3", "bf16-mixed"),
    ],
)
def test_a_ranks_peak_agrees_with_two_real_processes_within_three_percent(
    sharing: str, precision: str, tmp_path: Path
) -> None:
    predicted = predict(
        WIDE_GPT.model,
        torch.optim.AdamW,
        WIDE_GPT.batch,
        batch_size=BATCH_SIZE,
        device="cpu",
        precision=precision,
        parallel=Parallel(sharing=Sharing(sharing), world_size=WORLD_SIZE, deepspeed={"zero_optimization": ZERO}),
        steps=STEPS,
    )
    assert predicted.memory.peak_bytes == pytest.approx(real_peak_bytes(sharing, precision, tmp_path), rel=0.03)


def test_more_ranks_hold_less_of_what_they_share() -> None:
    def states(ranks: int) -> int:
        report = predict(WIDE_GPT.model, torch.optim.AdamW, WIDE_GPT.batch, batch_size=1, parallel=f"fsdp2:{ranks}")
        return report.memory.component_peaks["optimizer"]

    assert states(64) == pytest.approx(states(2) / 32, rel=0.02)


def test_tied_weights_are_sharded_with_the_root() -> None:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=999
    )
    report = predict(
        lambda: BertForMaskedLM(config),
        torch.optim.AdamW,
        lambda: {"input_ids": (words := torch.randint(0, 999, (2, 16))), "labels": words},
        parallel="fsdp2:4",
    )
    assert report.memory.component_peaks["optimizer"] < 8 * report.parameters / 4 * 1.05


def test_a_unit_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(AnatomyError, match="units: GPT2LMHeadModel has no module of class Nothing"):
        predict(
            WIDE_GPT.model,
            torch.optim.AdamW,
            WIDE_GPT.batch,
            batch_size=1,
            parallel=Parallel(sharing=Sharing.FSDP2, world_size=2, units=("Nothing",)),
        )


@pytest.mark.parametrize("text", ["", "fsdp2", "fsdp2:", "fsdp2:0", "tensor:4", "none:2", "zero3:-1"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(AnatomyError, match="parallel: "):
        predict(WIDE_GPT.model, torch.optim.AdamW, WIDE_GPT.batch, batch_size=1, parallel=text)
