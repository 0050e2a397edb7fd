"""`fix`: the steps in their order, and what is only said.

A step relies on those before it: names are the current ones before blocks are looked at, and values are in their exact
types before they are compared with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedconfig.agreement import settle_agreement
from stepfast.integrations.deepspeedconfig.batch import has_auto, settle_batch
from stepfast.integrations.deepspeedconfig.draft import Block, Draft, Path, Rewrite, Undecided, dotted, places, plain
from stepfast.integrations.deepspeedconfig.keys import CLIPPING, RELEASE, ZERO
from stepfast.integrations.deepspeedconfig.kinds import Flag, Whole
from stepfast.integrations.deepspeedconfig.offload import OPTIMIZER, PARAM, offloads, settle_offload
from stepfast.integrations.deepspeedconfig.optimizer import settle_clipping, settle_optimizer, settle_scheduler
from stepfast.integrations.deepspeedconfig.renames import bring_home, remove, remove_unknown, rename
from stepfast.integrations.deepspeedconfig.values import AUTO, settle_blocks, settle_values

_UNTESTED = ("zero_allow_untested_optimizer",)
_FORCED = ("zero_force_ds_cpu_optimizer",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A configuration that DeepSpeed `RELEASE` takes, what was rewritten for that, and what its reader should know."""

    configuration: Block
    rewrites: tuple[Rewrite, ...]
    notes: tuple[str, ...]


def fix(
    configuration: Mapping[str, object],
    *,
    world_size: int | None = None,
    own_optimizer: bool = False,
    keep_nebula: bool = False,
    removals: Sequence[str] = (),
) -> Fixed:
    """Makes a configuration valid; the argument stays as it is.

    `world_size`: the ranks that the batch sizes are for, where they are known. `own_optimizer`: the script hands its
    optimizer to DeepSpeed, which then wants to be told so. `keep_nebula`: leaves that block where it is.
    `removals`: dotted paths that are taken out first, whatever they mean.

    Raises Undecided where a person has to decide, SpecError where a path of `removals` is not there. What was valid
    comes back equal, without rewrites; so does what comes back from here.
    """
    draft = plain(configuration)
    _decided(draft)
    for text in removals:
        draft.drop(_found(draft, text), "asked for")
    _name_zero(draft)
    bring_home(draft)
    rename(draft)
    settle_offload(draft)
    remove(draft, keep_nebula=keep_nebula)
    settle_optimizer(draft)
    settle_scheduler(draft)
    settle_clipping(draft)
    settle_blocks(draft)
    remove_unknown(draft, keep_nebula=keep_nebula)
    settle_values(draft)
    _decided(draft)
    settle_agreement(draft)
    settle_batch(draft, world_size=world_size)
    _decided(draft)
    if own_optimizer:
        _allow_own(draft)
    return Fixed(configuration=draft.root, rewrites=tuple(draft.rewrites), notes=tuple(_notes(draft)))


def _decided(draft: Draft) -> None:
    if draft.problems:
        raise Undecided(tuple(draft.problems))


def _found(draft: Draft, text: str) -> Path:
    for path, _ in places(draft.root):
        if dotted(path) == text:
            return path
    raise SpecError(text, "is asked to be removed, and is not there")


def _name_zero(draft: Draft) -> None:
    """ZeRO was a switch once, and the number of its stage; before all else, for other keys move into its block."""
    value = draft.get((ZERO,))
    if isinstance(value, bool):
        draft.put((ZERO,), {"stage": int(value)}, "a block has the stage: the first, when this was a switch")
    elif value is None:
        draft.drop((ZERO,), "null is no block; where it is not there ZeRO is off")
    elif isinstance(value, int | float | str):
        stage = Whole(least=0, most=3).read(value)
        if isinstance(stage, int):
            draft.put((ZERO,), {"stage": stage}, "a block has the stage")


def _allow_own(draft: Draft) -> None:
    if _has_zero(draft) and Flag().read(draft.root.get(_UNTESTED[0])) is not True:
        draft.put(_UNTESTED, True, "with ZeRO DeepSpeed takes a script's own optimizer, other than Adam's kin, only so")
    if offloads(draft, OPTIMIZER) and Flag().read(draft.root.get(_FORCED[0], True)) is not False:
        draft.put(_FORCED, False, "DeepSpeed keeps the state of a script's own optimizer on the CPU only so")


def _notes(draft: Draft) -> list[str]:
    notes = [*draft.notes]
    if CLIPPING not in draft.root and not has_auto(draft):
        notes.append(
            f"{CLIPPING} is not said: DeepSpeed {RELEASE} clips at 1.0 then, where older releases did not clip. "
            "Write 0.0 for no clipping"
        )
    if "optimizer" not in draft.root and _has_zero(draft) and not draft.root.get(_UNTESTED[0]):
        notes.append(
            "no optimizer is named, so the script brings its own: with ZeRO DeepSpeed takes only Adam and its kin, and "
            "none of torch's with its state on the CPU, unless it is told to (--own-optimizer writes that)"
        )
    notes += [
        f"{dotted(path)} names no device: that was the CPU in early releases, and is none in {RELEASE}"
        for path in (OPTIMIZER, PARAM)
        if (draft.block(path) is not None and not draft.has((*path, "device")))
    ]
    if has_auto(draft):
        notes.append('"auto" is left for Transformers, Accelerate or Lightning to fill in; DeepSpeed alone does not')
    return notes


def _has_zero(draft: Draft) -> bool:
    stage = (draft.block((ZERO,)) or {}).get("stage", 0)
    return stage != AUTO and Whole(least=1, most=3).read(stage) in {1, 2, 3}
