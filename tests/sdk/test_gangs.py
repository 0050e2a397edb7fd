"""How ranks find each other and their agent, and what they may take for equal on all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Every rank's model differs from the others': DDP keeps it equal within a group of its own, or leaves a part alone.
DIFFERENT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([r]) for r in range(2)]
def build(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    if sys.argv[1] == "a group of its own":
        return net, DistributedDataParallel(net, process_group=groups[rank])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight"])
    return net, DistributedDataParallel(net)
net, model = build(rank)
with Checkpointer(model=model) as checkpointer:
    checkpointer.save(1)
other, model = build(10 + rank)
with Checkpointer(model=model) as checkpointer:
    assert checkpointer.restore(step=1) == 1
print("same" if all(map(torch.equal, net.parameters(), other.parameters())) else "others'", flush=True)
dist.destroy_process_group()
"""

# The script starts its own ranks, as PyTorch's tutorial does: nothing but the process group tells how many there are.
SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from stepfast.torch import Checkpointer
def work(rank):
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    state = {"rank": rank, "weights": torch.full((1000,), float(rank))}
    with Checkpointer(state=state) as checkpointer:
        start = checkpointer.restore()
        checkpointer.save(start + 1)
    assert state["rank"] == rank and (state["weights"] == rank).all()
    os.write(1, f"went on from {start}\\n".encode())  # in one piece: the ranks share their output
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.start_processes(work, nprocs=2, start_method="fork")
"""

# One rank looks for the agent where there is none.
HALF = """
import os, sys
import torch.distributed as dist
from stepfast.torch import Checkpointer, join
dist.init_process_group("gloo")
join.AGENT_START_SECONDS = 0.2
if dist.get_rank() == 1:
    os.environ["STEPFAST_SOCKET"] = "/nowhere/agent.sock"
with Checkpointer(state={"rank": dist.get_rank()}) as checkpointer:
    checkpointer.save(1)
print("committed", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("what", ["a group of its own", "a parameter left alone"])
def test_what_ddp_does_not_keep_equal_on_all_ranks_is_each_ranks_own(what: str, launcher: Any) -> None:
    done = launcher.run(DIFFERENT, what, ranks=2)
    assert (done.code, done.output.count("same")) == (0, 2), done.output


@pytest.mark.parametrize("with_agent", [False, True], ids=["no agent", "agent"])
def test_ranks_that_the_script_started_itself_are_one_gang(
    with_agent: bool, launcher: Any, tmp_path: Path, start_agent: Callable[..., Any]
) -> None:
    variables = launcher.variables(start_agent() if with_agent else None, 1, {})
    if not with_agent:
        del variables["STEPFAST_RUN"]
    script = launcher.write(SPAWNED)
    for launch in range(2):
        command = [sys.executable, str(script), (tmp_path / f"meeting-{launch}").as_uri()]
        if with_agent:
            variables["STEPFAST_RUN"] = f"spawned-{launch}"
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )
        assert (done.returncode, done.stdout.count(f"went on from {launch}")) == (0, 2), done.stdout + done.stderr


def test_rank_without_the_agent_that_others_have_takes_all_to_the_storage(
    launcher: Any, start_agent: Callable[..., Any]
) -> None:
    done = launcher.run(HALF, ranks=2, agent=start_agent())
    assert (done.code, done.output.count("committed")) == (0, 2), done.output
    assert "/nowhere/agent.sock" in done.output
    assert len(list(launcher.bench.folder.glob("*/manifest.json"))) == 1
