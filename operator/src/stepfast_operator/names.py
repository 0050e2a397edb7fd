"""Names that are derived from others: a job's name from its script, a job's uid among its runs. Pure."""

from __future__ import annotations

import re

from stepfast.step import attempt_of

_UNSAFE = re.compile(r"[^a-z0-9]+")


def job_name_of(script: str) -> str:
    """A DNS-safe job name out of a script's or module's name: `Train_GPT.py` becomes `train-gpt`."""
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return _UNSAFE.sub("-", stem.lower()).strip("-")[:63].strip("-") or "job"


def is_run_of(run: str, uid: str) -> bool:
    """Whether a run is one of that job's attempts."""
    return run.startswith(f"{uid}-") and attempt_of(run) > 0
