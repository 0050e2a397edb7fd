"""What `init` was told, and the environment: where and how often checkpoints are persisted, and how many are kept."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepfast.environment import Environment, absolute_storage_uri, read_environment
from stepfast.errors import SpecError

log = logging.getLogger("stepfast")

PATH, INTERVAL = "NEBULA_PERSISTENT_STORAGE_PATH", "NEBULA_PERSISTENT_TIME_INTERVAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """None: not said. `persist_interval_seconds`: between two checkpoints that are persisted; 0: each of them is."""

    storage_path: str | None = None
    persist_interval_seconds: float | None = None
    max_to_keep: int | None = None

    def apply(self, environment: Environment, values: Mapping[str, str]) -> Environment:
        """The environment of a rank that was told so. A job's own storage goes before the script's: what restarts the
        job looks for its checkpoints there.
        """
        uri = environment.storage_uri
        if self.storage_path is not None and not values.get("STEPFAST_STORAGE_URI"):
            uri = absolute_storage_uri(self.storage_path)
        elif self.storage_path is not None and absolute_storage_uri(self.storage_path) != uri and environment.rank == 0:
            log.warning("stepfast: persistent_storage_path %r is not used: this job's storage is %s",
                        self.storage_path, uri)  # fmt: skip
        interval, kept = self.persist_interval_seconds, self.max_to_keep
        return replace(
            environment,
            storage_uri=uri,
            persist_interval_seconds=environment.persist_interval_seconds if interval is None else interval,
            max_to_keep=environment.max_to_keep if kept is None else kept,
        )


def make_settings(path: object, interval: object, kept: object, values: Mapping[str, str]) -> Settings:
    """What `init` was called with, and, where it was not, the `NEBULA_…` variables. Raises SpecError, naming which."""
    return Settings(
        storage_path=_path(path) if path is not None else values.get(PATH) or None,
        persist_interval_seconds=(
            _number("persistent_time_interval", interval, 0)
            if interval is not None
            else _number(INTERVAL, values[INTERVAL], 0) if values.get(INTERVAL) else None
        ),
        max_to_keep=int(_number("num_of_version_in_retention", kept, 1)) if kept is not None else None,
    )  # fmt: skip


def read_settings(settings: Settings) -> Environment:
    """This process's environment with the settings. Raises SpecError."""
    return settings.apply(read_environment(), os.environ)


def _path(path: object) -> str:
    if isinstance(path, tuple) and len(path) == 1:
        # `path = "/tmp/test",` with its comma is how Nebula's own documentation writes it.
        log.warning(
            "stepfast: persistent_storage_path is the tuple %r (a comma behind it?): %r is taken", path, path[0]
        )
        path = path[0]
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise SpecError("persistent_storage_path", f"{path!r} is not a path or URI")
    return path


def _number(name: str, value: object, least: int) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # what is none says so
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number < math.inf:
        raise SpecError(name, f"{value!r} is not a number of at least {least}")
    return number
