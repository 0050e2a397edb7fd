"""What another number of ranks has saved, as an engine's rank is to load it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

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
        log.warning("stepfast: step %s of %s ranks is loaded on %s", step, self._saved, self._ranks)

    @staticmethod
    def begun(engine: Any, checkpoints: TaggedCheckpoints, step: int) -> Moving | None:
        """None when as many ranks have saved it. Every rank calls it. Raises StateUnsupported."""
        names = checkpoints.names_of_all(step)
        saved = saved_ranks(names)
        return Moving(engine, checkpoints, step, names) if saved not in (0, int(engine.seq_dp_world_size)) else None

    def leave_names(self, folder: Path) -> None:
        """As `stepfast.nebula.names` does, of all ranks that there are now."""
        for of_rank in filter(None, map(RankFile.parse, self._names)):
            for rank in range(self._ranks):
                (folder / of_rank.of(rank)).touch(exist_ok=True)

    def load(self, file: RankFile) -> Any:
        """What that rank would have saved. Raises CheckpointMismatch, StateUnsupported."""
        return self._model(file) if file.kind == "model" else self._optimizer(file)

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
