"""Which step a gang restores, and that all of its ranks can: agreed on before any object is touched (I5)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfast.environment import Environment
from stepfast.errors import CheckpointDamaged, CheckpointMismatch, GangError
from stepfast.torch.gang import Gang
from stepfast.torch.objects import RNG, ObjectSet
from stepfast.torch.reader import Source, StepReader
from stepfast.torch.rng import set_rng_state

log = logging.getLogger("stepfast")

_NOTHING = "nothing"
_GAVE_UP = "!"  # before the text of a rank that cannot go on, for a reason other than damage


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

    def resume(self, step: int | None) -> Resumed:
        """Restores that step; None: the one that the launcher fixed, else the latest, else an older whole one.

        Raises CheckpointNotFound and CheckpointDamaged for an explicit step, CheckpointMismatch, CheckpointUnsafe,
        GangError, StorageError.
        """
        self._calls += 1
        wanted = first = self._agree_on(step)
        while wanted is not None:
            damage, root, reader = self._read(wanted)
            if damage is None and reader is not None:
                self._objects.load({name: state for name, state in root.items() if name != RNG}, step=wanted)
                if RNG in root:
                    set_rng_state(root[RNG])
                is_rollback = step is not None or wanted != first
                return Resumed(step=wanted, tier=str(reader.tier), is_rollback=is_rollback)
            log.error("stepfast: step %s is damaged: %s", wanted, damage)
            older = self._older(wanted)
            if step is not None:
                path, _, reason = (damage or "").partition(": ")
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

    def _read(self, step: int) -> tuple[str | None, Mapping[str, Any], StepReader | None]:
        """Reads this rank's state without touching the objects; the damage that any rank found, or None."""
        topic = f"verdict/{self._calls}/{step}"
        verdict, root, reader = "", {}, None
        try:
            reader = StepReader(self._source, step, name=self._name)
            root = self._root_of(reader)
        except CheckpointDamaged as error:
            verdict = f"{error.path}: {error.reason}"
        except Exception as error:
            # The others wait for this rank's verdict: they must not wait for ever.
            self._gang.exchange(topic, f"{_GAVE_UP}{type(error).__name__}: {error}")
            raise
        finally:
            if reader is not None:
                reader.close()
        verdicts = self._gang.exchange(topic, verdict)
        for rank, text in enumerate(verdicts):
            if text.startswith(_GAVE_UP):
                raise GangError(f"rank {rank} cannot restore step {step}: {text.removeprefix(_GAVE_UP)}")
        return next((text for text in verdicts if text), None), root, reader

    def _root_of(self, reader: StepReader) -> dict[str, Any]:
        world_size, rank = reader.manifest.world_size, self._environment.rank
        source_rank = rank if rank < world_size else 0
        root, document = reader.read(source_rank, weights_only=self._weights_only)
        if world_size != self._environment.world_size:
            # What a single rank saved is equal on all ranks by nature; whether it is to be is said now.
            shared = self._objects.replicated_names if world_size == 1 else document["replicatedObjects"]
            own = [name for name in root if name != RNG and name not in shared]
            if own:
                raise CheckpointMismatch(
                    f"step {reader.step} was saved by {world_size} ranks and these are {self._environment.world_size}; "
                    f"{', '.join(sorted(own))} is each rank's own: declare it replicated if it is equal on all ranks"
                )
            if source_rank != rank:
                root.pop(RNG, None)
        return dict(root)

    def _older(self, step: int) -> int | None:
        mine = max((s for s in self._source.steps() if s < step), default=None) if self._gang.rank == 0 else None
        text = self._gang.exchange(f"older/{self._calls}/{step}", _NOTHING if mine is None else str(mine))[0]
        return None if text == _NOTHING else int(text)
