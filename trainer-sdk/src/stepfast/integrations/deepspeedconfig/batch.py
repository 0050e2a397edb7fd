"""The three batch sizes: samples a step = samples a rank at once × accumulation steps × ranks.

How many ranks there will be a configuration does not say. What training depends on is the samples a step, so where the
three contradict each other that one stays.
"""

from __future__ import annotations

from typing import Final

from stepfast.integrations.deepspeedconfig.draft import Draft, Path, Value, places
from stepfast.integrations.deepspeedconfig.keys import MICRO, SECTIONS, STEPS, TRAIN, ZERO, is_read
from stepfast.integrations.deepspeedconfig.values import AUTO

_OWN_AUTO: Final = frozenset({("data_types", "keep_in_fp32_modules"), (ZERO, "zenflow")})
_INVENTED: Final = (
    "DeepSpeed needs a batch size, and none is said. It counts only where DeepSpeed makes the loader (training_data), "
    "and for the samples and the throughput that it reports: write what one rank takes at once"
)


def settle_batch(draft: Draft, *, world_size: int | None) -> None:
    values = [draft.get((name,)) for name in (TRAIN, MICRO, STEPS)]
    if AUTO in values:
        return
    train, micro, steps = map(_size, values)
    if train is None and micro is None:
        if not has_auto(draft):
            draft.put((MICRO,), 1, _INVENTED)
    elif train is not None:
        _agree(draft, train, micro, steps, _groups(draft, world_size))


def has_auto(draft: Draft) -> bool:
    """Whether a framework is to fill something in; then it fills in the batch sizes too."""
    return any(value == AUTO and is_read(path) and not _is_own(path) for path, value in places(draft.root))


def _is_own(path: Path) -> bool:
    """Whether "auto" is a word of DeepSpeed itself there."""
    return path[:2] in _OWN_AUTO or (path[:1] in SECTIONS and SECTIONS[path[:1]].is_open)


def _groups(draft: Draft, world_size: int | None) -> int | None:
    """How many ranks have samples of their own: those that share a sequence share its samples."""
    share = draft.get(("sequence_parallel_size",))
    if world_size is None or not isinstance(share, int):
        return world_size
    if world_size % share != 0:
        draft.refuse(("sequence_parallel_size",), f"{world_size} ranks cannot be divided by it")
    return max(1, world_size // share)


def _agree(draft: Draft, train: int, micro: int | None, steps: int | None, world_size: int | None) -> None:
    ranks = world_size or 1
    if _fits(train, (micro or 1) * (steps or 1), world_size, is_open=micro is None or steps is None):
        return
    if micro is not None and steps is not None and train % (micro * ranks) == 0:
        draft.drop((STEPS,), f"{_odds(train, micro, steps, world_size)}: DeepSpeed works it out of the other two")
    elif micro is not None and steps is not None and train % (steps * ranks) == 0:
        draft.drop((MICRO,), f"{_odds(train, micro, steps, world_size)}: DeepSpeed works it out of the other two")
    else:
        draft.refuse((TRAIN,), _odds(train, micro, steps, world_size))


def _fits(train: int, unit: int, world_size: int | None, *, is_open: bool) -> bool:
    if world_size is None:
        return train % unit == 0
    return train % (unit * world_size) == 0 if is_open else train == unit * world_size


def _odds(train: int, micro: int | None, steps: int | None, world_size: int | None) -> str:
    given = [f"{MICRO} {micro}"] * (micro is not None) + [f"{STEPS} {steps}"] * (steps is not None)
    ranks = "any number of ranks" if world_size is None else f"{world_size} ranks"
    return f"{TRAIN} {train} is not {' × '.join([*given, ranks])}"


def _size(value: Value) -> int | None:
    return value if isinstance(value, int) else None
