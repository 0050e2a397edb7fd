"""That the job's ranks train together."""

from __future__ import annotations

from stepfast.environment import Environment
from stepfast.errors import StateUnsupported


def check_together(environment: Environment, seen: int, framework: str, hint: str) -> None:
    """Raises StateUnsupported when the framework sees another number of ranks than the job has. `hint`: how it sees
    all of them.
    """
    if environment.world_size != seen:
        raise StateUnsupported(
            f"the job has {environment.world_size} ranks, of which {framework} sees {seen}: each of them would train "
            f"for itself. {hint}"
        )


__all__ = ["check_together"]
