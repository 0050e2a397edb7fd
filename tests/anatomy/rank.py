"""One of several real ranks that train a family of models; tells what the allocator had: the truth of predictions.

Run as `python rank.py SHARING PRECISION STORE RANK WORLD_SIZE`; prints the most bytes that
were allocated within each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from benchmarks.anatomy.cpumemory import STEP, allocator_peaks_bytes  # noqa: E402

from families import WIDE_GPT, Family  # noqa: E402 - it is found by the path above

BATCH_SIZE = 8
STEPS = 2  # the first has no moments yet
ZERO = {"reduce_bucket_size": 100_000}  # DeepSpeed's own, 500 million elements, would be all that there is to see


def train(sharing: str, family: Family, precision: str) -> None:
    model = family.model().train()
    compute = torch.bfloat16 if precision == "bf16-mixed" else None
    if sharing.startswith("zero"):
        _train_deepspeed(model, family, int(sharing[-1]), is_mixed=compute is not None)
        return
    optimizer: torch.optim.Optimizer
    if sharing == "ddp":
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = _sharded(model, compute)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    is_cast = compute is not None and sharing == "ddp"
    for _ in range(STEPS):
        with record_function(STEP):
            batch = family.batch(BATCH_SIZE)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = wrapped(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _sharded(model: torch.nn.Module, compute: torch.dtype | None) -> torch.nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if compute else MixedPrecisionPolicy()
    )
    names = set(model._no_split_modules)  # type: ignore[arg-type] # Transformers'
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def _train_deepspeed(model: torch.nn.Module, family: Family, stage: int, *, is_mixed: bool) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, **ZERO},
            "bf16": {"enabled": is_mixed},
        },
    )
    for _ in range(STEPS):
        with record_function(STEP):
            batch = family.batch(BATCH_SIZE)
            if is_mixed:
                batch = {name: each.bfloat16() if each.is_floating_point() else each for name, each in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()


def main() -> None:
    sharing, precision, store, rank, world_size = sys.argv[1:]
    os.environ.update(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, DS_ACCELERATOR="cpu", LOCAL_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    torch.set_num_threads(1)  # so that what sends and receives has its turn
    peaks = allocator_peaks_bytes(lambda: train(sharing, WIDE_GPT, precision))
    print("peak bytes of each step:", *peaks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
