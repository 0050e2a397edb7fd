"""The document's operation classes, and what it says of forward and backward passes, come out of real models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from stepfast.torch.anatomy import Report, predict


@pytest.fixture(scope="module")
def bert() -> Report:
    """BERT-large's layers, fewer of them: shares of FLOPs hardly depend on how many."""

    def model() -> nn.Module:
        return BertForSequenceClassification(
            BertConfig(
                hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, intermediate_size=4096,
                attn_implementation="eager",
            )
        )  # fmt: skip

    def batch(count: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(0, 30000, (count, 512)), "labels": torch.randint(0, 2, (count,))}

    return predict(model, torch.optim.AdamW, batch, batch_size=4, device="v100-16gb")


def flops(report: Report, kind: str, *phases: str) -> float:
    return sum(each.flops for each in report.time.classes if each.kind == kind and each.phase in phases)


def test_contractions_are_nearly_all_flops_of_a_transformer(bert: Report) -> None:
    passes = ("forward", "backward")
    total = sum(flops(bert, kind, *passes) for kind in ("contraction", "normalisation", "element-wise"))
    assert flops(bert, "contraction", *passes) / total == pytest.approx(0.998, abs=0.001)
    assert flops(bert, "normalisation", *passes) / total == pytest.approx(0.001, abs=0.0007)


def test_the_backward_pass_multiplies_twice_as_much_as_the_forward_pass(bert: Report) -> None:
    ratio = flops(bert, "contraction", "backward") / flops(bert, "contraction", "forward")
    assert ratio == pytest.approx(2.0, rel=0.01)


def test_contractions_are_bound_by_arithmetic_and_all_else_by_memory(bert: Report) -> None:
    bounds = {(each.kind, each.phase): each.bound for each in bert.time.classes}
    assert bounds.pop(("contraction", "forward")) == bounds.pop(("contraction", "backward")) == "compute"
    assert set(bounds.values()) == {"memory"}


def test_a_linear_layers_flops_are_those_of_its_formula() -> None:
    report = predict(
        lambda: nn.Linear(300, 200, bias=False),
        torch.optim.SGD,
        lambda: torch.randn(7, 300, requires_grad=True),
        loss_fn=lambda model, batch: model(batch).sum(),
    )
    assert flops(report, "contraction", "forward") == 2 * 7 * 300 * 200
    assert flops(report, "contraction", "backward") == 2 * 2 * 7 * 300 * 200


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizers_work_is_counted_alike_one_by_one_and_all_at_once(foreach: bool) -> None:
    report = predict(
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))),
        lambda parameters: torch.optim.SGD(parameters, foreach=foreach),
        lambda: torch.randn(7, 64),
        loss_fn=lambda model, batch: model(batch).sum(),
    )
    assert flops(report, "element-wise", "optimizer") == report.parameters
