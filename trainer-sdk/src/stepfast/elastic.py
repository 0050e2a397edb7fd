"""torchrun's restarts inside living pods, counted alike by all nodes of a gang, each with a store of its own.

torchrun counts them by node: the node whose rank died counts one, the nodes whose ranks it takes along count none.
But TORCHELASTIC_RESTART_COUNT is what the ranks of a launch know each other by: it names their run. Every node takes
part in every rendezvous of a gang of fixed size, so the number of its launches is the same on all.

torchrun keeps the store in which ranks meet over its restarts, with what they wrote there before: a rank that is sooner
back than another looks for that one at the address of its dead process (pytorch issue 135712, whose remedy, a new
store for each launch, has gone again since).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def renew_stores() -> None:
    """Makes torchrun's rendezvous of this process give each launch of the ranks a new store."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    meet: Any = DynamicRendezvousHandler.next_rendezvous

    def renewed(handler: Any) -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        return meet(handler)

    DynamicRendezvousHandler.next_rendezvous = renewed  # type: ignore[method-assign, assignment] # torch has no hook for it


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
