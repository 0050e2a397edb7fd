"""Which step a gang restores, and that all of its ranks can: agreed on before any object takes it in (I5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from stepfast.environment import Environment
from stepfast.errors import CheckpointDamaged, CheckpointMismatch, GangError
from stepfast.torch.gang import Gang
from stepfast.torch.garbage import garbage_kept
from stepfast.torch.objects import RNG, ObjectSet, RankStates
from stepfast.torch.reader import StepReader, reading_threads
from stepfast.torch.rng import set_rng_state
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
    ) -> None:
        self._source, self._gang, self._environment, self._objects = source, gang, environment, objects
        self._name, self._weights_only = name, weights_only
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
            mine = self._environment.resume_step if self._calls == 1 else None
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
        if reader.manifest.world_size != self._environment.world_size:
            document = reader.document(source_rank)
            # What a single rank saved is equal on all ranks by nature; whether it is to be is said now.
            is_alone = reader.manifest.world_size == 1
            shared = self._objects.replicated_names if is_alone else document["replicatedObjects"]
            free = {RNG, *shared, *self._objects.resharded_names}
            own = [name for name, _ in document["structure"][1] if name not in free]
            if own:
                raise CheckpointMismatch(
                    f"step {reader.step} was saved by {reader.manifest.world_size} ranks and these are "
                    f"{self._environment.world_size}; {', '.join(sorted(own))} is each rank's own: declare it "
                    "replicated if it is equal on all ranks"
                )
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
            if reader.manifest.world_size != self._environment.world_size:
                root.update(self._states_of_ranks(reader))

        topic = f"delivered/{self._calls}/{reader.step}"
        damage = self._together(topic, reader.step, read, lambda: reader.has_touched)
        if damage:
            return damage
        self.is_half_restored = True  # until every object has all of it
        rng = root.pop(RNG, None)
        self._objects.load(root, step=reader.step)
        if rng is not None and source_rank == self._environment.rank:
            set_rng_state(rng)
        return ""

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
        """The rank whose file is this one's: its own, where the gang that saved had one of that number."""
        return self._environment.rank if self._environment.rank < reader.manifest.world_size else 0

    def _older(self, step: int) -> int | None:
        mine = max((s for s in self._source.steps() if s < step), default=None) if self._gang.rank == 0 else None
        text = self._gang.exchange(f"older/{self._calls}/{step}", _NOTHING if mine is None else str(mine))[0]
        return None if text == _NOTHING else int(text)
