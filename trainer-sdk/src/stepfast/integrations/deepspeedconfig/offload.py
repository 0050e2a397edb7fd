"""What ZeRO moves off the device: today one block for the optimizer and one for the parameters.

Older releases had switches for it (`cpu_offload` and its kin), and pinned memory was a switch for both.
"""

from __future__ import annotations

from typing import Final

from stepfast.integrations.deepspeedconfig.draft import ABSENT, Draft, Path, Value
from stepfast.integrations.deepspeedconfig.keys import ZERO
from stepfast.integrations.deepspeedconfig.kinds import Flag

OPTIMIZER: Final[Path] = (ZERO, "offload_optimizer")
PARAM: Final[Path] = (ZERO, "offload_param")

_SWITCHES: Final = (
    # old key of zero_optimization, the block that says it today
    ("cpu_offload", OPTIMIZER),
    ("cpu_offload_param", PARAM),
    ("cpu_offload_params", PARAM),
)
_DEVICES: Final = frozenset({"none", "cpu", "nvme"})


def settle_offload(draft: Draft) -> None:
    for path in (OPTIMIZER, PARAM):
        _shape(draft, path)
    for name, path in _SWITCHES:
        if draft.has((ZERO, name)):
            _switch(draft, (ZERO, name), path)
    for name in ("cpu_offload_use_pin_memory", "pin_memory"):
        if draft.has((ZERO, name)):
            _pin(draft, (ZERO, name))
    if draft.has((ZERO, "fast_init")):
        _speed(draft, (ZERO, "fast_init"))


def offloads(draft: Draft, path: Path) -> bool:
    """Whether the block at this path moves something away."""
    return (draft.block(path) or {}).get("device", "none") in {"cpu", "nvme"}


def _shape(draft: Draft, path: Path) -> None:
    """A switch or a device alone, in the place of the block that names it."""
    value = draft.get(path)
    if isinstance(value, str) and value.lower() in _DEVICES:
        draft.put(path, {"device": value.lower()}, "a block names the device")
    elif _reads(value) is True:
        draft.put(path, {"device": "cpu"}, "a block names the device, which was the CPU where only a switch was set")
    elif _reads(value) is False:
        draft.drop(path, "nothing is moved away where the block is not there")


def _switch(draft: Draft, old: Path, path: Path) -> None:
    why = f"{'.'.join(path)} took its place"
    is_on = _reads(draft.get(old))
    block = draft.block(path)
    if is_on is None:
        draft.refuse(old, "wants true or false")
    elif not is_on:
        draft.drop(old, f"{why}, and this was off")
    elif block is not None and "device" in block:
        device = block["device"]
        says = "says the same" if device == "cpu" else f"counts, which says {device!r}"
        draft.drop(old, f"{why}; it is there too, and {says}")
    elif block is not None:
        draft.move(old, (*path, "device"), why, now="cpu")
    else:
        draft.move(old, path, why, now={"device": "cpu"})


def _pin(draft: Draft, old: Path) -> None:
    """One switch for both blocks once: it goes into each that is there and does not say it itself."""
    value = draft.get(old)
    assert value is not ABSENT
    taken = [path for path in (OPTIMIZER, PARAM) if offloads(draft, path)]
    why = "each block that moves something away says it for itself"
    if not taken:
        draft.drop(old, f"{why}, and there is none")
        return
    for path in taken[1:]:
        if not draft.has((*path, "pin_memory")):
            draft.put((*path, "pin_memory"), value, f"{old[-1]} of {ZERO} was for this block too")
    draft.move(old, (*taken[0], "pin_memory"), why)


def _speed(draft: Draft, old: Path) -> None:
    if draft.block(OPTIMIZER) is not None:
        draft.move(old, (*OPTIMIZER, "fast_init"), "it is about an optimizer that is moved to NVMe")
    else:
        draft.drop(old, f"it is about an optimizer that is moved to NVMe, and there is no {'.'.join(OPTIMIZER)}")


def _reads(value: Value) -> bool | None:
    """What a switch says; None where there is none."""
    said = ABSENT if value is ABSENT else Flag().read(value)
    return said if isinstance(said, bool) else None
