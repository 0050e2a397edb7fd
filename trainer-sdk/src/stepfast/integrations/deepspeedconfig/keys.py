"""The keys that the current DeepSpeed reads, and the values that each takes: a closed table, one section a block.

It was made from the release's own classes; `tests/integrations/test_deepspeed_keys.py` holds it to the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stepfast.integrations.deepspeedconfig.draft import Path
from stepfast.integrations.deepspeedconfig.kinds import (
    Flag,
    Kind,
    Many,
    Mapped,
    Rate,
    Real,
    Whole,
    Word,
    Words,
)

RELEASE: Final = "0.19.8"

TRAIN: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
STEPS: Final = "gradient_accumulation_steps"
ZERO: Final = "zero_optimization"
CLIPPING: Final = "gradient_clipping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block's keys. Blocks in it are sections of their own, found by their paths."""

    keys: Mapping[str, Kind] = field(default_factory=dict)
    is_model: bool  # read by a model, which converts values, refuses unknown keys, and takes "auto" for not said
    is_open: bool = False  # has other keys too, which are not looked at here
    is_nullable: bool = False


def _model(*, is_nullable: bool = False, **keys: Kind) -> Section:
    return Section(keys=keys, is_model=True, is_nullable=is_nullable)


def _plain(*, is_nullable: bool = False, is_open: bool = False, **keys: Kind) -> Section:
    return Section(keys=keys, is_model=False, is_nullable=is_nullable, is_open=is_open)


_ANY = Kind(is_nullable=True)
_FLAG, _WHOLE, _SIZE, _COUNT, _TEXT = Flag(), Whole(), Whole(least=0), Whole(least=1), Word()
_SHARE = Real(least=0.0, most=1.0)
_NULL_FLAG, _NULL_WHOLE, _NULL_REAL = Flag(is_nullable=True), Whole(is_nullable=True), Real(is_nullable=True)
_NULL_COUNT, _NULL_TEXT = Whole(least=1, is_nullable=True), Word(is_nullable=True)
_DEVICE = Word(options=("none", "cpu", "nvme"))
_WIRE = Word(
    options=("fp32", "fp16", "bf16"), is_any_case=True, is_nullable=True,
    aliases=(("float32", "fp32"), ("float", "fp32"), ("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16")),
)  # fmt: skip
_DTYPE = Word(
    options=(
        "fp16", "torch.float16", "float16", "half", "fp32", "torch.float32", "float32", "float", "int8", "torch.int8",
        "bf16", "torch.bfloat16", "bfloat16",
    )
)  # fmt: skip

