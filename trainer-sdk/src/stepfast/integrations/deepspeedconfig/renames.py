"""What older releases called otherwise, what stands in the wrong block, and what is gone: tables, one key a line.

`gone` is what costs nothing or what DeepSpeed never knew. `missed` changes the training when it is taken out: that is
left to the caller, unless the configuration itself says that it is off.
"""

from __future__ import annotations

import difflib
from typing import Final

from stepfast.integrations.deepspeedconfig.draft import ABSENT, Block, Draft, Json, Path, Value, dotted
from stepfast.integrations.deepspeedconfig.keys import MICRO, RELEASE, SECTIONS, SYNONYMS, TRAIN, names_in
from stepfast.integrations.deepspeedconfig.kinds import Flag
from stepfast.integrations.deepspeedconfig.values import AUTO

# How alike an unknown key and a known one are for it to be a slip of the pen (difflib's ratio).
_ALIKE = 0.85

_Z = "zero_optimization"
_STAGE_0 = "of the first releases, when ZeRO had no block of its own"
_SCALER = "the name inside DeepSpeed's loss scaler; the configuration's is another"
_SLIP = "a slip in DeepSpeed's own documentation"
_16BIT = "renamed when bf16 came"

_RENAMED: Final = (
    # old path, new path, why
    ("bfloat16", "bf16", "the block was renamed"),
    ("allgather_size", f"{_Z}.allgather_bucket_size", _STAGE_0),
    ("zero_all_gather_size", f"{_Z}.allgather_bucket_size", _STAGE_0),
    ("zero_reduce_scatter", f"{_Z}.reduce_scatter", _STAGE_0),
    ("zero_max_elements_per_comm", f"{_Z}.reduce_bucket_size", _STAGE_0),
    ("seq_parallel_comm_data_type", "seq_parallel_communication_data_type", "the key was renamed"),
    (f"{_Z}.allgather_size", f"{_Z}.allgather_bucket_size", "the key was renamed"),
    (f"{_Z}.max_elements_per_comm", f"{_Z}.reduce_bucket_size", "the key was renamed"),
    (f"{_Z}.stage3_gather_fp16_weights_on_model_save", f"{_Z}.stage3_gather_16bit_weights_on_model_save", _16BIT),
    (f"{_Z}.gather_fp16_weights_on_model_save", f"{_Z}.stage3_gather_16bit_weights_on_model_save", _16BIT),
    (f"{_Z}.stage3_sub_group_size", f"{_Z}.sub_group_size", "this key has no prefix"),
    ("fp16.scale_window", "fp16.loss_scale_window", _SCALER),
    ("fp16.min_scale", "fp16.min_loss_scale", _SCALER),
    ("fp16.delayed_shift", "fp16.hysteresis", _SCALER),
    ("bf16.check_overflow", "bf16.check_grad_overflow", "the key was renamed"),
    ("aio.thread_count", "aio.intra_op_parallelism", "the key was renamed"),
    ("activation_checkpointing.partitioned_activations", "activation_checkpointing.partition_activations", _SLIP),
)  # fmt: skip

_GUESSED = "no release knows this key; it was never more than a guess"
_NO_SCALE = "bf16 has the range of fp32 and scales no loss: the key belongs to fp16"
_COMPILE = "compiling is asked for in the script, by engine.compile(backend=…, compile_kwargs=…)"
_MICS = "MiCS was removed: parameters are sharded over all ranks, with the same results"

_GONE: Final = (
    # path, why
    (f"{_Z}.min_num_size", _GUESSED),
    (f"{_Z}.sync_bn_in_backward", f"{_GUESSED}; torch.nn.SyncBatchNorm is what synchronises batch norms"),
    (f"{_Z}.stage3_gather_fp16_weights_during_training", f"{_GUESSED}; ZeRO 3 gathers weights where they are needed"),
    (f"{_Z}.mics_shard_size", f"{_MICS}; zero_hpz_partition_size keeps a second copy near"),
    (f"{_Z}.mics_hierarchical_params_gather", f"{_MICS}; this chose how they travelled"),
    ("sparse_gradients", "gradients travel dense, with the same sums; those of nn.Embedding(sparse=True) need no key"),
    ("graph_harvesting", "CUDA graphs of short kernels were removed; results are the same"),
    ("tensor_parallel.dtype", "JSON has no word for a dtype of torch: call deepspeed.tp_model_init(…, dtype=…)"),
    ("compile.enabled", _COMPILE),
    ("compile.disable", _COMPILE),
    ("compile.backend", _COMPILE),
    ("compile.kwargs", _COMPILE),
    ("bf16.loss_scale", _NO_SCALE),
    ("bf16.initial_scale_power", _NO_SCALE),
    ("bf16.loss_scale_window", _NO_SCALE),
    ("bf16.hysteresis", _NO_SCALE),
    ("bf16.consecutive_hysteresis", _NO_SCALE),
    ("bf16.min_loss_scale", _NO_SCALE),
    ("bf16.auto_cast", "bf16 has no such key: it belongs to fp16"),
)  # fmt: skip

