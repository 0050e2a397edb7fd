"""The training of a gang that changes its size: a batch is the whole gang's, and no random number depends on a rank.
Each rank prints what it ends with: how often every sample was trained on, and all weights and moments, to be compared.

Mounted into pods by a ConfigMap.
"""

from __future__ import annotations

import argparse
import base64
import io
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from stepfast.torch import Checkpointer, GlobalBatchSampler, every

WIDTH = 16
SAMPLES = 120
BATCH_SIZE = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds to sleep in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(
        torch.float64
    )  # what differs in the end is a mistake then, and not what rounding makes of it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = list(zip(range(SAMPLES), torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1), strict=True))
    sampler = GlobalBatchSampler(SAMPLES, BATCH_SIZE, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, persistent_workers=True)
    trained = {"times": torch.zeros(SAMPLES, dtype=torch.int64)}  # how often on each sample
    checkpointer = Checkpointer(
        model=model, optimizer=optimizer, sampler=sampler, trained=trained, replicated=["optimizer", "trained"],
        interval=every(steps=options.save_every),
    )  # fmt: skip
    start = checkpointer.restore()
    print(f"rank {rank} of {dist.get_world_size()} starts after step {start}", flush=True)
    step = start
    while step < options.steps:
        for numbers, inputs, wanted in loader:
            loss = (model(inputs) - wanted).square().mean() * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count(numbers, trained["times"])
            sampler.advance()
            step += 1
            checkpointer.step(step, metrics={"loss": loss.item()})
            time.sleep(options.pace)
            if step == options.steps:
                break
    checkpointer.close()
    print(f"rank {rank} ends after step {step} with {packed(model, optimizer, trained['times'])}", flush=True)
    dist.destroy_process_group()


def count(numbers: torch.Tensor, times: torch.Tensor) -> None:
    """Counts the whole gang's samples of this step."""
    here = torch.zeros_like(times)
    here[numbers] = 1
    dist.all_reduce(here)
    times += here


def packed(model: nn.Module, optimizer: torch.optim.Optimizer, times: torch.Tensor) -> str:
    """All of it, as text."""
    moments = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    out = io.BytesIO()
    torch.save({"times": times, "values": [*(one.detach() for one in model.parameters()), *moments]}, out)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    main()
