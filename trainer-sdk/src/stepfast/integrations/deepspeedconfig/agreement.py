"""Values that are fine alone and refused together."""

from __future__ import annotations

from stepfast.integrations.deepspeedconfig.draft import Draft, Json, Path, Value
from stepfast.integrations.deepspeedconfig.keys import ZERO
from stepfast.integrations.deepspeedconfig.kinds import Flag, Real
from stepfast.integrations.deepspeedconfig.offload import OPTIMIZER
from stepfast.integrations.deepspeedconfig.values import AUTO

_NEEDS_ZERO: tuple[Path, ...] = (
    ("fp16", "fp16_master_weights_and_grads"),
    ("bf16", "bf16_master_weights_and_grads"),
    ("bf16", "bf16_optimizer_states"),
)


def settle_agreement(draft: Draft) -> None:
    """What training does not feel is taken out; the rest is a question."""
    stage = _number(draft.get((ZERO, "stage")), 0)
    if _is_on(draft, ("fp16", "enabled")) and _is_on(draft, ("bf16", "enabled")):
        draft.refuse(("fp16", "enabled"), "bf16 is enabled too, and DeepSpeed trains in one of them: disable the other")
    if _is_on(draft, (ZERO, "legacy_stage1")):
        draft.drop((ZERO, "legacy_stage1"), "the first ZeRO 1 was removed in 0.5.9; today's computes the same")
    norm = (ZERO, "compute_grad_norm")
    if stage not in {1, 2} and draft.has(norm) and draft.get(norm) != AUTO and not _is_on(draft, norm):
        draft.drop(norm, "only ZeRO 1 and 2 can leave the norm of the gradients out")
    if _number(draft.get((*OPTIMIZER, "ratio")), 1) < 1 and stage != 3:
        draft.drop((*OPTIMIZER, "ratio"), "only ZeRO 3 moves a part of the optimizer; the others move all of it")
    for path in _NEEDS_ZERO:
        if _is_on(draft, path) and stage == 0:
            draft.refuse(path, "needs ZeRO: set zero_optimization.stage")
    if _is_on(draft, _NEEDS_ZERO[2]) and not _is_on(draft, _NEEDS_ZERO[1]):
        draft.refuse(_NEEDS_ZERO[2], "needs bf16_master_weights_and_grads")
    _settle_sums(draft, stage)
    _settle_scaling(draft)


def _settle_sums(draft: Draft, stage: float) -> None:
    path = ("gradient_allreduce_op",)
    if str(draft.get(path)).lower() != "sum":
        return
    others = (
        (stage == 3, "ZeRO 3"),
        (draft.block((ZERO, "zenflow")) is not None, "ZenFlow"),
        (_is_on(draft, ("compile", "deepcompile")), "DeepCompile"),
    )
    for is_there, other in others:
        if is_there:
            draft.refuse(path, f"{other} takes the mean only")


def _settle_scaling(draft: Draft) -> None:
    if not _is_on(draft, ("fp16", "enabled")) or _number(draft.get(("fp16", "loss_scale")), 0) != 0:
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        if _number(draft.get(("fp16", name)), 1) <= 0:
            draft.refuse(("fp16", name), "wants a whole number of at least 1 where the loss is scaled dynamically")


def _is_on(draft: Draft, path: Path) -> bool:
    value = draft.get(path)
    return isinstance(value, bool | int | float | str) and Flag().read(value) is True


def _number(value: Value, default: float) -> float:
    said: Json | object = Real().read(value) if isinstance(value, int | float | str) else None
    return said if isinstance(said, int | float) else default