NEBULA: Final = "nebula"
_NEBULA_WHY = (
    "DeepSpeed 0.19.7 removed Nebula and refuses the block. stepfast.integrations.deepspeed.initialize(…) takes it, in "
    "the place of deepspeed.initialize(…), and saves as it says: for that leave it in (--keep-nebula)"
)

_CURRICULUM = "it was removed: data_efficiency.data_sampling.curriculum_learning is another, which orders samples"
_ELASTIC = f"elastic training was removed, which chose the batch sizes: give {TRAIN} or {MICRO}"

_MISSED: Final = (
    # path, why
    ("amp", "Apex was removed, and without it the model trains in fp32: choose fp16, bf16 or torch_autocast"),
    ("compression_training", "compression was removed: the model would train as it is, not quantised, not pruned"),
    ("quantize_training", "quantised training (MoQ) was removed: the model would train as it is"),
    ("eigenvalue", "it steered quantised training (MoQ), which was removed"),
    ("progressive_layer_drop", "progressive layer drop was removed: all layers would train at every step"),
    ("curriculum_learning", _CURRICULUM),
    ("sparse_attention", "sparse attention was removed: attention would be dense"),
    ("elasticity", _ELASTIC),
    (f"{_Z}.zeropp_loco_param", "LoCo was removed: quantised gradients lose the feedback of their errors"),
)  # fmt: skip

# Where a key belongs that stands in the wrong place, in the order in which blocks are asked.
_HOMES: Final = (
    # of ZeRO's block. Its model refuses every one of them, so nothing trains with it there, and moving loses nothing:
    ("activation_checkpointing",),  # partition_activations and its kin: an article's example has them there
    (),  # aio, gradient_clipping, communication_data_type, …
)
_TOP_HOMES: Final = (
    # of the top level. No release read any of these there, not even the first ones (those that they did read are among
    # _RENAMED): DeepSpeed ignores it, and in its block it would begin to count, so somebody has to decide:
    (_Z,),  # overlap_comm, load_from_fp32_weights, cpu_offload, …: another schedule, other weights, another device
    ("activation_checkpointing",),  # in a block of its own since there is any
    ("fp16",),  # loss_scale, hysteresis, auto_cast, …: other gradients
)
# Words that mean something else in every block.
_HOMELESS: Final = frozenset({"enabled", "profile", "type", "params", "dtype", "stage", NEBULA})


def old_paths() -> list[Path]:
    """Every key that this module and `offload` know and the release does not."""
    listed = [_path(row[0]) for row in (*_RENAMED, *_GONE, *_MISSED)]
    return [*listed, *((_Z, name) for name in OFFLOAD_NAMES), ("fp32_allreduce",), (NEBULA,)]


def bring_home(draft: Draft) -> None:
    """Keys in the wrong block go where they belong, also by their old names; but for what begins to count by that."""
    for name in [name for name in draft.block((_Z,)) or () if _is_stray((_Z,), name)]:
        home = next((home for home in _HOMES if name in names_in(home) | _old_names(home)), None)
        if home is not None:
            draft.move((_Z, name), (*home, name), f"no key of {_Z}")
    for name in [name for name in draft.root if _is_stray((), name)]:
        home = next((home for home in _TOP_HOMES if name in names_in(home) | _old_live_names(home)), None)
        if home is not None and not draft.has((*home, name)):
            draft.refuse((name,), _stray_why(name, dotted((*home, name))))


def rename(draft: Draft) -> None:
    for old, new, why in _RENAMED:
        if draft.has(_path(old)):
            draft.move(_path(old), _path(new), why)
    if draft.has((_Z, "fp32_allreduce")):
        draft.move((_Z, "fp32_allreduce"), ("fp32_allreduce",), f"no key of {_Z}")
    if draft.has(("fp32_allreduce",)):
        _rename_allreduce(draft)
    for name, other in SYNONYMS.items():
        if all(draft.get(path) not in (ABSENT, AUTO) for path in (name, other)):
            draft.move(name, other, "two names of one key, which DeepSpeed refuses together")


