"""Which ranks train together, and how they share the model. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepfast.errors import AnatomyOptionError


class Sharing(StrEnum):
    """What ranks share. ZeRO's stages are DeepSpeed's: 1 optimizer states, 2 gradients, too, 3 weights, too."""

    NONE = "none"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @property
    def zero_stage(self) -> int | None:
        return int(self[-1]) if self.startswith("zero") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """`world_size` ranks, each with a batch of its own.

    `bucket_megabytes`, `gradients_in_buckets`: DistributedDataParallel's bucket_cap_mb and gradient_as_bucket_view.
    `units`: classes of modules that FSDP2 shards one by one (empty: those that Transformers names, else the members of
    every ModuleList). `reshards`: FSDP2's reshard_after_forward. `deepspeed`: a DeepSpeed configuration to add to.
    """

    sharing: Sharing = Sharing.NONE
    world_size: int = 1
    bucket_megabytes: int = 25
    gradients_in_buckets: bool = False
    units: tuple[str, ...] = ()
    reshards: bool = True
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise AnatomyOptionError(f"parallel: {self.world_size} ranks; at least 1 is needed")

    def __str__(self) -> str:
        return "one rank" if self.sharing is Sharing.NONE else f"{self.sharing}, {self.world_size} ranks"


def parallel_from(text: str) -> Parallel:
    """From `fsdp2:8`: what is shared, and by how many ranks. Raises AnatomyError."""
    match = re.fullmatch(r"(\w+):(\d+)", text.strip().lower())
    if text.strip().lower() == Sharing.NONE:
        return Parallel()
    kinds = [kind.value for kind in Sharing if kind is not Sharing.NONE]
    if match is None or match[1] not in kinds:
        raise AnatomyOptionError(f"parallel: {text!r} is no KIND:RANKS, as fsdp2:8; kinds: {', '.join(kinds)}")
    return Parallel(sharing=Sharing(match[1]), world_size=int(match[2]))
