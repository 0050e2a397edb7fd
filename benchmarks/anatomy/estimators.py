"""What others say that a training step takes, asked as their users ask. In bytes, for fp32, Adam and one device."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def accelerate(model: nn.Module) -> int:
    """`accelerate estimate-memory`, its column "Training using Adam": the largest of the stages that it tells apart."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total, "float32").values()))


def deepspeed_zero2(model: nn.Module) -> int:
    """DeepSpeed's estimate of ZeRO 2 on one device, nothing offloaded."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, device = estimate_zero2_model_states_mem_needs(total_params=_parameters(model), cpu_offload=False)
    return int(device)


def deepspeed_zero3(model: nn.Module) -> int:
    """DeepSpeed's estimate of ZeRO 3 on one device, nothing offloaded."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    _, device, _ = estimate_zero3_model_states_mem_needs(
        total_params=_parameters(model), largest_layer_params=largest, cpu_offload=False, cpu_offload_params=False
    )
    return int(device)


def eighteen_bytes(model: nn.Module) -> int:
    """The rule of "Model training anatomy" for AdamW in mixed precision, which many use for all."""
    return 18 * _parameters(model)


ESTIMATORS: dict[str, Callable[[nn.Module], int]] = {
    "accelerate estimate-memory": accelerate,
    "DeepSpeed, ZeRO 2": deepspeed_zero2,
    "DeepSpeed, ZeRO 3": deepspeed_zero3,
    "18 bytes a parameter": eighteen_bytes,
}


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
