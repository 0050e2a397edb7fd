"""DeepSpeed with Stepfast's checkpoints: `initialize` in the place of `deepspeed.initialize`.

What `save_checkpoint` writes as files goes as named objects into one step, staged in memory, persisted while training
goes on; `load_checkpoint` finds it wherever the job runs next, with nothing on its disk. The files' names stay, of no
bytes, where DeepSpeed looks for them. The `nebula` block that DeepSpeed removed is taken again.

Tested with DeepSpeed 0.19.8, whose `CheckpointEngine` is implemented here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedexport import export_checkpoint
from stepfast.integrations.missing import missing
from stepfast.nebula.settings import Settings, make_settings

try:
    import deepspeed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
except ImportError as error:
    raise missing("deepspeed", error) from error

from stepfast.integrations.deepspeedengine import StepfastCheckpointEngine, check_offload, replaced

_IN_ARGUMENTS = ("deepspeed_config", "deepscale_config")
_NEBULA_KEYS = {
    "enabled", "persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention",
    "enable_nebula_load", "load_path",
}  # fmt: skip


def initialize(*args: Any, **kwargs: Any) -> Any:
    """As `deepspeed.initialize`, with the same arguments and result; its engine's checkpoints are Stepfast's.

    The configuration may have a `nebula` block: `persistent_storage_path` (where there is no launcher that names the
    job's storage), `persistent_time_interval` in seconds, `num_of_version_in_retention`; with `enabled: false` the
    engine's checkpoints stay DeepSpeed's own. Every rank calls it. Raises SpecError, StateUnsupported.
    """
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    with _configuration(given) as configuration:
        settings = settings_of(configuration.pop("nebula", None))
        if settings is None:
            return deepspeed.initialize(**given)
        check_offload(configuration)
        made = StepfastCheckpointEngine(settings)
        with replaced("create_checkpoint_engine", lambda *_, **__: made):
            result = deepspeed.initialize(**given)
    made.serve(result[0])
    return result


@contextmanager
def _configuration(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reads the configuration, wherever it is given: DeepSpeed takes what is left of it."""
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            given[name] = _read(given[name])
            yield given[name]
            return
    script = given.get("args")
    name = next((name for name in _IN_ARGUMENTS if getattr(script, name, None) is not None), "")
    if not name:
        yield {}  # DeepSpeed says that there is none
        return
    path = getattr(script, name)
    given["config"] = _read(path)
    # DeepSpeed takes one of both; the caller's arguments are to say the same afterwards.
    setattr(script, name, None)
    try:
        yield given["config"]
    finally:
        setattr(script, name, path)


def _read(configuration: Any) -> dict[str, Any]:
    """As DeepSpeed reads it: a dict, a file of JSON with comments, or such in base64."""
    if isinstance(configuration, Mapping):
        return dict(configuration)
    path = os.fspath(configuration) if isinstance(configuration, os.PathLike) else configuration
    try:
        found = load_ds_config(path)
    except (OSError, ValueError) as error:
        raise SpecError("config", f"{configuration!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SpecError("config", f"{configuration} holds no JSON object")
    return dict(found)


def settings_of(block: Any) -> Settings | None:
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


__all__ = ["StepfastCheckpointEngine", "export_checkpoint", "initialize", "settings_of"]
