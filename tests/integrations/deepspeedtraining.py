"""Trains a tiny model on the CPU by a configuration (JSON, on standard input), as the article's script does: with its
own SGD. Writes the losses as JSON to standard output.

No operator of DeepSpeed's is compiled: that takes minutes, and one process has nobody to share memory with.
"""

# ruff: noqa: E402 - what DeepSpeed writes while it is imported must not get among the answers

from __future__ import annotations

import json
import os
import sys
import tempfile

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed writes to standard output, too

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

configuration = json.load(sys.stdin)
torch.manual_seed(0)
torch.set_num_threads(1)
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 1))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), config=configuration
    )
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 10, dtype=dtype)
    losses = []
    for _ in range(3 * engine.gradient_accumulation_steps()):
        loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    answers.write(json.dumps({"losses": losses, "steps": engine.global_steps}))
    answers.flush()
    torch.distributed.destroy_process_group()
