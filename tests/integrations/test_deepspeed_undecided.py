"""What `fix` leaves to a person: values that cannot stay, and without which the training would be another."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast.integrations.deepspeedconfig import Undecided, fix

BATCH = {"train_micro_batch_size_per_gpu": 2}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# configuration, the path that is asked about, a word of the reason
UNDECIDED = {
    "both of fp16 and bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled",
        "bf16 is enabled too",
    ),
    "a slip of the pen": (
        {"gradient_acumulation_steps": 4},
        "gradient_acumulation_steps",
        "gradient_accumulation_steps",
    ),
    "a slip of the pen in ZeRO": (zero(stage=3, overlap_com=True), "zero_optimization.overlap_com", "overlap_comm"),
    "a loss scale beside its block": (
        {"loss_scale": 128, "fp16": {"enabled": True}},
        "loss_scale",
        "Move it to fp16.loss_scale, and it begins to count; or take it out (--remove loss_scale)",
    ),
    "an old name in the loss scaler beside its block": ({"scale_window": 9}, "scale_window", "fp16.scale_window"),
    "offloading beside ZeRO's block": (
        zero(stage=2) | {"cpu_offload": True},
        "cpu_offload",
        "Move it to zero_optimization.cpu_offload",
    ),
    "weights to load beside ZeRO's block": (
        zero(stage=3) | {"load_from_fp32_weights": False},
        "load_from_fp32_weights",
        "DeepSpeed ignores it",
    ),
    "activations beside their block": (
        {"partition_activations": True},
        "partition_activations",
        "activation_checkpointing.partition_activations",
    ),
    "half a pair of surrogates": ({"tensorboard": {"job_name": "\ud800"}}, "tensorboard.job_name", "no value of text"),
    "half a pair in a list": ({"my_run": ["\udfff"]}, "my_run.0", "no value of text"),
    "half a pair in a key": ({"fp16": {"\ud800": 1}}, "fp16", "'\\ud800' is no name of a key"),
    "a switch that there is none of": (zero(stage=2, enabled=False), "zero_optimization.enabled", "no such switch"),
    "compression": ({"compression_training": {"x": {"enabled": True}}}, "compression_training", "not quantised"),
    "Apex": ({"amp": {"enabled": True}}, "amp", "fp32"),
    "elastic training": ({"elasticity": {"enabled": True}}, "elasticity", "batch sizes"),
    "LoCo": (zero(stage=3, zeropp_loco_param={"err_beta": 0.8}), "zero_optimization.zeropp_loco_param", "feedback"),
    "1-bit Adam": ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type", "Adam trains without"),
    "an optimizer of nobody": ({"optimizer": {"type": "Adamm"}}, "optimizer.type", "is Adam meant?"),
    "a schedule of nobody": ({"scheduler": {"type": "Cosine"}}, "scheduler.type", "no such scheduler"),
    "a schedule without its end": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "scheduler.params",
        "total_num_steps",
    ),
    "a slip in a schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 3}}},
        "scheduler.params.warmup_num_step",
        "warmup_num_steps",
    ),
    "a stage that there is none of": (zero(stage=4), "zero_optimization.stage", "from 0 to 3"),
    "half an element": (zero(stage=1, reduce_bucket_size=0.5), "zero_optimization.reduce_bucket_size", "whole number"),
    "a block that is a list": ({"fp16": [1]}, "fp16", "wants a block"),
    "a clipping block without a number": (
        {"gradient_clipping": {"enabled": True}},
        "gradient_clipping",
        "does not say one",
    ),
    "master weights in fp16 without ZeRO": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
        "needs ZeRO",
    ),
    "sums in ZeRO 3": (zero(stage=3) | {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "ZeRO 3"),
    "a window of no steps": (
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        "fp16.loss_scale_window",
        "at least 1",
    ),
    "batch sizes that fit nothing": (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        "train_batch_size",
        "any number of ranks",
    ),
    "a number that JSON lacks": ({"gradient_clipping": float("inf")}, "gradient_clipping", "no value of JSON"),
    "a value that JSON lacks": (zero(stage=object()), "zero_optimization.stage", "no value of JSON"),
}


@pytest.mark.parametrize(("configuration", "path", "reason"), UNDECIDED.values(), ids=UNDECIDED)
def test_what_would_change_the_training_is_left_to_the_caller(configuration: Any, path: str, reason: str) -> None:
    with pytest.raises(Undecided) as raised:
        fix(BATCH | configuration)

    assert [problem.path for problem in raised.value.problems] == [path]
    assert reason in raised.value.problems[0].why
    assert str(raised.value).startswith(f"{path}: ")


def test_everything_undecided_is_told_at_once() -> None:
    with pytest.raises(Undecided) as raised:
        fix({"amp": {"enabled": True}, "zero_optimization": {"stage": 7}, "optimizer": {"type": "Adamm"}})

    assert {problem.path for problem in raised.value.problems} == {"amp", "zero_optimization.stage", "optimizer.type"}