SECTIONS: Final[Mapping[Path, Section]] = {
    (): _plain(
        train_batch_size=_NULL_COUNT, train_micro_batch_size_per_gpu=_NULL_COUNT,
        gradient_accumulation_steps=_NULL_COUNT, managed_gradient_accumulation=_FLAG, steps_per_print=_NULL_WHOLE,
        dump_state=_NULL_FLAG, disable_python_gc=_NULL_FLAG, disable_allgather=_NULL_FLAG,
        communication_data_type=_WIRE, seq_parallel_communication_data_type=_WIRE, prescale_gradients=_NULL_FLAG,
        gradient_predivide_factor=Real(),
        gradient_allreduce_op=Word(options=("mean", "sum"), is_any_case=True), gradient_clipping=Real(least=0.0),
        zero_allow_untested_optimizer=_NULL_FLAG, zero_force_ds_cpu_optimizer=_NULL_FLAG, wall_clock_breakdown=_FLAG,
        memory_breakdown=_NULL_FLAG, use_data_before_expert_parallelism=_NULL_FLAG, dataloader_drop_last=_NULL_FLAG,
        log_level=_ANY, vocabulary_size=_NULL_WHOLE, sequence_parallel_size=_COUNT, data_parallel_size=_COUNT,
        datastates_ckpt=_ANY,
    ),
    ("zero_optimization",): _model(
        stage=Whole(least=0, most=3), contiguous_gradients=_FLAG, reduce_scatter=_FLAG, reduce_bucket_size=_COUNT,
        use_multi_rank_bucket_allreduce=_FLAG, allgather_partitions=_FLAG, allgather_bucket_size=_SIZE,
        overlap_comm=_NULL_FLAG, compute_grad_norm=_FLAG, load_from_fp32_weights=_FLAG, elastic_checkpoint=_FLAG,
        sub_group_size=_SIZE, prefetch_bucket_size=_SIZE, stage3_prefetch_bucket_size=_SIZE,
        param_persistence_threshold=_SIZE, stage3_param_persistence_threshold=_SIZE, model_persistence_threshold=_SIZE,
        stage3_model_persistence_threshold=_SIZE, max_live_parameters=_SIZE, stage3_max_live_parameters=_SIZE,
        max_reuse_distance=_SIZE, stage3_max_reuse_distance=_SIZE, gather_16bit_weights_on_model_save=_FLAG,
        stage3_gather_16bit_weights_on_model_save=_FLAG, module_granularity_threshold=_WHOLE,
        stage3_module_granularity_threshold=_WHOLE, use_all_reduce_for_fetch_params=_FLAG,
        stage3_use_all_reduce_for_fetch_params=_FLAG, allgather_sequential=_FLAG, stage3_allgather_sequential=_FLAG,
        ignore_unused_parameters=_FLAG, legacy_stage1=_FLAG, round_robin_gradients=_FLAG, parameter_alignment=_FLAG,
        zero_hpz_partition_size=_SIZE, zero_quantized_weights=_FLAG, zero_quantized_nontrainable_weights=_FLAG,
        zero_quantized_gradients=_FLAG, memory_efficient_linear=_FLAG, pipeline_loading_checkpoint=_FLAG,
        override_module_apply=_FLAG, log_trace_cache_warnings=_FLAG, enable_sanity_checks=_FLAG,
        save_muon_momentum_buffer_in_memory=_FLAG,
    ),
    ("zero_optimization", "offload_param"): _model(
        is_nullable=True, device=_DEVICE, nvme_path=_NULL_TEXT, buffer_count=_SIZE, buffer_size=_SIZE, max_in_cpu=_SIZE,
        pin_memory=_FLAG,
    ),
    ("zero_optimization", "offload_optimizer"): _model(
        is_nullable=True, device=_DEVICE, nvme_path=_NULL_TEXT, buffer_count=_SIZE, pin_memory=_FLAG,
        pipeline_read=_FLAG, pipeline_write=_FLAG, fast_init=_FLAG, ratio=_SHARE, super_offload=_FLAG,
        cpuadam_cores_perc=_SHARE,
    ),
    ("zero_optimization", "zenflow"): _model(
        is_nullable=True, topk_ratio=Real(least=0.0, most=1.0, is_open=True),
        select_strategy=Word(options=("auto", "step", "epoch")), select_interval=Whole(is_quotable=False),
        update_interval=Whole(least=1, is_quotable=False), overlap_step=_FLAG, offload=_FLAG, auto_ratio=_SHARE,
        full_warm_up_rounds=_WHOLE, pt_reserved_cores_perc=_SHARE, steps_per_epoch=_NULL_WHOLE,
    ),
    ("zero_optimization", "leaf_module"): _model(
        is_nullable=True, classes=Words(is_lone=True), names=Words(is_lone=True), name_suffixes=Words(is_lone=True)
    ),
    ("bf16",): _model(
        is_nullable=True, enabled=_FLAG, immediate_grad_update=_FLAG, check_grad_overflow=_FLAG,
        bf16_master_weights_and_grads=_FLAG, bf16_optimizer_states=_FLAG,
    ),
    ("fp16",): _model(
        enabled=_FLAG, auto_cast=_FLAG, loss_scale=Real(least=0.0), initial_scale_power=_WHOLE,
        loss_scale_window=_WHOLE, hysteresis=_WHOLE, consecutive_hysteresis=_FLAG, min_loss_scale=_WHOLE,
        fp16_master_weights_and_grads=_FLAG,
    ),
    ("torch_autocast",): _plain(enabled=_NULL_FLAG, dtype=_DTYPE, lower_precision_safe_modules=Words()),
    ("data_types",): _plain(
        grad_accum_dtype=Word(options=_DTYPE.options, is_nullable=True),
        param_dtype=Word(options=_DTYPE.options, is_nullable=True),
        buffer_dtype=Word(options=_DTYPE.options, is_nullable=True), keep_in_fp32_modules=Words(),
    ),
    ("activation_checkpointing",): _plain(
        partition_activations=_NULL_FLAG, number_checkpoints=_NULL_WHOLE, contiguous_memory_optimization=_NULL_FLAG,
        synchronize_checkpoint_boundary=_NULL_FLAG, cpu_checkpointing=_NULL_FLAG, profile=_NULL_FLAG,
    ),
    ("optimizer",): _plain(type=_NULL_TEXT, params=Mapped(is_nullable=True), legacy_fusion=_NULL_FLAG),
    ("scheduler",): _plain(type=_NULL_TEXT, params=Mapped(is_nullable=True)),
    ("checkpoint",): _plain(
        tag_validation=Word(options=("WARN", "IGNORE", "FAIL"), is_any_case=True), load_universal=_NULL_FLAG,
        use_node_local_storage=_NULL_FLAG, checkpoint_serialization=_NULL_FLAG,
    ),
    ("checkpoint", "parallel_write"): _plain(pipeline_stage=_FLAG),
    ("checkpoint", "writer"): _plain(
        is_nullable=True, type=Word(options=("FAST", "PYTHON", "MOCK"), is_any_case=True), io_buffer_size=_COUNT,
        io_buffer_double=_NULL_FLAG, io_multiplier=_COUNT, show_statistics=_NULL_FLAG, decoupled=_NULL_FLAG,
        data_parallel=Word(options=("REPLICA", "SOCKET", "MACHINE"), is_any_case=True, is_nullable=True),
    ),
    ("aio",): _plain(
        is_nullable=True, block_size=_COUNT, queue_depth=_COUNT, intra_op_parallelism=_COUNT, single_submit=_NULL_FLAG,
        overlap_events=_NULL_FLAG, use_gds=_NULL_FLAG,
    ),
    ("flops_profiler",): _plain(
        enabled=_FLAG, recompute_fwd_factor=Real(), profile_step=_WHOLE, module_depth=_WHOLE, top_modules=_WHOLE,
        detailed=_NULL_FLAG, output_file=_NULL_TEXT,
    ),
    ("comms_logger",): _model(enabled=_FLAG, prof_all=_FLAG, prof_ops=Many(), verbose=_FLAG, debug=_FLAG),
    ("tensorboard",): _model(enabled=_FLAG, output_path=_TEXT, job_name=_TEXT),
    ("csv_monitor",): _model(enabled=_FLAG, output_path=_TEXT, job_name=_TEXT),
    ("wandb",): _model(enabled=_FLAG, group=_NULL_TEXT, team=_NULL_TEXT, project=_TEXT),
    ("comet",): _model(
        enabled=_FLAG, samples_log_interval=_WHOLE, project=_NULL_TEXT, workspace=_NULL_TEXT, api_key=_NULL_TEXT,
        experiment_name=_NULL_TEXT, experiment_key=_NULL_TEXT, online=_NULL_FLAG, mode=_NULL_TEXT,
    ),
    ("timers",): _plain(),
    ("timers", "throughput"): _model(enabled=_FLAG, synchronized=_FLAG),
    ("hybrid_engine",): _model(
        enabled=_FLAG, max_out_tokens=_COUNT, inference_tp_size=_WHOLE, release_inference_cache=_FLAG,
        pin_parameters=_FLAG, tp_gather_partition_size=_WHOLE, enable_cuda_graph=_FLAG,
    ),
    ("compile",): _model(
        deepcompile=_FLAG, autoep_non_moe=_FLAG, free_activation=_FLAG, free_activation_threshold=_WHOLE,
        offload_activation=_FLAG, offload_activation_pin_memory=_FLAG, offload_opt_states=_FLAG, double_buffer=_FLAG,
        symmetric_memory=_FLAG, debug_log=_FLAG, offload_parameters=_FLAG, sync_before_reduce=_FLAG,
        sync_after_reduce=_FLAG, sync_before_allgather=_FLAG, sync_after_allgather=_FLAG, keep_int_input_tensors=_FLAG,
        keep_all_input_tensors=_FLAG, passes=Words(options=("z1", "z3", "autosp", "autotp"), is_nullable=True),
    ),
    ("weight_quantization",): _model(
        enabled=_FLAG, num_bits=_WHOLE, q_type=Word(options=("asymmetric", "symmetric")), q_groups=_WHOLE,
        quantized_initialization=Mapped(), post_init_quant=Mapped(),
    ),
    ("tensor_parallel",): _model(
        autotp_size=_WHOLE, tp_overlap_comm=_FLAG, vocab_parallel_lm_head=_NULL_FLAG,
        vocab_parallel_ce_backend=Word(options=("torch", "liger")), injection_policy_tuple=Many(is_nullable=True),
        partition_config=Mapped(is_nullable=True), preset_model=_NULL_TEXT, keep_module_on_host=_FLAG,
        replace_with_kernel_inject=_FLAG, kernel_inject=_FLAG,
    ),
    ("tensor_parallel", "tp"): _model(tp_size=_WHOLE, tp_grain_size=_WHOLE, mpu=_ANY, tp_group=_ANY),
    ("tensor_parallel", "tensor_parallel"): _model(tp_size=_WHOLE, tp_grain_size=_WHOLE, mpu=_ANY, tp_group=_ANY),
    ("autotuning",): _plain(is_open=True),
    ("data_efficiency",): _plain(is_open=True),
    ("expert_parallel",): _plain(is_open=True, is_nullable=True),
    ("pipeline",): _plain(is_open=True),
}  # fmt: skip

