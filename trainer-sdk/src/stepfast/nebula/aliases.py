"""Makes `import nebulaml` and `import torch_nebula` mean Stepfast in this process, as soon as it is imported."""

from __future__ import annotations

import sys

from stepfast import nebula
from stepfast.nebula import deepspeedmodule

sys.modules["nebulaml"] = nebula
sys.modules["torch_nebula"] = deepspeedmodule
