"""`Accelerator` that is Stepfast's; all tests of one run are projects of one job."""

import os
import tempfile

import accelerate
import accelerate.accelerator

from stepfast.integrations.accelerate import StepfastAccelerator

if "STEPFAST_STORAGE_URI" not in os.environ:  # processes that tests start have it from pytest's
    scratch = tempfile.TemporaryDirectory(prefix="stepfast-upstream-")
    os.environ["STEPFAST_STORAGE_URI"] = scratch.name

accelerate.Accelerator = accelerate.accelerator.Accelerator = StepfastAccelerator
