"""What another number of ranks has saved, as an engine's rank is to load it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from stepfast.errors import CheckpointMismatch, StateUnsupported
from stepfast.integrations.deepspeedranks import (
    Layout,
    RankFile,
    check_movable,
    layout_of,
    moved,
    moved_frozen,
    old_layout,
    saved_ranks,
)  # fmt: skip
from stepfast.torch.tagged import TaggedCheckpoints

log = logging.getLogger("stepfast")

_FROZEN, _SHAPES, _OPTIMIZER = "frozen_param_fragments", "frozen_param_shapes", "optimizer_state_dict"


class Moving:
    """A checkpoint of one number of ranks, while another number loads it."""

    def __init__(self, engine: Any, checkpoints: TaggedCheckpoints, step: int, names: Collection[str]) -> None:
        check_movable(names)
        self._checkpoints, self._step, self._names = checkpoints, step, frozenset(names)
        self._engine, self._ranks, self._saved = engine, int(engine.seq_dp_world_size), saved_ranks(names)
        self._ready: dict[str, Any] = {}  # this rank's optimizer state, until it is loaded
        log.warning("stepfast: step %s of %s ranks is loaded on %s", step, self._saved, self._ranks)

    @staticmethod
    def begun(
        engine: Any, checkpoints: TaggedCheckpoints, step: int, *, with_optimizer: bool = True
    ) -> Moving | None:  # fmt: skip
        """None when as many ranks have saved it. Every rank calls it, and all raise what one would: CheckpointMismatch,
        StateUnsupported, before anything of the engine has changed.
        """
        names = checkpoints.names_of_all(step)
        saved = saved_ranks(names)
        if saved in (0, int(engine.seq_dp_world_size)):
            return None
        moving = Moving(engine, checkpoints, step, names)
        refused: CheckpointMismatch | StateUnsupported | None = None
        if with_optimizer and engine.zero_optimization():
            try:
                moving._take_optimizer(checkpoints.environment.rank)
            except (CheckpointMismatch, StateUnsupported) as error:
                refused = error
            told = checkpoints.exchange("refused", str(refused or ""))
            if refused is not None:
                raise refused
            if any(told):
                raise StateUnsupported(next(filter(None, told)))
        return moving

    def _take_optimizer(self, rank: int) -> None:
        own = next(file for file in map(RankFile.parse, sorted(self._names)) if file and file.kind == "optim").of(rank)
        self._ready = {own: self._optimizer(cast(RankFile, RankFile.parse(own)))}

    def leave_names(self, folder: Path) -> None:
        """As `stepfast.nebula.names` does, of all ranks that there are now."""
        for of_rank in filter(None, map(RankFile.parse, self._names)):
            for rank in range(self._ranks):
                (folder / of_rank.of(rank)).touch(exist_ok=True)

    def load(self, file: RankFile) -> Any:
        """What that rank would have saved. Raises CheckpointMismatch, StateUnsupported."""
        if file.kind == "model":
            return self._model(file)
        return self._ready.pop(file.of(file.rank), None) or self._optimizer(file)

    def told(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state, that says the number of ranks that there are now."""
        return {**state, "dp_world_size": self._ranks}

    def _model(self, file: RankFile) -> dict[str, Any]:
        name = file.of(file.rank)
        state = self.told(self._read(name if name in self._names else file.of(0)))
        if not state.get(_FROZEN):
            return state
        numels = {name: shape.numel() for name, shape in state[_SHAPES].items()}

        def load(rank: int) -> Any:
            return self._read(file.of(rank))[_FROZEN]

        return {**state, _FROZEN: moved_frozen(numels, (self._saved, self._ranks), file.rank, load)}

    def _optimizer(self, file: RankFile) -> dict[str, Any]:
        first = self._read(file.of(0))

        def load(rank: int) -> Any:
            return (first if rank == 0 else self._read(file.of(rank)))[_OPTIMIZER]

        old = old_layout(self._layout, self._saved, first[_OPTIMIZER])
        return {**first, _OPTIMIZER: moved(old, self._layout, file.rank, load)}

    @cached_property
    def _layout(self) -> Layout:
        # Only where an optimizer's state is asked for: who takes the weights alone may have no optimizer.
        return layout_of(self._engine)

    def _read(self, name: str) -> Any:
        return self._checkpoints.load(self._step, name, "cpu")


__all__ = ["Moving"]
