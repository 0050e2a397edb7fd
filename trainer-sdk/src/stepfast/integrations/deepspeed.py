"""DeepSpeed with Stepfast's checkpoints: `initialize` in the place of `deepspeed.initialize`.

What `save_checkpoint` writes as files goes as named objects into one step, staged in memory, persisted while training
goes on; `load_checkpoint` finds it wherever the job runs next, with nothing on its disk. The files' names stay, of no
bytes, where DeepSpeed looks for them. The `nebula` block that DeepSpeed removed is taken again.

Needs DeepSpeed 0.19.7 or newer, whose `CheckpointEngine` is implemented here.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepfast.errors import SpecError
from stepfast.integrations.deepspeedexport import export_checkpoint
from stepfast.integrations.missing import missing
from stepfast.nebula.settings import Settings, make_settings

try:
    import deepspeed
except ImportError as error:
    raise missing("deepspeed", error) from error

from stepfast.integrations.deepspeedengine import StepfastCheckpointEngine, replaced

_NEBULA_KEYS = {
    "enabled", "persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention",
    "enable_nebula_load", "load_path",
}  # fmt: skip


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
    settings = settings_of(block)
    if settings is None:
        return deepspeed.initialize(*args, **kwargs)
    made = StepfastCheckpointEngine(settings)
    with replaced("create_checkpoint_engine", lambda *_, **__: made):
        result = deepspeed.initialize(*args, **kwargs)
    made.serve(result[0])
    return result


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
