"""DeepSpeed's checkpoint engine, by Stepfast."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stepfast.integrations.deepspeedengines import Engines, tag_in, tag_of
from stepfast.integrations.deepspeedmoving import Moving
from stepfast.integrations.deepspeedranks import RankFile
from stepfast.integrations.deepspeedweights import whole_weights
from stepfast.integrations.missing import missing
from stepfast.nebula.names import leave_names
from stepfast.nebula.settings import Settings
from stepfast.tags import number_in
from stepfast.torch.rng import get_rng_state, set_rng_state
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import OpenTag, TaggedCheckpoints
from stepfast.torch.writer import Saved

try:
    import deepspeed.runtime.engine
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
except ImportError as error:
    raise missing("deepspeed", error) from error

RNG = "stepfast.rng"  # beside DeepSpeed's own files: the random generators of the rank

_engines = Engines()
_replacing = threading.Lock()


@contextmanager
def replaced(name: str, ours: Any) -> Iterator[None]:
    """Has DeepSpeed's engine call ours by that name."""
    module: Any = deepspeed.runtime.engine
    with _replacing:
        theirs = getattr(module, name)
        setattr(module, name, ours)
        try:
            yield
        finally:
            setattr(module, name, theirs)


class StepfastCheckpointEngine(CheckpointEngine):
    """Saves what DeepSpeed gives it, by the files' names, under the tag; every rank commits every tag.

    It is not `decoupled` by DeepSpeed's word, which would have a checkpoint wait for the next optimizer step before it
    is staged: it is staged when `save_checkpoint` returns, and all that takes longer goes on without the ranks.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._settings, self._number = settings, 0
        self.next_step: int | None = None
        """What the next save is to become, if its tag says no number; None: the step after the last."""
        self.saved: Saved | None = None
        """The save that this rank made last."""
        self._info: CheckpointCommitInfo | None = None
        self._opened: OpenTag | None = None
        self._loading: tuple[Path, CommittedStep] | None = None  # the folder that stands for it
        self._moving: Moving | None = None  # while what another number of ranks has saved is loaded

    @staticmethod
    def adopt(checkpoints: TaggedCheckpoints) -> None:
        """Has all engines of the process save to these, which something else keeps and removes."""
        _engines.adopt(checkpoints)

    def serve(self, engine: Any) -> None:
        """Takes the place of what DeepSpeed's engine, which was made with this one, does by itself."""
        self._number = _engines.add()
        engine.load_checkpoint = functools.wraps(engine.load_checkpoint)(self._loads(engine, engine.load_checkpoint))
        engine.step = functools.wraps(engine.step)(self._steps(engine, engine.step))

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return _engines.checkpoints(self._settings)

    # ------------------------------------------------------------ saving

    def create(self, info: CheckpointCommitInfo) -> None:
        self._info, self._opened = info, None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)
        # Every rank makes sure of a checkpoint's folder; of a model that is exported it does not.
        if self._info is not None and self._opened is None and self._is_of_tag(path):
            tag = self._info.tag
            number = number_in(tag)
            self._opened = self.checkpoints.open(
                tag_in(self._info.save_dir, tag), begins_after=_engines.begun_at,
                step=self.next_step if number is None else number,
            )  # fmt: skip

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps the state until `commit`, and leaves a file of that name and no bytes. What belongs to no tag
        (`save_16bit_model`) is a real file.
        """
        if self._opened is None or not self._is_of_tag(os.path.dirname(path)):
            torch.save(state_dict, path)
            return
        # Nothing is trained between this and the commit.
        self._opened.put(os.path.basename(path), state_dict, copy=False)
        Path(path).touch(exist_ok=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Stages what was saved. False when memory is exhausted and the job skips what does not fit."""
        opened, self._opened, self._info = self._opened, None, None
        if opened is None:
            return True
        opened.put(RNG, get_rng_state(), copy=False)
        self.saved = opened.commit()
        return self.saved.saved

    def preserves_storage_sharing(self) -> bool:
        return False  # a view's own bytes are saved, not all that it is a view of

    def _is_of_tag(self, folder: str) -> bool:
        info = self._info
        return info is not None and os.path.abspath(folder) == os.path.abspath(os.path.join(info.save_dir, info.tag))

    # ------------------------------------------------------------ loading

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved by that name under that tag; a file that has bytes is what it is."""
        folder, name = Path(path).absolute().parent, os.path.basename(path)
        found = self._loading[1] if self._loading is not None and self._loading[0] == folder else None
        if found is None and _has_bytes(path):
            return torch.load(path, map_location=map_location, weights_only=False)
        found = found or _engines.find(self.checkpoints, os.path.dirname(os.path.dirname(path)), folder.name)
        if found is None:
            raise FileNotFoundError(f"{path}: neither a file nor a checkpoint {folder.name!r} of this job")
        if self._moving is not None and (of_rank := RankFile.parse(name)) is not None:
            return self._moving.load(of_rank)
        item = self.checkpoints.load(found.step, name, map_location)
        return self._moving.told(item) if self._moving is not None and name.endswith("model_states.pt") else item

    def _loads(self, engine: Any, load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's `load_checkpoint`, for checkpoints that are here."""
        arguments = inspect.signature(load_checkpoint)

        def load(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
            weights_only = bool(arguments.bind(load_dir, tag, *args, **kwargs).arguments.get("load_module_only"))
            found = _engines.find(self.checkpoints, load_dir, None if tag is None else str(tag))
            if found is None:
                return load_checkpoint(load_dir, tag, *args, **kwargs)
            folder = Path(load_dir, tag_of(found)).absolute()
            leave_names(self.checkpoints, found.step, folder, but=(RNG,))
            self._moving = Moving.begun(engine, self.checkpoints, found.step)
            if self._moving is not None:
                self._moving.leave_names(folder)
            self._loading = (folder, found)
            try:
                # With ZeRO 3 and no optimizer's state DeepSpeed would put the weights together out of the files.
                with replaced("get_fp32_state_dict_from_zero_checkpoint", lambda *_: self._whole_weights(found.step)):
                    result = load_checkpoint(load_dir, tag_of(found), *args, **kwargs)
                if not weights_only and self._has_own_rng(found.step):
                    set_rng_state(self.checkpoints.load(found.step, RNG))
            finally:
                self._loading = self._moving = None
            _engines.goes_on(self._number, found.step, weights_only=weights_only)
            return result

        return load

    def _whole_weights(self, step: int) -> dict[str, torch.Tensor]:
        names = self.checkpoints.names_of_all(step)
        return whole_weights(names, lambda name: self.checkpoints.load(step, name, "cpu"))

    def _has_own_rng(self, step: int) -> bool:
        """Another rank's would draw the same dropout for other data."""
        with self.checkpoints.reading(step) as steps:
            rank = self.checkpoints.environment.rank
            return rank in steps.ranks(step) and RNG in steps.names_of(step, rank)

    def _steps(self, engine: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's `step`, with a heartbeat after each that was an optimizer's."""

        def take(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = step(*args, **kwargs)
            if engine.global_steps != before:
                self.checkpoints.progress(engine.global_steps)
            return result

        return take

    def cleanup(self) -> None:
        """Waits until the newest checkpoint is committed."""
        self.checkpoints.close()


def _has_bytes(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


__all__ = ["StepfastCheckpointEngine", "replaced"]
