"""torch.distributed.checkpoint with FSDP2 on two ranks: `save`, `async_save` in a thread, and both through Stepfast."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.frameworks.clock import Clock, Task, loss_of, make_batch, make_model
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

from stepfast.torch.dcp import Sharing, StepfastStorageWriter, TaggedCheckpoints


def main() -> None:
    task = Task.read()
    dist.init_process_group("gloo")
    background: Any = dist.new_group(backend="gloo")
    torch.set_num_threads(1)
    clock, model, batch = Clock(task), make_model(task.layers), make_batch()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = (
        TaggedCheckpoints(sharing=Sharing.EVERY_RANK, persist_all=True) if task.way.startswith("stepfast") else None
    )
    writer = StepfastStorageWriter(checkpoints) if checkpoints is not None else None
    pending: Any = Future()
    pending.set_result(None)
    for step in range(task.iterations):
        clock.tick()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()
        if not clock.is_due:
            continue
        weights, moments = get_state_dict(model, optimizer)
        where: Any = {"checkpoint_id": f"dcp/{step}", "storage_writer": writer}
        if task.way.endswith("async"):
            pending.result()
            pending = async_save({"model": weights, "optimizer": moments}, process_group=background, **where)
        else:
            save({"model": weights, "optimizer": moments}, **where)
    if dist.get_rank() == 0:
        clock.tell()
    pending.result()
    if checkpoints is not None:
        checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
