"""DeepSpeed with Stepfast's checkpoints: `initialize` in the place of `deepspeed.initialize`.

What `save_checkpoint` writes as files goes as named objects into one step, staged in memory, persisted while training
goes on; `load_checkpoint` finds it wherever the job runs next, with nothing on its disk. The files' names stay, of no
bytes, where DeepSpeed looks for them. The `nebula` block that DeepSpeed removed is taken again.

Needs DeepSpeed 0.19.7 or newer, whose `CheckpointEngine` is implemented here.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stepfast.environment import read_environment
from stepfast.errors import SpecError, StateUnsupported
from stepfast.integrations.deepspeedexport import export_checkpoint
from stepfast.integrations.deepspeedranks import RankFile, check_movable, layout_of, moved, old_layout, saved_ranks
from stepfast.integrations.missing import missing
from stepfast.nebula.names import leave_names
from stepfast.nebula.settings import Settings, make_settings
from stepfast.torch.rng import get_rng_state, set_rng_state
from stepfast.torch.sources import CommittedStep
from stepfast.torch.tagged import OpenTag, Sharing, TaggedCheckpoints

try:
    import deepspeed
    import deepspeed.runtime.engine
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
except ModuleNotFoundError as error:
    raise missing("deepspeed") from error

log = logging.getLogger("stepfast")

RNG = "stepfast.rng"  # beside DeepSpeed's own files: the random generators of the rank
_NEBULA_KEYS = {
    "enabled", "persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention",
    "enable_nebula_load", "load_path",
}  # fmt: skip
_swapping = threading.Lock()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """As `deepspeed.initialize`, with the same arguments and result; its engine's checkpoints are Stepfast's.

    The configuration may have a `nebula` block: `persistent_storage_path` (where there is no launcher that names the
    job's storage), `persistent_time_interval` in seconds, `num_of_version_in_retention`; with `enabled: false` the
    engine's checkpoints stay DeepSpeed's own. Every rank calls it. Raises SpecError.
    """
    kwargs = dict(kwargs)
    configuration, take = _configuration(args, kwargs)
    block = configuration.pop("nebula", None) if configuration is not None else None
    if configuration is not None:
        take(configuration)
    settings = _settings(block)
    if settings is None:
        return deepspeed.initialize(*args, **kwargs)
    with _our_engine(settings) as made:
        result = deepspeed.initialize(*args, **kwargs)
    engine = result[0]
    engine.load_checkpoint = functools.wraps(engine.load_checkpoint)(made[0].loading(engine, engine.load_checkpoint))
    engine.step = functools.wraps(engine.step)(made[0].stepping(engine, engine.step))
    return result


class StepfastCheckpointEngine(CheckpointEngine):
    """Saves what DeepSpeed gives it, by the files' names, under the tag; every rank commits every tag.

    It is not `decoupled` by DeepSpeed's word, which would have a checkpoint wait for the next optimizer step before it
    is staged: it is staged when `save_checkpoint` returns, and all that takes longer goes on without the ranks.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._checkpoints = _checkpoints_of_process(settings)
        self._info: CheckpointCommitInfo | None = None
        self._opened: OpenTag | None = None
        self._loading: tuple[str, CommittedStep] | None = None
        self._moving: Moving | None = None  # while what another number of ranks has saved is loaded

    @property
    def checkpoints(self) -> TaggedCheckpoints:
        """This rank's."""
        return self._checkpoints

    # ------------------------------------------------------------ saving

    def create(self, info: CheckpointCommitInfo) -> None:
        self._info, self._opened = info, None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)
        # Every rank makes sure of a checkpoint's folder; of a model that is exported it does not.
        if self._info is not None and self._opened is None and self._is_of_tag(path):
            self._opened = self._checkpoints.open(self._info.tag)

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
        return opened.commit().saved

    def preserves_storage_sharing(self) -> bool:
        return False  # a view's own bytes are saved, not all that it is a view of

    def _is_of_tag(self, folder: str) -> bool:
        info = self._info
        return info is not None and os.path.abspath(folder) == os.path.abspath(os.path.join(info.save_dir, info.tag))

    # ------------------------------------------------------------ loading

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved by that name under that tag; a file that has bytes is what it is."""
        tag, name = os.path.basename(os.path.dirname(path)), os.path.basename(path)
        found = self._loading[1] if self._loading is not None and self._loading[0] == tag else None
        if found is None and _has_bytes(path):
            return torch.load(path, map_location=map_location, weights_only=False)
        found = found or self._checkpoints.find(tag)
        if found is None:
            raise FileNotFoundError(f"{path}: neither a file nor a checkpoint {tag!r} of this job")
        if self._moving is not None and (of_rank := RankFile.parse(name)) is not None:
            return self._moving.load(of_rank)
        item = self._checkpoints.load(found.step, name, map_location)
        return self._moving.told(item) if self._moving is not None and name.endswith("model_states.pt") else item

    def loading(self, engine: Any, load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's `load_checkpoint`, for checkpoints that are here."""

        def load(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
            found = self._checkpoints.latest() if tag is None else self._checkpoints.find(str(tag))
            if found is None:
                return load_checkpoint(load_dir, tag, *args, **kwargs)
            own_tag = leave_names(self._checkpoints, found, load_dir, but=(RNG,))
            self._moving = Moving.begun(engine, self._checkpoints, found.step)
            if self._moving is not None:
                self._moving.leave_names(Path(load_dir, own_tag))
            self._loading = (own_tag, found)
            try:
                result = load_checkpoint(load_dir, own_tag, *args, **kwargs)
                if not kwargs.get("load_module_only") and self._has_own_rng(found.step):
                    set_rng_state(self._checkpoints.load(found.step, RNG))
            finally:
                self._loading = self._moving = None
            return result

        return load

    def _has_own_rng(self, step: int) -> bool:
        """Another rank's would draw the same dropout for other data."""
        with self._checkpoints.reading(step) as steps:
            rank = self._checkpoints.environment.rank
            return rank in steps.ranks(step) and RNG in steps.names_of(step, rank)

    def stepping(self, engine: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's `step`, with a heartbeat after each that was an optimizer's."""

        def take(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = step(*args, **kwargs)
            if engine.global_steps != before:
                self._checkpoints.progress(engine.global_steps)
            return result

        return take

    def cleanup(self) -> None:
        """Waits until the newest checkpoint is committed."""
        self._checkpoints.close()


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


_made: list[TaggedCheckpoints] = []


def _checkpoints_of_process(settings: Settings) -> TaggedCheckpoints:
    """One for all engines: it is the process that is a rank."""
    if not _made or _made[0].is_closed:
        environment = settings.apply(read_environment(), os.environ)
        _made[:] = [TaggedCheckpoints(sharing=Sharing.EVERY_RANK, environment=environment)]
    return _made[0]


@contextmanager
def _our_engine(settings: Settings) -> Iterator[list[StepfastCheckpointEngine]]:
    """Has DeepSpeed make ours, for as long as one engine is made."""
    made: list[StepfastCheckpointEngine] = []

    def create(*_: Any, **__: Any) -> StepfastCheckpointEngine:
        made.append(StepfastCheckpointEngine(settings))
        return made[-1]

    module: Any = deepspeed.runtime.engine
    with _swapping:
        theirs = module.create_checkpoint_engine
        module.create_checkpoint_engine = create
        try:
            yield made
        finally:
            module.create_checkpoint_engine = theirs


def _configuration(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any] | None, Callable[[dict[str, Any]], None]]:
    """A copy of the configuration, and what puts it into its place; None when DeepSpeed has to find it itself."""
    for name in ("config", "config_params"):
        if kwargs.get(name) is not None:
            return _read(kwargs[name]), functools.partial(kwargs.__setitem__, name)
    script: Any = kwargs.get("args", args[0] if args else None)
    path = getattr(script, "deepspeed_config", None)
    if path is None:
        return None, lambda _: None

    def take(configuration: dict[str, Any]) -> None:
        script.deepspeed_config = None
        kwargs["config"] = configuration

    return _read(path), take


def _read(configuration: Any) -> dict[str, Any]:
    if isinstance(configuration, Mapping):
        return dict(configuration)
    try:
        found = json.loads(Path(configuration).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise SpecError("config", f"{configuration!r} is neither a dict nor a file with JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpecError("config", f"{configuration} holds no JSON object")
    return found


def _settings(block: Any) -> Settings | None:
    """What the `nebula` block says; None when it asks for DeepSpeed's own checkpoints."""
    if block is None:
        return make_settings(None, None, None, os.environ)
    if not isinstance(block, Mapping):
        raise SpecError("config.nebula", f"{block!r} is not an object")
    unknown = sorted(set(block) - _NEBULA_KEYS)
    if unknown:
        raise SpecError(f"config.nebula.{unknown[0]}", f"is none of {', '.join(sorted(_NEBULA_KEYS))}")
    if not block.get("enabled", True):
        return None
    return make_settings(
        block.get("persistent_storage_path"), block.get("persistent_time_interval"),
        block.get("num_of_version_in_retention"), os.environ,
    )  # fmt: skip


def _has_bytes(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


__all__ = ["StepfastCheckpointEngine", "export_checkpoint", "initialize"]
