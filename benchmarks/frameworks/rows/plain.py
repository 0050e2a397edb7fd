"""A loop of one's own: torch.save, DCP's async_save; `Checkpointer`, and Nebula's API."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model
from torch.distributed.checkpoint.state_dict_saver import async_save

from stepfast import nebula
from stepfast.torch import Checkpointer


def main() -> None:
    task = Task.read()
    clock, model, batch = Clock(task), make_model(task.layers), make_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer) if task.way == "stepfast" else None
    if task.way == "nebula":
        nebula.init(persistent_storage_path=".stepfast/checkpoints", persistent_time_interval=0)
    pending: Any = Future()
    pending.set_result(None)
    for step in range(task.iterations):
        clock.tick()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()
        if not clock.is_due:
            continue
        if checkpointer is not None:
            checkpointer.save(step)
        elif task.way == "nebula":
            checkpoint = nebula.Checkpoint(f"global_step{step}")
            checkpoint.save("model", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            checkpoint.commit()
        elif task.way == "async":
            pending.result()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            pending = async_save(state, checkpoint_id=f"dcp/{step}", no_dist=True)
        else:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{step}.pt")
    clock.tell()
    pending.result()
    if checkpointer is not None:
        checkpointer.close()


if __name__ == "__main__":
    main()