def remove(draft: Draft, *, keep_nebula: bool) -> None:
    for text, why in _GONE:
        if draft.has(_path(text)):
            draft.drop(_path(text), why)
    for text, why in _MISSED:
        path = _path(text)
        if draft.has(path) and _is_off(draft.get(path)):
            draft.drop(path, f"it is off, and DeepSpeed {RELEASE} refuses the key even so")
        elif draft.has(path):
            draft.refuse(path, why)
    if draft.has((NEBULA,)) and not keep_nebula:
        draft.drop((NEBULA,), _NEBULA_WHY)


def remove_unknown(draft: Draft, *, keep_nebula: bool) -> None:
    """What is left that the table of keys does not have. A slip of the pen is no unknown key, but a question; what
    DeepSpeed ignores is whoever wrote it's own (a comment, a seed), and stays.
    """
    for path, section in SECTIONS.items():
        block = draft.block(path)
        if block is None or section.is_open:
            continue
        known = names_in(path) | ({NEBULA} if keep_nebula and not path else set())
        for name in [name for name in block if name not in known]:
            _remove_one(draft, (*path, name), known, is_refused=section.is_model)


def _remove_one(draft: Draft, path: Path, known: set[str], *, is_refused: bool) -> None:
    does = "refuses" if is_refused else "ignores"
    meant = difflib.get_close_matches(path[-1].lower(), known, n=1, cutoff=_ALIKE)
    if meant and not draft.has((*path[:-1], meant[0])):
        draft.refuse(path, f"no key of DeepSpeed, which {does} it; is {meant[0]} meant?")
    elif path[-1] == "enabled" and _is_off(draft.get(path)):
        draft.refuse(path, f"there is no such switch, and DeepSpeed {does} it: take out what is to be off")
    elif not is_refused:
        draft.note(path, f"no key that DeepSpeed {RELEASE} reads there; it stays, and does nothing")
    else:
        draft.drop(path, f"no key of DeepSpeed {RELEASE}, which {does} it, nor an old one that is known here")


def _rename_allreduce(draft: Draft) -> None:
    why = "the type on the wire has a key of its own"
    path = ("fp32_allreduce",)
    value = draft.get(path)
    if value is not ABSENT and Flag().read(value) is True:
        draft.move(path, ("communication_data_type",), why, now="fp32")
    elif _is_off(value):
        draft.drop(path, f"{why}, and this was off")
    else:
        draft.refuse(path, "wants true or false")


def _is_off(value: Value) -> bool:
    """Whether a block says of itself that it does nothing: empty, or with switches that are all off."""
    if not isinstance(value, dict):
        return value is None or (value is not ABSENT and Flag().read(value) is False)
    switches = list(_switches(value))
    return not value or (bool(switches) and all(Flag().read(switch) is False for switch in switches))


def _switches(block: Block) -> list[Json]:
    found: list[Json] = []
    for name, value in block.items():
        if name == "enabled":
            found.append(value)
        elif isinstance(value, dict):
            found += _switches(value)
    return found


def _is_stray(block: Path, name: str) -> bool:
    return name not in names_in(block) | _old_names(block) | _HOMELESS


def _old_names(block: Path) -> set[str]:
    """Names that a section had once, or never but in configurations that are known here."""
    return {path[-1] for path in old_paths() if path[:-1] == block}


def _old_live_names(block: Path) -> set[str]:
    """Those of them that would do something in the section: they have another name today, or another shape."""
    renamed = {path[-1] for old, _, _ in _RENAMED if (path := _path(old))[:-1] == block}
    return renamed | (set(OFFLOAD_NAMES) if block == (_Z,) else set())


# Switches and keys of the times before offloading had blocks of its own; `offload` makes blocks of them.
OFFLOAD_NAMES: Final = (
    "cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory", "pin_memory", "fast_init",
)  # fmt: skip


def _stray_why(name: str, home: str) -> str:
    return (
        f"no key of the top level, where DeepSpeed ignores it. Move it to {home}, and it begins to count; or take it "
        f"out (--remove {name}), and training stays as it is"
    )


def _path(text: str) -> Path:
    return tuple(text.split("."))
