"""What happens with the steps that the ranks of one run stage on this node: a state machine without I/O.

Events are methods; each returns the effects to carry out. Invariants owned here:
 I4 A slot is given to a new save only when its bytes are persisted, given up by the gang, or older than a newer step
    that the same rank holds whole.
 I7 A step that is due is dropped only when the gang decided so, and then whole: on every rank of the node at once, or
    when a rank could not stage it, so that it can never be whole. A flush needs no decision: everything held becomes
    due, newest first.
 I1 A slot that an earlier run of the job left to this one is memory to be used again, never bytes of this run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from stepfast.ranks import RankSet
from stepfast.slot import SlotRecord
from stepfast_sidecar.holdings import (
    DropStep,
    Effect,
    Freed,
    Held,
    Holding,
    Persist,
    PersistWindow,
    StagedTwice,
    StepState,
    ends_file,
)

_MISSING_REMEMBERED = 64  # steps that a rank gave up: the others stage the same ones within a step or two


class RunFlow:
    """The steps of one run on one node."""

    def __init__(self, run: str, local_world_size: int) -> None:
        self.run = run
        self.local_world_size = local_world_size
        self.holdings: dict[tuple[int, int], Holding] = {}
        self.ranks: set[int] = set()
        """Of this node, that have been here. Who shares in a step of some ranks alone has come before that is known."""
        self.spared: frozenset[tuple[int, int]] = frozenset()
        """By rank and slot: what is given to a save only when nothing else is left; it is being mirrored."""
        self._steps: dict[int, StepState] = {}
        self._wanted: set[int] = set()
        self._copying: dict[int, set[int]] = {}  # by rank, reserved slots that it has not given up
        self._missing: dict[int, set[int]] = {}  # by step, the ranks that gave it up
        self._flushing = False
        self._blocked = False  # persisting fails at present; `retry` lifts it

    # ------------------------------------------------------------ slots

    def add_slot(self, rank: int, slot: int, seq: int = 0) -> None:
        """A slot that this run may use; `seq` is the highest that its file knows."""
        self.holdings.setdefault((rank, slot), Holding(rank=rank, slot=slot, seq=seq))

    def remove_slot(self, rank: int, slot: int) -> None:
        self.holdings.pop((rank, slot), None)

    def slots_of(self, rank: int) -> list[Holding]:
        return sorted((h for h in self.holdings.values() if h.rank == rank), key=lambda h: h.slot)

    def reusable_slots(self, rank: int) -> list[int]:
        """The rank's slots that hold nothing that is needed."""
        return [h.slot for h in self.slots_of(rank) if self._is_reusable(h)]

    def is_known(self, step: int) -> bool:
        """Whether something of the step is held, on its way or committed here."""
        return step in self._steps

    def is_committed(self, step: int) -> bool:
        """Whether the step is known to be committed."""
        return step in self._steps and self._steps[step].committed

    def reserve(
        self, rank: int, drop: Collection[int], copying: Collection[int] = ()
    ) -> tuple[Holding | None, list[Effect]]:
        """The slot for the rank's next save, or None while it has to wait, and what was dropped for it.

        `copying`: slots of earlier saves that the rank has not staged yet, and will.
        """
        self._copying[rank] = set(copying)
        effects = [effect for step in sorted(set(drop)) for effect in self._drop(step)]
        candidates = [h for h in self.slots_of(rank) if self._is_reusable(h)]
        if not candidates:
            return None, effects
        chosen = min(candidates, key=self._preference)
        reserved = replace(chosen, held=Held.RESERVED, seq=chosen.seq + 1, record=None, due=False)
        self.holdings[(rank, chosen.slot)] = reserved
        return reserved, effects

    def _drop(self, step: int) -> list[Effect]:
        """Gives the step up as the gang decided, unless somebody needs it: then the decision came too late."""
        if self._flushing or step in self._wanted:
            return []
        state = self._steps.get(step)
        if state is not None and (state.persisting or state.parted):
            state.given_up = True
            return []
        held = list(self._of_step(step))
        if not any(h.due for h in held):
            return []
        if any(h.held is not Held.STAGED or self._is_newest(h) for h in held):
            return []
        return self._free(step)

    def _is_reusable(self, holding: Holding) -> bool:
        match holding.held:
            case Held.FREE | Held.RESERVED if holding.slot in self._copying.get(holding.rank, ()):
                return False  # FREE: an earlier agent reserved it
            case Held.FREE | Held.PERSISTED | Held.RESERVED:
                # RESERVED: the rank asked again and does not copy into it, so it gave the earlier reservation up.
                return True
            case Held.PERSISTING:
                return False
            case Held.STAGED:
                needed = self._flushing or holding.due or self._step(holding) in self._wanted
                return not needed and not self._is_newest(holding)

    def _is_newest(self, holding: Holding) -> bool:
        steps = [step for h in self.slots_of(holding.rank) if (step := self._step(h)) is not None]
        return bool(steps) and self._step(holding) == max(steps)

    def _preference(self, holding: Holding) -> tuple[int, int]:
        order = {Held.RESERVED: 0, Held.FREE: 1, Held.PERSISTED: 2, Held.STAGED: 4, Held.PERSISTING: 9}
        newest = holding.held is Held.PERSISTED and self._is_newest(holding)
        is_spared = (holding.rank, holding.slot) in self.spared
        return order[holding.held] + newest + 5 * is_spared, holding.step or 0

    # ------------------------------------------------------------ events

    def staged(self, rank: int, slot: int, record: SlotRecord) -> list[Effect]:
        """A rank's slot holds a whole window of a step."""
        holding = replace(
            self.holdings[(rank, slot)],
            held=Held.STAGED,
            seq=record.seq,
            record=record,
            due=record.due or self._flushing or record.step in self._wanted,
        )
        self._copying.get(rank, set()).discard(slot)
        if self._has(record):
            self.holdings[(rank, slot)] = replace(holding, held=Held.FREE, record=None, due=False)
            effects = self._make_due(record.step) if holding.due else self._next()
            return [StagedTwice(holding=holding), Freed(rank=rank), *effects]
        self.holdings[(rank, slot)] = holding
        if self._missing.get(record.step):
            return self._free(record.step)
        self._note(record)
        if record.window_bytes < record.file_bytes:
            self.holdings[(rank, slot)] = persisting = replace(holding, held=Held.PERSISTING)
            return [PersistWindow(holding=persisting)]
        return self._next()

    def share(self, step: int, sharers: RankSet) -> list[Effect]:
        """These ranks of the gang have files in the step, and no others."""
        state = self._steps.setdefault(step, StepState())
        state.sharers, state.is_open = sharers, False
        return self._next()

    def sharers_of(self, step: int) -> RankSet | None:
        """The ranks of the gang that have files in the step; None: all of them."""
        return self._steps[step].sharers if step in self._steps else None

    def window_persisted(self, rank: int, slot: int, *, file: dict[str, Any] | None) -> list[Effect]:
        """A window is stored, its slot free; with the last one the rank's file is, and its entry known."""
        holding = self.holdings[(rank, slot)]
        record = holding.record
        if holding.held is not Held.PERSISTING:  # the step was given up meanwhile
            return []
        self.holdings[(rank, slot)] = replace(holding, held=Held.FREE, record=None, due=False)
        if record is not None and file is not None:
            self._steps.setdefault(record.step, StepState()).streamed.setdefault(rank, {})[record.name] = file
        return [Freed(rank=rank), *self._next()]

    def persisted(self, step: int) -> list[Effect]:
        """This node's part of the step is written."""
        state = self._steps.setdefault(step, StepState())
        state.parted, state.persisting, self._blocked = True, False, False
        freed = self._mark(step, Held.PERSISTED)
        return [*(Freed(rank=rank) for rank in freed), *self._next()]

    def persist_failed(self, step: int) -> list[Effect]:
        """The step could not be persisted; nothing is tried again before `retry`."""
        self._steps.setdefault(step, StepState()).persisting = False
        self._blocked = True
        return [Freed(rank=rank) for rank in self._mark(step, Held.STAGED)]

    def retry(self) -> list[Effect]:
        """The time to try again has come."""
        self._blocked = False
        return self._next()

    def persister_lost(self) -> list[Effect]:
        """The persister died: what it had in hand is staged still; windows it had taken are lost."""
        for state in self._steps.values():
            state.persisting = False
        self._blocked = True
        effects: list[Effect] = []
        for key in list(self.holdings):
            holding = self.holdings[key]
            if holding.held is Held.PERSISTING:
                if self._step(holding) is not None:
                    self.holdings[key] = replace(holding, held=Held.STAGED)
                    effects.append(Freed(rank=holding.rank))
                elif holding.record is not None:
                    effects += self.window_lost(*key, holding.record)
        return effects

    def window_lost(self, rank: int, slot: int, record: SlotRecord) -> list[Effect]:
        """A window went with a persister that had, alone, the file's earlier ones; its slot is free.

        The rank begins the file again when it asks for the next window's slot. After the last window it does not ask,
        and training has gone on: the step is given up, so that nobody waits for it.
        """
        self.holdings[(rank, slot)] = replace(self.holdings[(rank, slot)], held=Held.FREE, record=None, due=False)
        if ends_file(record):
            return [Freed(rank=rank), *self._free(record.step)]
        return [Freed(rank=rank)]

    def relieve(self, rank: int) -> list[Effect]:
        """The rank waits for a slot, and nothing under way would free one: the newest step that it holds is due."""
        mine = [h for h in self.slots_of(rank) if self._step(h) is not None]
        if any(h.held is Held.PERSISTING or (h.held is Held.STAGED and h.due) for h in mine):
            return []
        staged = [h.step for h in mine if h.held is Held.STAGED and h.step is not None]
        return self._make_due(max(staged)) if staged else []

    def give_up(self, step: int) -> list[Effect]:
        """The step's bytes cannot be persisted at all (its slot was damaged by its owner)."""
        return [*self._free(step), *self._next()]

    def rank_begins(self, rank: int, step: int) -> None:
        """The rank is about to stage the step, be it that it gave it up before."""
        self._missing.get(step, set()).discard(rank)

    def rank_gave_up(self, rank: int, step: int) -> list[Effect]:
        """The rank will not stage the step: what the others stage of it would never be whole."""
        self._missing.setdefault(step, set()).add(rank)
        while len(self._missing) > _MISSING_REMEMBERED:
            del self._missing[min(self._missing)]
        state = self._steps.get(step)
        if state is not None and (state.persisting or state.parted):
            return []  # it had staged it before
        return [*self._free(step), *self._next()]

    def committed(self, step: int) -> None:
        """The step's manifest is there."""
        self._steps.setdefault(step, StepState()).committed = True
        self._wanted.discard(step)
        held = {h.step for h in self.holdings.values()}
        for old in [s for s in self._steps if s < step and s not in held]:
            # An older step that is not whole by now never will be: each rank stages its steps in their order.
            if self._steps[old].committed or not (self._steps[old].parted or self._is_complete(old)):
                del self._steps[old]

    def want(self, step: int) -> list[Effect]:
        """Somebody waits for the step's commit."""
        self._wanted.add(step)
        if step in self._steps:
            self._steps[step].given_up = False
        return self._make_due(step)

    def _make_due(self, step: int) -> list[Effect]:
        for holding in self._of_step(step):
            self.holdings[(holding.rank, holding.slot)] = replace(holding, due=True)
        return self._next()

    def flush(self) -> list[Effect]:
        """Everything held is due, also what will still be staged, until `end_flush`; nothing is given up any more."""
        self._flushing = True
        for state in self._steps.values():
            state.given_up = False
        for key, holding in self.holdings.items():
            if holding.held is Held.STAGED:
                self.holdings[key] = replace(holding, due=True)
        return self._next()

    def end_flush(self) -> None:
        """Training goes on: what was due stays so, and what is staged from now on is due as its ranks say."""
        self._flushing = False

    # ------------------------------------------------------------ what stands

    def incomplete_steps(self) -> list[int]:
        """Steps that are held, though not by every rank of this node."""
        held = self._held_steps((Held.STAGED,))
        return sorted(step for step in held if not self._is_complete(step))

    def memory_step(self, *, due: bool = False) -> int | None:
        """The newest step that every rank of this node holds in memory, whole; `due`: of those to be persisted."""
        return max((step for step in self._held_steps(Held, due=due) if self._is_complete(step)), default=None)

    def is_whole(self, step: int) -> bool:
        """Whether every rank of this node holds all its files of the step."""
        return self._is_complete(step)

    def held(self, step: int) -> tuple[Holding, ...]:
        """The slots that hold whole files of the step, by rank."""
        return tuple(self._of_step(step))

    def pending_steps(self) -> list[int]:
        """Steps that are due, complete on this node (or with windows that are on their way) and not committed; not
        those that the gang gave up once their part here is written: they may never be whole.
        """
        due = self._held_steps((Held.STAGED, Held.PERSISTING), due=True)
        due |= {h.record.step for h in self.holdings.values() if h.held is Held.PERSISTING and h.record is not None}
        due |= {step for step, state in self._steps.items() if state.streamed and not state.parted}
        waiting = {step for step in due if self._is_complete(step, with_windows=True)}
        return sorted(waiting.union(step for step in self.uncommitted_parts() if not self._steps[step].given_up))

    def pending_bytes(self) -> int:
        pending = set(self.pending_steps())
        return sum(
            h.record.window_bytes
            for h in self.holdings.values()
            if h.record is not None and h.step in pending and h.record.run == self.run and h.held is not Held.PERSISTED
        )

    def unpersisted_of(self, rank: int) -> tuple[int, ...]:
        """The rank's steps that are staged and due and not persisted."""
        return tuple(sorted(self._held_steps((Held.STAGED, Held.PERSISTING), due=True, rank=rank)))

    @property
    def is_flushing(self) -> bool:
        """Whether all that is held is to be persisted, and all that will be."""
        return self._flushing

    @property
    def is_persisting(self) -> bool:
        """Whether the persister has something of this run in hand."""
        return any(h.held is Held.PERSISTING for h in self.holdings.values()) or bool(self.persisting_steps())

    def persisting_steps(self) -> tuple[int, ...]:
        return tuple(sorted(step for step, state in self._steps.items() if state.persisting))

    def uncommitted_parts(self) -> list[int]:
        """Steps whose part this node wrote while their manifest is not known to exist."""
        return sorted(step for step, state in self._steps.items() if state.parted and not state.committed)

    def referred_steps(self) -> set[int]:
        """What the steps refer to that are held or on their way, and not known to be committed."""
        return {older for state in self._steps.values() if not state.committed for older in state.referred}

    def adopt(self, holding: Holding, *, parted: bool) -> None:
        """A slot that an earlier agent of this node left behind."""
        self.holdings[(holding.rank, holding.slot)] = holding
        self.ranks.add(holding.rank)
        if holding.record is not None and holding.held is not Held.FREE:
            state = self._note(holding.record)
            state.parted = state.parted or parted
            if state.parted:
                # Noted in one slot, so it is so for all: the agent ended before it had noted it in the others.
                self._mark(holding.record.step, Held.PERSISTED)

    # ------------------------------------------------------------ inside

    def _note(self, record: SlotRecord) -> StepState:
        state = self._steps.setdefault(record.step, StepState())
        state.note(record)
        return state

    def _has(self, record: SlotRecord) -> bool:
        """Whether the rank's file is held here, whole, or stored."""
        state = self._steps.get(record.step)
        if state is None:
            return False
        if state.parted or record.name in state.streamed.get(record.rank, ()):
            return True
        held = [h.record for h in self._of_step(record.step) if h.rank == record.rank]
        return any(other is not None and other.name == record.name for other in held)

    def _step(self, holding: Holding) -> int | None:
        """The step of this run of which the slot holds a whole file: no window, nor what an earlier run left in it."""
        record = holding.record
        if record is None or record.run != self.run or record.window_bytes < record.file_bytes:
            return None
        return holding.step

    def _held_steps(self, states: Iterable[Held], *, due: bool = False, rank: int | None = None) -> set[int]:
        states = set(states)
        return {
            step
            for h in self.holdings.values()
            if (step := self._step(h)) is not None and h.held in states and h.due >= due and rank in (None, h.rank)
        }

    def _forget_overwritten(self) -> None:
        """Steps that were held in memory alone, and whose slots hold newer ones by now."""
        alive = {h.step for h in self.holdings.values() if h.step is not None}
        alive |= {step for step, state in self._steps.items() if state.streamed or state.parted}
        newest = max(alive, default=0)
        for step in [s for s in self._steps if s < newest and s not in alive]:
            del self._steps[step]

    def _free(self, step: int) -> list[Effect]:
        """Forgets the step and what is held of it."""
        held = tuple(h for h in self.holdings.values() if h.step == step and h.record and h.record.run == self.run)
        for h in held:
            self.holdings[(h.rank, h.slot)] = replace(h, held=Held.FREE, record=None, due=False)
        self._steps.pop(step, None)
        self._wanted.discard(step)
        freed = (Freed(rank=rank) for rank in sorted({h.rank for h in held}))
        return [DropStep(step=step, run=self.run, holdings=held), *freed]

    def _is_complete(self, step: int, *, with_windows: bool = False) -> bool:
        """Whether every rank staged all its files; with those whose last window is not stored yet, if asked for."""
        state = self._steps.get(step)
        if state is None or state.is_open or not self._has_all_ranks(state):
            return False
        names = {rank: set(streamed) for rank, streamed in state.streamed.items()}
        for h in self.holdings.values():
            record = h.record
            if record is None or h.step != step or record.run != self.run:
                continue
            if self._step(h) == step or (with_windows and ends_file(record)):
                names.setdefault(h.rank, set()).add(record.name)
        return all(len(names.get(rank, ())) >= files for rank, files in state.files.items())

    def _has_all_ranks(self, state: StepState) -> bool:
        if state.sharers is None:
            return len(state.files) >= self.local_world_size
        return bool(state.files) and all(rank in state.files for rank in self.ranks if rank in state.sharers)

    def _next(self) -> list[Effect]:
        """Starts persisting the newest step that is due and complete, one at a time."""
        if self._blocked or any(state.persisting for state in self._steps.values()):
            return []
        self._forget_overwritten()
        due = self._held_steps((Held.STAGED,), due=True)
        due |= {step for step, state in self._steps.items() if state.streamed and not state.parted}
        ready = [step for step in due if not self._steps[step].parted and self._is_complete(step)]
        if not ready:
            return []
        step = max(ready)
        state = self._steps[step]
        state.persisting = True
        self._mark(step, Held.PERSISTING)
        streamed = (files[name] for _, files in sorted(state.streamed.items()) for name in sorted(files))
        return [
            Persist(
                step=step, run=self.run, holdings=tuple(self._of_step(step)), ranks=tuple(sorted(state.files)),
                tag=state.tag, sharers=state.sharers, refers=tuple(sorted(state.referred)), streamed=tuple(streamed),
            )
        ]  # fmt: skip

    def _of_step(self, step: int) -> Iterable[Holding]:
        return sorted((h for h in self.holdings.values() if self._step(h) == step), key=lambda h: (h.rank, h.slot))

    def _mark(self, step: int, held: Held) -> list[int]:
        marked = list(self._of_step(step))
        for holding in marked:
            self.holdings[(holding.rank, holding.slot)] = replace(holding, held=held)
        return sorted({holding.rank for holding in marked})
