"""Hugging Face Accelerate with Stepfast's checkpoints: an Accelerator in the place of Accelerate's.

    accelerator = StepfastAccelerator(project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True))
    ...
    if accelerator.latest_checkpoint() is not None:
        accelerator.load_state()    # the job's latest step, also where the disk is empty
    ...
    accelerator.save_state()

What `save_state` writes as files goes as named objects into one step, staged in memory, persisted while training goes
on. In its folder lies what says which step is meant; Accelerate's rules (names, total_limit) go on working with these.

Needs accelerate 1 or newer.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from stepfast.errors import CheckpointNotFound, StateUnsupported
from stepfast.integrations.epochs import Epochs
from stepfast.integrations.missing import missing
from stepfast.integrations.pointers import (
    POINTER,
    Pointers,
    Scope,
    has_pointer,
    is_unfinished_pointer,
    number_at_end,
    path_of,
    remove_pointer,
    tag_of,
    write_file,
)
from stepfast.integrations.process import check_together, checkpoints_of_process
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import OpenTag, TaggedCheckpoints

try:
    from accelerate import Accelerator, checkpointing
    from accelerate.utils import save as save_as_accelerate
except ImportError as error:
    raise missing("accelerate", error) from error

EPOCHS, STEPS, FILES = "stepfast.epochs", "stepfast.steps", "files/"  # beside what Accelerate saves
_CUSTOM = "custom_checkpoint_"
_AUTOMATIC = "checkpoint_"
_UNSUPPORTED = {
    "DEEPSPEED": "with DeepSpeed: train with stepfast.integrations.deepspeed.initialize",
    "FSDP": "with FSDP: save its shards with stepfast.torch.dcp",
    "MEGATRON_LM": "with Megatron-LM: save with Accelerate's own Accelerator",
    "XLA": "on XLA: save with Accelerate's own Accelerator",
}  # fmt: skip
_swapping = threading.Lock()


class StepfastAccelerator(Accelerator):
    """Accelerate's, with the same arguments; its states are steps of the job. Every rank prepares, saves and loads.

    The job's status shows the loss at each `backward`, and what is given to `log` with a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._folders: Pointers | None = None
        self._epochs = Epochs()
        self._steps = 0  # how often gradients were complete
        super().__init__(*args, **kwargs)

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return self._begun().checkpoints

    def latest_checkpoint(self) -> str | None:
        """The folder of the step that the job goes on from, for `load_state`, made again where the disk is empty; None
        when there is none. Every rank calls it. Raises StorageError.
        """
        found = self._latest()
        return None if found is None else str(self._point(found))

    def is_last_step(self) -> bool:
        """Whether the job is to be stopped behind this step: then `save_state`, which waits until it is. Every rank
        asks behind each step; where none does, the next `save_state` is the last.
        """
        return self.checkpoints.is_last_step(self._steps)

    # ------------------------------------------------------------ Accelerate's

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """As Accelerate's; returns when the state is staged in memory. Raises StateUnsupported."""
        self._check_supported()
        folders, folder = self._begun(), self._folder_to_save(output_dir)
        opened = folders.checkpoints.open(tag_of(folder), step=self._steps or number_at_end(folder.name))
        has_hooks = bool(self._save_model_state_pre_hook)
        before = _files(folder) if has_hooks and self.is_local_main_process else {}
        if self._automatic_folder() is None and self.is_main_process:
            folders.look()
        saving = _ours(save=functools.partial(self._save, opened))
        with folders.watching(), saving, self._pointing_first(folder, opened):
            super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        if has_hooks:
            self._put_files(opened, folder, before)
        opened.put(EPOCHS, self._epochs.state(self._dataloaders, self.gradient_state.active_dataloader), copy=False)
        opened.put(STEPS, self._steps)
        folders.point(folder, opened.step, opened.tag)
        saved = opened.commit()
        folders.committed(saved)
        if self.is_main_process:
            folders.sweep()
        if folders.checkpoints.is_last_step(self._steps):
            folders.checkpoints.wait_to_be_stopped(saved.step)
        return str(folder)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """As Accelerate's; without a folder: the job's latest step. Folders that Accelerate itself has written are read
        as such. Raises CheckpointNotFound, CheckpointDamaged, StorageError.
        """
        self._check_supported()
        if input_dir is not None and os.path.isdir(input_dir) and not has_pointer(input_dir):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        found = self._find(input_dir)
        folder = self._point(found, input_dir)
        self._lay_out(found, folder)
        with _ours(load=functools.partial(self._load, found, self._rng_of(found))):
            super().load_state(str(folder), load_kwargs, **load_model_func_kwargs)
        self._steps = self.checkpoints.load(found.step, STEPS)
        if EPOCHS in self.checkpoints.names(found.step):
            self._epochs.restore(self.checkpoints.load(found.step, EPOCHS), self._dataloaders, self._models)
        automatic = self._automatic_folder()
        if automatic is not None:  # Accelerate saves into no folder that there is
            numbers = [number_at_end(path.name) for path in automatic.glob("*")]
            taken = [number for number in numbers if number is not None]
            self.project_configuration.iteration = max(taken, default=-1) + 1

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. Every rank calls it, and joins the job with it, should none of them have done so before."""
        self._begun()
        return super().prepare(*args, **kwargs)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().prepare_data_loader(*args, **kwargs)
        self._epochs.watch(loader)
        return loader

    def backward(self, loss: Any, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            self._steps += 1
            self.checkpoints.progress(self._steps, {"loss": loss.detach()})

    def log(self, values: Mapping[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        # The main process alone may log, and before the ranks have joined the job it would wait for the others.
        if self._folders is not None and not self._folders.checkpoints.is_closed:
            self._folders.checkpoints.progress(self._steps, values)
        super().log(values, step, *args, **kwargs)

    def end_training(self) -> None:
        """As Accelerate's, when all is persisted. Raises StorageUnavailable."""
        if self._folders is not None:
            self._folders.finish()
        super().end_training()

    # ------------------------------------------------------------ out of the job

    def export(self, checkpoint: str, folder: str | os.PathLike[str]) -> None:
        """Writes the state that was saved in the folder `checkpoint` as Accelerate would have, for any Accelerator's
        `load_state`. Rank 0 does it; other ranks only join the job. Raises CheckpointNotFound, StorageError.
        """
        self._begun()
        if not self.is_main_process:
            return
        found = self._find(checkpoint)
        os.makedirs(folder, exist_ok=True)
        with self.checkpoints.reading(found.step) as steps:
            names = {name for rank in steps.ranks(found.step) for name in steps.names_of(found.step, rank)}
        for name in sorted(names - {EPOCHS, STEPS}):
            item = self.checkpoints.load(found.step, name, "cpu")
            if name.startswith(FILES):
                _write(Path(folder), name, item)
            elif name.startswith("pytorch_model"):
                path = Path(folder, name.removeprefix("pytorch_")).with_suffix(".safetensors")
                save_as_accelerate(item, path, safe_serialization=True)
            else:
                torch.save(item, Path(folder, name))

    # ------------------------------------------------------------ inside

    def _begun(self) -> Pointers:
        """The job's folders, made again by one rank of each node, before any is looked for. Every rank calls it."""
        if self._folders is None or self._folders.checkpoints.is_closed:
            self._folders = Pointers(checkpoints_of_process())
            if self.is_local_main_process:
                self._make_folders_again(self._folders)
            self.wait_for_everyone()
        return self._folders

    def _make_folders_again(self, folders: Pointers) -> None:
        scope = self._scope()
        if scope is None:
            folders.make_again(lambda found: path_of(found.tag), ())
            return
        own = {found.step: path for found, path in scope.own(folders.checkpoints.steps())}
        folders.make_again(lambda found: own.get(found.step), scope.folder.glob("*"))
        last = max((number_at_end(path.name) or 0 for path in own.values()), default=-1)
        for path in scope.folder.glob(f"{_AUTOMATIC}*"):
            # Where a state is to be saved Accelerate suffers no folder.
            if (number_at_end(path.name) or 0) > last and _is_begun(path):
                remove_pointer(path)

    @contextmanager
    def _pointing_first(self, folder: Path, opened: OpenTag) -> Iterator[None]:
        """Has a new folder stand for its step before anything lies in it: what is killed then is known as lost."""
        if self._automatic_folder() is None:  # what it stands for already counts until the new one is saved
            yield
            return
        handle = self.register_save_state_pre_hook(lambda *_: self._begun().point(folder, opened.step, opened.tag))
        self._save_model_state_pre_hook.move_to_end(handle.id, last=False)
        try:
            yield
        finally:
            handle.remove()

    def _check_supported(self) -> None:
        what = _UNSUPPORTED.get(str(self.distributed_type.value))
        if what is not None:
            raise StateUnsupported(f"StepfastAccelerator saves no training {what}")
        environment = self.checkpoints.environment
        check_together(environment, self.num_processes, "Accelerate", "Without a GPU it wants cpu=True")

    def _automatic_folder(self) -> Path | None:
        is_automatic = self.project_configuration.automatic_checkpoint_naming
        return Path(self.project_dir, "checkpoints") if is_automatic else None

    def _folder_to_save(self, output_dir: str | None) -> Path:
        automatic = self._automatic_folder()
        if automatic is not None:
            return automatic / f"{_AUTOMATIC}{self.save_iteration}"
        if output_dir is None:
            raise ValueError("save_state needs an output_dir where automatic_checkpoint_naming is off")
        return Path(output_dir)

    def _scope(self) -> Scope | None:
        """Of the job's steps this project's; None where folders are named by the script."""
        automatic = self._automatic_folder()
        return None if automatic is None else Scope(automatic, _AUTOMATIC)

    def _folder_of(self, found: CommittedStep) -> Path | None:
        scope = self._scope()
        if scope is None:
            return path_of(found.tag)
        own = scope.own(self.checkpoints.steps())
        return next((path for step, path in own if step.step == found.step), None)

    def _latest(self) -> CommittedStep | None:
        checkpoints, scope = self.checkpoints, self._scope()
        if scope is None:
            return checkpoints.latest()

        def choose(steps: Sequence[CommittedStep]) -> CommittedStep | None:
            own = scope.own(steps)
            return own[-1][0] if own else None

        return checkpoints.latest(choose, trainer=str(scope.folder.absolute()))

    def _find(self, input_dir: str | None) -> CommittedStep:
        folders = self._begun()
        if input_dir is None:
            found = self._latest()
        else:
            folder = Path(os.path.expanduser(input_dir))
            found = folders.find(folder, tag_of(folder), self._scope())
        if found is None:
            raise CheckpointNotFound(
                f"{input_dir or 'the latest state'} is no checkpoint of this job that is committed: "
                "StepfastAccelerator.latest_checkpoint() names one, or None when there is none"
            )
        return found

    def _point(self, found: CommittedStep, input_dir: str | None = None) -> Path:
        folder = self._folder_of(found) if input_dir is None else Path(os.path.expanduser(input_dir))
        if folder is None:
            raise CheckpointNotFound(f"step {found.step} ({found.tag or 'no tag'}) is no state of this Accelerator")
        self._begun().point(folder, found.step, found.tag)
        return folder

    def _save(self, opened: OpenTag, item: Any, path: Any, *_: Any, of_rank: bool = False, **__: Any) -> None:
        """What Accelerate saves, which most often is rank 0's to save."""
        if of_rank or self.is_main_process:
            opened.put(_name_of(path), item, copy=False)

    def _load(self, found: CommittedStep, rng: Any, path: Any, map_location: Any = None, **_: Any) -> Any:
        name = _name_of(path)
        return rng if name == self._rng_name else self.checkpoints.load(found.step, name, map_location)

    def _rng_of(self, found: CommittedStep) -> Any:
        """This rank's; None when the step has none of it. Read here: Accelerate makes nothing of an error."""
        own = self.checkpoints.names(found.step)
        return self.checkpoints.load(found.step, self._rng_name) if self._rng_name in own else None

    @property
    def _rng_name(self) -> str:
        return f"random_states_{self.process_index}.pkl"

    def _put_files(self, opened: OpenTag, folder: Path, before: dict[str, int]) -> None:
        """What hooks have written into the folder, on each node what lies on its disk."""
        self.wait_for_everyone()
        if self.is_local_main_process:
            for name, changed in _files(folder).items():
                if before.get(name) == changed:
                    continue
                with suppress(FileNotFoundError):  # what is gone by now is not in the folder
                    content = bytearray((folder / name).read_bytes())
                    opened.put(f"{FILES}{name}", torch.frombuffer(content, dtype=torch.uint8) if content else None)

    def _lay_out(self, found: CommittedStep, folder: Path) -> None:
        """What is looked for in the folder before anything is loaded: names of custom objects, and files of hooks."""
        for name in self.checkpoints.names_of_first(found.step):
            if name.startswith(_CUSTOM):
                (folder / name).touch(exist_ok=True)
            elif name.startswith(FILES):
                _write(folder, name, self.checkpoints.load(found.step, name))


