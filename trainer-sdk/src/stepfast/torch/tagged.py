"""Steps as their users make them: under a tag, out of named objects, by whichever ranks take part.

What `stepfast.nebula` and the adapters of frameworks stand on. A rank opens a tag, puts objects into it by name, and
commits; what the names hold is saved as one file of that rank. Which ranks have to commit until the step is whole is
said when the job's `TaggedCheckpoints` is made (`Sharing`).
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any

from stepfast.admission import RankReport
from stepfast.environment import Environment, absolute_storage_uri, read_environment
from stepfast.errors import AgentError, CheckpointDamaged, CheckpointNotFound, StorageError
from stepfast.layout import job_folder
from stepfast.messages import Restored, Skipped
from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.step import Tier, is_tag
from stepfast.tags import Opening, TagBook, TaggedStep, open_tag
from stepfast.torch.attendance import Attendance
from stepfast.torch.claims import claim, give_up
from stepfast.torch.copying import MapLocation, copied
from stepfast.torch.join import join_agent, join_gang
from stepfast.torch.overlap import Overlap
from stepfast.torch.planner import Planner
from stepfast.torch.saver import Save
from stepfast.torch.sources import AgentSource, CommittedStep, DirectSource, Source
from stepfast.torch.state import Json
from stepfast.torch.stopping import Stopping, wait_to_be_stopped
from stepfast.torch.taggedsteps import FILE_NAME, TaggedSteps
from stepfast.torch.writer import Saved, Writer

log = logging.getLogger("stepfast")

_BOOK, _BRANCH = "tags", "tags/from"  # topics of the gang
_SCRATCH = -1


class Sharing(StrEnum):
    """Which ranks save under a tag."""

    EVERY_RANK = "EveryRank"  # each opens every tag, and commits it, be it with nothing
    THIS_RANK = "ThisRank"  # it alone: nobody else has anything to save
    WHOEVER_OPENS = "WhoeverOpens"  # those that open the tag before they are past the place where others do


class _Named:
    """The objects that are saved, by name, as they were put."""

    replicated_names: Sequence[str] = ()

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return self.objects

    def replicated_tensors(self, structure: Json, count: int) -> list[bool]:
        return [False] * count


class OpenTag:
    """A tag that is open: objects go in by name, `commit` makes them a step."""

    def __init__(self, checkpoints: TaggedCheckpoints, agreed: TaggedStep) -> None:
        self._checkpoints, self._agreed = checkpoints, agreed
        self._objects: dict[str, Any] = {}
        self._saved: Saved | None = None
        self._put_seconds = 0.0

    @property
    def tag(self) -> str:
        """What it was opened as."""
        return self._agreed.tag

    @property
    def step(self) -> int:
        """The step that it becomes."""
        return self._agreed.step

    @property
    def names(self) -> list[str]:
        """What was put in so far."""
        return list(self._objects)

    def put(self, name: str, item: Any, *, copy: bool = True) -> None:
        """Takes the object, which may be any nest of tensors and what can be pickled; a name's last object counts.

        Unless `copy`, its tensors are read at the commit: nobody may change them before that. Raises StateUnsupported,
        ValueError when the tag is committed.
        """
        began = time.perf_counter()
        if self._saved is not None:
            raise ValueError(f"tag {self.tag!r} is committed: {name!r} cannot be put into it any more")
        self._objects[name] = copied(item) if copy and self._agreed.save else item
        self._put_seconds += time.perf_counter() - began

    def commit(self) -> Saved:
        """Stages what was put in as this rank's share of the step; at once when it was committed before.

        The step exists when all ranks that share in it have committed and it is persisted: `Saved.wait`.
        """
        if self._saved is None:
            self._saved = self._checkpoints.commit(self._agreed, self._objects, self._put_seconds)
            self._objects = dict.fromkeys(self._objects)
        return self._saved


class TaggedCheckpoints:
    """A job's steps by tag and name. One a process; which ranks make one, and open tags, says `sharing`.

    weights_only: True refuses to read objects that only travel pickled, since to read those runs their code.
    persist_all: every step is persisted, however slow the storage: saves wait for memory rather than overtake.
    """

    def __init__(
        self, *, sharing: Sharing, environment: Environment | None = None, storage_uri: str | None = None,
        weights_only: bool = False, persist_all: bool = False,
    ) -> None:  # fmt: skip
        self._closed = False
        self._sharing, self._weights_only, self._persist_all = sharing, weights_only, persist_all
        environment = environment if environment is not None else read_environment()
        if storage_uri is not None:
            environment = replace(environment, storage_uri=absolute_storage_uri(storage_uri))
        self._gang, self._environment = join_gang(environment)
        self._run_key = claim(self._environment, self)
        self._link = join_agent(self._environment, self._gang, with_all=sharing is Sharing.EVERY_RANK)
        self._writer = Writer(self._link, self._environment, FILE_NAME, Overlap(None, []))
        self._source: Source = (
            AgentSource(self._link)
            if self._link is not None
            else DirectSource(self._writer.store, job_folder(self._environment.job), run=self._environment.run)
        )
        self._stopping = Stopping(self._gang, self._link)
        self._named = _Named()
        self._planner = Planner(self._named, self._environment, weights_only=weights_only)
        self._opened: Counter[str] = Counter()
        self._asked = 0
        self._has_progressed = False  # what is read from then on is not what training goes on from
        self._newest: Saved | None = None
        self._saves: dict[str, Saved] = {}  # the newest of each tag
        self._steps = TaggedSteps(
            self._source, rank=self._environment.rank, local_world_size=self._environment.local_world_size,
            weights_only=weights_only,
        )  # fmt: skip
        is_open = sharing is Sharing.WHOEVER_OPENS and self._environment.world_size > 1
        self._attendance = Attendance(self._gang, self._told_sharers) if is_open else None
        atexit.register(self._at_exit)

    @property
    def sharing(self) -> Sharing:
        """Which ranks save."""
        return self._sharing

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be saved or read any more."""
        return self._closed

    @property
    def weights_only(self) -> bool:
        """Whether objects that only travel pickled are refused."""
        return self._weights_only

    @property
    def environment(self) -> Environment:
        """The rank's surroundings, as the gang knows them."""
        return self._environment

    # ------------------------------------------------------------ in the loop

    def remove(self, step: int) -> None:
        """Removes a committed step that is of no more use. Raises StorageError."""
        self._source.remove(step)

    def progress(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Tells that a step is done: the heartbeat. `metrics`: numbers to show beside it."""
        self._has_progressed = True
        if self._link is not None:
            self._link.progress(step, metrics or {})

    @property
    def save_requested(self) -> bool:
        """Whether the job is to be stopped, and its ranks are to save before that: as far as this rank was told."""
        return self._link is not None and self._link.save_requested

    def is_last_step(self, step: int) -> bool:
        """Whether all ranks are to save this step, and then to `wait_to_be_stopped`. Every rank asks behind the same
        steps. Raises GangError.
        """
        return self._stopping.is_last(step)

    def wait_to_be_stopped(self, step: int) -> None:
        """Behind the last step: until whoever asked for it ends the process. Every rank calls it, also one that saves
        nothing. Raises StorageUnavailable.
        """
        wait_to_be_stopped(self._link, self._writer, step)

    # ------------------------------------------------------------ saving

    def persist_all(self) -> None:
        """From now on every step is persisted, as if it had been said at the beginning. Every rank says it."""
        self._persist_all = True

    def open(self, tag: str, *, step: int | None = None, begins_after: int | None = None) -> OpenTag:
        """Opens the tag; ranks that open it for the same time mean the same step. Raises ValueError, GangError.

        `step`: what it is to become, if that is ahead of all that the run has saved. `begins_after`: the step that
        the run goes on from, should this be its first tag; None: the newest that was read.
        """
        if not is_tag(tag):
            raise ValueError(f"{tag!r} cannot be a tag: give printable text of at most 256 bytes, as global_step500")
        self._opened[tag] += 1
        occurrence, rank = self._opened[tag], self._environment.rank

        def change(text: str) -> str:
            book = TagBook.from_json(text)
            if book.find(tag, occurrence) is not None:
                return text
            opening = Opening(
                tag=tag, occurrence=occurrence, rank=rank, now=time.time(), wanted=step,
                begins_after=self._leave_newer_steps(begins_after) if book.count == 0 else _SCRATCH,
            )  # fmt: skip
            return open_tag(
                book, opening, self._reports(), on_busy=self._environment.on_busy,
                persist_interval_seconds=0 if self._persist_all else self._environment.persist_interval_seconds,
            ).to_json()  # fmt: skip

        agreed = TagBook.from_json(self._gang.update(_BOOK, change)).find(tag, occurrence)
        if agreed is None:
            raise AssertionError(f"tag {tag!r} is not in the book that rank {rank} put it into")
        if self._attendance is not None:
            self._attendance.open(agreed)
        return OpenTag(self, agreed)

    def commit(self, agreed: TaggedStep, objects: Mapping[str, Any], put_seconds: float) -> Saved:
        """`OpenTag.commit`'s work; `put_seconds`: what it took to put the objects in."""
        began = time.perf_counter() - put_seconds
        if not agreed.save:
            log.warning("stepfast: %s is not saved: every slot still waits to be persisted", agreed.tag)
            if self._link is not None:
                self._link.tell(Skipped(step=agreed.step))
            return Saved(self._writer, agreed.step, saved=False, stall_seconds=time.perf_counter() - began)
        self._named.objects = dict(objects)
        try:
            plan, header_tail, sources = self._planner.prepare(agreed.step)
            save = Save(
                step=agreed.step, due=agreed.due, drop=agreed.drop, plan=plan, header_tail=header_tail,
                sources=sources, began=began, tag=agreed.tag, sharers=self._sharers(),
            )  # fmt: skip
            self._writer.write(save)
        finally:
            self._named.objects = {}
        if self._attendance is not None:
            self._attendance.commit(agreed)
        self._gang.tell(f"tags/report/{self._environment.rank}", self._report(agreed.step).to_json())
        if self._link is not None:
            self._link.progress(agreed.step, {})
        saved = Saved(self._writer, agreed.step, saved=True, stall_seconds=time.perf_counter() - began)
        self._newest = self._saves[agreed.tag] = saved
        return saved

    def flush(self, tag: str | None = None) -> None:
        """Waits until this rank's newest step, or its newest of that tag, is persisted and committed. Raises
        StorageUnavailable, CheckpointNotFound (dropped, or never saved).
        """
        if tag is not None and tag not in self._saves:
            raise CheckpointNotFound(f"rank {self._environment.rank} has saved no {tag!r}")
        saved = self._newest if tag is None else self._saves[tag]
        if saved is not None and saved.saved:
            saved.wait(Tier.PERSISTENT)

    def _told_sharers(self, step: int, sharers: RankSet) -> None:
        try:
            self._writer.share(step, str(sharers))
        except StorageError as error:
            log.error("stepfast: step %s is not committed: %s", step, error)

    def _sharers(self) -> str:
        if self._attendance is not None:
            return UNKNOWN
        if self._sharing is Sharing.EVERY_RANK or self._environment.world_size == 1:
            return EVERY_RANK
        return str(RankSet.of([self._environment.rank]))

    def _reports(self) -> list[RankReport]:
        """What the ranks that share in every step last published; nothing while one of them has not yet."""
        if self._attendance is not None or self._persist_all:
            return []  # whose they would be is not known yet; or nothing is given up
        ranks = range(self._environment.world_size)
        if self._sharing is Sharing.THIS_RANK:
            ranks = range(self._environment.rank, self._environment.rank + 1)
        texts = self._gang.hear([f"tags/report/{rank}" for rank in ranks])
        return [RankReport.from_json(text) for text in texts or ()]

    def _report(self, step: int) -> RankReport:
        agent = self._writer.agent
        return RankReport(
            rank=self._environment.rank,
            step=agent.staged_step if agent is not None else step,
            slots=agent.slots if agent is not None else 0,
            persisting=agent.persisting if agent is not None else (),
            unpersisted=self._writer.unpersisted(),
            waited=self._link.waited_steps if self._link is not None else (),
        )

    def _leave_newer_steps(self, branch_step: int | None) -> int:
        """Before the run's first step: what other runs committed above the one that it goes on from is superseded."""
        if branch_step is None:
            known = self._gang.hear([_BRANCH])
            branch_step = int(known[0]) if known else _SCRATCH
        superseded = self._source.supersede_after(branch_step)
        if superseded:
            since = "its beginning: nothing was loaded" if branch_step == _SCRATCH else f"step {branch_step}"
            log.warning("stepfast: training goes on from %s: steps %s are superseded", since, list(superseded))
        return branch_step

    # ------------------------------------------------------------ reading

    def steps(self) -> list[CommittedStep]:
        """The committed steps that can be read, oldest first; waits for this rank's own newest. Raises StorageError."""
        self.flush()
        return self._steps.steps()

    def latest(self) -> CommittedStep | None:
        """The step to go on from: the newest of this run; before its first, the one that the launcher named, or else
        the newest that is committed, the same on all ranks. Raises StorageError.
        """
        steps = self.steps()
        if self._has_opened():
            return steps[-1] if steps else None
        named = self._environment.resume_step
        # Whoever launched us says 0 for "from scratch"; a step 0 may have been saved nevertheless.
        mine = max((found.step for found in steps if named is None or found.step <= named), default=_SCRATCH)
        agreed = int(self._gang.update("tags/resume", lambda known: known or str(mine)))
        return next((found for found in steps if found.step == agreed), None)

    def find(self, tag: str) -> CommittedStep | None:
        """The newest committed step of that tag. Raises StorageError."""
        return next((found for found in reversed(self.steps()) if found.tag == tag), None)

    def names(self, step: int) -> list[str]:
        """What this rank saved in the step, or, when it saved nothing, the first rank that did."""
        with self._setting_aside(step) as steps:
            return steps.names(step)

    def names_of_first(self, step: int) -> list[str]:
        """What the first of the step's ranks saved."""
        with self._setting_aside(step) as steps:
            return steps.names_of(step, steps.ranks(step)[0])

    def names_of_all(self, step: int) -> list[str]:
        """What any of the step's ranks saved, each name once. Every rank calls it."""
        world_size, rank = self._environment.world_size, self._environment.rank
        with self._setting_aside(step) as steps:
            own = {name for other in steps.ranks(step)[rank::world_size] for name in steps.names_of(step, other)}
        self._asked += 1
        told = self._gang.exchange(f"tags/names/{self._asked}", json.dumps(sorted(own)))
        return sorted({name for names in told for name in json.loads(names)})

    def exchange(self, topic: str, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Every rank calls it. Raises GangError."""
        self._asked += 1
        return self._gang.exchange(f"tags/{topic}/{self._asked}", text)

    def load(self, step: int, name: str, map_location: MapLocation = None, *, weights_only: bool | None = None) -> Any:
        """The object of that name as this rank saved it, or, when it did not, the first rank that has.

        Raises CheckpointNotFound when nobody has, CheckpointDamaged, CheckpointUnsafe, StorageError.
        """
        with self.reading(step) as steps:
            return steps.load(step, name, map_location, weights_only=weights_only)

    @contextmanager
    def reading(self, step: int) -> Iterator[TaggedSteps]:
        """While all that a rank goes on with is read out of the step.

        A step that turns out to be damaged is marked superseded with all newer ones, so that the next attempt begins
        with an older one.
        """
        began = time.perf_counter()
        with self._setting_aside(step) as steps:
            yield steps
        if self._has_opened():
            return  # what training has gone on from stays as it is
        self._gang.update(_BRANCH, lambda known: str(max(step, int(known or _SCRATCH))))
        if self._link is not None and not self._has_progressed:
            seconds = time.perf_counter() - began
            self._link.tell(Restored(step=step, tier=str(self._steps.tier), time=time.time(), seconds=seconds))

    @contextmanager
    def _setting_aside(self, step: int) -> Iterator[TaggedSteps]:
        self._settle(step)
        try:
            yield self._steps
        except CheckpointDamaged as error:
            raise self._set_aside(error) from error

    def _settle(self, step: int) -> None:
        """What this rank has saved is there before it is read."""
        for saved in self._saves.values():
            if saved.step == step:
                saved.wait(Tier.PERSISTENT)

    def _has_opened(self) -> bool:
        """Whether the run has opened a tag."""
        return self._gang.hear([_BOOK]) is not None

    def _set_aside(self, error: CheckpointDamaged) -> CheckpointDamaged:
        """The error, with the step that can be read instead; what is damaged is not found again."""
        self._steps.close()
        older = max((found.step for found in self._steps.steps() if found.step < error.step), default=None)
        try:
            self._source.supersede_after(older if older is not None else _SCRATCH)
        except (StorageError, AgentError) as failure:
            log.error("stepfast: damaged step %s could not be set aside: %s", error.step, failure)
        return CheckpointDamaged(error.path, error.step, error.reason, older)

    # ------------------------------------------------------------ the end

    def close(self, timeout_seconds: float = 600.0) -> None:
        """Waits until the newest step is committed, and says goodbye. Raises StorageUnavailable."""
        if self._closed:
            return
        try:
            if self._newest is not None and self._newest.saved:
                self._newest.wait(Tier.PERSISTENT, timeout_seconds)
        finally:
            self._end()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        give_up(self._run_key, self)
        atexit.unregister(self._at_exit)
        self._steps.close()
        if self._attendance is not None:
            self._attendance.close()
        self._writer.close()

    def _at_exit(self) -> None:
        self._end()


__all__ = ["OpenTag", "Sharing", "TaggedCheckpoints"]
