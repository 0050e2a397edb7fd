"""Who shares in a step when nobody has said it: found out from what the ranks of a real gang do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepfast import catalog
from stepfast.layout import job_folder
from stepfast.storage import open_store

# Trains with DDP; `who` says which ranks save, `when` each rank's place.
SCRIPT = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from stepfast.errors import GangError
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
who, steps = json.loads(sys.argv[1]), 4
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoints = TaggedCheckpoints(sharing=Sharing.WHOEVER_OPENS)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
def save(step):
    opened = checkpoints.open(f"global_step{step}")
    opened.put("rank", rank)
    opened.commit()
for step in range(1, steps + 1):
    model(torch.ones(2, 4)).sum().backward()
    if rank in who[str(step)]:
        save(step)
if len(sys.argv) > 2:
    try:
        if rank == 0:
            save(9)
        dist.barrier(); dist.barrier()
        while rank == 1 and checkpoints._attendance._next_index < 5: pass
        while rank == 1 and checkpoints._attendance._questions: pass
        if rank == 1:
            save(9)
    except GangError as error:
        print(error, flush=True)
    dist.barrier()
found = checkpoints.latest() if rank in who[str(steps)] else None
checkpoints.close()
dist.destroy_process_group()
"""

EVERY = {step: [0, 1, 2] for step in (1, 2, 3, 4)}
FIRST = {step: [0] for step in (1, 2, 3, 4)}
LAST = {step: [2] for step in (1, 2, 3, 4)}
MIXED = {1: [0, 1, 2], 2: [0], 3: [1, 2], 4: [0, 1, 2]}


@pytest.mark.parametrize(
    "who", [EVERY, FIRST, LAST, MIXED], ids=["every-rank", "rank-0", "rank-2", "now-these-now-those"]
)
@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no-agent"])
def test_step_is_whole_with_the_ranks_that_saved_it(
    launcher: Any, start_agent: Any, who: dict[int, list[int]], with_agent: bool
) -> None:
    agent = start_agent() if with_agent else None
    finished = launcher.run(SCRIPT, json.dumps(who), ranks=3, agent=agent)
    assert finished.code == 0, finished.output
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    found = {
        step: sorted(file.rank for file in catalog.verify_step(store, folder, step))
        for step in (committed.step for committed in catalog.committed_steps(store, folder))
    }
    store.close()
    assert found == who


GO_BACK = """
import torch.distributed as dist
import stepfast.nebula as nm
dist.init_process_group("gloo")
rank = dist.get_rank()
nm.init(persistent_time_interval=0)
dist.barrier()
for step in (1, 2, 3):
    if rank == 0:
        nm.Checkpoint(f"global_step{step}", 1).save("x", step)
        nm.Checkpoint("best", 1).save("x", step)
    dist.barrier()
    latest, got = nm.get_latest_checkpoint(), nm.get_checkpoint(f"global_step{step}")
    seen = [None, None]
    dist.all_gather_object(seen, (latest and latest.load("x"), latest and latest.tag, got and got.tag))
    if rank == 0:
        print("SEEN", step, seen == [(step, "best", f"global_step{step}")] * 2, seen, flush=True)
    dist.barrier()
"""


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no-agent"])
def test_ranks_that_go_back_to_the_latest_go_back_to_the_same(
    launcher: Any, start_agent: Any, with_agent: bool
) -> None:
    finished = launcher.run(GO_BACK, ranks=2, agent=start_agent() if with_agent else None)
    assert finished.code == 0, finished.output
    assert [f"SEEN {step} True" in finished.output for step in (1, 2, 3)] == [True] * 3, finished.output


ASK_BEFORE = """
import time, torch.distributed as dist
from stepfast.torch.tagged import Sharing, TaggedCheckpoints
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoints = TaggedCheckpoints(sharing=Sharing.WHOEVER_OPENS)
for step in (1, 2, 3):
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # rank 0 has saved by now, and waits for this rank's share
        checkpoints.latest()
    opened = checkpoints.open(f"global_step{step}")
    opened.put("rank", rank)
    opened.commit()
dist.barrier()
print("LATEST", checkpoints.latest().step, flush=True)
dist.barrier()
"""


def test_rank_that_asks_for_the_latest_before_it_saves_keeps_nobody_waiting(launcher: Any) -> None:
    finished = launcher.run(ASK_BEFORE, ranks=2, timeout_seconds=100.0)
    assert finished.code == 0, finished.output
    assert finished.output.count("LATEST 3") == 2, finished.output


def test_rank_that_comes_too_late_for_a_step_is_told_so(launcher: Any, start_agent: Any) -> None:
    finished = launcher.run(SCRIPT, json.dumps(FIRST), "late", ranks=2, agent=start_agent())
    assert finished.code == 0, finished.output
    assert "rank 1 opens 'global_step9' behind a collective operation" in finished.output
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    assert [file.rank for file in catalog.verify_step(store, folder, 9)] == [0]
    store.close()
