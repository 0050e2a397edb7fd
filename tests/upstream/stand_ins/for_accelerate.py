"""`Accelerator` that is Stepfast's."""

import accelerate
import accelerate.accelerator

from stepfast.integrations.accelerate import StepfastAccelerator

accelerate.Accelerator = accelerate.accelerator.Accelerator = StepfastAccelerator
