"""Steps that ask for values: what follows from shapes is known, so they go the way that they go in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import Report, predict

WIDTH = 16


def asked(question: Callable[[Tensor], Any], *, batch: Callable[[int], Tensor] | None = None) -> Any:
    """What a step hears that asks this of its batch."""
    heard: list[Any] = []

    def loss(module: nn.Module, given: Tensor) -> Tensor:
        heard.append(question(given))
        found: Tensor = module(torch.ones(2, WIDTH)).mean()
        return found

    predict(lambda: nn.Linear(WIDTH, 1), torch.optim.SGD, batch or _points, batch_size=2, loss_fn=loss, device="cpu")
    return heard[0]


def _points(count: int) -> Tensor:
    return torch.randn(count, 8)


def written(mask: Tensor, value: Tensor | float) -> Tensor:
    mask[:, 0] = value
    return mask


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        pytest.param(lambda given: bool(torch.ones(2, 8, dtype=torch.long).all()), True, id="a mask of ones"),
        pytest.param(lambda given: bool(written(torch.ones(2, 8), 0).all()), False, id="a word masked"),
        pytest.param(lambda given: bool((torch.arange(8).diff() == 1).all()), True, id="positions run on"),
        pytest.param(lambda given: int(torch.arange(8).max()) + 1, 8, id="a length"),
        pytest.param(lambda given: torch.full((3,), 5).tolist(), [5, 5, 5], id="a list"),
        pytest.param(lambda given: torch.linspace(0, 0.5, 3).tolist(), [0, 0.25, 0.5], id="rates"),
        pytest.param(lambda given: (torch.arange(5) > 2).nonzero().shape[0], 2, id="a shape by values"),
        pytest.param(lambda given: bool(written(torch.ones(2, 8), given[:, 0]).all()), False, id="unknown in it"),
        pytest.param(lambda given: bool((given == 3).any()), False, id="unknown: no"),
        pytest.param(lambda given: bool(torch.rand([]) < 1), False, id="drawn: no"),
        pytest.param(lambda given: torch.equal(given, given), True, id="equal to itself"),
        pytest.param(lambda given: torch.equal(given, given + 1), False, id="unknown: not equal"),
        pytest.param(lambda given: torch.equal(torch.arange(4), torch.arange(4)), True, id="known: equal"),
        pytest.param(lambda given: given.mean().item(), 1.0, id="a number for a log"),
    ],
)
def test_a_question_is_answered(question: Callable[[Tensor], Any], answer: object) -> None:
    assert asked(question) == answer


def test_a_batch_of_real_tensors_is_known() -> None:
    words = torch.tensor([[1, 2, 0], [3, 0, 0]])
    assert asked(lambda given: (given != 0).sum(-1).tolist(), batch=lambda count: words) == [2, 1]


def test_words_that_stand_for_data_are_known() -> None:
    found = asked(lambda given: int(given.max()), batch=lambda count: torch.randint(3, 5, (count, 100)))
    assert found == 4


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (lambda given: int(given.argmax()), "reads a whole number"),
        (lambda given: (given > 0).nonzero(), "whose size depends on values"),
    ],
)
def test_what_nobody_knows_is_refused(question: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(AnatomyError, match=said):
        asked(question)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
            vocab_size=1000, use_cache=False,
        )
    )  # fmt: skip


def predicted(mask: Callable[[Tensor], Tensor] | None, attention: str) -> Report:
    def batch(count: int) -> dict[str, Tensor]:
        words = torch.randint(1, 900, (count, 256))
        masks = {} if mask is None else {"attention_mask": mask(words)}
        return {"input_ids": words, "labels": words, **masks}

    return predict(llama, torch.optim.AdamW, batch, batch_size=2, precision="bf16-mixed", attention=attention)


def activations(report: Report) -> int:
    return report.memory.component_peaks["activations"]


@pytest.mark.parametrize("mask", [None, torch.ones_like], ids=["no mask", "nothing masked"])
def test_transformers_makes_no_mask_where_nothing_is_masked_and_flash_attention_runs(mask: Any) -> None:
    assert activations(predicted(mask, "auto")) == activations(predicted(mask, "flash"))
    assert activations(predicted(mask, "auto")) < activations(predicted(mask, "math"))


def test_words_that_may_be_masked_are_attended_to_with_a_mask() -> None:
    padded = predicted(lambda words: (words > 5).long(), "auto")
    assert activations(padded) > activations(predicted(None, "auto"))
