"""Steps as their users make them: under a tag, out of named objects, by whichever ranks take part.

What `stepfast.nebula` and the adapters of frameworks stand on. A rank opens a tag, puts objects into it by name, and
commits; what the names hold is saved as one file of that rank. Which ranks have to commit until the step is whole is
said when the job's `TaggedCheckpoints` is made (`Sharing`).
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stepfast.environment import Environment, absolute_storage_uri, read_environment
from stepfast.errors import (
    AgentError,
    CheckpointDamaged,
    CheckpointNotFound,
    StorageError,
    StorageUnavailable,
)
from stepfast.layout import job_folder
from stepfast.messages import Restored, Skipped
from stepfast.step import Tier, is_tag
from stepfast.tags import Opening, TagBook, TaggedStep, open_tag
from stepfast.torch.attendance import LAST_SECONDS
from stepfast.torch.branch import SCRATCH, Branch
from stepfast.torch.claims import claim, give_up
from stepfast.torch.copying import MapLocation
from stepfast.torch.gang import Gang
from stepfast.torch.join import join_agent, join_gang
from stepfast.torch.opentag import NamedObjects, OpenTag
from stepfast.torch.overlap import Overlap
from stepfast.torch.planner import Planner
from stepfast.torch.reports import Reports
from stepfast.torch.resumption import Choice, Resumption
from stepfast.torch.saver import Save
from stepfast.torch.settlement import Settlement, read_book
from stepfast.torch.sharers import Sharers, Sharing
from stepfast.torch.sources import AgentSource, CommittedStep, DirectSource, Source
from stepfast.torch.stopping import Stopping, wait_to_be_stopped
from stepfast.torch.taggedsteps import FILE_NAME, TaggedSteps, newest_of
from stepfast.torch.taghistory import join_history
from stepfast.torch.topics import Topic
from stepfast.torch.writer import Saved, Writer

log = logging.getLogger("stepfast")

_FLUSH_SECONDS = 600.0  # until it is known who shares in a step that somebody waits for


class TaggedCheckpoints:
    """A job's steps by tag and name. One a process at a time, and those that it makes after it go on with the run;
    which ranks make one, and open tags, says `sharing`.

    weights_only: True refuses to read objects that only travel pickled, since to read those runs their code.
    persist_all: every step is persisted, however slow the storage: saves wait for memory rather than overtake.
    before: closed ones of this process and job, whose run these go on with, whichever the environment names.
    """

    def __init__(
        self, *, sharing: Sharing, environment: Environment | None = None, storage_uri: str | None = None,
        weights_only: bool = False, persist_all: bool = False, before: TaggedCheckpoints | None = None,
    ) -> None:  # fmt: skip
        self._closed = False
        self._sharing, self._weights_only, self._persist_all = sharing, weights_only, persist_all
        environment = environment if environment is not None else read_environment()
        if storage_uri is not None:
            environment = replace(environment, storage_uri=absolute_storage_uri(storage_uri))
        self._gang, self._environment = join_gang(environment) if before is None else before._rejoined(environment)
        self._run_key = claim(self._environment, self)
        self._history, self._gang = join_history(self._run_key, self._gang)
        self._link = join_agent(self._environment, self._gang, with_all=sharing is Sharing.EVERY_RANK)
        self._writer = Writer(self._link, self._environment, FILE_NAME, Overlap(None, []))
        self._source: Source = (
            AgentSource(self._link)
            if self._link is not None
            else DirectSource(self._writer.store, job_folder(self._environment.job), run=self._environment.run)
        )
        # Of a step of every rank the agent of rank 0 leads the commit, of other steps that of a rank that shares in it.
        self._branch = Branch(
            self._gang, self._source, self._link, rank=self._environment.rank,
            leader=0 if sharing is Sharing.EVERY_RANK else None,
        )  # fmt: skip
        self._stopping = Stopping(self._gang, self._link)
        self._settlement = Settlement(self._gang, self._source, self._link, run=self._environment.run)
        self._named = NamedObjects()
        self._planner = Planner(self._named, self._environment, weights_only=weights_only)
        self._newest: Saved | None = None
        self._saves: dict[str, Saved] = {}  # the newest of each tag
        self._steps = TaggedSteps(
            self._source, rank=self._environment.rank, local_world_size=self._environment.local_world_size,
            weights_only=weights_only,
        )  # fmt: skip
        self._resumption = Resumption(self._gang, self._steps.steps)
        is_open = sharing is Sharing.WHOEVER_OPENS and self._environment.world_size > 1
        ranks = range(self._environment.world_size) if sharing is not Sharing.THIS_RANK else [self._environment.rank]
        self._reports = Reports(
            self._gang, self._writer, self._link, rank=self._environment.rank, sharers=None if is_open else ranks
        )
        self._sharers: Sharers = Sharers(
            sharing, self._gang, self._writer, self._branch, rank=self._environment.rank,
            world_size=self._environment.world_size, on_look=self._reports.publish,
            before=self._history.attendance,
        )  # fmt: skip
        self._history.attendance = self._sharers.attendance
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
        self._settlement.tell_removed(step)
        self._source.remove(step)

    def progress(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Tells that a step is done: the heartbeat. `metrics`: numbers to show beside it."""
        self._history.has_progressed = True  # what is read from then on is not what training goes on from
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

    @property
    def has_saved(self) -> bool:
        """Whether this rank has opened a tag in this run."""
        return bool(self._history.opened)

    @property
    def begins_after(self) -> int | None:
        """The newest step that was read before the run's first was opened; None: none was."""
        return self._resumption.read_step

    def go_on_from(self, step: int | None) -> None:
        """The step was read by this rank, if not through these."""
        if step is not None and not self._has_opened():
            self._resumption.note_read(step)

    def persist_every(self, seconds: float) -> None:
        """From now on a step is persisted once that time has passed since the last. Every rank says it."""
        self._environment = replace(self._environment, persist_interval_seconds=seconds)

    def _rejoined(self, environment: Environment) -> tuple[Gang, Environment]:
        """The gang and the run of these, which are closed, and the environment as they know it."""
        known = self._environment
        return self._gang, replace(
            environment, run=known.run, is_run_unique=known.is_run_unique, rank=known.rank,
            world_size=known.world_size, local_rank=known.local_rank, local_world_size=known.local_world_size,
            node=known.node,
        )  # fmt: skip

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
        self._reports.publish()
        occurrence, rank = self._history.opened[tag] + 1, self._environment.rank
        branch_step = begins_after
        if branch_step is None:  # asked of the gang once: a save is one round trip
            branch_step = self._branch.step if self._branch.step is not None else self._resumption.read_step
        branch_step = SCRATCH if branch_step is None else branch_step
        may_save = self._branch.leave(branch_step)

        def change(text: str) -> str:
            book = TagBook.from_json(text)
            if book.find(tag, occurrence) is not None:
                return text
            opening = Opening(
                tag=tag, occurrence=occurrence, rank=rank, now=time.time(), wanted=step,
                begins_after=max(branch_step, self._history.last_step), last_number=self._history.last_number,
                opens_every_tag=self._sharing is Sharing.EVERY_RANK, drops=not self._sharers.are_found_out,
            )  # fmt: skip
            return open_tag(
                book, opening, [] if self._persist_all else self._reports.hear(), on_busy=self._environment.on_busy,
                persist_interval_seconds=0 if self._persist_all else self._environment.persist_interval_seconds,
                may_save=may_save,
            ).to_json()  # fmt: skip

        agreed = TagBook.from_json(self._gang.update(Topic.BOOK, change)).find(tag, occurrence)
        self._history.opened[tag] = occurrence  # an opening that failed is none
        if agreed is None:
            raise AssertionError(f"tag {tag!r} is not in the book that rank {rank} put it into")
        self._sharers.opened(agreed)
        self._history.last_number = agreed.number
        self._history.last_step = max(agreed.step, self._history.last_step)
        return OpenTag(self, agreed)

    def note_put(self, agreed: TaggedStep) -> None:
        """Something is put into the step."""
        self._sharers.put(agreed)

    def commit(self, agreed: TaggedStep, objects: Mapping[str, Any], put_seconds: float) -> Saved:
        """`OpenTag.commit`'s work; `put_seconds`: what it took to put the objects in."""
        began = time.perf_counter() - put_seconds
        if not agreed.save:
            why = "every slot still waits to be persisted, or the storage is away at the beginning of the run"
            log.warning("stepfast: %s is not saved: %s", agreed.tag, why)
            if self._link is not None:
                self._link.tell(Skipped(step=agreed.step))
            return Saved(self._writer, agreed.step, saved=False, stall_seconds=time.perf_counter() - began)
        self._named.objects = dict(objects)
        try:
            plan, header_tail, sources = self._planner.prepare(agreed.step)
            save = Save(
                step=agreed.step, due=agreed.due, drop=agreed.drop, plan=plan, header_tail=header_tail,
                sources=sources, began=began, tag=agreed.tag, sharers=self._sharers.said,
            )  # fmt: skip
            self._writer.write(save)
        except BaseException as error:
            self.fail(agreed, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._named.objects = {}
        if self._writer.has_failed(agreed.step):
            self.fail(agreed, "its share could not be stored")
        else:
            self._sharers.committed(agreed)
        self._reports.saved(agreed.step)
        if self._link is not None:
            self._link.progress(agreed.step, {})
        saved = Saved(self._writer, agreed.step, saved=True, stall_seconds=time.perf_counter() - began)
        self._newest = self._saves[agreed.tag] = saved
        return saved

    def flush(self, tag: str | None = None) -> None:
        """Waits until this rank's newest step, or its newest of that tag, is persisted and committed. One of several
        ranks that has not saved the tag has nothing to wait for. Raises StorageUnavailable, CheckpointNotFound
        (dropped, or, of a rank that is alone, never saved).
        """
        if tag is not None and tag not in self._saves:
            if self._environment.world_size > 1 or tag in self._history.opened:
                return
            raise CheckpointNotFound(f"rank {self._environment.rank} has saved no {tag!r}")
        saved = self._newest if tag is None else self._saves[tag]
        if saved is not None and saved.saved:
            self._sharers.wait(saved.step, _FLUSH_SECONDS)
            saved.wait(Tier.PERSISTENT)

    def settle(self, tag: str | None = None) -> None:
        """Waits until the run's newest step, or its newest of that tag, is committed, whichever ranks have saved it;
        or, where it never will be, the one before. Also for ranks that save nothing. Raises StorageError, GangError.
        """
        self._settle_newest(tag, of_others=True)

    def fail(self, agreed: TaggedStep, reason: str) -> None:
        """No other rank waits for a step that this one cannot save its share of, where it is not every rank's."""
        self._sharers.failed(agreed, reason)

    # ------------------------------------------------------------ reading

    def steps(self) -> list[CommittedStep]:
        """The committed steps that can be read, oldest first; waits for the newest that was saved before this call, by
        this rank, or by others before a collective operation that this one has begun. Raises StorageError.
        """
        self._settle_newest()
        return self._steps.steps()

    def latest(self, choose: Choice | None = None, *, trainer: str = "") -> CommittedStep | None:
        """The step to go on from: the newest of this run; before its first, the one that the launcher named, or else
        the newest that is committed, the same on all ranks. Raises StorageError, and CheckpointNotFound or GangError
        when that one is gone and no other can take its place: never None then, which means from scratch.

        `choose`: which of those up to there, oldest first, a trainer of the job goes on from; `trainer`: its name.
        """
        steps = self.steps()
        choose = choose if choose is not None else _newest
        if self._has_opened():
            return choose(steps)
        named = self._environment.resume_step
        # Whoever launched us says 0 for "from scratch"; a step 0 may have been saved nevertheless.
        mine = choose([found for found in steps if named is None or found.step <= named])
        return self._resumption.agree(mine, choose, trainer=trainer)

    def find(self, tag: str) -> CommittedStep | None:
        """The newest committed step of that tag; waits as `steps` does, for that tag's. Raises StorageError."""
        self._settle_newest(tag)
        return newest_of(tag, self._steps.steps())

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
        told = self.exchange("names", json.dumps(sorted(own)))
        return sorted({name for names in told for name in json.loads(names)})

    def is_so_for_all(self, is_so: bool) -> bool:
        """Whether every rank says so. Every rank calls it. Raises GangError."""
        return all(json.loads(text) for text in self.exchange("so", json.dumps(is_so)))

    def exchange(self, topic: str, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Every rank calls it. Raises GangError."""
        return self._gang.exchange(Topic.EXCHANGE.of(topic), text)

    def load(self, step: int, name: str, map_location: MapLocation = None, *, weights_only: bool | None = None) -> Any:
        """The object of that name as this rank saved it, or, when it did not, the first rank that has.

        Raises CheckpointNotFound when nobody has, CheckpointDamaged, CheckpointUnsafe, StorageError.
        """
        with self.reading(step) as steps:
            return steps.load(step, name, map_location, weights_only=weights_only)

    @contextmanager
    def reading(self, step: int) -> Iterator[TaggedSteps]:
        """While all that a rank goes on with is read out of the step.

        A step that turns out to be damaged is marked superseded, it alone: where it is the newest, the next attempt
        begins with an older one.
        """
        began = time.perf_counter()
        with self._setting_aside(step) as steps:
            yield steps
        if self._has_opened():
            return  # what training has gone on from stays as it is
        self._resumption.note_read(step)
        if self._link is not None and not self._history.has_progressed:
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

    def _settle_newest(self, tag: str | None = None, *, of_others: bool = False) -> None:
        """The newest step that ranks have saved, of that tag, is committed; or, where it never will be, the one before.

        Every rank looks into the same book: after the same saves they all find the same step. `of_others`: what other
        ranks have saved is waited for wherever this one stands.
        """
        for agreed in reversed(read_book(self._gang).steps):
            if agreed.save and tag in (None, agreed.tag) and self._is_committed(agreed, of_others=of_others):
                return
        if self._branch.is_own:
            self._branch.wait()  # nothing of the run is there, and nothing that is superseded is to be found

    def _is_committed(self, agreed: TaggedStep, *, of_others: bool) -> bool:
        """Waits until it is known; False for what is not saved yet."""
        if self._settlement.is_removed(agreed.step):
            return False
        if self._history.opened[agreed.tag] >= agreed.occurrence:
            own = self._saves.get(agreed.tag)
            if own is None or own.step != agreed.step or self._writer.has_failed(own.step):
                return False
            if own is not self._newest:  # retention may have removed it
                return self._settlement.is_committed(agreed)
            return self._is_own_committed(agreed.tag, own)
        # A step that this rank may still share in is nothing that it could wait for.
        is_past = of_others or self._sharers.is_past(agreed)
        return is_past and self._settlement.is_committed(agreed)

    def _is_own_committed(self, tag: str, saved: Saved) -> bool:
        try:
            self.flush(tag)
        except CheckpointNotFound:  # dropped for a newer one, or given up
            return False
        except StorageUnavailable:
            if not self._writer.has_failed(saved.step):
                raise
            return False
        return saved.saved

    def _has_opened(self) -> bool:
        """Whether the run has opened a tag."""
        return self._gang.hear([Topic.BOOK]) is not None

    def _set_aside(self, error: CheckpointDamaged) -> CheckpointDamaged:
        """The error, with the step that can be read instead; what is damaged is not found again."""
        self._steps.close()
        older = max((found.step for found in self._steps.steps() if found.step < error.step), default=None)
        try:
            self._source.set_aside(error.step)
        except (StorageError, AgentError) as failure:
            log.error("stepfast: damaged step %s could not be set aside: %s", error.step, failure)
        return CheckpointDamaged(error.path, error.step, error.reason, older)

    # ------------------------------------------------------------ the end

    def close(self, timeout_seconds: float = 600.0, *, goes_on: bool = False) -> None:
        """Waits until the newest step is committed, and says goodbye. Raises StorageUnavailable.

        `goes_on`: others are made in the place of these at once, `before` which these were: the rank has not ended.
        """
        if self._closed:
            return
        began = time.monotonic()
        try:
            self._sharers.settle(timeout_seconds, is_silent=goes_on)
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - began))
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
        self._sharers.settle(LAST_SECONDS, is_silent=hasattr(sys, "last_value"))
        self._sharers.end()
        self._reports.end()
        self._writer.close()

    def _at_exit(self) -> None:
        self._end()


def _newest(steps: Sequence[CommittedStep]) -> CommittedStep | None:
    return steps[-1] if steps else None


__all__ = ["OpenTag", "Sharing", "TaggedCheckpoints"]