class _Torch:
    """torch, as Accelerate sees it while it saves a state."""

    def __init__(self, save: Callable[..., None]) -> None:
        self.save = save

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _ours(*, save: Callable[..., None] | None = None, load: Callable[..., Any] | None = None) -> Iterator[None]:
    """Has Accelerate's own saving and loading of states go through these, for as long as one is saved or loaded."""
    module: Any = checkpointing
    changed: dict[str, Any] = {}
    if save is not None:
        # What it gives to torch itself is each rank's own: generators, scaler, dataloaders.
        changed = {"save": save, "torch": _Torch(functools.partial(save, of_rank=True))}
    if load is not None:

        def load_model(model: Any, path: Any, device: Any = "cpu", **kwargs: Any) -> None:
            model.load_state_dict(load(path, map_location=device), **kwargs)

        changed = {"load": load, "load_model": load_model}
    with _swapping:
        theirs = {name: getattr(module, name) for name in changed}
        vars(module).update(changed)
        try:
            yield
        finally:
            vars(module).update(theirs)


def _name_of(path: Any) -> str:
    """One name for a model's weights, whatever the format of their file: `pytorch_model_1.bin`."""
    name = Path(path).name
    if name.endswith(".safetensors"):
        return f"pytorch_{name.removesuffix('.safetensors')}.bin"
    return name


def _is_begun(folder: Path) -> bool:
    """Whether its save was killed before the folder stood for a step."""
    try:
        return all(map(is_unfinished_pointer, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):  # another node that has the folder, too, may have removed it
        return False


def _files(folder: Path) -> dict[str, int]:
    """What lies in the folder but Stepfast's own, and when it was changed."""
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names if name != POINTER and not is_unfinished_pointer(name)):
            with suppress(FileNotFoundError):  # another rank's hook is at work there
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    found[str(path.relative_to(folder))] = about.st_mtime_ns
    return found


def _write(folder: Path, name: str, item: torch.Tensor | None) -> None:
    path = folder / name.removeprefix(FILES)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path.parent, path.name, b"" if item is None else item.cpu().numpy().tobytes())


__all__ = ["StepfastAccelerator"]
