"""The optimizer, its schedule, and the clipping of gradients, which was a parameter of the optimizer once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

from stepfast.integrations.deepspeedconfig.draft import ABSENT, Block, Draft, Json, Path
from stepfast.integrations.deepspeedconfig.keys import (
    CLIPPING,
    OPTIMIZERS,
    RELEASE,
    SCHEDULERS,
    SCHEDULERS_NEED,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from stepfast.integrations.deepspeedconfig.kinds import Flag, Kind, Rate, Real
from stepfast.integrations.deepspeedconfig.values import AUTO, settle_value

_ALIKE = 0.7

# Names of the classes behind the types, which people wrote for them.
_OTHERWISE: Final = {
    "fusedadam": "Adam", "deepspeedcpuadam": "Adam", "cpuadam": "Adam", "adamw_torch": "AdamW",
    "fusedlamb": "Lamb", "fusedlion": "Lion", "deepspeedcpulion": "Lion", "deepspeedcpuadagrad": "Adagrad",
}  # fmt: skip
_COMPRESSED: Final = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}

_NUMBERS: Final[dict[str, Kind]] = {
    "lr": Real(), "eps": Rate(), "weight_decay": Real(), "momentum": Real(), "betas": Rate(), "alpha": Real(),
    "rho": Real(), "dampening": Real(), "lr_decay": Real(), "max_coeff": Real(), "min_coeff": Real(),
}  # fmt: skip
_OTHERS: Final = ("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fused")
_OUTSIDE: Final = "parameters stand in params; DeepSpeed ignores them here"
# Where the number stood that dictionaries for `gradient_clipping` held.
_CLIPS: Final = ("clip_value", "value", "max_norm", "max_grad_norm", "norm", "clip_norm", "threshold")


def settle_clipping(draft: Draft) -> None:
    path = (CLIPPING,)
    value = draft.get(path)
    if isinstance(value, dict):
        _flatten_clipping(draft, path, value)
    elif isinstance(value, bool):
        draft.put(path, 1.0 if value else 0.0, "a number is wanted; true counted as 1, false as 0")
    elif value is None:
        draft.put(path, 0.0, "a number is wanted; 0 is what switches clipping off")


def settle_optimizer(draft: Draft) -> None:
    path = ("optimizer",)
    _name_type(draft, path)
    block = draft.block(path)
    if block is None:
        return
    for name in [name for name in (*_NUMBERS, *_OTHERS, "max_grad_norm") if name in block]:
        draft.move((*path, name), (*path, "params", name), _OUTSIDE)
    grad_norm = (*path, "params", "max_grad_norm")
    if draft.has(grad_norm):
        if draft.get(grad_norm) is None:
            draft.drop(grad_norm, "null says nothing")
        else:
            draft.move(grad_norm, (CLIPPING,), "DeepSpeed clips, not its optimizers, which refuse it")
    _settle_type(draft, (*path, "type"), OPTIMIZERS, TORCH_OPTIMIZERS, is_any_case=True)
    params = draft.block((*path, "params"))
    for name in [name for name in params or () if name in _NUMBERS]:
        settle_value(draft, (*path, "params", name), _NUMBERS[name], is_model=False)


def settle_scheduler(draft: Draft) -> None:
    path = ("scheduler",)
    _name_type(draft, path)
    if draft.block(path) is None:
        return
    _settle_type(draft, (*path, "type"), tuple(SCHEDULERS), TORCH_SCHEDULERS, is_any_case=False)
    if not isinstance(draft.get((*path, "type")), str):
        return
    params = draft.get((*path, "params"))
    if params is ABSENT or params is None:
        draft.put((*path, "params"), {}, "DeepSpeed hands them to the schedule, and fails where there are none")
    _settle_schedule(draft, path)


def _settle_schedule(draft: Draft, path: Path) -> None:
    name, params = str(draft.get((*path, "type"))), draft.block((*path, "params"))
    section = SCHEDULERS.get(name)
    if section is None or params is None:
        return
    for key in [key for key in draft.block(path) or () if key in section.keys]:
        draft.move((*path, key), (*path, "params", key), _OUTSIDE)
    if params.get("warmup_num_steps") == 0 and "warmup_num_steps" in section.keys:
        draft.put((*path, "params", "warmup_num_steps"), 1, "at least 1 is wanted, and warms up as 0 did")
    for key in list(params):
        if key in section.keys:
            settle_value(draft, (*path, "params", key), section.keys[key], is_model=False)
        elif meant := difflib.get_close_matches(key, set(section.keys) - set(params), n=1, cutoff=0.85):
            draft.refuse((*path, "params", key), f"no parameter of {name}; is {meant[0]} meant?")
        else:
            draft.drop((*path, "params", key), f"no parameter of {name}, which refuses it")
    for key in SCHEDULERS_NEED.get(name, ()):
        if key not in params:
            draft.refuse((*path, "params"), f"{name} needs {key}, and nothing here says it")


def _name_type(draft: Draft, path: Path) -> None:
    """A name alone, or under another key."""
    value = draft.get(path)
    if isinstance(value, str) and value != AUTO:
        draft.put(path, {"type": value}, "a block names the type")
    elif isinstance(value, dict) and "type" not in value and isinstance(value.get("name"), str):
        draft.move((*path, "name"), (*path, "type"), "the key is called type")


def _settle_type(draft: Draft, path: Path, own: Sequence[str], torch: Sequence[str], *, is_any_case: bool) -> None:
    name = draft.get(path)
    if name is ABSENT or name is None or name == AUTO:
        return
    if not isinstance(name, str):
        draft.refuse(path, f"wants the name of the {path[0]}")
        return
    lower = name.lower()
    if name in {*own, *torch} or (is_any_case and lower in {known.lower() for known in own}):
        return
    exact = {known.lower(): known for known in (*torch, *own)}.get(lower)
    what = path[0]
    if exact is not None:
        draft.put(path, exact, f"DeepSpeed looks for the {what} by its exact name")
    elif what == "optimizer" and lower in _OTHERWISE:
        draft.put(path, _OTHERWISE[lower], "the type, of which DeepSpeed chooses the class by device and offloading")
    elif what == "optimizer" and lower in _COMPRESSED:
        kin = _COMPRESSED[lower]
        draft.refuse(path, f"DeepSpeed {RELEASE} has no 1-bit optimizers: {kin} trains without compression")
    else:
        near = difflib.get_close_matches(name, (*own, *torch), n=1, cutoff=_ALIKE)
        draft.refuse(path, f"DeepSpeed {RELEASE} has no such {what}{f'; is {near[0]} meant?' if near else ''}")


def _flatten_clipping(draft: Draft, path: Path, block: Block) -> None:
    is_off = "enabled" in block and Flag().read(block["enabled"]) is False
    numbers = [number for key in _CLIPS if (number := _norm(block.get(key))) is not None]
    rest = set(block) - {"enabled", *_CLIPS}
    if is_off:
        draft.put(path, 0.0, "a number is wanted; 0 is what switches clipping off")
    elif len(numbers) == 1 and not rest:
        draft.put(path, numbers[0], "a number is wanted, the norm that gradients are clipped to")
    else:
        draft.refuse(path, "wants a number, the norm that gradients are clipped to, and this block does not say one")


def _norm(value: Json) -> int | float | None:
    number = Real(least=0.0).read(value)
    return number if isinstance(number, int | float) else None
