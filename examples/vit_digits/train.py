"""A small vision transformer learns scikit-learn's handwritten digits: 8x8 pixels, no download, CPU only.

Shows what Stepfast asks of an ordinary DistributedDataParallel script: one `Checkpointer` over the objects
that make up the training, `restore()` before the loop, `step()` inside it, `close()` after it: look for
"Stepfast:".

Here every rank draws random numbers of its own, NumPy's for the augmentation and PyTorch's for dropout. Their
states are part of every checkpoint, so a run that was killed goes on with the images it would have seen.

    python train.py                                              one process
    torchrun --nproc-per-node 2 train.py                         two ranks
    stepfast run --nproc-per-node 2 train.py                     two ranks that survive being killed
    stepfast run --nproc-per-node 2 train.py --crash-at-step 300 --crash-rank 1     see it happen
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch script gives it)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepfast.torch import Checkpointer, every

IMAGE_PIXELS = 8
PATCH_PIXELS = 2
CLASSES = 10
WARMUP_STEPS = 30
LOG_EVERY_STEPS = 50


# --- data -------------------------------------------------------------------------------------------------


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels: float32 (n, 8, 8) about zero, int64 (n,).

    One image in five is held out, the same ones for every seed.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[held_out], labels[held_out]


class EpochSampler:
    """Draws the batches of a run: every image once an epoch, in an order given by the seed and the epoch.

    A batch is the whole gang's, and each rank takes its share of it, so the order of the data is the same for
    every number of ranks. All there is to save is the position, in the middle of an epoch or not.
    """

    def __init__(self, images: int, *, batch_size: int, seed: int) -> None:
        self.images = images
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0  # images drawn since the start of the run

    def next_batch(self, rank: int, world_size: int) -> Tensor:
        """Indices of one rank's images: int64, (batch_size / world_size,)."""
        drawn = np.arange(self.position, self.position + self.batch_size)
        self.position += self.batch_size
        # A batch may begin in one epoch and end in a later one.
        epochs, places = np.divmod(drawn, self.images)
        order = {epoch: self._order(epoch) for epoch in np.unique(epochs).tolist()}
        batch = [order[epoch][place] for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)]
        return torch.tensor(batch[rank::world_size])

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self.seed, epoch]).permutation(self.images).tolist()
        return order

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.seed = state["position"], state["seed"]


