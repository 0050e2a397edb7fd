"""Lightning's CheckpointIO, by Stepfast: where a checkpoint's file would be lies one that says which step it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfast.environment import absolute_storage_uri
from stepfast.errors import StateUnsupported
from stepfast.integrations.lightningnames import TorchCheckpointIO
from stepfast.integrations.pointers import Pointers, has_pointer, path_of, tag_of
from stepfast.integrations.process import checkpoints_of_process
from stepfast.nebula.settings import Settings
from stepfast.torch.copying import MapLocation
from stepfast.torch.dcp.metadata import METADATA
from stepfast.torch.rng import get_rng_state
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
from stepfast.torch.writer import Saved

log = logging.getLogger("stepfast")

RNG = "stepfast.rng"  # beside Lightning's own keys: the random generators of each rank, by `rng_of`
WEIGHTS_ALONE = "stepfast.weights_alone"  # beside them where no training can go on from the checkpoint
SUFFIX = ".ckpt"
_OPTIONS = {"is_best", "persist_path"}  # Nebula's


class StepfastCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints as steps of the job. Files that are torch's own are read as such.

    every_rank: each rank calls it with each checkpoint, as Stepfast's strategies have it: then each rank's random
    generators are saved. Otherwise rank 0 alone does, as Lightning's own strategies have it.
    """

    in_folders = False
    """Whether Lightning's checkpoints are folders, not files."""

    def __init__(self, *, every_rank: bool = False, settings: Settings | None = None) -> None:
        self._sharing = Sharing.EVERY_RANK if every_rank else Sharing.THIS_RANK
        self._settings = settings
        self._made: Pointers | None = None
        self.saved: Saved | None = None
        """The save that this rank made last."""
        self.rng: Any = None
        """The generators' state of the checkpoint that was loaded last; None when it has none of this rank."""
        self.is_epochs_end = False
        """Whether that checkpoint was made behind an epoch's last batch."""

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, in this process or another: what it is told, and nothing of what it has done."""
        return {**vars(self), "_made": None, "saved": None, "rng": None}

    def configure(self, settings: Settings) -> None:
        """What nobody has said yet, before the first checkpoint; what comes later is said not to be used."""
        if self._made is None:
            self._settings = self._settings or settings
        else:
            settings.apply(self.checkpoints.environment, os.environ)

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return self.pointers.checkpoints

    @property
    def pointers(self) -> Pointers:
        """The files that stand for steps; made again where the disk has none of them."""
        if self._made is None or self._made.checkpoints.is_closed:
            self._made = Pointers(checkpoints_of_process(self._sharing, self._settings), in_folders=self.in_folders)
            if self._made.checkpoints.environment.local_rank == 0:
                paths = map(self.path_of, self._made.checkpoints.steps())
                folders = {path.parent for path in paths if path is not None}
                self._made.make_again(self.path_of, [file for folder in folders for file in folder.glob(f"*{SUFFIX}")])
        return self._made

    def latest_checkpoint(self, dirpath: str | os.PathLike[str] | None = None) -> str | None:
        """A path for `trainer.fit(ckpt_path=…)`: of the step that training goes on from, also on a disk that has seen
        nothing of it; None when there is none. What was saved with `save_weights_only` is none. Every rank calls it.
        Raises CheckpointDamaged; the next attempt is told of an older one.

        dirpath: what was saved there, or in a folder in there; None: anywhere, by whichever of the job's Trainers.
        """
        found = self._latest(None if dirpath is None else os.path.relpath(dirpath))
        if found is None:
            return None
        path = self.path_of(found) or Path(f"global_step{found.step}{SUFFIX}")
        self.pointers.point(path, found.step, found.tag)
        return str(path)

    def export_checkpoint(self, path: Any, to: str | os.PathLike[str]) -> None:
        """Writes the checkpoint that was saved at that path as the file that Lightning itself would have written: for
        `load_from_checkpoint`, and for trainings without Stepfast. Raises FileNotFoundError, CheckpointDamaged,
        StateUnsupported for shards.
        """
        checkpoint = self._read(self.find(path), "cpu", weights_only=False)
        super().save_checkpoint(checkpoint, to)

    # ------------------------------------------------------------ Lightning's

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Stages the checkpoint in memory; it is persisted while training goes on.

        `storage_options`: Nebula's, `is_best` and `persist_path`, of which neither is needed: every checkpoint is
        persisted, in the job's storage. Raises TypeError for others.
        """
        self.check_options(storage_options)
        opened = self.checkpoints.open(self.tag_of(path), step=step_of(checkpoint))
        if self.checkpoints.environment.rank == 0 or self._sharing is not Sharing.EVERY_RANK:
            for name, item in checkpoint.items():
                opened.put(str(name), item, copy=False)
            for name in marks_of(checkpoint):
                opened.put(name, True)
        opened.put(rng_of(self.checkpoints.environment.rank), get_rng_state(), copy=False)
        self.saved_at(path, opened.commit(), opened.tag)

    def load_checkpoint(
        self, path: Any, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint that was saved at that path, by whichever rank. Raises FileNotFoundError, CheckpointDamaged,
        CheckpointUnsafe.
        """
        if os.path.exists(path) and not has_pointer(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        found = self.find(path)
        checkpoint = self._read(found, "cpu" if map_location is None else map_location, weights_only=bool(weights_only))
        own = rng_of(self.checkpoints.environment.rank)
        is_there = own in self.checkpoints.names(found.step)
        self.loaded(checkpoint, self.checkpoints.load(found.step, own, weights_only=True) if is_there else None)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the checkpoint once the newest one is committed: until then it is all that there may be."""
        try:
            is_file = os.path.exists(path) and not has_pointer(path)
        except OSError as error:
            log.warning("stepfast: what %s stands for cannot be read, so it stays: %s", path, error)
            return
        if is_file:
            super().remove_checkpoint(path)
        else:
            self.pointers.remove(path, self.tag_of(path))

    def teardown(self) -> None:
        """Waits until all is persisted, and removed that was to be."""
        if self._made is not None:
            self._made.finish()

    # ------------------------------------------------------------ what strategies need

    def tag_of(self, path: Any) -> str:
        """The path as seen from where the script runs: what is saved there again replaces what was."""
        return tag_of(path, SUFFIX)

    def path_of(self, found: CommittedStep) -> Path | None:
        """Where that step was saved; None where that cannot be told."""
        return path_of(found.tag, SUFFIX)

    def check_options(self, options: Any) -> None:
        """Raises TypeError for `storage_options` that nobody knows."""
        if options is None:
            return
        if not isinstance(options, Mapping) or not options.keys() <= _OPTIONS:
            raise TypeError(f"storage_options may say {' and '.join(sorted(_OPTIONS))}; these are {options!r}")
        asked, uri = options.get("persist_path"), self.checkpoints.environment.storage_uri
        if asked is not None and absolute_storage_uri(str(asked)) != uri:
            log.warning("stepfast: persist_path %r is not used: this job's storage is %s", asked, uri)

    def saved_at(self, path: Any, saved: Saved, tag: str) -> None:
        """Has the path stand for a step that this rank has just saved, and removes what it stood for before."""
        self.saved = saved
        self.pointers.committed(saved)
        if self.checkpoints.environment.rank == 0:
            self.pointers.point(path, saved.step, tag)
            self.pointers.sweep()

    def loaded(self, checkpoint: Mapping[str, Any], rng: Any) -> None:
        """Tells what training goes on from; `rng`: this rank's generators there."""
        self.rng = rng
        try:
            self.is_epochs_end = bool(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"])
        except (KeyError, TypeError):  # a checkpoint of weights alone
            self.is_epochs_end = False

    def find(self, path: Any) -> CommittedStep:
        """The step that the path stands for. Raises FileNotFoundError, as Lightning's own."""
        self._settle(self.tag_of(path))
        found = self.pointers.find(path, self.tag_of(path))
        if found is None:
            raise FileNotFoundError(
                f"Checkpoint file not found: {path} is no checkpoint of this job that is committed: go on from "
                "StepfastCheckpointIO.latest_checkpoint(), which is one"
            )
        return found

    # ------------------------------------------------------------ inside

    def _latest(self, folder: str | None) -> CommittedStep | None:
        self._settle()
        newest = self.checkpoints.latest()
        for found in reversed(self.checkpoints.steps()):
            path = self.path_of(found)
            is_there = folder is None or (path is not None and path.is_relative_to(folder))
            if newest is None or found.step > newest.step or not is_there:
                continue
            if not found.tag or WEIGHTS_ALONE not in self.checkpoints.names_of_first(found.step):
                return found
            log.warning(
                "stepfast: step %s (%s) holds weights alone: no training goes on from it", found.step, found.tag
            )
        return None

    def _settle(self, tag: str | None = None) -> None:
        """What rank 0 has just saved is there for the other ranks too."""
        if self._sharing is Sharing.THIS_RANK:
            self.checkpoints.settle(tag)

    def _read(self, found: CommittedStep, location: MapLocation, *, weights_only: bool) -> dict[str, Any]:
        names = self.checkpoints.names_of_first(found.step)
        if METADATA in names:
            raise StateUnsupported(
                f"step {found.step} ({found.tag}) was saved by its shards: load it with the strategy"
            )
        return {
            name: self.checkpoints.load(found.step, name, location, weights_only=weights_only)
            for name in names
            if name != WEIGHTS_ALONE and not name.startswith(RNG)
        }


def step_of(checkpoint: Mapping[str, Any]) -> int | None:
    """The step that a checkpoint of a training is to become."""
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def marks_of(checkpoint: Mapping[str, Any]) -> list[str]:
    """What says, by its name alone, what a step is no good for."""
    is_trainers = "pytorch-lightning_version" in checkpoint
    return [WEIGHTS_ALONE] if is_trainers and "optimizer_states" not in checkpoint else []


def rng_of(rank: int) -> str:
    """The name of that rank's random generators; another's would draw the same dropout for other data."""
    return f"{RNG}.{rank}"


__all__ = ["SUFFIX", "StepfastCheckpointIO", "marks_of", "rng_of", "step_of"]
