"""Hugging Face's Trainer with Stepfast's checkpoints: a class to put before it.

    class MyTrainer(StepfastTrainerMixin, Trainer): ...

    trainer = MyTrainer(model=model, args=TrainingArguments(output_dir="out", save_steps=100), train_dataset=data)
    trainer.train()     # goes on from the job's latest step, also where the disk is empty

What Trainer saves goes as named objects into one step, staged in memory, persisted while training goes on. In
`out/checkpoint-<n>` lies what says which step is meant, Trainer's own state and the random generators; Trainer's rules
(save_total_limit, load_best_model_at_end) go on working with these folders. `export` writes a regular checkpoint.

Needs transformers 5 or newer.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from stepfast.errors import CheckpointNotFound, StateUnsupported
from stepfast.integrations.missing import missing
from stepfast.integrations.pointers import Pointers, Scope, has_pointer, tag_of, write_file
from stepfast.integrations.process import check_together, checkpoints_of_process
from stepfast.step import MAX_STEP
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import OpenTag, TaggedCheckpoints
from stepfast.torch.writer import Saved

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise missing("transformers[torch]", error) from error

log = logging.getLogger("stepfast")

_trained_in: set[Path] = set()  # the folders whose trainings this process has begun

# What is in a step, by the names of Trainer's files; the weights are not any one file's.
MODEL, OPTIMIZER, SCHEDULER, SCALER, STATE = "model", "optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json"


class StepfastTrainerMixin(Trainer):
    """Before Trainer, or a class made of it: its checkpoints are steps of the job. Every rank trains, each of them with
    the whole model: one process, or DDP.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._folders: Pointers | None = None
        self._opened: OpenTag | None = None
        self.saved: Saved | None = None
        """The save that this rank made last."""
        self.step_loss: torch.Tensor | None = None
        """The loss of the step that is under way, of what this rank has seen of it."""
        super().__init__(*args, **kwargs)
        self.add_callback(StepfastCallback(self))

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return self._own_folders.checkpoints

    @property
    def _own_folders(self) -> Pointers:
        if self._folders is None or self._folders.checkpoints.is_closed:
            self._folders = Pointers(checkpoints_of_process())
        return self._folders

    # ------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. `resume_from_checkpoint`: None or True: the latest step of this output_dir, if it has one;
        False: from scratch; a folder, of a step or a real one: that. In a job that was restarted, resumed or resized
        since, each of them means the latest step. A second training of a process in one output_dir begins anew unless
        told otherwise.

        Returns when all is persisted. Raises StateUnsupported, CheckpointNotFound, CheckpointDamaged, StorageError.
        """
        self._check_supported()
        if self.hp_search_backend is None:
            resume_from_checkpoint = self._resume_point(resume_from_checkpoint)
            _trained_in.add(self._folder)
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        self._sweep()
        self._own_folders.finish()
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_folders.watching():  # where one checkpoint is kept, and the best, the last one goes
            return super()._finalize_training(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        # What Trainer adds up, too: each loss is a share of its step's.
        self.step_loss = loss.detach() if self.step_loss is None else self.step_loss + loss.detach()
        return loss

    def _check_supported(self) -> None:
        for is_on, what in (
            (self.is_deepspeed_enabled, "with DeepSpeed: train with stepfast.integrations.deepspeed.initialize"),
            (self.is_fsdp_enabled, "with FSDP: save its shards with stepfast.torch.dcp"),
            (getattr(self, "is_distributed_loading_by_transformers", False), "of a model that is sharded as it loads"),
            (
                self.args.push_to_hub and self.args.hub_strategy != "end",
                'that is pushed as it is saved: take hub_strategy="end"',
            ),
        ):
            if is_on:
                raise StateUnsupported(f"StepfastTrainerMixin saves no training {what}")
        hint = "Without a GPU its TrainingArguments want use_cpu=True"
        check_together(self.checkpoints.environment, self.args.world_size, "Trainer", hint)

    def _resume_point(self, asked: str | bool | None) -> Any:
        """The folder that Trainer is to go on from."""
        is_restarted = self.checkpoints.environment.is_restarted
        is_first = self._folder not in _trained_in  # else the latest step is the first training's
        is_named = isinstance(asked, str | os.PathLike)
        found = None
        if asked is True or (is_first and (asked is None or is_restarted)):
            found = self._latest(must_be=asked is True)
        if found is None and is_named:
            found = self._step_of(asked)
        if (found is not None or not is_first) and self._is_nodes_first:
            # What is newer than the step that training goes on from is superseded by the first save.
            last = found.step if found is not None and is_first else MAX_STEP
            own = {step.step: path for step, path in self._own_steps() if step.step <= last}
            present = self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            self._own_folders.make_again(lambda step: own.get(step.step), present)
        return asked if found is None else self._fill(found, asked)

    def _latest(self, *, must_be: bool) -> CommittedStep | None:
        """The step of this output_dir that the job goes on from. Steps of weights alone are none: what the optimizer
        knew would be gone. Raises CheckpointNotFound if `must_be` and there is no other.
        """

        def choose(steps: Sequence[CommittedStep]) -> CommittedStep | None:
            own = [found for found, _ in self._scope.own(steps)]
            whole = (found for found in reversed(own) if self._is_whole(found))
            return next(whole, None)

        found = self.checkpoints.latest(choose, trainer=str(self._folder))
        own = [step for step, _ in self._own_steps()]
        if own and (found is None or found.step < own[-1].step) and not self._is_whole(own[-1]):
            going_on = "from scratch" if found is None else f"with step {found.step}"
            told = f"step {own[-1].step} ({own[-1].tag}) has weights alone, by save_only_model: no training resumes it"
            if found is None and must_be:
                raise CheckpointNotFound(f"{told}; to begin with its weights, name its folder")
            log.warning("stepfast: %s; this one begins %s", told, going_on)
        elif found is None and (others := self._committed_tags()):
            log.warning("stepfast: %s begins from scratch: of it nothing is committed, but %s", self._folder, others)
        return found

    def _is_whole(self, found: CommittedStep) -> bool:
        """Whether training can go on from the step."""
        return OPTIMIZER in self.checkpoints.names_of_first(found.step)

    def _fill(self, found: CommittedStep, asked: Any) -> str:
        """Makes the step's folder what Trainer reads of it before it asks for anything; its path."""
        own = {step.step: path for step, path in self._own_steps()}
        folder = own.get(found.step, Path(asked) if isinstance(asked, str | os.PathLike) else None)
        if folder is None:
            raise AssertionError(f"step {found.step} ({found.tag}) is none of {self._folder}")
        self._own_folders.point(folder, found.step, found.tag)
        state = json.loads(_text(self.checkpoints.load(found.step, STATE)))
        if state.get("best_model_checkpoint"):
            # The job may be in another place than the one that it was saved from.
            state["best_model_checkpoint"] = str(Path(self.args.output_dir, Path(state["best_model_checkpoint"]).name))
        write_file(folder, STATE, json.dumps(state, indent=2, sort_keys=True).encode())
        if self._rng_name in self.checkpoints.names(found.step):
            write_file(folder, self._rng_name, _bytes(self.checkpoints.load(found.step, self._rng_name)))
        return str(folder)

    # ------------------------------------------------------------ saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None or self.hp_search_backend is not None:
            super()._save_checkpoint(model, trial)
            return
        folder = self._scope.path(self.state.global_step)
        self._opened = opened = self.checkpoints.open(tag_of(folder), step=self.state.global_step)
        try:
            # Each rank needs the folder: of the best one Trainer asks whether it is there.
            self._own_folders.point(folder, opened.step, opened.tag)
            with self._own_folders.watching():
                super()._save_checkpoint(model, trial)
            if self.is_world_process_zero():
                opened.put(STATE, _tensor(self._state_text(folder)), copy=False)
            self.saved = opened.commit()
        finally:
            self._opened = None
        self._own_folders.committed(self.saved)
        self._sweep()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._opened is None:
            super().save_model(output_dir, _internal_call)
        elif self.is_world_process_zero():
            self._opened.put(MODEL, self.model.state_dict(), copy=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._opened is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.is_world_process_zero():
            self._opened.put(OPTIMIZER, self.optimizer.state_dict(), copy=False)
            self._opened.put(SCHEDULER, self.lr_scheduler.state_dict(), copy=False)

    def _save_scaler(self, output_dir: str) -> None:
        if self._opened is None:
            super()._save_scaler(output_dir)
        elif self.is_world_process_zero() and getattr(self.accelerator, "scaler", None) is not None:
            self._opened.put(SCALER, self.accelerator.scaler.state_dict(), copy=False)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # a small file: Trainer knows the generators of each kind of device
        if self._opened is not None:
            self._opened.put(self._rng_name, _tensor(Path(output_dir, self._rng_name).read_bytes()), copy=False)

    def _state_text(self, folder: Path) -> bytes:
        """Trainer's own state, as it has written it; written again where its rules have removed the step's folder."""
        try:
            return Path(folder, STATE).read_bytes()
        except FileNotFoundError:
            with TemporaryDirectory(prefix="stepfast-") as other:
                self.state.save_to_json(os.path.join(other, STATE))
                return Path(other, STATE).read_bytes()

    def _sweep(self) -> None:
        if self.is_world_process_zero():
            self._own_folders.sweep()

    # ------------------------------------------------------------ loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        found = self._step_of(resume_from_checkpoint)
        if found is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(found, self.model if model is None else model)

    def _load_best_model(self) -> None:
        found = self._step_of(self.state.best_model_checkpoint)
        if found is None:
            super()._load_best_model()
        else:
            self._load_weights(found, self.model)

    def _load_weights(self, found: CommittedStep, model: Any) -> None:
        result = model.load_state_dict(self.checkpoints.load(found.step, MODEL, "cpu"), strict=False)
        self._issue_warnings_after_load(result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        found = self._step_of(checkpoint)
        if found is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif OPTIMIZER in self.checkpoints.names_of_first(found.step):  # not where save_only_model was set
            on_device = self.args.world_size > 1 and self.args.device.type != "cpu"
            location = self.args.device if on_device else "cpu"
            self.optimizer.load_state_dict(self.checkpoints.load(found.step, OPTIMIZER, location))
            self.lr_scheduler.load_state_dict(self.checkpoints.load(found.step, SCHEDULER))

    def _load_scaler(self, checkpoint: str | None) -> None:
        found = self._step_of(checkpoint)
        if found is None:
            super()._load_scaler(checkpoint)
        elif SCALER in self.checkpoints.names_of_first(found.step):
            self.accelerator.scaler.load_state_dict(self.checkpoints.load(found.step, SCALER))

    # ------------------------------------------------------------ out of the job

    def export(self, step: int, folder: str | os.PathLike[str]) -> None:
        """Writes a regular checkpoint of that global step, which `from_pretrained` and any Trainer's
        `resume_from_checkpoint` read. Rank 0 does it; other ranks only take part in the job.

        Raises CheckpointNotFound, CheckpointDamaged, StorageError.
        """
        checkpoints = self.checkpoints  # which every rank takes part in
        if not self.is_world_process_zero():
            return
        own = self._own_steps()
        found = next((found for found, path in reversed(own) if path == self._scope.path(step)), None)
        if found is None:
            there = ", ".join(path.name for _, path in own) or "none"
            raise CheckpointNotFound(f"global step {step} is not committed: {there} of {self._folder} are")
        load = checkpoints.load
        names = checkpoints.names_of_first(found.step)
        self._save(os.fspath(folder), state_dict=load(found.step, MODEL, "cpu"))
        for name in (OPTIMIZER, SCHEDULER, SCALER):
            if name in names:
                torch.save(load(found.step, name, "cpu"), os.path.join(folder, name))
        write_file(folder, STATE, _bytes(load(found.step, STATE)))
        for name in self._rng_names(found):
            write_file(folder, name, _bytes(load(found.step, name)))

    # ------------------------------------------------------------ inside

    @property
    def _rng_name(self) -> str:
        """Trainer's name for the file of this rank's generators."""
        return "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"

    def _rng_names(self, found: CommittedStep) -> list[str]:
        with self.checkpoints.reading(found.step) as steps:
            names = {name for rank in steps.ranks(found.step) for name in steps.names_of(found.step, rank)}
        return sorted(name for name in names if name.startswith("rng_state"))

    @property
    def _is_nodes_first(self) -> bool:
        return bool(self.is_local_process_zero())

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir).absolute()

    @property
    def _scope(self) -> Scope:
        return Scope(Path(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-")

    def _own_steps(self) -> list[tuple[CommittedStep, Path]]:
        return self._scope.own(self.checkpoints.steps())

    def _step_of(self, folder: Any) -> CommittedStep | None:
        """The step that a folder stands for; None for a real checkpoint, and for no folder."""
        if folder is None or (os.path.isdir(folder) and not has_pointer(folder)):
            return None
        return self._own_folders.find(folder, tag_of(folder), self._scope)

    def _committed_tags(self) -> str:
        return ", ".join(found.tag or str(found.step) for found in self.checkpoints.steps())


class StepfastCallback(TrainerCallback):
    """Tells the job's status of each step. A trainer that saves through Stepfast adds it by itself: then with the loss
    of each step, and a job that is to be stopped is saved before. Otherwise with what is logged.
    """

    def __init__(self, trainer: StepfastTrainerMixin | None = None) -> None:
        self._trainer = trainer
        self._logs: dict[str, Any] = {}
        self._is_last = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self._logs = dict(logs or {})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        metrics = dict(self._logs)
        if self._trainer is not None and self._trainer.step_loss is not None:
            metrics["loss"], self._trainer.step_loss = self._trainer.step_loss, None
        checkpoints = checkpoints_of_process()
        checkpoints.progress(state.global_step, metrics)
        if self._trainer is not None and checkpoints.is_last_step(state.global_step):
            self._is_last = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Not by ending the training: that would be in the checkpoint, and what follows the training would run.
        if self._is_last and self._trainer is not None and self._trainer.saved is not None:
            checkpoints_of_process().wait_to_be_stopped(self._trainer.saved.step)


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _bytes(item: torch.Tensor) -> bytes:
    return item.cpu().numpy().tobytes()


def _text(item: torch.Tensor) -> str:
    return _bytes(item).decode()


__all__ = ["StepfastCallback", "StepfastTrainerMixin"]
