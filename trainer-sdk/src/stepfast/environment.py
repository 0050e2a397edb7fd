"""What a training process is told by whoever launched it: the `STEPFAST_…` variables, and torchrun's."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stepfast.admission import Interval
from stepfast.errors import SpecError
from stepfast.step import JobKey, OnBusy, attempt_of, restarted_run, run_id

DEFAULT_STORAGE = ".stepfast/checkpoints"

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A rank's surroundings. `socket` is None without an agent; `resume_step` is None when nobody fixed one."""

    job: JobKey
    run: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    storage_uri: str
    socket: str | None
    resume_step: int | None
    memory_bytes: int
    interval: Interval | None
    persist_interval_seconds: float
    max_to_keep: int
    on_busy: OnBusy
    mtbf_seconds: float | None  # None: what was seen of this job tells, beside what is usual
    interruptions: int = 0  # of this job's training, before this process
    trained_seconds: float = 0.0  # before this process, in all attempts
    is_run_unique: bool = True  # False: the launcher named none, and the ranks have to agree on one
    gang_scope: str = ""  # what the ranks that meet have in common; empty: the run
    anatomy: str = ""  # "": not measured; "1": measured; else a file that rank 0's report is written to as well

    @property
    def is_restarted(self) -> bool:
        """Whether the job goes on: after a failure, or after a suspension or a resize, which are none."""
        return self.interruptions > 0 or attempt_of(self.run) > 1


def read_environment(values: Mapping[str, str] | None = None, *, script: str | None = None) -> Environment:
    """Reads the process's environment. Raises SpecError, naming the variable."""
    env = os.environ if values is None else values
    settings = _settings(env.get("STEPFAST_SETTINGS", "{}"))
    world_size = _integer(env, "WORLD_SIZE", 1)
    # Ranks that share an agent; more than torchrun's own figure where one machine plays several nodes.
    local_world_size = _number(settings, "ranksPerAgent", _integer(env, "LOCAL_WORLD_SIZE", 1), int)
    rank = _integer(env, "RANK", 0)
    restarts = _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
    run = re.sub(r"[^A-Za-z0-9._-]", "-", env.get("STEPFAST_RUN", "")).strip("-.")
    is_run_unique = bool(run)
    scope = run or "unnamed"
    run = run or run_id(uuid.uuid4().hex[:12], 1)
    run, scope = restarted_run(run, restarts), restarted_run(scope, restarts)
    resume = env.get("STEPFAST_RESUME_STEP")
    memory = env.get("STEPFAST_MEMORY_BUFFER_SIZE") or env.get("NEBULA_MEMORY_BUFFER_SIZE") or "0"
    return Environment(
        job=JobKey.parse(env["STEPFAST_JOB"]) if "STEPFAST_JOB" in env else _default_job(script),
        run=run,
        is_run_unique=is_run_unique,
        gang_scope=scope,
        rank=rank,
        local_rank=_integer(env, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=local_world_size,
        node=_number(settings, "node", rank // local_world_size, int),
        storage_uri=absolute_storage_uri(env.get("STEPFAST_STORAGE_URI") or DEFAULT_STORAGE),
        socket=env.get("STEPFAST_SOCKET") or None,
        resume_step=int(resume) if resume and not restarts else None,
        memory_bytes=_integer({"STEPFAST_MEMORY_BUFFER_SIZE": memory}, "STEPFAST_MEMORY_BUFFER_SIZE", 0),
        interval=_interval(settings.get("interval")),
        persist_interval_seconds=_number(settings, "persistIntervalSeconds", 2.0, float),
        max_to_keep=_number(settings, "maxToKeep", 5, int),
        on_busy=_on_busy(settings.get("onBusy", OnBusy.WAIT)),
        mtbf_seconds=_number(settings, "mtbfSeconds", 0.0, float) or None,
        interruptions=_number(settings, "interruptions", 0, int) + restarts,
        trained_seconds=_trained_seconds(settings, restarts),
        anatomy=_anatomy(env.get("STEPFAST_ANATOMY", "")),
    )


def _trained_seconds(settings: Mapping[str, object], restarts: int) -> float:
    """Before this process. What the launcher said is as old as the attempt: torchrun has started its ranks anew since,
    and the time between is taken for training.
    """
    seconds = _number(settings, "trainedSeconds", 0.0, float)
    planned_time = _number(settings, "plannedTime", 0.0, float)
    return seconds + (max(0.0, time.time() - planned_time) if restarts and planned_time else 0.0)


def _anatomy(text: str) -> str:
    return "" if text.strip() in ("", "0") else text.strip()


def absolute_storage_uri(text: str) -> str:
    """A path of this machine as a `file://` URI, any other URI as it is: an agent has another working directory."""
    return text if "://" in text else Path(text).expanduser().absolute().as_uri()


def _settings(text: str) -> dict[str, object]:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise SpecError("STEPFAST_SETTINGS", f"is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise SpecError("STEPFAST_SETTINGS", "is not a JSON object")
    return settings


def _default_job(script: str | None) -> JobKey:
    stem = Path(script if script is not None else sys.argv[0] or "training").stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-") or "training"
    return JobKey(namespace="local", name=name[:60].strip("-"))


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    if not text.isdigit():
        raise SpecError(name, f"{text!r} is not a number")
    return int(text)


def _number(settings: Mapping[str, object], name: str, default: N, kind: type[N]) -> N:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SpecError(f"STEPFAST_SETTINGS.{name}", f"{value!r} is not a number of at least 0")
    return kind(value)


def _interval(value: object) -> Interval | None:
    if value is None:
        return None
    if value == "auto":
        return Interval()
    if isinstance(value, dict) and len(value) == 1:
        kind, amount = next(iter(value.items()))
        if isinstance(amount, int | float) and amount > 0 and kind in ("steps", "seconds"):
            return Interval(steps=int(amount)) if kind == "steps" else Interval(seconds=float(amount))
    raise SpecError("STEPFAST_SETTINGS.interval", f'{value!r} is not "auto", {{"steps": n}} or {{"seconds": s}}')


def _on_busy(value: object) -> OnBusy:
    try:
        return OnBusy(str(value))
    except ValueError as error:
        raise SpecError("STEPFAST_SETTINGS.onBusy", f"{value!r} is neither Wait nor Skip") from error
