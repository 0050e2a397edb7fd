"""The random generators of a process, as plain values: Python's, NumPy's, torch's and CUDA's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """The states of all generators of this process. CUDA's only once CUDA is in use."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        legacy: Any = np.random.get_state(legacy=True)
        name, keys, position, has_gauss, cached = legacy
        state["numpy"] = {
            "name": name, "keys": torch.from_numpy(keys.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached": float(cached),
        }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the generators where `get_rng_state` found them."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        numpy = state["numpy"]
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
