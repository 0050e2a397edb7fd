"""What Hugging Face's "Model training anatomy" says and measured comes out of predictions.

Its figures are of a V100 with 16 GB, of torch 1.10 and Transformers 4.15; those of the other batch sizes, of
recomputation and of fp16 are of the page that goes with it, "Performance and scalability".
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from stepfast.torch.anatomy import TORCH_1_10, predict

MIB = 1 << 20


def bert_large() -> nn.Module:
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="eager",  # it was the only one
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sequences(count: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(100, 30000, (count, 512)), "labels": torch.randint(0, 2, (count,))}


@pytest.mark.parametrize(
    ("batch_size", "options", "measured"),
    [
        pytest.param(4, {}, 14949, id="batch 4"),
        pytest.param(1, {"accumulation_steps": 4}, 8681, id="batch 1, accumulated 4 times"),
        pytest.param(1, {"accumulation_steps": 4, "checkpointing": True}, 6775, id="batch 1, recomputed"),
        pytest.param(4, {"precision": "fp16-mixed"}, 13743, id="batch 4, fp16"),
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_bert_large_occupies_what_was_measured_within_three_percent(
    batch_size: int, options: dict[str, object], measured: int
) -> None:
    report = predict(
        bert_large, torch.optim.AdamW, sequences, batch_size=batch_size, device="v100-16gb", clip_norm=1.0,
        release=TORCH_1_10, **options,  # type: ignore[arg-type] # the table's
    )  # fmt: skip
    assert report.memory.occupied_bytes / MIB == pytest.approx(measured, rel=0.03)


def layers() -> nn.Module:
    """Products of matrices alone: every parameter is used in lower precision under autocast."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def sgd_with_momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=0.9)  # type: ignore[arg-type] # what is handed over


def bytes_per_parameter(component: str, **options: object) -> float:
    report = predict(
        layers, options.pop("optimizer", torch.optim.AdamW), lambda: torch.randn(1, 256), loss_fn=square_loss,
        **options,  # type: ignore[arg-type] # the table's
    )  # fmt: skip
    return report.memory.component_peaks[component] / report.parameters


def test_adamw_in_mixed_precision_takes_eighteen_bytes_a_parameter() -> None:
    parts = ("weights", "optimizer", "gradients")
    total = sum(bytes_per_parameter(part, release=TORCH_1_10, precision="fp16-mixed") for part in parts)
    assert total == pytest.approx(18, rel=0.001)


@pytest.mark.parametrize(
    ("component", "options", "expected"),
    [
        pytest.param("weights", {}, 4, id="weights, fp32"),
        pytest.param("weights", {"precision": "fp16-mixed"}, 6, id="weights, mixed precision"),
        pytest.param("optimizer", {}, 8, id="AdamW"),
        pytest.param("optimizer", {"optimizer": sgd_with_momentum}, 4, id="SGD with momentum"),
        pytest.param("gradients", {}, 4, id="gradients, fp32"),
        pytest.param("gradients", {"precision": "bf16-mixed"}, 4, id="gradients, mixed precision"),
    ],
)
def test_bytes_of_each_parameter_are_those_of_the_document(
    component: str, options: dict[str, object], expected: float
) -> None:
    assert bytes_per_parameter(component, release=TORCH_1_10, **options) == pytest.approx(expected, rel=0.001)
