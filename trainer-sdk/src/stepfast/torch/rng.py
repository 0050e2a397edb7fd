"""The random generators of a process, as plain values: Python's, NumPy's, torch's and CUDA's.

NumPy's and CUDA's only once they are in use: what nobody has drawn from or seeded has no state to go on from, and to
import `numpy.random`, which NumPy itself does when it is first asked for, takes as long as reading 100 MiB back.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """The states of all generators of this process that are in use."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy.random" in sys.modules:
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


def set_rng_state(state: Mapping[str, Any]) -> None:
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


def set_derived_rng_state(state: Mapping[str, Any], *, step: int, rank: int, world_size: int) -> None:
    """Puts the generators to what follows from a state that another number of ranks saved; all give the same rank's.

    Each rank, step and number of ranks has numbers of its own; in each attempt they are the same.
    """
    found = hashlib.sha256(f"{step}/{rank}/{world_size}".encode())
    _digest(state, found)
    digest = found.digest()  # 32 bytes: torch takes 63 bits of it, Python and NumPy take all
    random.seed(digest)
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # CUDA's, too
    if "numpy" in state or "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed(np.frombuffer(digest, dtype=">u4").astype(np.uint32))


@contextmanager
def rng_state_kept() -> Iterator[None]:
    """What is drawn within it, nobody has drawn."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _digest(state: Mapping[str, Any], found: hashlib._Hash) -> None:
    for name, value in sorted(state.items()):
        found.update(name.encode())
        if isinstance(value, Mapping):
            _digest(value, found)
        elif isinstance(value, torch.Tensor):
            found.update(value.cpu().numpy().tobytes())
        else:
            found.update(repr(value).encode())
