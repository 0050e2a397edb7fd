"""The engines of a process, and which of the job's steps each of them means.

A step's tag says the folder, too: what two engines save under one tag, each in its folder, are two steps, as with
DeepSpeed they are two checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace

from stepfast.environment import read_environment
from stepfast.errors import CheckpointNotFound, SpecError
from stepfast.integrations.deepspeedfolder import Files, files_of, latest_tag
from stepfast.integrations.deepspeedretention import Retention
from stepfast.integrations.deepspeedtags import tag_in, tag_of
from stepfast.nebula.settings import Settings
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")


class Engines:
    """Those of this process; their checkpoints are one rank's. All ranks make the same engines."""

    def __init__(self) -> None:
        self._count = 0
        self._living: set[int] = set()
        self._settings = Settings()  # what the engines have said, all together
        self._begun: dict[int, int] = {}  # the step that each engine goes on from
        self._borrowed: list[int] = []  # steps of which engines have taken the weights alone, or that are gone
        self._made: TaggedCheckpoints | None = None
        self._retention: Retention | None = None
        self._listed: list[CommittedStep] | None = []  # as an engine last saw it; None: nobody has looked
        self._is_adopted = False

    def check(self, settings: Settings) -> None:
        """Raises SpecError when an engine says otherwise than those before it: there is one storage for all."""
        for name, before, now in (
            ("persistent_storage_path", self._settings.storage_path, settings.storage_path),
            ("persistent_time_interval", self._settings.persist_interval_seconds, settings.persist_interval_seconds),
        ):
            if before != now and now is not None and (before is not None or self._is_open):
                raise SpecError(
                    f"config.nebula.{name}",
                    f"{now!r}, where an engine before it has {before!r}: all engines of a process save to one storage",
                )

    def add(self, settings: Settings) -> int:
        """One engine more; its number. Raises SpecError."""
        self.check(settings)
        if not self._is_open:
            told, interval = self._settings, settings.persist_interval_seconds
            self._settings = Settings(
                storage_path=settings.storage_path or told.storage_path,
                persist_interval_seconds=told.persist_interval_seconds if interval is None else interval,
            )
        self._count += 1
        self._living.add(self._count)
        if self._made is not None and self._is_open and len(self._living) > 1:
            self._made.persist_all()
        return self._count

    def remove(self, engine: int) -> None:
        """That engine is no more; what it had loaded is what training goes on from if no other has loaded anything."""
        self._living.discard(engine)
        if engine in self._begun:
            self._borrowed.append(self._begun.pop(engine))
        if not self._living and not self._is_open:
            self._settings = Settings()

    def adopt(self, checkpoints: TaggedCheckpoints) -> None:
        """These are theirs: a framework says what is kept, and has made them before."""
        self._made, self._is_adopted = checkpoints, True

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """Theirs. What one engine saves never takes the place of another's: several have each of theirs persisted."""
        if self._made is None or self._made.is_closed:
            # Whose a step is, the agent does not know: what is kept is said by Retention.
            environment = replace(self._settings.apply(read_environment(), os.environ), max_to_keep=0)
            self._listed = [] if self._made is None else None  # what was closed may have saved
            self._made = TaggedCheckpoints(
                sharing=Sharing.EVERY_RANK, environment=environment, persist_all=len(self._living) > 1
            )
            self._retention, self._is_adopted = None, False
        return self._made

    @property
    def _is_open(self) -> bool:
        return self._made is not None and not self._made.is_closed

    def begins(self) -> None:
        """Tells that a tag was opened."""
        checkpoints = self.checkpoints
        if self._retention is None and not self._is_adopted and checkpoints.environment.rank == 0:
            self._retention = Retention(checkpoints, self._kept(checkpoints))

    def _kept(self, checkpoints: TaggedCheckpoints) -> list[CommittedStep]:
        """What is there behind the first opening: nothing that training does not go on from. The storage is asked only
        where nobody has listed it before: it may be away.
        """
        if self._listed is None:
            return checkpoints.steps()
        begun = self.begun_at if self.begun_at is not None else checkpoints.begins_after
        return [found for found in self._listed if begun is not None and found.step <= begun]

    def saved(self, tag: str, saved: Saved, settings: Settings) -> None:
        """Tells of a step that an engine of these settings has staged."""
        if self._retention is not None:
            environment = settings.apply(read_environment(), {"STEPFAST_STORAGE_URI": "the job's"})
            resumed = environment.resume_step
            self._retention.saved(
                tag, saved, keep=environment.max_to_keep, is_only=len(self._living) <= 1,
                protected={*self._begun.values(), *([resumed] if resumed else [])},
            )  # fmt: skip

    def finish(self) -> None:
        """Waits until the newest step is committed, and what is too old is removed. Raises StorageUnavailable."""
        if self._made is None or self._made.is_closed:
            return
        if self._retention is not None:
            self._retention.finish()
        self._made.close()

    def find(self, load_dir: str, tag: str | None) -> CommittedStep | str | None:
        """The step that is meant, or the tag whose files DeepSpeed is to read itself; None: there is nothing.

        Rank 0 decides, because ranks that list the storage at different moments see different steps. Every rank calls
        it. Raises CheckpointNotFound on a rank that does not see that step, StorageError.
        """
        checkpoints = self.checkpoints
        rank = checkpoints.environment.rank
        chosen = self._choose(checkpoints, load_dir, tag) if rank == 0 else None
        step = chosen.step if isinstance(chosen, CommittedStep) else chosen
        told = json.loads(checkpoints.exchange("found", json.dumps(step))[0])
        if rank == 0 or not isinstance(told, int):
            return chosen if rank == 0 else told
        found = next((found for found in checkpoints.steps() if found.step == told), None)
        if found is None:
            raise CheckpointNotFound(
                f"rank {rank} does not see step {told}, which rank 0 loads: do all nodes have the same storage?"
            )
        return found

    def _choose(self, checkpoints: TaggedCheckpoints, load_dir: str, tag: str | None) -> CommittedStep | str | None:
        """The newest that was saved in that folder under that tag, or under any if it is None; otherwise what files of
        DeepSpeed's own are there. The only engine of a process then takes the job's newest: its folder may be called
        anew in each attempt.
        """
        steps = self._listed = checkpoints.steps()
        if tag is None:
            last = checkpoints.latest()
            steps = [found for found in steps if last is not None and found.step <= last.step]
        there = [found for found in steps if _is_in(found, load_dir, tag)]
        if there:
            return there[-1]
        on_disk = tag if tag is not None else latest_tag(load_dir)
        files = Files.NONE if on_disk is None else files_of(load_dir, on_disk)
        if files is Files.REAL:
            return on_disk
        elsewhere = [found for found in steps if tag is None or tag_of(found) == tag]
        if elsewhere and len(self._living) <= 1:
            log.warning("stepfast: nothing was saved in %s: %s is taken", load_dir, elsewhere[-1].tag)
            return elsewhere[-1]
        if elsewhere:
            log.warning(
                "stepfast: of several engines each loads from the folder that it saves in: nothing was saved in "
                "%s, there are %s", load_dir, sorted({found.tag for found in elsewhere}),
            )  # fmt: skip
        if files is Files.NAMES:
            log.warning("stepfast: no checkpoint is behind the names in %s/%s: nothing is loaded", load_dir, on_disk)
            return None
        # DeepSpeed itself says that it is not there.
        return None if elsewhere else on_disk

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


def _is_in(found: CommittedStep, folder: str, tag: str | None) -> bool:
    return found.tag == tag_in(folder, tag_of(found) if tag is None else tag)


__all__ = ["Engines"]
