"""The training that chaos trials kill: its whole state is a known function of seed, rank and step.

Each rank keeps a journal, a line an event, and holds a lock while it lives, so that a second gang would be seen.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from stepfast.torch import Checkpointer, every

SIZE = 300_000  # float32: a few megabytes a rank, so that a kill can meet a copy or an upload


class Work:
    """A walk of a tensor under every random generator; `apply` is one step."""

    def __init__(self, seed: int, rank: int) -> None:
        torch.manual_seed(seed * 1000 + rank)
        random.seed(seed * 1000 + rank)
        self.weights = torch.randn(SIZE)
        self.shared = torch.arange(SIZE, dtype=torch.float64) * seed  # equal on all ranks: declared replicated

    def apply(self, step: int) -> None:
        self.weights.mul_(0.999).add_(torch.randn(SIZE), alpha=random.random())
        self.shared.mul_(1.0001).add_(step)

    def digest(self) -> str:
        found = hashlib.sha256(self.weights.numpy().tobytes())
        found.update(self.shared.numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        found.update(repr(random.getstate()).encode())
        return found.hexdigest()[:24]


def main() -> None:
    torch.set_num_threads(1)
    folder, seed, total = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    lock = open(folder / f"rank-{rank}.lock", "w")  # noqa: SIM115  # held until the process dies
    journal = open(folder / f"rank-{rank}.journal", "a", buffering=1)  # noqa: SIM115  # same

    def note(event: str, **values: object) -> None:
        journal.write(json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **values}) + "\n")

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("two gangs", run=os.environ["STEPFAST_RUN"])
        sys.exit(99)

    work = Work(seed, rank)
    local = {"weights": work.weights}
    shared = {"shared": work.shared}
    checkpointer = Checkpointer(interval=every(steps=2), replicated=("shared",), local=local, shared=shared)
    start = checkpointer.restore()
    work.weights, work.shared = local["weights"], shared["shared"]
    note("restored", step=start, digest=work.digest(), run=os.environ["STEPFAST_RUN"])
    for step in range(start + 1, total + 1):
        work.apply(step)
        time.sleep(0.03)  # a step has some length, so that a random moment can fall into any part of it
        saved = checkpointer.step(step)
        if saved is not None and saved.saved:
            note("staged", step=step)
    note("done", digest=work.digest())
    checkpointer.close()


if __name__ == "__main__":
    main()
