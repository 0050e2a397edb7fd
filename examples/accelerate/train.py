"""A small regression, in a loop of one's own with Hugging Face Accelerate.

What Stepfast asks of it is another Accelerator: look for "Stepfast:". Killed at any moment and started again, also
where the disk is empty, it goes on bit for bit.

    stepfast run train.py
    stepfast run --nproc-per-node 2 train.py --crash-at-step 45      see a recovery
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from accelerate import skip_first_batches
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

from stepfast.integrations.accelerate import StepfastAccelerator


class Progress:
    """How many batches were trained on: saved and loaded with the rest."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def main(options: argparse.Namespace) -> None:
    """Trains, from the latest state on if there is one."""
    set_seed(0)
    # Stepfast: in the place of Accelerator, with the same arguments.
    accelerator = StepfastAccelerator(
        cpu=not torch.cuda.is_available(),
        project_config=ProjectConfiguration(options.output, automatic_checkpoint_naming=True, total_limit=2),
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.square().mean(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if accelerator.latest_checkpoint() is not None:  # Stepfast: of an earlier attempt
        accelerator.load_state()
    loss = torch.zeros(())
    while progress.batches < options.steps:
        done = progress.batches % len(loader)
        for inputs, targets in skip_first_batches(loader, done) if done else loader:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.batches += 1
            if progress.batches % 10 == 0:
                accelerator.save_state()  # returns when the state is in memory
            is_first = os.environ.get("STEPFAST_ATTEMPT") == "1" and accelerator.is_last_process
            if progress.batches == options.crash_at_step and is_first:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.batches == options.steps:
                break
    accelerator.end_training()  # Stepfast: waits until the last state is committed
    accelerator.print(f"{progress.batches} batches, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", default="regression")
    parser.add_argument("--crash-at-step", type=int, default=0)
    main(parser.parse_args())
