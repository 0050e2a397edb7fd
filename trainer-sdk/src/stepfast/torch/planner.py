"""From live objects to what one save writes: their states collected, the layout kept while it fits."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from stepfast.environment import Environment
from stepfast.torch.objects import RNG, ObjectSet
from stepfast.torch.plan import SavePlan
from stepfast.torch.rng import get_rng_state
from stepfast.torch.state import Collected, collect, encode_value, has_pickles

log = logging.getLogger("stepfast")


class Planner:
    """Plans this rank's saves. `plan` is the layout of the newest, None before the first."""

    def __init__(self, objects: ObjectSet, environment: Environment, *, weights_only: bool) -> None:
        self.plan: SavePlan | None = None
        self._objects, self._environment, self._weights_only = objects, environment, weights_only

    def prepare(self, step: int) -> tuple[SavePlan, bytes, list[torch.Tensor]]:
        """The layout, the file's header, and the tensors in the order of the layout, as they are now.

        Raises StateUnsupported.
        """
        root = self._objects.state()
        root[RNG] = get_rng_state()
        collected = collect(root)
        plan = self.plan
        if plan is None or not plan.fits(collected):
            plan = self.plan = self._make_plan(root, collected)
        header = plan.header(self._variable(step, collected))
        return plan, header, plan.sources(collected.tensors)

    def _make_plan(self, root: dict[str, Any], collected: Collected) -> SavePlan:
        if has_pickles(collected) and self._weights_only:
            log.warning(
                "stepfast: the state holds objects that only travel pickled; restoring them needs weights_only=False"
            )
        return SavePlan(
            root,
            collected,
            self._objects.replicated_tensors(root, collected),
            prefix="",
            rank=self._environment.rank,
            world_size=self._environment.world_size,
            replicated_objects=self._objects.replicated_names,
        )

    def _variable(self, step: int, collected: Collected) -> dict[str, str]:
        """What changes from save to save while the layout stays."""
        about = {"step": step, "run": self._environment.run, "rank": self._environment.rank}
        return {
            "stepfast.save": json.dumps(about),
            "values": json.dumps([encode_value(value) for value in collected.values], separators=(",", ":")),
        }
