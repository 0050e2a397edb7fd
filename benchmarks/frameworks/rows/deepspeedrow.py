"""DeepSpeed, ZeRO 1; its asynchronous way is the decoupled writer."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import deepspeed
import torch
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model

from stepfast.integrations.deepspeed import initialize


def main() -> None:
    task = Task.read()
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute
    clock, model, batch = Clock(task), make_model(task.layers), make_batch()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(batch), "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    if task.way == "async":
        os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # what its own launcher says of machines
        config["checkpoint"] = {"writer": {"type": sys.argv[1], "decoupled": True, "data_parallel": "replica"}}
    start = initialize if task.way == "stepfast" else deepspeed.initialize
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=config)
    for step in range(task.iterations):
        clock.tick()
        engine.backward(loss_of(engine, batch))
        engine.step()
        if clock.is_due:
            engine.save_checkpoint("deepspeed", tag=f"global_step{step}")
    clock.tell()
    engine.destroy()
    torch.distributed.destroy_process_group()


def _leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """At once: the decoupled writer's process would be waited for, which waits for more."""
    os.write(2, "".join(traceback.format_exception(kind, error, trace)).encode())  # torch keeps what a hook prints
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = _leave
    main()
