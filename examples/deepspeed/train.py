"""A small regression with DeepSpeed, one configuration a point: ZeRO stages, precision, communication, and so on.

What Stepfast asks of a DeepSpeed script is another `initialize`, and to load before the loop: look for "Stepfast:".
Killed at any moment and started again, also where the disk is empty, it goes on bit for bit.

    stepfast run --name zero3 --nproc-per-node 2 train.py --config zero3.json
    stepfast run --name zero3-killed --nproc-per-node 2 train.py --config zero3.json --crash-at-step 25   a recovery
    stepfast run --name fp16 train.py --config fp16.json                         needs a GPU, and says so

Each name is a job of its own, with checkpoints of its own: another configuration wants another one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from stepfast.integrations.deepspeed import initialize

HERE = Path(__file__).parent
WIDTH = 64


class Regression(nn.Module):
    """(batch, 16) float → (batch, 1); the middle may be computed again in the backward pass."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self._is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpointing.checkpoint(self.middle, x) if self._is_checkpointed else self.middle(x)
        return self.last(x)


class SignMomentum(torch.optim.Optimizer):
    """An optimizer of one's own: the sign of a running mean of gradients (as in signSGD with momentum)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
                    parameter.add_(mean.sign(), alpha=-group["lr"])


def batch(step: int, micro: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rank's share of a step's data: the same in every attempt."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + 1000 * micro + step)
    x = torch.randn(size, 16, generator=generator)
    return x, x.square().mean(dim=1, keepdim=True)


def main() -> None:
    args = parse_arguments()
    config = json.loads((HERE / args.config).read_text(encoding="utf-8"))
    needs_gpu = config.get("fp16", {}).get("enabled", False)
    if needs_gpu and not torch.cuda.is_available():
        sys.exit(f"{args.config} trains in fp16, which DeepSpeed does on a GPU alone, and there is none: try bf16.json")
    if not torch.cuda.is_available():
        # DeepSpeed would compile an all-reduce for CPUs: a minute, and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Regression(is_checkpointed="activation_checkpointing" in config)
    own = SignMomentum(model.parameters(), lr=0.001) if "optimizer" not in config else None
    # Stepfast: in the place of deepspeed.initialize.
    engine, *_ = initialize(model=model, optimizer=own, model_parameters=model.parameters(), config=config)
    # Stepfast: the latest checkpoint of this job, wherever it runs now.
    path, client_state = engine.load_checkpoint(args.checkpoints)
    first = client_state["step"] + 1 if path is not None else 1
    if rank == 0:
        print(f"{args.config}: from step {first}", flush=True)
    train(engine, args, first, rank)
    if rank == 0:
        print(f"{args.config}: done", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(engine: Any, args: argparse.Namespace, first: int, rank: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    losses = {}
    for step in range(first, args.steps + 1):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            x, wanted = batch(step, micro, rank, engine.train_micro_batch_size_per_gpu())
            found = engine(x.to(engine.device, dtype))
            loss = (found.float() - wanted.to(engine.device)).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses[step] = total.hex()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {total / engine.gradient_accumulation_steps():.4f}", flush=True)
        if step % args.save_every == 0:
            engine.save_checkpoint(args.checkpoints, client_state={"step": step})
        if step == args.crash_at_step and rank == 0 and os.environ.get("STEPFAST_ATTEMPT", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    if args.losses:
        Path(f"{args.losses}.rank{rank}").write_text(json.dumps(losses), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="zero1.json", help="one of the files beside this script")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--checkpoints", help="DeepSpeed's folder, which may be empty each time; otherwise of the configuration"
    )
    parser.add_argument("--crash-at-step", type=int, help="rank 0 kills itself after that step, in the first attempt")
    parser.add_argument("--losses", help="write each rank's losses to FILE.rankN, to compare")
    args = parser.parse_args()
    args.checkpoints = args.checkpoints or f"checkpoints/{Path(args.config).stem}"
    return args


if __name__ == "__main__":
    main()