# Two names of one key: a model takes either, and refuses both together.
SYNONYMS: Final[Mapping[Path, Path]] = {
    **{
        (ZERO, name.removeprefix("stage3_")): (ZERO, name)
        for name in SECTIONS[(ZERO,)].keys
        if name.startswith("stage3_")
    },
    ("tensor_parallel", "replace_with_kernel_inject"): ("tensor_parallel", "kernel_inject"),
    ("tensor_parallel", "tensor_parallel"): ("tensor_parallel", "tp"),
}

# DeepSpeed's own optimizers, which it knows in any case; any other is a class of torch.optim.
OPTIMIZERS: Final = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
TORCH_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip

# DeepSpeed's own schedules with the parameters of each; any other is a class of torch.optim.lr_scheduler.
SCHEDULERS: Final[Mapping[str, Section]] = {
    "LRRangeTest": _plain(
        lr_range_test_min_lr=Rate(), lr_range_test_step_size=_COUNT, lr_range_test_step_rate=Real(),
        lr_range_test_staircase=_FLAG, last_batch_iteration=_WHOLE,
    ),
    "OneCycle": _plain(
        cycle_min_lr=Rate(), cycle_max_lr=Rate(), decay_lr_rate=Real(), cycle_first_step_size=Real(),
        cycle_second_step_size=_NULL_REAL, cycle_first_stair_count=_WHOLE, cycle_second_stair_count=_NULL_WHOLE,
        decay_step_size=Real(), cycle_momentum=_FLAG, cycle_min_mom=Rate(), cycle_max_mom=Rate(), decay_mom_rate=Real(),
        last_batch_iteration=_WHOLE,
    ),
    "WarmupLR": _plain(
        warmup_min_lr=Rate(), warmup_max_lr=Rate(is_nullable=True), warmup_num_steps=_COUNT, warmup_type=_TEXT,
        last_batch_iteration=_WHOLE,
    ),
    "WarmupDecayLR": _plain(
        total_num_steps=Real(), warmup_min_lr=Rate(), warmup_max_lr=Rate(is_nullable=True), warmup_num_steps=_COUNT,
        warmup_type=_TEXT, last_batch_iteration=_WHOLE,
    ),
    "WarmupCosineLR": _plain(
        total_num_steps=Real(), warmup_min_ratio=Real(), warmup_num_steps=_COUNT, cos_min_ratio=Real(),
        warmup_type=_TEXT, last_batch_iteration=_WHOLE,
    ),
}  # fmt: skip
SCHEDULERS_NEED: Final[Mapping[str, tuple[str, ...]]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
TORCH_SCHEDULERS: Final = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip


def is_read(path: Path) -> bool:
    """Whether the release reads what stands at this path, or hands it on: no name on the way is an unknown one."""
    steps = ((path[:end], path[end]) for end in range(len(path)))
    return all(at not in SECTIONS or SECTIONS[at].is_open or name in names_in(at) for at, name in steps)


def names_in(path: Path) -> set[str]:
    """The keys of a section, its blocks among them."""
    inner = {found[-1] for found in SECTIONS if found and found[:-1] == path}
    return set(SECTIONS[path].keys) | inner
