"""FSDP2 on one rank: torch's own `fully_shard`, which runs on fake tensors as it is."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.parallel.plan import Parallel


def shard(model: nn.Module, plan: Parallel, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Shards the model in place: unit by unit, then what is left. `compute`: the dtype of mixed precision."""
    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if compute else MixedPrecisionPolicy()
    )
    for unit in _units(model, plan):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshards)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshards)


def _units(model: nn.Module, plan: Parallel) -> list[nn.Module]:
    named = set(plan.units) or set(getattr(model, "_no_split_modules", None) or ())
    if named:
        units = [module for module in model.modules() if type(module).__name__ in named]
        if not units and plan.units:
            raise AnatomyError(f"units: {type(model).__name__} has no module of class {', '.join(sorted(named))}")
        if units:
            return units
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for each in lists for member in each for module in member.modules() if module is not member}
    return [member for each in lists if id(each) not in inner for member in each]
