"""Which gangs mirror their steps, and who is whose neighbour in them: as the operator says in the CheckpointNode. Pure.

The nodes of a gang form a ring: each one's steps are mirrored by the next. Only the operator's word counts: it alone
knows which nodes the gang runs on, and a tenant has no part in it (I10).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfast.step import MAX_WORLD_SIZE, JobKey, is_run, split_run

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an agent listens for others."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Reads `10.0.0.1:9601` and `[fd00::1]:9601`. Raises ValueError."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match[2]) < 2**16:
            raise ValueError(f"{text!r:.80} is no address with a port")
        return Address(host=match[1].strip("[]"), port=int(match[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """One run's, as this node's agent has to know it. `node`: this node's index in it; `neighbours`: the other
    agents in the order of the ring, the first of which mirrors this node. A large gang's far ones are left out.
    """

    job: JobKey
    run: str
    node: int
    neighbours: tuple[Address, ...]

    @property
    def mirror(self) -> Address | None:
        """Who is to hold this node's steps, too."""
        return self.neighbours[0] if self.neighbours else None

    def is_of(self, job: JobKey, run: str) -> bool:
        """Whether that is its run, however often torchrun launched it again in its pods."""
        return self.job == job and split_run(run)[0] == self.run


def parse_gang(entry: Mapping[str, Any]) -> Gang:
    """One of the CheckpointNode's `spec.gangs`. Raises KeyError, TypeError, ValueError, SpecError."""
    run, node = entry["run"], entry["node"]
    if not is_run(run) or type(node) is not int or not 0 <= node < MAX_WORLD_SIZE:
        raise ValueError(f"run {run!r}, node {node!r}")
    return Gang(
        job=JobKey(namespace=entry["namespace"], name=entry["name"]),
        run=run,
        node=node,
        neighbours=tuple(Address.parse(address) for address in entry["neighbours"]),
    )
