"""The process as a rank: its checkpoints, which all trainers that it has share."""

from __future__ import annotations

import os
from dataclasses import replace

from stepfast.environment import Environment, read_environment
from stepfast.errors import CheckpointerOpen, StateUnsupported
from stepfast.nebula.settings import Settings, make_settings
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

_made: list[TaggedCheckpoints] = []


def checkpoints_of_process(
    sharing: Sharing = Sharing.EVERY_RANK, settings: Settings | None = None
) -> TaggedCheckpoints:
    """One for all trainers. The framework says what is kept: a best step may be older than all that retention would
    leave, and what the framework lists must be there, so every step is persisted. `settings`: those of the trainer that
    comes first count; None: the environment's.

    Raises CheckpointerOpen while another trainer's ranks save in another way.
    """
    if not _made or _made[0].is_closed:
        settings = settings if settings is not None else make_settings(None, None, None, os.environ)
        environment = replace(settings.apply(read_environment(), os.environ), max_to_keep=0)
        _made[:] = [TaggedCheckpoints(sharing=sharing, environment=environment, persist_all=True)]
    elif settings is not None:
        settings.apply(_made[0].environment, os.environ)  # says what is not used
    made = _made[0]
    if made.sharing is not sharing and made.environment.world_size > 1:
        raise CheckpointerOpen(
            f"of this process {made.sharing} saves, and here {sharing} would: have all trainers save in one way, or "
            "close the first one's `checkpoints`"
        )
    return made


def check_together(environment: Environment, seen: int, framework: str, hint: str) -> None:
    """Raises StateUnsupported when the framework sees another number of ranks than the job has. `hint`: how it sees
    all of them.
    """
    if environment.world_size != seen:
        raise StateUnsupported(
            f"the job has {environment.world_size} ranks, of which {framework} sees {seen}: each of them would train "
            f"for itself. {hint}"
        )


__all__ = ["check_together", "checkpoints_of_process"]
