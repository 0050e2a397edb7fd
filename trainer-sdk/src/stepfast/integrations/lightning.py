"""Lightning with Stepfast's checkpoints: a CheckpointIO, a strategy, a callback.

    io = StepfastCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[StepfastCallback(), ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(model, data, ckpt_path=io.latest_checkpoint("checkpoints"))

Where Lightning writes a checkpoint's file lies a small one that says which step it is; Lightning's own rules
(save_top_k, save_last, versions of names) go on working with these. What ModelCheckpoint lists is never removed by
retention, and what it removes goes when what replaced it is committed, never before.

Needs Lightning 2.5 or newer (`lightning`, or `pytorch_lightning`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepfast.environment import Environment, read_environment
from stepfast.errors import CheckpointNotFound, StepfastError
from stepfast.integrations.missing import missing
from stepfast.nebula.settings import Settings, make_settings
from stepfast.step import is_tag
from stepfast.torch.copying import MapLocation
from stepfast.torch.rng import get_rng_state, set_rng_state
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
from stepfast.torch.writer import Saved

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError:
    try:
        from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.strategies import DDPStrategy
    except ModuleNotFoundError as error:
        raise missing("lightning") from error

log = logging.getLogger("stepfast")

RNG = "stepfast.rng"  # beside Lightning's own keys: the random generators of the rank
_POINTER = "stepfast"  # the key of a pointer file's only entry
_POINTER_BYTES = 4096


class StepfastCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints as steps of the job. Files that are torch's own are read as such.

    every_rank: each rank calls it with each checkpoint, as `StepfastDDPStrategy` has it: then each rank's random
    generators are saved. Otherwise rank 0 alone does, as Lightning's other strategies have it.
    """

    def __init__(
        self, *, every_rank: bool = False, environment: Environment | None = None, settings: Settings | None = None
    ) -> None:
        self._sharing = Sharing.EVERY_RANK if every_rank else Sharing.THIS_RANK
        self._environment, self._settings = environment, settings
        self._made: TaggedCheckpoints | None = None
        self._newest: Saved | None = None
        self._removals: ThreadPoolExecutor | None = None
        self._saves: dict[int, Saved] = {}  # by step, until it is removed
        self._at_path: dict[str, int] = {}  # the newest step that this process saved under each tag
        self.rng: Any = None
        """The generators' state of the checkpoint that was loaded last; None when it has none of this rank."""
        self.is_epochs_end = False
        """Whether that checkpoint was made behind an epoch's last batch."""

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        if self._made is None or self._made.is_closed:
            environment = self._environment or read_environment()
            settings = self._settings or make_settings(None, None, None, os.environ)
            # ModelCheckpoint says what is kept: a best one may be older than all that retention would leave, and what
            # it lists must be there.
            environment = replace(settings.apply(environment, os.environ), max_to_keep=0)
            self._made = TaggedCheckpoints(sharing=self._sharing, environment=environment, persist_all=True)
        return self._made

    def latest_checkpoint(self, dirpath: str | os.PathLike[str] = "checkpoints") -> str | None:
        """A path for `trainer.fit(ckpt_path=…)`: of the step that the job goes on from, also on a disk that has seen
        nothing of it; None when there is none. Every rank calls it.
        """
        found = self.checkpoints.latest()
        if found is None:
            return None
        path = Path(dirpath, f"{Path(found.tag or f'global_step{found.step}').name}.ckpt")
        self._point(path, found.step, found.tag)
        return str(path)

    # ------------------------------------------------------------ Lightning's

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Stages the checkpoint in memory; it is persisted while training goes on."""
        checkpoints = self.checkpoints
        opened = checkpoints.open(_tag_of(path), step=_step_of(checkpoint))
        if checkpoints.environment.rank == 0 or self._sharing is not Sharing.EVERY_RANK:
            for name, item in checkpoint.items():
                opened.put(str(name), item, copy=False)
        opened.put(RNG, get_rng_state(), copy=False)
        self._newest = self._saves[opened.step] = opened.commit()
        if checkpoints.environment.rank == 0:
            self._point(Path(path), opened.step, opened.tag)
            self._later(self._sweep, opened.tag, opened.step, self._newest)

    def load_checkpoint(
        self, path: Any, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint that was saved at that path. Raises CheckpointNotFound, CheckpointDamaged,
        CheckpointUnsafe.
        """
        pointer = _read_pointer(path)
        if pointer is None and os.path.exists(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        found = self._find(path, pointer)
        names = self.checkpoints.names_of_first(found.step)
        location = "cpu" if map_location is None else map_location
        is_careful = bool(weights_only)
        checkpoint = {
            name: self.checkpoints.load(found.step, name, location, weights_only=is_careful)
            for name in names
            if name != RNG
        }
        own = self.checkpoints.names(found.step)
        self.rng = self.checkpoints.load(found.step, RNG) if RNG in own else None
        self.is_epochs_end = _is_epochs_end(checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the checkpoint once the newest one is committed: until then it is all that there may be."""
        pointer = _read_pointer(path)
        if pointer is None and os.path.exists(path):
            super().remove_checkpoint(path)
            return
        if pointer is not None:
            os.unlink(path)
            self._later(self._remove, int(pointer["step"]), self._newest)
        elif (found := self.checkpoints.find(_tag_of(path))) is not None:  # saved before the disk was lost
            self._later(self._remove, found.step, self._newest)

    def teardown(self) -> None:
        """Waits until all is persisted, and removed that was to be."""
        if self._newest is not None and self._newest.saved and self._made is not None and not self._made.is_closed:
            self._newest.wait()
        removals, self._removals = self._removals, None
        if removals is not None:
            removals.shutdown(wait=True)

    # ------------------------------------------------------------ inside

    def _later(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._removals is None:
            self._removals = ThreadPoolExecutor(1, thread_name_prefix="stepfast-removal")
        self._removals.submit(work, *arguments)

    def _sweep(self, tag: str, step: int, saved: Saved) -> None:
        """Removes what was saved at that path before, by whichever attempt, once it is replaced."""
        before, self._at_path[tag] = self._at_path.get(tag), step
        if before is not None:
            self._remove(before, saved)
            return
        for found in self.checkpoints.steps():
            if found.tag == tag and found.step < step:
                self._remove(found.step, saved)

    def _remove(self, step: int, successor: Saved | None) -> None:
        try:
            # The step itself too: the newest is persisted first, and what is not there yet cannot be removed.
            for saved in (self._saves.pop(step, None), successor):
                if saved is not None and saved.saved:
                    saved.wait()
            self.checkpoints.remove(step)
        except StepfastError as error:
            log.warning("stepfast: step %s was not removed: %s", step, error)

    def _find(self, path: Any, pointer: dict[str, Any] | None) -> CommittedStep:
        """The step that the path stands for; of one that was lost with its attempt, the newest of its tag."""
        steps = self.checkpoints.steps()
        wanted = int(pointer["step"]) if pointer is not None else None
        exact = [found for found in steps if found.step == wanted]
        tagged = [found for found in steps if found.tag == _tag_of(path)]
        if not exact and not tagged:
            raise CheckpointNotFound(
                f"{path} is no checkpoint of this job that is committed: go on from "
                "StepfastCheckpointIO.latest_checkpoint(), which is one"
            )
        return (exact or tagged)[-1]

    def _point(self, path: Path, step: int, tag: str) -> None:
        """Writes, whole or not at all, which step is at that path."""
        environment = self.checkpoints.environment
        about = {"step": step, "tag": tag, "job": str(environment.job), "storage": environment.storage_uri}
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.{environment.rank}")
        building.write_text(json.dumps({_POINTER: about}), encoding="utf-8")
        os.replace(building, path)


class StepfastDDPStrategy(DDPStrategy):
    """DDP that saves each rank's random generators with rank 0's checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("checkpoint_io", StepfastCheckpointIO(every_rank=True))
        super().__init__(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


class StepfastCallback(Callback):
    """Tells the job's status of each step, and puts the random generators where the loaded checkpoint had them."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the next epoch's data is shuffled.
        self._restore(trainer, at_epochs_end=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # In the middle of an epoch its data was shuffled before.
        self._restore(trainer, at_epochs_end=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, StepfastCheckpointIO):
            io.checkpoints.progress(trainer.global_step, trainer.callback_metrics)

    def _restore(self, trainer: Trainer, *, at_epochs_end: bool) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, StepfastCheckpointIO) and io.rng is not None and io.is_epochs_end is at_epochs_end:
            set_rng_state(io.rng)
            io.rng = None


def _tag_of(path: Any) -> str:
    """The path as seen from where the script runs: what is saved there again replaces what was."""
    text = os.path.relpath(path).removesuffix(".ckpt")
    return text if is_tag(text) else Path(text).name


def _step_of(checkpoint: dict[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def _is_epochs_end(checkpoint: dict[str, Any]) -> bool:
    try:
        return bool(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"])
    except (KeyError, TypeError):  # a checkpoint of weights alone
        return False


def _read_pointer(path: Any) -> dict[str, Any] | None:
    """What a pointer file says; None for anything else."""
    try:
        if os.path.getsize(path) > _POINTER_BYTES:
            return None
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    about = document.get(_POINTER) if isinstance(document, dict) else None
    return about if isinstance(about, dict) and isinstance(about.get("step"), int) else None


__all__ = ["StepfastCallback", "StepfastCheckpointIO", "StepfastDDPStrategy"]
