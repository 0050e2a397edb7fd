"""How far a rank has come, in words that other ranks can compare: the collective operations that it has begun.

Counted by process group. Ranks that are in one group begin its operations in the same order, so that of two ranks the
one with more of them is further; ranks without a common group cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

Place = dict[str, int]  # operations begun, by group


def find_place() -> Place:
    """Where this process is; empty without groups."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world  # torch has no public list of groups
    place = {}
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group)
        if not ranks:
            continue
        try:
            count = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined] # nor any count
        except RuntimeError:  # a backend that does not count
            continue
        # Groups that were split off one group may have one name on different ranks.
        place[f"{name}/{next(iter(ranks))}/{len(ranks)}"] = count
    return place


def is_beyond(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether the first has begun an operation of a common group that the other has not."""
    return any(count > other[group] for group, count in one.items() if group in other)


__all__ = ["Place", "find_place", "is_beyond"]
