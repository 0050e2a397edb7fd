"""The model and its optimizer as one rank of a plan trains them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepfast.torch.anatomy.parallel.plan import Parallel, Sharing
from stepfast.torch.anatomy.parallel.replicas import ReplicatedTrainee
from stepfast.torch.anatomy.parallel.sharded import shard
from stepfast.torch.anatomy.parallel.zero import Label, deepspeed_at_home, zero_trainee
from stepfast.torch.anatomy.training import Loop, PlainTrainee, Trainee


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a plan. `compute`: the dtype of mixed precision (None: that of the weights). `mesh`: its world."""

    plan: Parallel
    loop: Loop
    compute: torch.dtype | None
    mesh: DeviceMesh | None
    label: Label

    @property
    def casts_itself(self) -> bool:
        """Whether mixed precision is the business of what shards the model, and not of autocast."""
        return self.plan.sharing is Sharing.FSDP2 or self.plan.sharing.zero_stage is not None

    def trainee(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], stack: ExitStack
    ) -> Trainee:
        """Wraps or shards the model, then makes its optimizer. What this holds open is closed with the stack."""
        if self.mesh is None:
            return PlainTrainee(model, make_optimizer(model), self.loop)
        if self.plan.sharing is Sharing.DDP:
            return ReplicatedTrainee(
                model,
                make_optimizer(model),
                self.loop,
                bucket_megabytes=self.plan.bucket_megabytes,
                gradients_in_buckets=self.plan.gradients_in_buckets,
            )
        if self.plan.sharing is Sharing.FSDP2:
            shard(model, self.plan, self.mesh, self.compute)
            return PlainTrainee(model, make_optimizer(model), self.loop)
        deepspeed = stack.enter_context(deepspeed_at_home())
        settings = {
            "gradient_accumulation_steps": self.loop.accumulation_steps,
            "gradient_clipping": self.loop.clip_norm or 0.0,
            # Its fp16 wants a device; bf16 takes the same memory.
            "bf16": {"enabled": self.compute is not None},
            "zero_optimization": {"stage": self.plan.sharing.zero_stage},
        }
        return zero_trainee(deepspeed, model, make_optimizer(model), _merged(settings, self.plan.deepspeed), self.label)


def _merged(settings: dict[str, object], theirs: object) -> dict[str, object]:
    """DeepSpeed's configuration: the caller's own values win, block by block."""
    assert isinstance(theirs, dict)
    merged = dict(settings)
    for key, value in theirs.items():
        mine = merged.get(key)
        merged[key] = {**mine, **value} if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged
