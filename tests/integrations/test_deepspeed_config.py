"""What `fix` does to old and broken configurations: a table of them, each refused before by the installed DeepSpeed (or
by its engine, or read otherwise than it was meant) and taken after.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedconfig import RELEASE, Absent, Undecided, fix

Configuration = dict[str, Any]
BATCH = {"train_micro_batch_size_per_gpu": 2}
CPU = {"device": "cpu"}


def zero(**keys: Any) -> Configuration:
    return {"zero_optimization": keys}


def with_batch(configuration: Configuration) -> Configuration:
    return configuration if "train_batch_size" in configuration else BATCH | configuration


def adam(**params: Any) -> Configuration:
    return {"optimizer": {"type": "Adam", "params": params}}


def warmup(**params: Any) -> Configuration:
    return {"scheduler": {"type": "WarmupLR", "params": params}}


# before, after
REFUSED = {
    "ZeRO as a switch": ({"zero_optimization": True}, zero(stage=1)),
    "ZeRO switched off": ({"zero_optimization": False}, zero(stage=0)),
    "ZeRO as a number": ({"zero_optimization": 2}, zero(stage=2)),
    "ZeRO as null": ({"zero_optimization": None}, {}),
    "allgather_size beside a switch": (
        {"zero_optimization": True, "allgather_size": 7},
        zero(stage=1, allgather_bucket_size=7),
    ),
    "allgather_size": (zero(stage=1, allgather_size=7), zero(stage=1, allgather_bucket_size=7)),
    "cpu_offload": (zero(stage=2, cpu_offload=True), zero(stage=2, offload_optimizer=CPU)),
    "cpu_offload off": (zero(stage=2, cpu_offload=False), zero(stage=2)),
    "cpu_offload beside its block": (
        zero(stage=2, cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
    ),
    "cpu_offload beside a block without a device": (
        zero(stage=2, cpu_offload=True, offload_optimizer={"pin_memory": False}),
        zero(stage=2, offload_optimizer={"pin_memory": False, "device": "cpu"}),
    ),
    "cpu_offload_params": (zero(stage=3, cpu_offload_params=True), zero(stage=3, offload_param=CPU)),
    "cpu_offload_param": (zero(stage=3, cpu_offload_param=True), zero(stage=3, offload_param=CPU)),
    "pinned memory of both blocks": (
        zero(stage=3, cpu_offload=True, cpu_offload_params=True, cpu_offload_use_pin_memory=False),
        zero(stage=3, offload_optimizer=CPU | {"pin_memory": False}, offload_param=CPU | {"pin_memory": False}),
    ),
    "pinned memory of nothing": (zero(stage=2, pin_memory=True), zero(stage=2)),
    "pin_memory beside the block": (
        zero(stage=2, offload_optimizer=CPU, pin_memory=True),
        zero(stage=2, offload_optimizer=CPU | {"pin_memory": True}),
    ),
    "fast_init beside the block": (
        zero(stage=3, offload_optimizer=CPU, fast_init=True),
        zero(stage=3, offload_optimizer=CPU | {"fast_init": True}),
    ),
    "fast_init of nothing": (zero(stage=3, fast_init=True), zero(stage=3)),
    "offload_param as a switch": (zero(stage=3, offload_param=True), zero(stage=3, offload_param=CPU)),
    "offload_optimizer switched off": (zero(stage=3, offload_optimizer=False), zero(stage=3)),
    "offload_optimizer as a device": (zero(stage=3, offload_optimizer="cpu"), zero(stage=3, offload_optimizer=CPU)),
    "a device in capitals": (zero(stage=3, offload_param={"device": "CPU"}), zero(stage=3, offload_param=CPU)),
    "fp16 weights on save": (
        zero(stage=3, stage3_gather_fp16_weights_on_model_save=True),
        zero(stage=3, stage3_gather_16bit_weights_on_model_save=True),
    ),
    "two names of one key": (
        zero(stage=3, prefetch_bucket_size=5, stage3_prefetch_bucket_size=6),
        zero(stage=3, stage3_prefetch_bucket_size=6),
    ),
    "activation checkpointing in ZeRO's block": (
        zero(stage=1, partition_activations=True, cpu_checkpointing=True),
        zero(stage=1) | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
    ),
    "aio in ZeRO's block": (
        zero(stage=3, aio={"thread_count": 2}),
        zero(stage=3) | {"aio": {"intra_op_parallelism": 2}},
    ),
    "guesses": (zero(stage=3, min_num_size=1e8, sync_bn_in_backward=True), zero(stage=3)),
    "a norm that has to be computed": (zero(stage=3, compute_grad_norm=False), zero(stage=3)),
    "a part of the optimizer in ZeRO 2": (
        zero(stage=2, offload_optimizer=CPU | {"ratio": 0.5}),
        zero(stage=2, offload_optimizer=CPU),
    ),
    "MiCS": (zero(stage=3, mics_shard_size=8, mics_hierarchical_params_gather=True), zero(stage=3)),
    "bfloat16": (
        {"bfloat16": {"enabled": True, "check_overflow": True}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
    ),
    "bf16 as a switch": ({"bf16": True}, {"bf16": {"enabled": True}}),
    "bf16 that scales its loss": (
        {"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}},
        {"bf16": {"enabled": True}},
    ),
    "names inside the loss scaler": (
        {"fp16": {"enabled": True, "scale_window": 500, "min_scale": 1, "delayed_shift": 2}},
        {"fp16": {"enabled": True, "loss_scale_window": 500, "min_loss_scale": 1, "hysteresis": 2}},
    ),
    "a number in quotes": ({"fp16": {"loss_scale_window": "1e3"}}, {"fp16": {"loss_scale_window": 1000}}),
    "null for a number": (zero(stage=1, reduce_bucket_size=None), zero(stage=1)),
    "batch sizes in quotes": ({"train_batch_size": "8"}, {"train_batch_size": 8}),
    "a flag in quotes": ({"wall_clock_breakdown": "false"}, {"wall_clock_breakdown": False}),
    "null for a block": ({"flops_profiler": None, "optimizer": None}, {}),
    "a type on the wire by its other name": (
        {"communication_data_type": "float16"},
        {"communication_data_type": "fp16"},
    ),
    "max_grad_norm": (adam(lr=0.1, max_grad_norm=0.5), adam(lr=0.1) | {"gradient_clipping": 0.5}),
    "max_grad_norm beside clipping": (
        adam(max_grad_norm=0.5) | {"gradient_clipping": 1.0},
        adam() | {"gradient_clipping": 1.0},
    ),
    "an optimizer by its name": ({"optimizer": "Adam"}, {"optimizer": {"type": "Adam"}}),
    "an optimizer in small letters": ({"optimizer": {"type": "sgd"}}, {"optimizer": {"type": "SGD"}}),
    "a class in the place of a type": ({"optimizer": {"type": "FusedAdam"}}, {"optimizer": {"type": "Adam"}}),
    "a schedule by its name": ({"scheduler": "WarmupLR"}, warmup()),
    "a schedule in small letters": ({"scheduler": {"type": "warmuplr", "params": {}}}, warmup()),
    "a schedule without parameters": ({"scheduler": {"type": "WarmupLR"}}, warmup()),
    "steps as 1e3": (warmup(warmup_num_steps=1e3), warmup(warmup_num_steps=1000)),
    "no step of warming up": (warmup(warmup_num_steps=0), warmup(warmup_num_steps=1)),
    "a rate in quotes": (warmup(warmup_max_lr="1e-3"), warmup(warmup_max_lr=0.001)),
    "a parameter of another schedule": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_max_lr": 1.0}}},
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}},
    ),
    "nebula": ({"nebula": {"enabled": True, "persistent_storage_path": "/p"}}, {}),
    "what was removed, and was off": (
        {
            "amp": {"enabled": False},
            "elasticity": {},
            "progressive_layer_drop": None,
            "sparse_gradients": True,
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        },
        {},
    ),
    "torch.compile in the configuration": ({"compile": {"disable": False, "backend": "inductor"}}, {"compile": {}}),
    "a dtype of torch in JSON": (
        {"tensor_parallel": {"dtype": "fp16", "autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 1}},
    ),
    "an unknown key that is refused": (zero(stage=1, colour="red"), zero(stage=1)),
    "batch sizes that no number of ranks gives": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
    ),
    "a rank's batch that does not divide": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 4},
        {"train_batch_size": 32, "gradient_accumulation_steps": 4},
    ),
}

# What DeepSpeed takes without a word, and reads otherwise than it was meant, or fails of later.
MISREAD = {
    "clipping as a block": ({"gradient_clipping": {"enabled": True, "clip_value": 0.5}}, {"gradient_clipping": 0.5}),
    "clipping as a block that is off": (
        {"gradient_clipping": {"enabled": False, "max_norm": 1.0}},
        {"gradient_clipping": 0.0},
    ),
    "clipping as a switch": ({"gradient_clipping": True}, {"gradient_clipping": 1.0}),
    "clipping as null": ({"gradient_clipping": None}, {"gradient_clipping": 0.0}),
    "aio's old name": ({"aio": {"thread_count": 2}}, {"aio": {"intra_op_parallelism": 2}}),
    "fp32_allreduce": ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
    "fp32_allreduce off": ({"fp32_allreduce": False}, {}),
    "the first ZeRO's keys": (
        {"zero_optimization": 1, "zero_reduce_scatter": False, "zero_max_elements_per_comm": 9},
        zero(stage=1, reduce_scatter=False, reduce_bucket_size=9),
    ),
    "the first ZeRO 1": (zero(stage=1, legacy_stage1=True), zero(stage=1)),
    "a rate beside params": ({"optimizer": {"type": "Adam", "lr": 0.1}}, adam(lr=0.1)),
    "a type under another name": ({"optimizer": {"name": "Adam"}}, {"optimizer": {"type": "Adam"}}),
    "steps beside params": (
        {"scheduler": {"type": "WarmupLR", "params": {}, "warmup_num_steps": 9}},
        warmup(warmup_num_steps=9),
    ),
    "a writer's buffer as 64e6": (
        {"checkpoint": {"writer": {"io_buffer_size": 64e6}}},
        {"checkpoint": {"writer": {"io_buffer_size": 64000000}}},
    ),
}


@pytest.mark.parametrize(("before", "after"), REFUSED.values(), ids=REFUSED)
def test_refused_configuration_becomes_valid(before: Any, after: Any, deepspeed: Any) -> None:
    assert deepspeed.refusal(with_batch(before)) is not None

    fixed = fix(with_batch(before))

    assert fixed.configuration == with_batch(after)
    assert fixed.rewrites
    assert deepspeed.refusal(fixed.configuration) is None


@pytest.mark.parametrize(("before", "after"), MISREAD.values(), ids=MISREAD)
def test_misread_configuration_says_what_was_meant(before: Any, after: Any, deepspeed: Any) -> None:
    fixed = fix(with_batch(before))

    assert fixed.configuration == with_batch(after)
    assert fixed.rewrites
    assert deepspeed.refusal(fixed.configuration) is None


# What DeepSpeed neither refuses nor reads.
IGNORED = {
    "a comment": {"_comment": "for the cluster"},
    "a seed": {"seed": 1234},
    "a block": {"my_run": {"owner": "me", "tags": ["auto"]}},
    "a word for frameworks in it": {"my_run": "auto"},
    "in a block that no model reads": {"flops_profiler": {"enabled": True, "colour": "red"}},
    "a guess": {"min_num_size": 1e8},
    "beside the block that says it": {"loss_scale": 128, "fp16": {"enabled": True, "loss_scale": 0}},
}


@pytest.mark.parametrize("configuration", IGNORED.values(), ids=IGNORED)
def test_what_deepspeed_ignores_stays_and_is_said(configuration: Any, deepspeed: Any) -> None:
    configuration = BATCH | {"gradient_clipping": 1.0} | configuration
    assert deepspeed.refusal(configuration) is None

    fixed = fix(configuration)

    assert (fixed.configuration, fixed.rewrites) == (configuration, ())
    assert ["stays, and does nothing" in note for note in fixed.notes] == [True]


def test_each_rewrite_says_what_was_there_what_is_and_why() -> None:
    fixed = fix(BATCH | {"nebula": {"enabled": True}} | zero(stage=2, cpu_offload=True, pin_memory=True))

    by_path = {rewrite.path: rewrite for rewrite in fixed.rewrites}
    assert by_path["nebula"].was == {"enabled": True}
    assert by_path["nebula"].now is Absent.ABSENT
    assert "stepfast.integrations.deepspeed.initialize" in by_path["nebula"].why
    moved = by_path["zero_optimization.cpu_offload"]
    assert (moved.was, moved.to, moved.now) == (True, "zero_optimization.offload_optimizer", CPU)
    assert all(rewrite.why for rewrite in fixed.rewrites)


def test_whole_numbers_are_written_as_such_which_is_no_change() -> None:
    fixed = fix(BATCH | zero(stage=1, reduce_bucket_size=5e8))

    assert fixed.rewrites == ()
    assert repr(fixed.configuration["zero_optimization"]) == "{'stage': 1, 'reduce_bucket_size': 500000000}"


def test_a_configuration_for_transformers_stays_as_it_is() -> None:
    configuration = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    }  # fmt: skip

    fixed = fix(configuration)

    assert (fixed.configuration, fixed.rewrites) == (configuration, ())
    assert ["auto" in note for note in fixed.notes] == [True]


def test_missing_batch_size_is_one_unless_transformers_fills_it_in() -> None:
    assert fix({"gradient_accumulation_steps": 4}).configuration["train_micro_batch_size_per_gpu"] == 1
    assert fix({"zero_optimization": {"stage": "auto"}}).configuration == {"zero_optimization": {"stage": "auto"}}
    own = fix({"data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}}).configuration
    assert own["train_micro_batch_size_per_gpu"] == 1


def test_world_size_decides_whether_batch_sizes_agree() -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}

    assert fix(sizes).rewrites == fix(sizes, world_size=2).rewrites == ()
    assert "gradient_accumulation_steps" not in fix(sizes, world_size=4).configuration
    with pytest.raises(Undecided, match="3 ranks"):
        fix(sizes, world_size=3)
    assert fix(sizes | {"sequence_parallel_size": 2}, world_size=4).rewrites == ()
    with pytest.raises(Undecided, match="4 ranks cannot be divided"):
        fix(sizes | {"sequence_parallel_size": 3}, world_size=4)


def test_scripts_own_optimizer_is_allowed_where_deepspeed_wants_to_be_told() -> None:
    configuration = BATCH | zero(stage=2, offload_optimizer=CPU) | {"gradient_clipping": 1.0}

    assert len(fix(configuration).notes) == 1
    fixed = fix(configuration, own_optimizer=True)

    assert fixed.configuration["zero_allow_untested_optimizer"] is True
    assert fixed.configuration["zero_force_ds_cpu_optimizer"] is False
    assert fixed.notes == ()
    assert fix(fixed.configuration, own_optimizer=True).rewrites == ()
    assert fix(BATCH, own_optimizer=True).rewrites == ()


def test_nebula_stays_for_whom_wants_it_to() -> None:
    configuration = BATCH | {"nebula": {"enabled": True}}

    assert fix(configuration, keep_nebula=True).configuration == configuration


def test_what_is_asked_to_be_removed_is_removed_first() -> None:
    configuration = BATCH | {"amp": {"enabled": True}, "fp16": {"enabled": True, "a.b": 1}}

    fixed = fix(configuration, removals=["amp", "fp16.a.b"])

    assert fixed.configuration == BATCH | {"fp16": {"enabled": True}}
    assert [(rewrite.path, rewrite.why) for rewrite in fixed.rewrites] == [
        ("amp", "asked for"),
        ("fp16.a.b", "asked for"),
    ]
    with pytest.raises(SpecError, match="is not there"):
        fix(configuration, removals=["ampp"])


def test_notes_tell_what_the_release_does_otherwise_than_older_ones() -> None:
    notes = fix(BATCH | zero(stage=1, offload_optimizer={}) | {"optimizer": {"type": "Adam"}}).notes

    assert len(notes) == 2
    assert f"{RELEASE} clips at 1.0" in notes[0]
    assert "offload_optimizer names no device" in notes[1]
