"""`Accelerator` that is Stepfast's: a project's folder is a job of its own."""

import os
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import accelerate.accelerator

from stepfast.integrations.accelerate import StepfastAccelerator
from stepfast.integrations.process import checkpoints_of_process

scratch = tempfile.TemporaryDirectory(prefix="stepfast-upstream-")
jobs: dict[str, Path] = {}


class Accelerator(StepfastAccelerator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        project = os.path.abspath(self.project_dir or ".")
        storage = str(jobs.setdefault(project, Path(scratch.name, str(len(jobs)))))
        if os.environ.get("STEPFAST_STORAGE_URI") != storage and "LOCAL_RANK" not in os.environ:
            if "STEPFAST_STORAGE_URI" in os.environ:
                checkpoints_of_process().close()
            os.environ["STEPFAST_STORAGE_URI"] = storage


accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
