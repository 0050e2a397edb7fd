"""Memory that is exhausted where the job skips what does not fit: all ranks of a gang skip alike."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from interpreters import TORCH
from stepfast.storage import open_store
from turnedfolder import TURN, lay_turned

# Every rank saves 4 MiB of its own; the agent has memory for two checkpoints.
TRAINING = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
import stepfast.nebula as nm

dist.init_process_group("gloo")
rank, job = dist.get_rank(), Path(sys.argv[1])
nm.init(persistent_time_interval=0)

def save(step):
    checkpoint = nm.Checkpoint(f"global_step{step}")
    checkpoint.save("state", torch.full((1 << 20,), 10.0 * step + rank))
    saved = checkpoint.commit()
    dist.barrier()
    return saved

def on_rank_0(*actions):
    for action in actions if rank == 0 else ():
        action()
    dist.barrier()

outcomes = [save(1)]
nm.flush_persistence()
dist.barrier()
on_rank_0(lambda: turn(job, "file"))  # nothing can be persisted
outcomes += [save(step) for step in range(2, 7)]
on_rank_0(lambda: turn(job, "folder"))
nm.flush_persistence()
outcomes += [save(7), save(8)]  # of which one may be skipped: ranks decide upon what they knew when they last met
for step, saved in enumerate(outcomes, 1):
    found = nm.get_checkpoint(f"global_step{step}")
    assert (found is not None) is saved, step
    assert not saved or (found.load("state") == 10.0 * step + rank).all(), step
os.write(1, f"FOUND {json.dumps(outcomes)}\\n".encode())  # in one piece: the ranks share their output
dist.barrier()
nm._shutdown()
dist.destroy_process_group()
"""


def test_what_does_not_fit_is_committed_by_no_rank_and_the_rest_by_all(
    start_node: Any, bench: Any, tmp_path: Path
) -> None:
    node = start_node((tmp_path / "storage").as_uri(), memory_limit=20 << 20)
    (tmp_path / "train.py").write_text(TURN + TRAINING)
    job = tmp_path / "storage" / str(bench.JOB)
    lay_turned(job, tmp_path)
    done = TORCH.run_gang(
        2, ["train.py", str(job)], cwd=tmp_path,
        env={**node.rank_environment(), "STEPFAST_SETTINGS": '{"onBusy": "Skip", "maxToKeep": 0, "node": 0}'},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    outcomes = json.loads(found[0].removeprefix("FOUND "))
    assert found == [found[0]] * 2
    assert (outcomes[0], all(outcomes[:6]), any(outcomes[6:])) == (True, False, True)
    with closing(open_store(node.storage_uri)) as store:
        assert bench.verify(store) == [step for step, saved in enumerate(outcomes, 1) if saved]
