"""A small training script that says when it gets where. Started by `benchmarks.gangs.recovery`, by path, as users' are.

With `--plain` it knows nothing of Stepfast and ends after its first step: the limit of a recovery.
"""

from __future__ import annotations

import argparse
import os
import time

from stamps import stamp  # type: ignore[import-not-found, unused-ignore] # its folder is on the path

STEPS_UNTIL_TRAINED = 30
_STEP_SECONDS = 0.02


def main() -> None:
    """Trains until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    is_plain = parser.parse_args().plain
    stamp("the script begins")
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    is_gang = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_gang:
        dist.init_process_group("gloo")
    stamp("the process group is there")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    model: nn.Module = nn.parallel.DistributedDataParallel(network) if is_gang else network
    optimizer = torch.optim.AdamW(model.parameters())
    stamp("model and optimizer are there")

    def train_step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()

    if is_plain:
        train_step()
        stamp("the first step is done", step=1)
        return
    from stepfast.torch import Checkpointer, every

    checkpointer = Checkpointer(model=model, optimizer=optimizer, interval=every(steps=10))
    stamp("the Checkpointer is there")
    start = checkpointer.restore()
    stamp("restored")
    step = start
    while True:
        step += 1
        train_step()
        checkpointer.step(step)
        if step == start + 1:
            stamp("the first step is done", step=step)
        if step == start + STEPS_UNTIL_TRAINED:
            stamp("trained", step=step)
        time.sleep(_STEP_SECONDS)


if __name__ == "__main__":
    main()
