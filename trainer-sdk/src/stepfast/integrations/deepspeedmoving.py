"""What another number of ranks has saved, as an engine's rank is to load it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepfast.errors import StateUnsupported
from stepfast.integrations.deepspeedranks import RankFile, check_movable, layout_of, moved, old_layout, saved_ranks
from stepfast.torch.tagged import TaggedCheckpoints

log = logging.getLogger("stepfast")


class Moving:
    """A checkpoint of one number of ranks, while another number loads it."""

    def __init__(self, engine: Any, checkpoints: TaggedCheckpoints, step: int, names: Collection[str]) -> None:
        check_movable(names)
        self._checkpoints, self._step, self._names = checkpoints, step, frozenset(names)
        self._new, self._saved = layout_of(engine), saved_ranks(names)
        log.warning("stepfast: step %s of %s ranks is loaded on %s", step, self._saved, self._new.ranks)

    @staticmethod
    def begun(engine: Any, checkpoints: TaggedCheckpoints, step: int) -> Moving | None:
        """None when as many ranks have saved it. Every rank calls it. Raises StateUnsupported."""
        names = checkpoints.names_of_all(step)
        saved = saved_ranks(names)
        return Moving(engine, checkpoints, step, names) if saved not in (0, int(engine.seq_dp_world_size)) else None

    def leave_names(self, folder: Path) -> None:
        """As `stepfast.nebula.names` does, of all ranks that there are now."""
        for of_rank in filter(None, map(RankFile.parse, self._names)):
            for rank in range(self._new.ranks):
                (folder / of_rank.of(rank)).touch(exist_ok=True)

    def load(self, file: RankFile) -> Any:
        """What that rank would have saved."""
        if file.kind == "model":
            name = file.of(file.rank)
            return self.told(self._read(name if name in self._names else file.of(0)))
        first = self._read(file.of(0))
        key = "optimizer_state_dict"

        def load(rank: int) -> Any:
            return (first if rank == 0 else self._read(file.of(rank)))[key]

        old = old_layout(self._new, self._saved, first[key])
        return {**first, key: moved(old, self._new, file.rank, load)}

    def told(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state, that says the number of ranks that there are now. Raises StateUnsupported."""
        if self._new.stage == 3 and state.get("frozen_param_fragments"):
            raise StateUnsupported("frozen parameters of ZeRO 3 are loaded on as many ranks as have saved them")
        return {**state, "dp_world_size": self._new.ranks}

    def _read(self, name: str) -> Any:
        return self._checkpoints.load(self._step, name, "cpu")


__all__ = ["Moving"]
