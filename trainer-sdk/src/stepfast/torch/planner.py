"""From live objects to what one save writes: their states collected, the layout kept while it fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from stepfast.environment import Environment
from stepfast.references import Reference
from stepfast.torch.garbage import garbage_kept
from stepfast.torch.pickled import Skeletons
from stepfast.torch.plan import SavePlan
from stepfast.torch.state import Collected, Found, Json, collect, describe, encode_value, has_pickles

log = logging.getLogger("stepfast")


class Objects(Protocol):
    """What is saved: its state at each save, and which of it all ranks share."""

    @property
    def replicated_names(self) -> Sequence[str]:
        """The names whose states all ranks share."""

    def state(self) -> dict[str, Any]:
        """The states by name."""

    def replicated_tensors(self, structure: Json, count: int) -> list[bool]:
        """For each of the `count` tensors of the state that is described so, whether all ranks have the same."""


class Held(Protocol):
    """What older steps' files hold of the state already (`settled.Ledger`)."""

    def references(
        self, plan: SavePlan, tensors: Sequence[torch.Tensor], steps: Collection[int]
    ) -> Mapping[int, Reference]:
        """What a save of these tensors leaves out, by the plan's entries' numbers, when it may refer to the steps."""


class Planner:
    """Plans this rank's saves. `plan` is the layout of all that the newest saves, None before the first."""

    def __init__(
        self, objects: Objects, environment: Environment, *, weights_only: bool, held: Held | None = None
    ) -> None:
        self.plan: SavePlan | None = None
        self._objects, self._environment, self._weights_only = objects, environment, weights_only
        self._held = held
        self._partial: tuple[SavePlan, Mapping[int, Reference], SavePlan] | None = None
        """The newest layout that leaves something out: of which, what, and itself."""

    def prepare(self, step: int, refers: Collection[int] = ()) -> tuple[SavePlan, bytes, list[torch.Tensor]]:
        """The layout, what its header says of this save, and the tensors in the order of the layout, as they are now.

        What the files of the steps `refers` hold of them is left out. Raises StateUnsupported.
        """
        with garbage_kept():
            root = self._objects.state()
            plan = self.plan
            skeletons = plan.make_skeletons() if plan is not None else Skeletons()
            found = plan.retrace(root, skeletons) if plan is not None else None
            if plan is None or found is None:
                found = collected = collect(root, skeletons)
                if plan is None or not plan.fits(collected):
                    plan = self.plan = self._make_plan(root, collected)
            if self._held is not None:
                plan = self._without(plan, self._held.references(plan, found.tensors, refers))
            tail = plan.header_tail(self._variable(step, found))
            return plan, tail, plan.sources(found.tensors)

    def _without(self, plan: SavePlan, references: Mapping[int, Reference]) -> SavePlan:
        if not references:
            return plan
        if self._partial is None or self._partial[:2] != (plan, references):
            self._partial = plan, references, plan.without(references)
        return self._partial[2]

    def _make_plan(self, root: dict[str, Any], collected: Collected) -> SavePlan:
        if has_pickles(collected) and self._weights_only:
            log.warning(
                "stepfast: the state holds objects that only travel pickled; restoring them needs weights_only=False"
            )
        structure, names = describe(root, "", collected.objects)
        return SavePlan(
            root,
            collected,
            structure,
            [name.removeprefix(".") for name in names],
            self._objects.replicated_tensors(structure, len(names)),
            rank=self._environment.rank,
            world_size=self._environment.world_size,
            replicated_objects=self._objects.replicated_names,
        )

    def _variable(self, step: int, found: Found) -> dict[str, str]:
        """What changes from save to save while the layout stays."""
        about = {"step": step, "run": self._environment.run, "rank": self._environment.rank}
        return {
            "stepfast.save": json.dumps(about),
            "values": json.dumps([encode_value(value) for value in found.values], separators=(",", ":")),
        }
