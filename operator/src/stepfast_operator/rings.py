"""Which nodes' agents mirror which, of a gang whose pods all have their nodes. Pure.

The nodes form a ring in the order of their indexes. A CheckpointNode names the agents that follow its own, the next one
first, as far as an object that the API server keeps for each node may reasonably grow.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepfast.step import JobKey
from stepfast_operator.document import JSON

MOST_NEIGHBOURS = 16


def ring_of(job: JobKey, run: str, nodes: Mapping[int, str], addresses: Mapping[str, str]) -> dict[str, JSON]:
    """By node, its entry of `CheckpointNode.spec.gangs`. `nodes`: by index; `addresses`: by node, of agents that take
    mirrors. An agent that takes none has none taken either, and is left out of the ring.
    """
    members = [(index, node) for index, node in sorted(nodes.items()) if node in addresses]
    entries = {}
    for place, (index, node) in enumerate(members):
        following = [*members[place + 1 :], *members[:place]][:MOST_NEIGHBOURS]
        neighbours = [addresses[other] for _, other in following if other != node]
        entries[node] = {
            "namespace": job.namespace, "name": job.name, "run": run, "node": index, "neighbours": neighbours,
        }  # fmt: skip
    return entries
