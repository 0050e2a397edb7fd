"""A loop with Accelerate, which has no asynchronous way of its own."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model

from stepfast.integrations.accelerate import StepfastAccelerator


def main() -> None:
    task = Task.read()
    clock, model, batch = Clock(task), make_model(task.layers), make_batch()
    accelerator = (StepfastAccelerator if task.way == "stepfast" else Accelerator)(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(task.iterations):
        clock.tick()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if clock.is_due:
            accelerator.save_state(f"accelerate/{step}")
    clock.tell()
    accelerator.end_training()


if __name__ == "__main__":
    main()
