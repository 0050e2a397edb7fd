"""A regression whose model and optimizer are sharded by FSDP2, and by tensor parallelism if asked.

Saved through torch.distributed.checkpoint, and gone on from on any number of ranks. What is Stepfast's is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stepfast.torch.dcp import Sharing, StepfastStorageReader, StepfastStorageWriter, TaggedCheckpoints

BATCH, WIDTH = 48, 32
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


class Training:
    """Model and optimizer, sharded; and where they are saved."""

    def __init__(self, tensor_parallel: int) -> None:
        world_size = dist.get_world_size()
        tensor_size = tensor_parallel if world_size % tensor_parallel == 0 else 1
        shape = (world_size // tensor_size, tensor_size)
        mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("data", "tensor"))
        self.data = mesh["data"]
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1)
        self.model = nn.Sequential(*layers).double().to(DEVICE)
        if tensor_size > 1:
            parallelize_module(self.model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mesh=self.data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        # What is saved in the background has a group of its own: its messages must not meet those of the training.
        self.background = dist.new_group(backend="gloo")
        self.saving: Future[Any] = Future()
        self.saving.set_result(None)
        # Stepfast: one store for the job; each rank takes part in each step.
        self.checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK)
        self.writer, self.reader = StepfastStorageWriter(self.checkpoints), StepfastStorageReader(self.checkpoints)

    def state(self, step: int) -> dict[str, Any]:
        """What is saved: each rank's shards, and what all have."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": step, "mean": torch.zeros(WIDTH)}

    def resume(self) -> int:
        """The step that training goes on from."""
        if self.checkpoints.latest() is None:  # Stepfast: of an earlier attempt, on however many ranks that was
            return 0
        state = self.state(0)
        dcp.load(state, storage_reader=self.reader)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["step"])

    def save(self, step: int, *, asynchronous: bool) -> None:
        """Stepfast: training goes on when the state is copied."""
        where: dict[str, Any] = {"checkpoint_id": f"global_step{step}", "storage_writer": self.writer}
        if asynchronous:
            self.saving.result()
            self.saving = dcp.async_save(self.state(step), process_group=self.background, **where)
        else:
            dcp.save(self.state(step), **where)

    def step(self, step: int) -> float:
        """One step of training; the loss over all ranks."""
        data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        part = data.tensor_split(self.data.size())[self.data.get_local_rank()].to(DEVICE)
        # FSDP takes the mean over its ranks: parts of different lengths count for as much as they are.
        loss = (self.model(part) - part.sum(1, keepdim=True).sin()).square().sum() * self.data.size() / BATCH
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def close(self) -> None:
        """Stepfast: until the last step is committed."""
        self.saving.result()
        self.checkpoints.close()


def main(arguments: argparse.Namespace) -> None:
    """Trains, from the latest committed step on if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training = Training(arguments.tensor_parallel)
    begin, losses = training.resume(), {}
    for step in range(begin + 1, arguments.steps + 1):
        losses[step] = training.step(step)
        training.checkpoints.progress(step, {"loss": losses[step]})  # Stepfast: the heartbeat
        if step % arguments.save_every == 0:
            training.save(step, asynchronous=arguments.asynchronous)
        if step == arguments.crash_at_step and os.environ.get("STEPFAST_ATTEMPT") == "1" and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    training.close()
    weights = {name: value.full_tensor() for name, value in training.model.state_dict().items()}
    if rank == 0:
        print(f"from step {begin} on {world_size} ranks: loss {losses.get(arguments.steps, float('nan')):.6f}")
        if arguments.final_state is not None:
            state = {name: [number.hex() for number in value.flatten().tolist()] for name, value in weights.items()}
            arguments.final_state.write_text(json.dumps({"begin": begin, "losses": losses, "weights": state}))
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="save with dcp.async_save")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="that share each layer")
    parser.add_argument("--crash-at-step", type=int, default=0, help="the last rank kills itself, the first time")
    parser.add_argument("--final-state", type=Path, metavar="FILE", help="write losses and weights")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
