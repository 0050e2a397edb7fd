"""A training with batches of one size on any number of ranks, run by test_elastic_training.py under torchrun.

`elastictraining.py KIND FOLDER --last N --save STEP`: goes on from what is committed, trains to step N, saves one step
on its way; what is behind that is lost. Each rank notes in FOLDER which samples it trained on in which step, and rank 0
what the training came to.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from stepfast.torch import Checkpointer, GlobalBatchSampler, every
from stepfast.torch.dcp import Sharing, StepfastStorageReader, StepfastStorageWriter, TaggedCheckpoints

SAMPLES, BATCH = 62, 14  # four batches of 14 and one of 6 an epoch: four ranks and three cannot share 14 equally


class Replicated:
    """DDP: model and optimizer are equal on all ranks."""

    def __init__(self, network: nn.Module, sampler: GlobalBatchSampler) -> None:
        self.model: nn.Module = DistributedDataParallel(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._checkpointer = Checkpointer(
            model=self.model, optimizer=self.optimizer, sampler=sampler, replicated=["optimizer"],
            interval=every(steps=1000),
        )  # fmt: skip

    def restore(self) -> int:
        return self._checkpointer.restore()

    def save(self, step: int) -> None:
        self._checkpointer.save(step).wait(timeout_seconds=60)


class Sharded:
    """FSDP2: each rank has its shards, saved through torch.distributed.checkpoint."""

    def __init__(self, network: nn.Module, sampler: GlobalBatchSampler) -> None:
        self.model, self._sampler = network, sampler
        for module in (*network.children(), network):
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        self._checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK, persist_all=True)

    def _state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "sampler": self._sampler.state_dict(), "step": 0}

    def restore(self) -> int:
        if self._checkpoints.latest() is None:
            return 0
        state = self._state()
        dcp.load(state, storage_reader=StepfastStorageReader(self._checkpoints))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._sampler.load_state_dict(state["sampler"])
        return int(state["step"])

    def save(self, step: int) -> None:
        writer = StepfastStorageWriter(self._checkpoints)
        dcp.save(self._state() | {"step": step}, checkpoint_id=f"global_step{step}", storage_writer=writer)
        self._checkpoints.flush()


KINDS = {"replicated": Replicated, "sharded": Sharded}


def data() -> TensorDataset:
    """Samples that know their own number."""
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs.sin().sum(1, keepdim=True))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def results(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Each parameter and each of its moments, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **{f" {key}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}}
        found |= {
            name.removeprefix("module.") + suffix: whole(tensor).double().flatten().tolist()
            for suffix, tensor in tensors.items()
        }
    return found


def main(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=3)
    loader = DataLoader(data(), batch_sampler=sampler, num_workers=arguments.workers, persistent_workers=True)
    training = KINDS[arguments.kind](network, sampler)
    begin = step = training.restore()
    noted: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    while step < arguments.last:
        for numbers, inputs, targets in loader:
            loss = (training.model(inputs) - targets).square().mean() * sampler.weight
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            sampler.advance()
            step += 1
            noted[step] = numbers.tolist()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses[step] = total.item() / world_size
            if step == arguments.save:
                training.save(step)
            if step == arguments.last:
                break
    folder = arguments.folder
    attempt = os.environ["STEPFAST_ATTEMPT"]
    found = {"begin": begin, "epoch": sampler.epoch, "noted": noted, "losses": losses}
    (folder / f"noted.{attempt}.{rank}.json").write_text(json.dumps(found))
    came_to = results(training.model, training.optimizer)
    if rank == 0:
        (folder / f"results.{attempt}.json").write_text(json.dumps(came_to))
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
