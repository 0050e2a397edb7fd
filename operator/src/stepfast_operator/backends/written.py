"""What was written last into the spec of each CheckpointNode, for as long as the watch has not told of it."""

from __future__ import annotations

from dataclasses import dataclass

from stepfast_operator.document import JSON
from stepfast_operator.podview import NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    uid: str
    generation: int
    entries: tuple[JSON, ...]


class Written:
    """One list of the spec (`field`), by node. An object that is made anew has nothing of the one before it."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._by_node: dict[str, _Writing] = {}

    def note(self, node: str, document: JSON) -> int:
        """The object as the API server answered; its generation."""
        metadata = document["metadata"]
        generation, entries = int(metadata["generation"]), tuple(document["spec"].get(self._field) or ())
        self._by_node[node] = _Writing(uid=str(metadata["uid"]), generation=generation, entries=entries)
        return generation

    def newest(self, report: NodeReport, told: tuple[JSON, ...]) -> tuple[int, tuple[JSON, ...]]:
        """Generation and list as they stand: what was written, or what the watch has `told`."""
        written = self._by_node.get(report.node)
        if written is not None and written.uid == report.uid and written.generation > report.generation:
            return written.generation, written.entries
        self._by_node.pop(report.node, None)
        return report.generation, told
