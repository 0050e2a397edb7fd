"""A checkpointed training that is measured, because its environment asks for it (`STEPFAST_ANATOMY`).

What is found goes with the heartbeat, under names that begin with `anatomy_`, and rank 0's report into a file. Nothing
of it can end training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepfast.anatomymetrics import told
from stepfast.environment import Environment

if TYPE_CHECKING:
    from stepfast.torch.anatomy import Meter, Report

log = logging.getLogger("stepfast")


class Measuring:
    """One training's meter, if it is asked for and there is one model and one optimizer to follow."""

    def __init__(self, environment: Environment, objects: Mapping[str, Any]) -> None:
        self._file = (
            Path(environment.anatomy) if environment.anatomy not in ("", "1") and not environment.rank else None
        )
        self._written: Report | None = None
        self._meter = self._made(environment, objects) if environment.anatomy else None

    def metrics(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The caller's metrics, and beside them what is measured. The caller's win."""
        if self._meter is None:
            return theirs
        report = self._meter.report()
        if self._file is not None and report is not None and report is not self._written:
            self._written = report
            self._write(self._file, report)
        return {**told(self._meter.metrics()), **theirs}

    def lost(self, seconds: float) -> None:
        """A save stalled training for so long."""
        if self._meter is not None:
            self._meter.lost(seconds)

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()

    def _made(self, environment: Environment, objects: Mapping[str, Any]) -> Meter | None:
        # Ranks wait for each other, so that the samples of each would slow all of them: the others have their clocks.
        try:
            return _meter(objects, is_sampling=environment.rank == 0)
        except Exception:
            log.exception("stepfast: the anatomy of this training is not measured")
            return None

    def _write(self, file: Path, report: Report) -> None:
        try:
            beside = file.with_name(f"{file.name}.{os.getpid()}")
            beside.write_text(report.to_json(), encoding="utf-8")
            beside.replace(file)
        except OSError as error:
            log.warning("stepfast: the anatomy of this training cannot be written: %s", error)
            self._file = None


def _meter(objects: Mapping[str, Any], *, is_sampling: bool) -> Meter | None:
    models = [each for each in objects.values() if isinstance(each, nn.Module)]
    optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        log.warning(
            "stepfast: STEPFAST_ANATOMY measures a Checkpointer with one model and one optimizer, not %s and %s",
            len(models),
            len(optimizers),
        )
        return None
    from stepfast.torch.anatomy import Meter

    return Meter(models[0], optimizers[0], is_sampling=is_sampling)
