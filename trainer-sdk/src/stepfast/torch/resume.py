"""Which step a gang restores, and that all of its ranks can: agreed on before any object takes it in (I5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from stepfast.environment import Environment
from stepfast.errors import CheckpointDamaged, CheckpointMismatch, GangError
from stepfast.torch.gang import Gang
from stepfast.torch.garbage import garbage_kept
from stepfast.torch.objects import RNG, ObjectSet, RankStates
from stepfast.torch.reader import StepReader, reading_threads
from stepfast.torch.rng import set_derived_rng_state, set_rng_state
from stepfast.torch.sources import Source

log = logging.getLogger("stepfast")

_NOTHING = "nothing"
_GAVE_UP = "!"  # before the text of a rank that cannot go on, for a reason other than damage
_TOUCHED = "~"  # before the text of a rank whose objects are no longer what they were


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was restored: the step (None: nothing) and where its bytes came from.

    `is_rollback`: newer steps may be committed that this one's future has nothing to do with.
    """

    step: int | None
    tier: str = "None"
    is_rollback: bool = False


class Resumer:
    """Restores one rank's objects, in agreement with the other ranks; they all call it alike."""

    def __init__(
        self,
        source: Source,
        gang: Gang,
        environment: Environment,
        objects: ObjectSet,
        *,
        name: str,
        weights_only: bool,
        resume_step: int | None,
    ) -> None:
        """`resume_step`: what the first restore goes on from, as the launcher has fixed it; None: the latest."""
        self._source, self._gang, self._environment, self._objects = source, gang, environment, objects
        self._name, self._weights_only, self._resume_step = name, weights_only, resume_step
        self._calls = 0
        self.is_half_restored = False
        """Whether the objects, on any rank, hold parts of a step that could not be restored as a whole."""

    def resume(self, step: int | None) -> Resumed:
        """Restores that step; None: the one that the launcher fixed, else the latest, else an older whole one.

        Raises CheckpointNotFound and CheckpointDamaged for an explicit step, CheckpointMismatch, CheckpointUnsafe,
        GangError, StorageError.
        """
        self._calls += 1
        wanted = first = self._agree_on(step)
        while wanted is not None:
            with garbage_kept():
                damage, reader = self._examine(wanted, is_only=step is not None)
                if reader is not None:
                    with closing(reader):
                        damage = self._deliver(reader)
                    if not damage:
                        self.is_half_restored = False
                        is_rollback = step is not None or wanted != first
                        return Resumed(step=wanted, tier=str(reader.tier), is_rollback=is_rollback)
            log.error("stepfast: step %s is damaged: %s", wanted, damage)
            older = self._older(wanted)
            if step is not None or (older is None and self.is_half_restored):
                path, _, reason = damage.partition(": ")
                raise CheckpointDamaged(path, wanted, reason, older)
            wanted = older
        return Resumed(step=None, is_rollback=first is not None)

    def _agree_on(self, step: int | None) -> int | None:
        """One number for the whole gang, rank 0's; None when there is nothing to restore."""
        mine = step
        if step is None and self._gang.rank == 0:
            mine = self._resume_step if self._calls == 1 else None
            # Whoever launched us says 0 for "from scratch"; a step 0 may have been saved nevertheless.
            if not mine:
                steps = self._source.steps()
                mine = max((s for s in steps if mine is None or s <= mine), default=None)
        texts = self._gang.exchange(f"restore/{self._calls}", _NOTHING if mine is None else str(mine))
        if step is not None and any(text != str(step) for text in texts):
            raise GangError(f"ranks restore different steps: {sorted(set(texts))}")
        return None if texts[0] == _NOTHING else int(texts[0])

    def _examine(self, step: int, *, is_only: bool) -> tuple[str, StepReader | None]:
        """Looks at what this rank would read, and touches nothing: the damage that any rank found, else a reader.

        `is_only`: no other step may be restored instead, so that all of it has to be whole before it is touched.
        """
        readers: list[StepReader] = []

        def examine() -> None:
            threads = reading_threads(self._environment.local_world_size)
            readers.append(StepReader(self._source, step, name=self._name, threads=threads))
            self._prepare(readers[0])
            if not readers[0].is_in_memory and (is_only or not self._has_older(step)):
                readers[0].check(self._source_rank(readers[0]))

        is_fine = False
        try:
            damage = self._together(f"verdict/{self._calls}/{step}", step, examine)
            is_fine = not damage
        finally:
            if readers and not is_fine:
                readers[0].close()
        return damage, readers[0] if is_fine else None

    def _together(
        self, topic: str, step: int, work: Callable[[], None], has_touched: Callable[[], bool] = lambda: False
    ) -> str:
        """Does this rank's share of the work; the damage that any rank found, or nothing."""
        verdict, failure = "", None
        try:
            work()
        except CheckpointDamaged as error:
            verdict = f"{error.path}: {error.reason}"
        except Exception as error:  # noqa: BLE001 - raised below: the others must not wait for this rank's verdict
            verdict, failure = f"{_GAVE_UP}{type(error).__name__}: {error}", error
        finally:
            self.is_half_restored = self.is_half_restored or has_touched()
        try:
            told = self._gang.exchange(topic, f"{_TOUCHED if has_touched() else ''}{verdict}")
        except GangError:
            if failure is not None:
                raise failure  # noqa: B904 - the gang's is its context
            raise
        self.is_half_restored = self.is_half_restored or any(text.startswith(_TOUCHED) for text in told)
        if failure is not None:
            raise failure
        verdicts = [text.removeprefix(_TOUCHED) for text in told]
        for rank, text in enumerate(verdicts):
            if text.startswith(_GAVE_UP):
                raise GangError(f"rank {rank} cannot restore step {step}: {text.removeprefix(_GAVE_UP)}")
        return next(filter(None, verdicts), "")

    def _has_older(self, step: int) -> bool:
        return any(other < step for other in self._source.steps())

    def _prepare(self, reader: StepReader) -> None:
        source_rank = self._source_rank(reader)
        if self._is_of_others(reader):
            # What a single rank saved is equal on all ranks by nature; whether it is to be is said now.
            is_alone = reader.manifest.world_size == 1
            document = reader.document(source_rank)
            shared = self._objects.replicated_names if is_alone else document["replicatedObjects"]
            if own := self._objects.bound_to_ranks(shared):
                raise CheckpointMismatch(f"{self._gap(reader)}; {self._objects.explain_bound(own)}")
        reader.prepare(source_rank, weights_only=self._weights_only)

    def _deliver(self, reader: StepReader) -> str:
        """Restores the objects, on all ranks or none: the damage that any rank found, or nothing.

        No rank goes on before all have read: a slot that one reads another rank's next save may want.
        """
        source_rank, root = self._source_rank(reader), {}

        def read() -> None:
            names = [name for name, _ in reader.document(source_rank)["structure"][1]]
            self._objects.expect(names, step=reader.step)
            own = self._objects.own_states()
            root.update(reader.read(source_rank, own, weights_only=self._weights_only))
            if self._is_of_others(reader):
                root.update(self._states_of_ranks(reader))

        topic = f"delivered/{self._calls}/{reader.step}"
        damage = self._together(topic, reader.step, read, lambda: reader.has_touched)
        if damage:
            return damage
        self.is_half_restored = True  # until every object has all of it
        rng = root.pop(RNG, None)
        self._objects.load(root, step=reader.step)
        if rng is not None:
            self._set_generators(reader, rng)
        return ""

    def _set_generators(self, reader: StepReader, rng: Mapping[str, Any]) -> None:
        if not self._is_of_others(reader):
            set_rng_state(rng)
            return
        # What the script seeded at its start would draw the numbers of its first steps again.
        rank, world_size = self._environment.rank, self._environment.world_size
        set_derived_rng_state(rng, step=reader.step, rank=rank, world_size=world_size)
        if rank == 0:
            log.warning("stepfast: %s: their random generators are derived from that step's", self._gap(reader))

    def _states_of_ranks(self, reader: StepReader) -> dict[str, RankStates]:
        """Of objects that divide their state anew, this rank's share of what the ranks saved."""
        names = self._objects.resharded_names
        if not names:
            return {}
        found: dict[str, dict[int, Any]] = {name: {} for name in names}
        for rank in range(self._environment.rank, reader.manifest.world_size, self._environment.world_size):
            items = reader.read_objects(rank, names, lambda _: "cpu", weights_only=self._weights_only)
            for name, item in items.items():
                found[name][rank] = item
        return {name: RankStates(states) for name, states in found.items()}

    def _source_rank(self, reader: StepReader) -> int:
        """The rank whose file is this one's: its own; of another number of ranks, rank 0's for all, as DDP would have
        its buffers.
        """
        return 0 if self._is_of_others(reader) else self._environment.rank

    def _is_of_others(self, reader: StepReader) -> bool:
        """Whether another number of ranks saved the step."""
        return reader.manifest.world_size != self._environment.world_size

    def _gap(self, reader: StepReader) -> str:
        saved, here = reader.manifest.world_size, self._environment.world_size
        return f"step {reader.step} was saved by {_ranks(saved)} and these are {here}"

    def _older(self, step: int) -> int | None:
        mine = max((s for s in self._source.steps() if s < step), default=None) if self._gang.rank == 0 else None
        text = self._gang.exchange(f"older/{self._calls}/{step}", _NOTHING if mine is None else str(mine))[0]
        return None if text == _NOTHING else int(text)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
