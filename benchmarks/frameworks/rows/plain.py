"""A loop of one's own: torch.save, and `Checkpointer`; and Nebula's API."""

from __future__ import annotations

import torch
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model

from stepfast import nebula
from stepfast.torch import Checkpointer


def main() -> None:
    task = Task.read()
    clock, model, batch = Clock(task), make_model(task.layers), make_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer) if task.way == "stepfast" else None
    if task.way == "nebula":
        nebula.init(persistent_storage_path=".stepfast/checkpoints", persistent_time_interval=0)
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
        else:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{step}.pt")
    clock.tell()
    if checkpointer is not None:
        checkpointer.close()


if __name__ == "__main__":
    main()
