"""A small ViT learns digits, or a small BERT learns texts, by data parallelism, a pipeline, or an elastic pipeline.

One flag is the difference; `elastic` freezes layers late in training, packs the others into a shorter pipeline, and
fills the ranks that are free with replicas of it. What is Stepfast's is marked "Stepfast:".

    stepfast run --nproc-per-node 4 train.py --mode elastic --history elastic.jsonl
    stepfast run --nproc-per-node 4 train.py --mode elastic --crash-at-step 400    see it go on, at the right shape
    python plot.py elastic.jsonl                                                   what froze, when, and what it gave
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch script gives it)
from tasks import Task, make_task
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from stepfast.torch import Checkpointer, every
from stepfast.torch.elastic_pipeline import (
    ElasticPipeline,
    FreezingRule,
    GradientNormRule,
    GradualUnfreezing,
    GuardedRule,
    LateFreezing,
    MomentRule,
)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def rule_of(args: argparse.Namespace) -> FreezingRule | None:
    """Which layers are frozen when."""
    rules = {
        "none": None,
        "gradients": GradientNormRule(args.alpha),
        "moments": MomentRule(args.alpha),
        "guarded": GuardedRule(MomentRule(args.alpha)),
        "late": LateFreezing(args.epochs),
        "unfreezing": GradualUnfreezing(epochs=max(1, 2 * args.epochs // 5)),
    }
    return rules[args.rule or ("late" if args.mode == "elastic" else "none")]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    task = make_task(args.task, args.classes, width=args.width, dropout=args.dropout)
    if args.pretrained:
        weights = {name: weight for name, weight in torch.load(args.pretrained).items() if "classes" not in name}
        task.model.load_state_dict(weights, strict=False)  # but for the head's: these are other classes
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=args.lr, weight_decay=0.01)
    steps = -(-len(task.train) // args.batch_size)
    rate = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps) * max(0.0, 1 - step / (steps * args.epochs)))
    weights = (train_plainly if args.mode == "ddp" else train_elastically)(args, task, optimizer, rate)
    if args.save_weights and dist.get_rank() == 0:
        torch.save(weights, args.save_weights)


def train_elastically(args: argparse.Namespace, task: Task, optimizer: Optimizer, rate: LambdaLR) -> dict[str, Tensor]:
    # Stepfast: what trains the model, whatever its shape. Without a rule it stays the pipeline that it begins as; a
    # pipeline of one device is data parallelism.
    training = ElasticPipeline(
        task.model,
        optimizer,
        F.cross_entropy,
        data=task.train,
        batch_size=args.batch_size,
        length=args.length,
        rule=rule_of(args),
        packs=not args.no_packing,
        replicates=not args.no_replicas,
        cache=False if args.no_cache else None,
        micro_batches=args.micro_batches,
        seed=args.seed,
    )
    # Stepfast: its shape is part of the checkpoint, so a restart goes on at the shape that it had.
    checkpointer = Checkpointer(
        training=training, rate=rate, replicated=["rate"], interval=every(steps=args.save_every)
    )
    log = Log(args, start=checkpointer.restore())
    for epoch in training.epochs(args.epochs):
        for step in training.steps():
            rate.step()
            checkpointer.step(step.number)
            crash_if_asked(args, step.number)
        shape = training.shape
        log.write(
            epoch, training.step, frozen=shape.frozen, length=shape.length, replicas=shape.replicas,
            micro_batches=training.micro_batches, loss=training.mean_loss(),
            accuracy=(metric := training.evaluate(task.held_out, accuracy)),
        )  # fmt: skip
        if args.stop_at is not None and metric >= args.stop_at:
            break
        training.adapt(metric)
    checkpointer.close()
    return training.model_state_dict()


def train_plainly(args: argparse.Namespace, task: Task, optimizer: Optimizer, rate: LambdaLR) -> dict[str, Tensor]:
    """With DistributedDataParallel."""
    model = DistributedDataParallel(task.model)
    sampler = DistributedSampler(task.train, seed=args.seed)
    loader = DataLoader(task.train, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    progress = {"epoch": 0, "step": 0}
    checkpointer = Checkpointer(
        model=model, optimizer=optimizer, rate=rate, progress=progress, replicated=["optimizer", "rate", "progress"],
        interval=every(steps=len(loader)),
    )  # fmt: skip
    log = Log(args, start=checkpointer.restore())
    for epoch in range(progress["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            rate.step()
            total += torch.tensor([loss.item(), 1.0])
            progress["step"] += 1
            crash_if_asked(args, progress["step"])
        progress["epoch"] = epoch + 1
        metric = held_out_accuracy(task)
        dist.all_reduce(total)
        log.write(
            epoch, progress["step"], frozen=0, length=1, replicas=dist.get_world_size(), micro_batches=1,
            loss=float(total[0] / total[1]), accuracy=metric,
        )  # fmt: skip
        checkpointer.step(progress["step"])
        if args.stop_at is not None and metric >= args.stop_at:
            break
    checkpointer.close()
    return task.model.state_dict()


@torch.no_grad()
def held_out_accuracy(task: Task) -> float:
    """Each rank takes its share of the samples."""
    task.model.eval()
    inputs, labels = task.held_out[dist.get_rank() :: dist.get_world_size()]
    right = (task.model(inputs).argmax(dim=1) == labels).sum()
    task.model.train()
    dist.all_reduce(right)
    return float(right) / len(task.held_out)


class Log:
    """A line an epoch: on the screen, and as JSON. Seconds are those since the epoch before, evaluation included.

    An attempt that begins at step `start` keeps the lines up to there.
    """

    def __init__(self, args: argparse.Namespace, start: int) -> None:
        self._path = Path(args.history) if args.history else None
        self._batch_size = args.batch_size
        self._began, self._step = time.monotonic(), start
        self._written = 0  # up to which step
        if self._path is not None and dist.get_rank() == 0:
            lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= start]
            self._path.write_text("".join(kept))
            self._written = json.loads(kept[-1])["step"] if kept else 0

    def write(self, epoch: int, step: int, **measured: Any) -> None:
        seconds = time.monotonic() - self._began
        rate = (step - self._step) * self._batch_size / seconds
        self._began, self._step = time.monotonic(), step
        if dist.get_rank():
            return
        print(
            f"epoch {epoch:3}  {measured['frozen']:2} frozen  {measured['replicas']} x {measured['length']} devices  "
            f"{rate:6.0f} samples/s  loss {measured['loss']:.3f}  accuracy {measured['accuracy']:.3f}",
            flush=True,
        )
        if self._path is not None and step > self._written:
            row = {"epoch": epoch, "step": step, "seconds": seconds, "samples_per_second": rate, **measured}
            with self._path.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def crash_if_asked(args: argparse.Namespace, step: int) -> None:
    """As a lost node would, in the first attempt only."""
    attempt, restarts = os.environ.get("STEPFAST_ATTEMPT", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    is_first = attempt in {"", "1"} and restarts in {"", "0"}
    if is_first and step == args.crash_at_step and dist.get_rank() == args.crash_rank:
        os.kill(os.getpid(), signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["digits", "text"], default="digits")
    parser.add_argument("--mode", choices=["ddp", "pipeline", "elastic"], default="elastic")
    parser.add_argument(
        "--rule",
        choices=["none", "gradients", "moments", "guarded", "late", "unfreezing"],
        help="default: late in the elastic mode",
    )
    parser.add_argument(
        "--alpha", type=float, default=1 / 3, help="share of the active layers to freeze at once, at most"
    )
    parser.add_argument("--length", type=int, help="devices of the pipeline at first; default: all ranks")
    parser.add_argument("--no-packing", action="store_true", help="without AutoPipe")
    parser.add_argument("--no-replicas", action="store_true", help="without AutoDP")
    parser.add_argument("--no-cache", action="store_true", help="without AutoCache")
    parser.add_argument("--micro-batches", type=int, help="for each device; default: found by trying")
    parser.add_argument("--classes", type=int, nargs="+", help="of the task; default: all")
    parser.add_argument("--pretrained", help="weights to begin with, of all but the head")
    parser.add_argument("--save-weights", metavar="FILE", help="the whole model's, at the end")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--stop-at", type=float, metavar="ACCURACY", help="end when it is reached")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--history", metavar="FILE", help="a line of JSON an epoch")
    parser.add_argument("--crash-at-step", type=int)
    parser.add_argument("--crash-rank", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group()
    train(arguments)
    dist.destroy_process_group()
