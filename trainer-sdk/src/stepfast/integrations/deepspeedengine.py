"""DeepSpeed's checkpoint engine, by Stepfast."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stepfast.errors import StateUnsupported
from stepfast.integrations.deepspeedengines import Engines
from stepfast.integrations.deepspeedfolder import has_bytes, leave_name, write_latest
from stepfast.integrations.deepspeedmoving import Moving
from stepfast.integrations.deepspeedranks import RankFile
from stepfast.integrations.deepspeedtags import tag_in, tag_of
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
_ON_NVME = (
    "offload_optimizer to NVMe: DeepSpeed leaves its swap files on this node's disk, where nothing persists them: "
    'offload to the CPU, or keep DeepSpeed\'s checkpoints by "nebula": {"enabled": false}'
)

_engines = Engines()
_replacing = threading.RLock()  # what loads may load something else


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


def check_offload(configuration: Mapping[str, Any]) -> None:
    """Before DeepSpeed builds what an optimizer on NVMe needs. Raises StateUnsupported."""
    zero = configuration.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) and zero.get("stage") == 3 else None
    if isinstance(offload, Mapping) and offload.get("device") == "nvme":
        raise StateUnsupported(_ON_NVME)


class StepfastCheckpointEngine(CheckpointEngine):
    """Saves what DeepSpeed gives it, by the files' names, under the tag; every rank commits every tag.

    It is not `decoupled` by DeepSpeed's word, which would have a checkpoint wait for the next optimizer step before it
    is staged: it is staged when `save_checkpoint` returns, and all that takes longer goes on without the ranks.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.name = type(self).__name__
        _engines.check(settings)
        self._settings, self._number = settings, 0
        self.next_step: int | None = None
        """What the next save is to become, if its tag says no number; None: the step after the last."""
        self.saved: Saved | None = None
        """The save that this rank made last."""
        self._info: CheckpointCommitInfo | None = None
        self._is_saving = self._names_latest = False  # within save_checkpoint, which is to name the latest
        self._opened: OpenTag | None = None
        self._paths: list[str] = []  # of what was put in
        self._loading: tuple[Path, CommittedStep] | None = None  # the folder that stands for it
        self._moving: Moving | None = None  # while what another number of ranks has saved is loaded

    @staticmethod
    def adopt(checkpoints: TaggedCheckpoints) -> None:
        """Has all engines of the process save to these, which something else keeps and removes."""
        _engines.adopt(checkpoints)

    def serve(self, engine: Any) -> None:
        """Takes the place of what DeepSpeed's engine, which was made with this one, does by itself. Raises SpecError,
        StateUnsupported.
        """
        if engine.zero_nvme_offload_optimizer():  # however the configuration has said it
            raise StateUnsupported(_ON_NVME)
        self._number = _engines.add(self._settings)
        for name, wrap in (
            ("load_checkpoint", self._loads), ("save_checkpoint", self._saves),
            # Which a pipeline's engine, too, takes each step by.
            ("_take_model_step", self._steps), ("destroy", self._ends),
        ):  # fmt: skip
            theirs = getattr(engine, name)
            setattr(engine, name, functools.wraps(theirs)(wrap(engine, theirs)))

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return _engines.checkpoints

    def _ends(self, engine: Any, destroy: Callable[[], None]) -> Callable[[], None]:
        def end() -> None:
            _engines.remove(self._number)
            destroy()

        return end

    # ------------------------------------------------------------ saving

    def _saves(self, engine: Any, save_checkpoint: Callable[..., bool]) -> Callable[..., bool]:
        """DeepSpeed's `save_checkpoint`, that says False of what is not saved, and does not call it the latest."""
        arguments = inspect.signature(save_checkpoint)

        def save(*args: Any, **kwargs: Any) -> bool:
            bound = arguments.bind(*args, **kwargs)
            bound.apply_defaults()
            self._names_latest, bound.arguments["save_latest"] = bool(bound.arguments["save_latest"]), False
            self._is_saving, self.saved = True, None
            try:
                result = save_checkpoint(*bound.args, **bound.kwargs)
            finally:
                self._is_saving, self._info, self._opened, self._paths = False, None, None, []
            return result and self._has_saved

        return save

    @property
    def _has_saved(self) -> bool:
        return self.saved is not None and self.saved.saved

    def create(self, info: CheckpointCommitInfo) -> None:
        self._info, self._opened, self._paths = info, None, []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps the state until `commit`. What belongs to no tag (`save_16bit_model`) is a real file."""
        if self._info is None or not self._is_saving or not self._is_of_tag(os.path.dirname(path)):
            torch.save(state_dict, path)
            return
        # Nothing is trained between this and the commit.
        self._open(self._info).put(os.path.basename(path), state_dict, copy=False)
        self._paths.append(path)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Stages what was saved, and leaves files of these names and no bytes. False when memory is exhausted and the
        job skips what does not fit: then no file is touched.
        """
        if not self._is_saving:
            return True
        opened = self._open(info)
        opened.put(RNG, get_rng_state(), copy=False)
        self.saved = opened.commit()
        if not self.saved.saved:
            return False
        for path in self._paths:
            leave_name(path)
        if self._names_latest and self.checkpoints.environment.rank == 0:
            write_latest(info.save_dir, info.tag)
        _engines.saved(opened.tag, self.saved, self._settings)
        return True

    def _open(self, info: CheckpointCommitInfo) -> OpenTag:
        """Every rank opens the tag: at the latest when it commits."""
        if self._opened is None:
            number = number_in(info.tag)
            self._opened = self.checkpoints.open(
                tag_in(info.save_dir, info.tag), begins_after=_engines.begun_at,
                step=self.next_step if number is None else number,
            )  # fmt: skip
            _engines.begins()
        return self._opened

    def preserves_storage_sharing(self) -> bool:
        return False  # a view's own bytes are saved, not all that it is a view of

    def _is_of_tag(self, folder: str) -> bool:
        info = self._info
        return info is not None and os.path.abspath(folder) == os.path.abspath(os.path.join(info.save_dir, info.tag))

    # ------------------------------------------------------------ loading

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved by that name in the step that is loaded; otherwise a file that has bytes."""
        folder, name = Path(path).absolute().parent, os.path.basename(path)
        if self._loading is None or self._loading[0] != folder:
            # Never a step that this rank would look up by itself: rank 0 says what is loaded.
            if not has_bytes(path):
                raise FileNotFoundError(f"{path} has no bytes: what it stands for is read by load_checkpoint alone")
            return torch.load(path, map_location=map_location, weights_only=False)
        if self._moving is not None and (of_rank := RankFile.parse(name)) is not None:
            return self._moving.load(of_rank)
        item = self.checkpoints.load(self._loading[1].step, name, map_location)
        return self._moving.told(item) if self._moving is not None and name.endswith("model_states.pt") else item

    def _loads(self, engine: Any, load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's `load_checkpoint`, for checkpoints that are here."""
        arguments = inspect.signature(load_checkpoint)

        def load(*args: Any, **kwargs: Any) -> Any:
            bound = arguments.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if engine.load_universal_checkpoint():
                return load_checkpoint(*bound.args, **bound.kwargs)
            tag = None if given["tag"] is None else str(given["tag"])
            found = _engines.find(given["load_dir"], tag)
            if not isinstance(found, CommittedStep):
                given["tag"] = found
                return (None, None) if found is None else load_checkpoint(*bound.args, **bound.kwargs)
            given["tag"] = tag = tag or tag_of(found)
            weights_only = bool(given["load_module_only"])
            takes_optimizer = given["load_optimizer_states"] and not weights_only
            folder = Path(given["load_dir"], tag).absolute()
            try:
                leave_names(self.checkpoints, found.step, folder, but=(RNG,))
                self._moving = Moving.begun(engine, self.checkpoints, found.step, with_optimizer=takes_optimizer)
                if self._moving is not None:
                    self._moving.leave_names(folder)
                self._loading = (folder, found)
                # With ZeRO 3 and no optimizer's state DeepSpeed would put the weights together out of the files.
                with replaced("get_fp32_state_dict_from_zero_checkpoint", lambda *_: self._whole_weights(found.step)):
                    result = load_checkpoint(*bound.args, **bound.kwargs)
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
        """DeepSpeed's step of the optimizer, with a heartbeat after each."""

        def take(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = step(*args, **kwargs)
            if engine.global_steps != before:
                self.checkpoints.progress(engine.global_steps)
            return result

        return take

    def cleanup(self) -> None:
        """Waits until the newest checkpoint is committed."""
        _engines.finish()


__all__ = ["StepfastCheckpointEngine", "check_offload", "replaced"]
