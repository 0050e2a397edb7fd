"""torchrun's restarts inside living pods, counted alike by all nodes of a gang.

torchrun counts them by node: the node whose rank died counts one, the nodes whose ranks it takes along count none
(pytorch issue 135712). But TORCHELASTIC_RESTART_COUNT is what the ranks of a launch know each other by: it names their
run, and the place in the store where they meet. Every node takes part in every rendezvous of a gang of fixed size, so
the number of its launches is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def count_launches(on_launch: Callable[[int], None]) -> None:
    """Makes torchrun's agent of this process count so; `on_launch` hears of each launch, with the restarts before it.

    With it `--max-restarts` limits the restarts of the gang, whichever nodes caused them.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    start: Any = LocalElasticAgent._start_workers
    restarts = -1

    def counted(agent: Any, group: Any) -> Any:
        nonlocal restarts
        restarts += 1
        # What torchrun derives the count from; a node that was only taken along has not counted this one.
        agent._remaining_restarts = group.spec.max_restarts - restarts
        on_launch(restarts)
        return start(agent, group)

    LocalElasticAgent._start_workers = counted  # type: ignore[method-assign] # torch has no hook for it
