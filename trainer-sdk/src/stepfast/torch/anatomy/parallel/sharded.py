"""FSDP2 on one rank: torch's own `fully_shard`, which runs on fake tensors as it is."""

from __future__ import annotations

from collections import Counter

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
    if plan.units:
        units = [module for module in model.modules() if type(module).__name__ in plan.units]
        if not units:
            raise AnatomyError(f"units: {type(model).__name__} has no module of class {', '.join(plan.units)}")
        return units
    named = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in named] or _members_of_lists(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [unit for unit in units if not _shares(unit, uses)]


def _members_of_lists(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for each in lists for member in each for module in member.modules() if module is not member}
    return [member for each in lists if id(each) not in inner for member in each]


def _shares(unit: nn.Module, uses: Counter[int]) -> bool:
    """Whether a weight of the unit is tied to one outside: such ones are left to the root, where all of them are."""
    within = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
    return any(uses[parameter] > count for parameter, count in within.items())