def shift_randomly(images: Tensor) -> Tensor:
    """Moves each image by up to a pixel each way, drawn from NumPy's global state: different on each rank."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    corners = np.random.randint(0, 3, size=(len(images), 2)).tolist()
    return torch.stack(
        [
            image[top : top + IMAGE_PIXELS, left : left + IMAGE_PIXELS]
            for image, (top, left) in zip(padded, corners, strict=True)
        ]
    )


# --- model ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block: self-attention over all patches, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.query_key_value(self.attention_norm(x)).view(split).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        fed: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + fed


class VisionTransformer(nn.Module):
    """Images (batch, 8, 8) in, logits (batch, 10) out; the mean over the patches is what is classified."""

    def __init__(self, *, layers: int, width: int, heads: int, dropout: float = 0.05) -> None:
        super().__init__()
        patches = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
        self.patch_embedding = nn.Conv2d(1, width, kernel_size=PATCH_PIXELS, stride=PATCH_PIXELS)
        self.position_embedding = nn.Parameter(0.5 * torch.randn(patches, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images.unsqueeze(1)).flatten(2).transpose(1, 2)
        x = self.blocks(self.dropout(patches + self.position_embedding))
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


@torch.no_grad()
def held_out_accuracy(model: nn.Module, images: Tensor, labels: Tensor, rank: int, world_size: int) -> float:
    """Share of the held-out images that are recognised; each rank takes its share of them."""
    model.eval()
    right = (model(images[rank::world_size]).argmax(dim=1) == labels[rank::world_size]).sum()
    if world_size > 1:
        dist.all_reduce(right)
    model.train()
    return float(right) / len(labels)


# --- training ---------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    # Weights start equal on all ranks (DDP sees to that); augmentation and dropout differ from rank to rank.
    seed_everything(args.seed + rank)

    images, labels, held_out_images, held_out_labels = read_digits()
    sampler = EpochSampler(len(images), batch_size=args.batch_size, seed=args.seed)
    vit = VisionTransformer(layers=args.layers, width=args.width, heads=args.heads)
    model: nn.Module = DistributedDataParallel(vit) if world_size > 1 else vit
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, args.steps))
    latest = {"loss": math.nan}
    if world_size > 1:
        settle_gradient_buckets(model, torch.zeros(1, IMAGE_PIXELS, IMAGE_PIXELS))

    # Stepfast: name the objects that make up the training, and continue where the last attempt got to.
    checkpointer = Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        latest=latest,  # plain values
        replicated=("optimizer", "scheduler", "sampler", "latest"),  # equal on all ranks
        total_steps=args.steps,
        interval=every(steps=args.save_every),
    )
    start = checkpointer.restore()

    if rank == 0:
        parameters = sum(parameter.numel() for parameter in vit.parameters())
        print(f"ViT of {parameters:,} parameters, {len(images):,} images, {world_size} ranks", flush=True)
        print(f"continuing after step {start}" if start else "starting at step 1", flush=True)

    progress = Progress(start, images_per_step=args.batch_size)
    for step in range(start + 1, args.steps + 1):
        batch = sampler.next_batch(rank, world_size)
        loss = F.cross_entropy(model(shift_randomly(images[batch])), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        latest["loss"] = mean_over_ranks(loss, world_size)

        # Stepfast: tell that this step is done; it saves when the interval says so.
        checkpointer.step(step, metrics={"loss": latest["loss"]})

        crash_if_asked(args, step, rank)
        if rank == 0 and (step % LOG_EVERY_STEPS == 0 or step == args.steps):
            progress.report(step, args.steps, latest["loss"])
        if args.eval_every and step % args.eval_every == 0 and step < args.steps:
            accuracy = held_out_accuracy(vit, held_out_images, held_out_labels, rank, world_size)
            if rank == 0:
                print(f"step {step}: held-out accuracy {accuracy:.1%}", flush=True)

    # Stepfast: wait until what was saved is safe in storage.
    checkpointer.close()

    accuracy = held_out_accuracy(vit, held_out_images, held_out_labels, rank, world_size)
    if rank == 0:
        print(f"held-out accuracy after {args.steps} steps: {accuracy:.1%}", flush=True)
    if args.final_state:
        state = {
            "model": vit.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "sampler": sampler.state_dict(),
            "losses": {"train": latest["loss"], "held_out_accuracy": accuracy},
        }
        write_final_state(args.final_state, rank, state)


def mean_over_ranks(value: Tensor, world_size: int) -> float:
    """Equal on all ranks: what each rank had of its own, no other number of ranks could go on from."""
    mean = value.detach() / world_size
    if world_size > 1:
        dist.all_reduce(mean)
    return float(mean)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def settle_gradient_buckets(model: nn.Module, inputs: Tensor) -> None:
    """Has DDP lay out its gradient buckets before the run: it does so anew after its first backward pass.

    The layout decides in which order the gradients of three ranks or more are summed, and so their last bits.
    Settled here, it is the same in a new run and in a resumed one.
    """
    model(inputs).sum().backward()
    model.zero_grad()


def lr_factor(steps_done: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    if steps_done < warmup:
        return (steps_done + 1) / warmup
    progress = min(1.0, (steps_done - warmup) / max(1, steps - warmup))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


class Progress:
    """Prints a line now and then, with the speed since the line before."""

    def __init__(self, step: int, images_per_step: int) -> None:
        self.images_per_step = images_per_step
        self.last_step, self.last_time = step, time.perf_counter()

    def report(self, step: int, steps: int, loss: float) -> None:
        now = time.perf_counter()
        seconds_per_step = (now - self.last_time) / max(1, step - self.last_step)
        self.last_step, self.last_time = step, now
        print(
            f"step {step}/{steps}: train loss {loss:.3f}, "
            f"{self.images_per_step / seconds_per_step:,.0f} images/s, {seconds_per_step:.3f} s/step",
            flush=True,
        )


def crash_if_asked(args: argparse.Namespace, step: int, rank: int) -> None:
    """Dies the hard way, once: the first attempt only, or the job would die at this step for ever."""
    attempt = os.environ.get("STEPFAST_ATTEMPT", "")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")  # torchrun's own, within an attempt
    is_first_attempt = attempt in {"", "1"} and restarts in {"", "0"}
    if is_first_attempt and step == args.crash_at_step and rank == args.crash_rank:
        print(f"rank {rank} kills itself after step {step}, as asked", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def write_final_state(path: str, rank: int, state: dict[str, Any]) -> None:
    """Everything that two runs must agree on to be the same run, for comparison: one file per rank."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    state["rng"] = {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    torch.save(state, f"{path}.rank{rank}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the whole run")
    parser.add_argument("--layers", type=int, default=3, help="transformer blocks")
    parser.add_argument("--width", type=int, default=64, help="size of the residual stream")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout, shifts, data order")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=150, metavar="N", help="steps; 0: only at the end")
    parser.add_argument("--final-state", metavar="FILE", help="write what the run ended with to FILE.rank<R>")
    parser.add_argument("--crash-at-step", type=int, metavar="N", help="kill --crash-rank after step N, once")
    parser.add_argument("--crash-rank", type=int, metavar="R", help="the rank that --crash-at-step kills")
    args = parser.parse_args()
    if (args.crash_at_step is None) != (args.crash_rank is None):
        parser.error("--crash-at-step and --crash-rank go together")
    if args.batch_size % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"--batch-size {args.batch_size} cannot be shared equally by the ranks")
    return args


def main() -> None:
    args = parse_arguments()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # per rank: sums in another order would give other bits
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    train(args, rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
