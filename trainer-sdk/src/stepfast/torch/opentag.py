"""A tag that is open on this rank: what was put in so far, by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stepfast.tags import TaggedStep
from stepfast.torch.copying import copied
from stepfast.torch.state import Json
from stepfast.torch.writer import Saved


class Commits(Protocol):
    """Who makes a step of what was put in: `TaggedCheckpoints`."""

    def note_put(self, agreed: TaggedStep) -> None: ...

    def commit(self, agreed: TaggedStep, objects: Mapping[str, Any], put_seconds: float) -> Saved: ...

    def fail(self, agreed: TaggedStep, reason: str) -> None: ...


class NamedObjects:
    """The objects that are saved, by name, as they were put."""

    replicated_names: Sequence[str] = ()

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return self.objects

    def replicated_tensors(self, structure: Json, count: int) -> list[bool]:
        return [False] * count


class OpenTag:
    """A tag that is open: objects go in by name, `commit` makes them a step."""

    def __init__(self, checkpoints: Commits, agreed: TaggedStep) -> None:
        self._checkpoints, self._agreed = checkpoints, agreed
        self._objects: dict[str, Any] = {}
        self._saved: Saved | None = None
        self._put_seconds = 0.0

    @property
    def tag(self) -> str:
        """What it was opened as."""
        return self._agreed.tag

    @property
    def step(self) -> int:
        """The step that it becomes."""
        return self._agreed.step

    @property
    def names(self) -> list[str]:
        """What was put in so far."""
        return list(self._objects)

    def put(self, name: str, item: Any, *, copy: bool = True) -> None:
        """Takes the object, which may be any nest of tensors and what can be pickled; a name's last object counts.

        Unless `copy`, its tensors are read at the commit: nobody may change them before that. Raises StateUnsupported,
        ValueError when the tag is committed.
        """
        began = time.perf_counter()
        if self._saved is not None:
            raise ValueError(f"tag {self.tag!r} is committed: {name!r} cannot be put into it any more")
        self._checkpoints.note_put(self._agreed)
        try:
            self._objects[name] = copied(item) if copy and self._agreed.save else item
        except BaseException as error:
            self._checkpoints.fail(self._agreed, f"{name!r} could not be saved: {type(error).__name__}: {error}")
            raise
        self._put_seconds += time.perf_counter() - began

    def commit(self) -> Saved:
        """Stages what was put in as this rank's share of the step; at once when it was committed before.

        The step exists when all ranks that share in it have committed and it is persisted: `Saved.wait`.
        """
        if self._saved is None:
            self._saved = self._checkpoints.commit(self._agreed, self._objects, self._put_seconds)
            self._objects = dict.fromkeys(self._objects)
        return self._saved


__all__ = ["Commits", "NamedObjects", "OpenTag"]
