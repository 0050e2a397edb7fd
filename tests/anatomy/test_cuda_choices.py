"""What a prediction for CUDA chooses as CUDA would: attention's kernels by the device, autocast's lists, fused kernels.

Told by what a step keeps and holds, in bytes that follow from torch's sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F  # noqa: N812 - its customary name

from stepfast.torch.anatomy import Report, predict

A100 = "a100-80gb"
BATCH, HEADS, LENGTH, WIDTH = 2, 8, 512, 64
SCORES = BATCH * HEADS * LENGTH * LENGTH  # numbers that attention keeps where it is written out
ROW = BATCH * HEADS * LENGTH


class Attending(nn.Module):
    """Queries of `HEADS` heads, keys and values of `key_heads`."""

    def __init__(self, width: int, key_heads: int, *, is_causal: bool, is_masked: bool) -> None:
        super().__init__()
        self.width, self.key_heads, self.is_causal, self.is_masked = width, key_heads, is_causal, is_masked
        self.layer = nn.Linear(WIDTH, (HEADS + 2 * key_heads) * width)

    def forward(self, given: Tensor) -> Tensor:
        sizes = [self.width * count for count in (HEADS, self.key_heads, self.key_heads)]
        parts = self.layer(given).split(sizes, -1)
        query, key, value = (each.unflatten(-1, (-1, self.width)).transpose(1, 2) for each in parts)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if self.is_masked else None
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.is_causal, enable_gqa=self.key_heads != HEADS
        ).square().mean()  # fmt: skip


def attending(
    device: str, precision: str, *, width: int = WIDTH, key_heads: int = HEADS, **options: Any
) -> Report:  # fmt: skip
    wanted = {name: options.pop(name, False) for name in ("is_causal", "is_masked")}
    return predict(
        lambda: Attending(width, key_heads, **wanted), optim.SGD, lambda: torch.randn(BATCH, LENGTH, WIDTH),
        device=device, precision=precision, **options,
    )  # fmt: skip


def keeps_scores(report: Report) -> bool:
    return report.memory.component_peaks["activations"] > 4 * SCORES


@pytest.mark.parametrize(
    ("device", "precision", "options", "is_written_out"),
    [
        ("a100-80gb", "bf16-mixed", {}, False),
        ("v100-16gb", "fp16-mixed", {}, False),  # memory-efficient
        ("t4", "bf16-mixed", {}, True),  # no fused kernel has bf16 there
        ("a100-80gb", "fp32", {"width": 66}, True),  # rows that are not aligned
        ("v100-16gb", "fp32", {"width": 66}, False),
        ("a100-80gb", "bf16-mixed", {"attention": "math"}, True),
    ],
)
def test_attention_is_written_out_where_no_fused_kernel_can(
    device: str, precision: str, options: dict[str, Any], is_written_out: bool
) -> None:
    assert keeps_scores(attending(device, precision, **options)) == is_written_out


def test_written_out_in_half_precision_goes_through_fp32() -> None:
    math = attending("a100-80gb", "bf16", attention="math", loss_fn=half_loss)
    assert math.memory.component_peaks["activations"] > 4 * SCORES


def half_loss(module: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = module(given.bfloat16())
    return loss


def temporary(report: Report) -> int:
    return report.memory.component_peaks["temporary"]


def test_the_memory_efficient_backward_pass_holds_its_sums_in_fp32_too() -> None:
    """A tile of 64 by 64 sums with four numbers before it for each 64 queries of a head, and the rows' numbers."""
    held = ROW // 64 * (64 * 64 + 4) * 4 + ROW * 4
    assert temporary(attending("a100-80gb", "fp32")) >= held + 3 * ROW * WIDTH * 4  # three gradients beside


def test_flash_expands_the_gradients_of_shared_keys_and_values() -> None:
    shared, own = (
        temporary(attending("a100-80gb", "bf16", key_heads=count, loss_fn=half_loss)) for count in (2, HEADS)
    )
    expanded, gradients = 2 * ROW * WIDTH * 2, 2 * ROW * WIDTH * 2
    assert shared == own + expanded - gradients * 3 // 4


