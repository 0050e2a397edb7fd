"""A byte-level GPT learns Python from Python's own standard library: no download, CPU only.

Shows what Stepfast asks of an ordinary DistributedDataParallel script: one `Checkpointer` over the objects
that make up the training, `restore()` before the loop, `step()` inside it, `close()` after it: look for
"Stepfast:". Killed at any moment and started again, the run ends with the same parameters, optimizer
state and RNG, bit for bit, as one that nobody disturbed.

    python train.py                                              one process
    torchrun --nproc-per-node 2 train.py                         two ranks
    stepfast run --nproc-per-node 2 train.py                     two ranks that survive being killed
    stepfast run --nproc-per-node 2 train.py --crash-at-step 150 --crash-rank 1     see it happen
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import signal
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch script gives it)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepfast.torch import Checkpointer, every

VOCABULARY = 256  # one token per byte value
WARMUP_STEPS = 30
HELD_OUT_WINDOWS = 128
LOG_EVERY_STEPS = 20


# --- data -------------------------------------------------------------------------------------------------


def read_corpus() -> tuple[Tensor, Tensor]:
    """Training and held-out text of the standard library: uint8 vectors.

    A file's hash decides its side, so that the split is the same on every rank and in every attempt. The
    library's own tests stay out: not every distribution of Python ships them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if left_out.isdisjoint(path.relative_to(root).parts):
            text = path.read_bytes()
            is_held_out = hashlib.sha256(text).digest()[0] < 16  # one file in sixteen
            sides[is_held_out].append(text)
    train, held_out = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return train, held_out


class WindowSampler:
    """Draws the batches of a run: windows of the text, chosen by the seed and the position alone.

    A batch is the whole gang's, and each rank takes its share of it, so the order of the data is the same for
    every number of ranks. All there is to save is the position: batch n can be drawn without those before it.
    """

    def __init__(self, text: Tensor, *, context: int, batch_size: int, seed: int) -> None:
        self.text = text
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0

    def next_batch(self, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank: int64, (batch_size / world_size, context) each."""
        generator = np.random.default_rng([self.seed, self.position])
        starts = generator.integers(len(self.text) - self.context, size=self.batch_size)
        self.position += 1
        windows = torch.stack([self.text[i : i + self.context + 1] for i in starts[rank::world_size]]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed, "text_bytes": len(self.text)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["text_bytes"] != len(self.text):
            raise ValueError(
                f"the checkpoint was trained on {state['text_bytes']} bytes, this Python's library has "
                f"{len(self.text)}: resume with the Python that started the run, or start a new run"
            )
        self.position, self.seed = state["position"], state["seed"]


# --- model ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a feed-forward network."""

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
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        fed: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + fed


class GPT(nn.Module):
    """Bytes (batch, length) in, logits (batch, length, 256) out; the embedding doubles as the output head."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.05) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        for block in self.blocks.children():
            # Each block adds to the residual stream twice: scaled so that depth does not blow it up.
            for name, weight in block.named_parameters():
                if name in {"attention_out.weight", "feed_forward.2.weight"}:
                    nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.token_embedding.weight  # tied, and still tied after a restore

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_bits_per_byte(model: nn.Module, text: Tensor, context: int, rank: int, world_size: int) -> float:
    """Loss on windows spread evenly over the held-out text, shared out over the ranks."""
    model.eval()
    starts = torch.linspace(0, len(text) - context - 1, HELD_OUT_WINDOWS).long().tolist()[rank::world_size]
    windows = torch.stack([text[i : i + context + 1] for i in starts]).long()
    total = torch.zeros(2, dtype=torch.float64)  # nats, batches
    for batch in torch.split(windows, 32):
        nats = next_byte_loss(model, batch[:, :-1], batch[:, 1:])
        total += torch.tensor([nats.item() * len(batch), len(batch)], dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(total)
    model.train()
    return float(total[0] / total[1]) / math.log(2)


# --- training ---------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    # Model weights start equal on all ranks (DDP sees to that); dropout draws differ from rank to rank.
    seed_everything(args.seed + rank)

    text, held_out = read_corpus()
    sampler = WindowSampler(text, context=args.context, batch_size=args.batch_size, seed=args.seed)
    gpt = GPT(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    model: nn.Module = DistributedDataParallel(gpt) if world_size > 1 else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, args.steps))
    latest = {"loss": math.nan}
    if world_size > 1:
        settle_gradient_buckets(model, torch.zeros(1, args.context, dtype=torch.int64))

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
        parameters = sum(parameter.numel() for parameter in gpt.parameters())
        print(f"GPT of {parameters:,} parameters, {len(text):,} bytes, {world_size} ranks", flush=True)
        print(f"continuing after step {start}" if start else "starting at step 1", flush=True)

    progress = Progress(start, tokens_per_step=args.batch_size * args.context)
    for step in range(start + 1, args.steps + 1):
        tokens, targets = sampler.next_batch(rank, world_size)
        loss = next_byte_loss(model, tokens, targets)
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
            bits = held_out_bits_per_byte(gpt, held_out, args.context, rank, world_size)
            if rank == 0:
                print(f"step {step}: held-out {bits:.3f} bits per byte", flush=True)

    # Stepfast: wait until what was saved is safe in storage.
    checkpointer.close()

    bits = held_out_bits_per_byte(gpt, held_out, args.context, rank, world_size)
    if rank == 0:
        print(f"held-out loss after {args.steps} steps: {bits:.3f} bits per byte", flush=True)
    if args.final_state:
        state = {
            "model": gpt.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "sampler": sampler.state_dict(),
            "losses": {"train": latest["loss"], "held_out_bits_per_byte": bits},
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
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    if steps_done < warmup:
        return (steps_done + 1) / warmup
    progress = min(1.0, (steps_done - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


class Progress:
    """Prints a line now and then, with the speed since the line before."""

    def __init__(self, step: int, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.last_step, self.last_time = step, time.perf_counter()

    def report(self, step: int, steps: int, loss: float) -> None:
        now = time.perf_counter()
        seconds_per_step = (now - self.last_time) / max(1, step - self.last_step)
        self.last_step, self.last_time = step, now
        print(
            f"step {step}/{steps}: train loss {loss / math.log(2):.3f} bits per byte, "
            f"{self.tokens_per_step / seconds_per_step:,.0f} tokens/s, {seconds_per_step:.3f} s/step",
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
        description="Train a byte-level GPT on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the whole run")
    parser.add_argument("--layers", type=int, default=3, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="size of the residual stream")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--batch-size", type=int, default=48, help="windows per step, over all ranks")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout, data order")
    parser.add_argument("--save-every", type=int, default=25, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=100, metavar="N", help="steps; 0: only at the end")
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
