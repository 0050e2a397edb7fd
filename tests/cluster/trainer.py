"""The training that the cluster's tests disturb: two layers under DistributedDataParallel, dropout, momentum, at a pace
that leaves time to disturb it. Each rank prints a digest of all that it ends with, to be compared bit for bit.

Mounted into pods by a ConfigMap. What it does to itself it does in the first attempt alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepfast.torch import Checkpointer, every

WIDTH = 256
_GO_ON = threading.Event()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGUSR1, lambda *_: _GO_ON.set())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    own = {"seen": torch.zeros(WIDTH)}  # differs from rank to rank
    checkpointer = Checkpointer(
        model=model.module if options.unreplicated else model,
        optimizer=optimizer,
        own=own,
        replicated=() if options.unreplicated else ("optimizer",),
        interval=every(steps=options.save_every),
    )
    start = checkpointer.restore()
    print(f"rank {rank} starts after step {start}", flush=True)
    for step in range(start + 1, options.steps + 1):
        inputs = torch.randn(8, WIDTH)
        own["seen"] += inputs.sum(0)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(step, metrics={"loss": loss.item()})
        time.sleep(options.pace)
        misbehave(options, step, rank)
    checkpointer.close()
    print(f"rank {rank} ends after step {options.steps} with {digest(model, optimizer, own)}", flush=True)
    dist.destroy_process_group()


def misbehave(options: argparse.Namespace, step: int, rank: int) -> None:
    """What the first attempt was told to do to itself."""
    if os.environ["STEPFAST_ATTEMPT"] != "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" or rank != 1:
        return
    if step == options.exit_at_step:
        raise SystemExit(7)
    if step == options.hang_at_step:
        time.sleep(3600)
    if step == options.hold_at_step:
        _GO_ON.wait()
    if step == options.eat_at_step:
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1 << 20)) * 16)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, own: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for _, tensor in sorted({**model.state_dict(), **own}.items()):
        found.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        found.update(state["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds to sleep in each step")
    parser.add_argument("--unreplicated", action="store_true", help="each rank saves all of its state by itself")
    parser.add_argument("--exit-at-step", type=int)
    parser.add_argument("--hang-at-step", type=int)
    parser.add_argument("--hold-at-step", type=int, help="until SIGUSR1: what goes on meanwhile may take its time")
    parser.add_argument("--eat-at-step", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