def test_a_mask_keeps_flash_away_but_not_cudnns_kernel() -> None:
    masked = {device: attending(device, "bf16-mixed", is_masked=True) for device in ("a100-80gb", "h100-80gb")}
    biases = SCORES // HEADS // BATCH * 2
    one, other = (masked[device].memory.component_peaks["activations"] for device in ("a100-80gb", "h100-80gb"))
    assert one == pytest.approx(other + biases, rel=0.001)
    assert any("cuDNN" in note for note in masked["h100-80gb"].notes)
    assert not masked["a100-80gb"].notes


def heard(question: Callable[[Tensor], Tensor], precision: str = "bf16-mixed") -> torch.dtype:
    found: list[torch.dtype] = []

    def loss(module: nn.Module, given: Tensor) -> Tensor:
        hidden = module(given)
        result = question(hidden)
        found.append(result.dtype)
        return result.float().mean() + hidden.float().mean()

    predict(lambda: nn.Linear(8, 8), optim.SGD, lambda: torch.randn(4, 8), loss_fn=loss, precision=precision)
    return found[0]


@pytest.mark.parametrize(
    ("question", "dtype"),
    [
        pytest.param(lambda hidden: F.rms_norm(hidden, (8,)), torch.float32, id="rms_norm"),
        pytest.param(lambda hidden: F.layer_norm(hidden, (8,)), torch.float32, id="layer_norm"),
        pytest.param(lambda hidden: F.interpolate(hidden[None], scale_factor=2.0), torch.float32, id="interpolate"),
        pytest.param(lambda hidden: hidden.norm(), torch.float32, id="norm"),
        pytest.param(torch.linalg.vector_norm, torch.float32, id="vector_norm"),
        pytest.param(lambda hidden: torch.softmax(input=hidden, dim=-1), torch.float32, id="softmax, by keyword"),
        pytest.param(lambda hidden: torch.sum(input=hidden), torch.float32, id="sum, by keyword"),
        pytest.param(lambda hidden: torch.mv(hidden.float(), hidden[0].float()), torch.bfloat16, id="mv"),
        pytest.param(lambda hidden: F.prelu(hidden.float(), torch.ones(1)), torch.bfloat16, id="prelu"),
        pytest.param(lambda hidden: F.avg_pool3d(hidden[None, None, None], 1), torch.bfloat16, id="avg_pool3d"),
        pytest.param(lambda hidden: F.pad(hidden[None], (1, 1), mode="reflect"), torch.bfloat16, id="pad"),
        pytest.param(lambda hidden: hidden * 2, torch.bfloat16, id="what neither list names"),
    ],
)
def test_autocasts_lists_are_cudas(question: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    assert heard(question) is dtype


def normalised(layer: type[nn.Module]) -> Report:
    return predict(
        lambda: nn.Sequential(nn.Linear(64, 1024), layer(1024), nn.Linear(1024, 1)), optim.SGD,
        lambda: torch.randn(256, 64), loss_fn=lambda model, given: model(given).mean(),
    )  # fmt: skip


def test_rms_norm_is_one_kernel_that_keeps_its_input_as_layer_norm_does() -> None:
    one, other = (normalised(layer).memory.component_peaks["activations"] for layer in (nn.RMSNorm, nn.LayerNorm))
    assert one == pytest.approx(other, rel=0.001)


@pytest.mark.parametrize(
    ("optimizer", "is_at_once"), [(optim.AdamW, True), (optim.SGD, False), (optim.Adafactor, False)]
)
def test_optimizers_step_all_at_once_where_they_would(optimizer: Any, is_at_once: bool) -> None:
    def stepped(**options: Any) -> Report:
        return predict(
            lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))),
            lambda parameters: optimizer(parameters, **options),
            lambda: torch.randn(2, 64), loss_fn=lambda model, given: model(given).mean(),
        )  # fmt: skip

    assert temporary(stepped()) == temporary(stepped(foreach=is_at_once))
