"""The engines of a process, and which of the job's steps each of them means.

A step's tag says the folder, too: what two engines save under one tag, each in its folder, are two steps, as with
DeepSpeed they are two checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace

from stepfast.environment import read_environment
from stepfast.layout import Manifest
from stepfast.nebula.settings import Settings
from stepfast.step import is_tag
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints

log = logging.getLogger("stepfast")

_BETWEEN = "//"  # which no folder has in it


def tag_in(folder: str | os.PathLike[str], tag: str) -> str:
    """What a step is called that was saved there under that tag."""
    path = os.path.normpath(folder)
    named = f"{path}{_BETWEEN}{tag}"
    return named if is_tag(named) else f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}{_BETWEEN}{tag}"


def tag_of(found: CommittedStep | Manifest) -> str:
    """What DeepSpeed calls the step."""
    return found.tag.rpartition(_BETWEEN)[2] or f"global_step{found.step}"


def folder_of(found: CommittedStep) -> str | None:
    """The folder that the step was saved in; None for one that DeepSpeed has not saved."""
    folder, between, _ = found.tag.rpartition(_BETWEEN)
    return folder if between else None


class Engines:
    """Those of this process; their checkpoints are one rank's. All ranks make the same engines."""

    def __init__(self) -> None:
        self._count = 0
        self._begun: dict[int, int] = {}  # the step that each engine goes on from
        self._borrowed: list[int] = []  # steps of which engines have taken the weights alone
        self._made: TaggedCheckpoints | None = None

    def add(self) -> int:
        """One engine more; its number."""
        self._count += 1
        if self._made is not None and not self._made.is_closed:
            self._made.persist_all()
            if self._made.environment.max_to_keep:
                log.warning(
                    "stepfast: the newest %s checkpoints of all engines together are kept: for so many of each, "
                    "initialize all engines before the first loads or saves", self._made.environment.max_to_keep,
                )  # fmt: skip
        return self._count

    def adopt(self, checkpoints: TaggedCheckpoints) -> None:
        """These are theirs: a framework says what is kept, and has made them before."""
        self._made = checkpoints

    def checkpoints(self, settings: Settings) -> TaggedCheckpoints:
        """Theirs. What one engine saves never takes the place of another's: several have each of theirs persisted."""
        if self._made is None or self._made.is_closed:
            environment = settings.apply(read_environment(), os.environ)
            environment = replace(environment, max_to_keep=environment.max_to_keep * self._count)
            self._made = TaggedCheckpoints(
                sharing=Sharing.EVERY_RANK, environment=environment, persist_all=self._count > 1
            )
        return self._made

    def find(self, checkpoints: TaggedCheckpoints, load_dir: str, tag: str | None) -> CommittedStep | None:
        """The step that is meant; None: the job has none. Every rank calls it. Raises StorageError.

        The newest that was saved in that folder under that tag, or under any if it is None. The only engine of a
        process takes the job's newest where none was saved in the folder: folders may be called anew in each attempt.
        """
        steps = checkpoints.steps()
        if tag is None:
            last = checkpoints.latest()
            steps = [found for found in steps if last is not None and found.step <= last.step]
        else:
            steps = [found for found in steps if tag_of(found) == tag]
        there = [found for found in steps if found.tag == tag_in(load_dir, tag_of(found))]
        if not there and self._count > 1:
            if steps:
                log.warning(
                    "stepfast: of several engines each loads from the folder that it saves in: nothing was saved in "
                    "%s, there are %s", load_dir, sorted({found.tag for found in steps}),
                )  # fmt: skip
            return None
        chosen = there or steps
        return chosen[-1] if chosen else None

    def goes_on(self, engine: int, step: int, *, weights_only: bool) -> None:
        """Tells that the engine has loaded that step; its last load counts."""
        if weights_only:
            self._borrowed.append(step)
        else:
            self._begun[engine] = step

    @property
    def begun_at(self) -> int | None:
        """The step that training goes on from, that is: the newest that an engine goes on from. Weights alone are
        something to begin with only where no engine has loaded more. None: nothing was loaded.
        """
        return max(self._begun.values() or self._borrowed, default=None)


__all__ = ["Engines", "folder_of", "tag_in", "tag_of"]
