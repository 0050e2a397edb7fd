"""How ranks find each other and their agent, and what they may take for equal on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interpreters import TORCH
from stepfast import catalog
from stepfast.layout import job_folder
from stepfast.storage import open_store

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

# Rank 1 is at the second checkpointer first, where it finds what rank 0 said to the first.
ONE_AFTER_THE_OTHER = """
import sys, time
import torch.distributed as dist
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
for turn in range(2):
    if turn == 1 and rank == 0:
        time.sleep(1)
    state = {"rank": rank}
    with Checkpointer(state=state) as checkpointer:
        start = checkpointer.restore() if sys.argv[1] == "restored" else 2 * turn
        for step in (start + 1, start + 2):
            assert checkpointer.save(step).saved
    print(f"went on from {start}\\n", end="", flush=True)
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
@pytest.mark.parametrize("how", ["restored", "from scratch"])
def test_second_checkpointer_of_the_ranks_agrees_anew(
    how: str, with_agent: bool, launcher: Any, start_agent: Callable[..., Any]
) -> None:
    agent = start_agent() if with_agent else None
    done = launcher.run(ONE_AFTER_THE_OTHER, how, ranks=2, agent=agent, timeout_seconds=120.0)
    assert (done.code, done.output.count("went on from 0"), done.output.count("went on from 2")) == (0, 2, 2), (
        done.output
    )
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    assert [found.step for found in catalog.committed_steps(store, folder)] == [1, 2, 3, 4]
    store.close()


@pytest.mark.parametrize("with_agent", [False, True], ids=["no agent", "agent"])
def test_ranks_that_the_script_started_itself_are_one_gang(
    with_agent: bool, launcher: Any, tmp_path: Path, start_agent: Callable[..., Any]
) -> None:
    variables = launcher.variables(start_agent() if with_agent else None, 1, {})
    if not with_agent:
        del variables["STEPFAST_RUN"]
    script = launcher.write(SPAWNED)
    for launch in range(2):
        command = [str(script), (tmp_path / f"meeting-{launch}").as_uri()]
        if with_agent:
            variables["STEPFAST_RUN"] = f"spawned-{launch}"
        done = TORCH.run(command, env=variables, cwd=tmp_path)
        assert (done.returncode, done.stdout.count(f"went on from {launch}")) == (0, 2), done.stdout + done.stderr


def test_rank_without_the_agent_that_others_have_takes_all_to_the_storage(
    launcher: Any, start_agent: Callable[..., Any]
) -> None:
    done = launcher.run(HALF, ranks=2, agent=start_agent())
    assert (done.code, done.output.count("committed")) == (0, 2), done.output
    assert "/nowhere/agent.sock" in done.output
    assert len(list(launcher.bench.folder.glob("*/manifest.json"))) == 1


# ---------------------------------------------------------------- how Nebula's functions find it


def ranks_by_step(launcher: Any) -> dict[int, list[int]]:
    """Of the committed steps, those that have files in it."""
    store = open_store(launcher.bench.storage.as_uri())
    folder = job_folder(launcher.bench.job)
    found = {
        step.step: sorted(file.rank for file in catalog.verify_step(store, folder, step.step))
        for step in catalog.committed_steps(store, folder)
    }
    store.close()
    return found


NEBULA = """
import os, sys, time
import torch.distributed as dist
import stepfast.nebula as nm
rank = int(os.environ["RANK"])
"""


@pytest.mark.parametrize("kept", ["None", "50"], ids=["another-interval", "another-retention"])
def test_every_ranks_save_is_whole_after_a_second_init(launcher: Any, kept: str) -> None:
    finished = launcher.run(
        NEBULA
        + f"kept = {kept}"
        + """
nm.init(persistent_storage_path="/tmp/one")
nm.init(persistent_storage_path="/tmp/one", persistent_time_interval=0, num_of_version_in_retention=kept)
dist.init_process_group("gloo")
for step in (1, 2, 3):
    nm.Checkpoint(f"global_step{step}", 1).save("x", rank)
    dist.barrier()
nm.flush_persistence()
""",
        ranks=2,
    )
    assert finished.code == 0, finished.output
    assert ranks_by_step(launcher) == {1: [0, 1], 2: [0, 1], 3: [0, 1]}, finished.output


def test_rank_that_is_slow_to_configure_again_keeps_its_share_of_the_next_tag(launcher: Any) -> None:
    """While it closes the checkpoints that it had, a faster rank has saved the next ones already."""
    finished = launcher.run(
        NEBULA
        + """
from stepfast.nebula import engine
from stepfast.torch.writer import Writer
dist.init_process_group("gloo")
nm.init(persistent_time_interval=0, num_of_version_in_retention=20)
nm.Checkpoint("global_step1", 1).save("x", rank)
dist.barrier()
if rank == 1:
    close = Writer.close
    def close_late(self):  # behind this rank's own questions and answers
        deadline = time.monotonic() + 20
        while not os.path.exists("saved") and time.monotonic() < deadline:
            time.sleep(0.01)
        close(self)
    Writer.close = close_late
nm.init(persistent_time_interval=0, num_of_version_in_retention=30)
if rank == 1:
    Writer.close = close
nm.Checkpoint("global_step2", 1).save("x", rank)
if rank == 0:
    attendance, looks = engine.checkpoints()._sharers._attendance, []
    look = attendance._look
    attendance._look = lambda: (look(), looks.append(None))
    while len(looks) < 3:  # for answers that there are already
        time.sleep(0.01)
    open("saved", "w").close()
nm.flush_persistence()
""",
        ranks=2,
    )
    assert finished.code == 0, finished.output
    assert ranks_by_step(launcher) == {1: [0, 1], 2: [0, 1]}, finished.output


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no-agent"])
def test_every_ranks_save_is_whole_after_a_shutdown(launcher: Any, start_agent: Any, with_agent: bool) -> None:
    finished = launcher.run(
        NEBULA
        + """
dist.init_process_group("gloo")
nm.init(persistent_time_interval=0)
for tag in ("global_step1", "last", "last"):
    nm.Checkpoint(tag, 1).save("x", rank)
    dist.barrier()
    nm._shutdown()
    dist.barrier()
print(rank, [found["tag"] for found in nm.list_checkpoints()], flush=True)
""",
        ranks=2,
        agent=start_agent() if with_agent else None,
    )
    assert finished.code == 0, finished.output
    assert finished.output.count("['global_step1', 'last', 'last']") == 2, finished.output
    assert ranks_by_step(launcher) == {1: [0, 1], 2: [0, 1], 3: [0, 1]}, finished.output


STARTED_BY_THE_SCRIPT = """
import os, sys, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, path, first):
    import stepfast.nebula as nm
    from stepfast.errors import GangError
    nm.init(persistent_time_interval=0)
    if first == "look":
        assert nm.get_latest_checkpoint() is None
    elif first == "save" and rank == 0:
        nm.Checkpoint("global_step1", 1).save("x", rank)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        nm.Checkpoint("global_step1", 1).save("x", rank)
        dist.barrier()
        nm._shutdown()
    except GangError as error:
        print(rank, error, flush=True)
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(key, None)
    mp.start_processes(train, (os.path.abspath("meet"), sys.argv[1]), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize(
    ("first", "with_agent"),
    [("init", True), ("init", False), ("look", False)],
    ids=["init-agent", "init-no-agent", "look-no-agent"],
)
def test_ranks_that_the_script_starts_itself_are_one_gang(
    launcher: Any, start_agent: Any, first: str, with_agent: bool
) -> None:
    finished = launcher.run(STARTED_BY_THE_SCRIPT, first, ranks=1, agent=start_agent() if with_agent else None)
    assert finished.code == 0, finished.output[-3000:]
    assert ranks_by_step(launcher) == {1: [0, 1]}, finished.output[-1500:]


def test_rank_that_saved_before_it_had_a_group_is_told_so(launcher: Any) -> None:
    finished = launcher.run(STARTED_BY_THE_SCRIPT, "save", ranks=1)
    assert "0 this process has saved checkpoints as the only rank, and is one of 2 now" in finished.output


def test_flush_of_a_tag_can_be_called_by_ranks_that_have_not_saved_it(launcher: Any) -> None:
    finished = launcher.run(
        NEBULA
        + """
dist.init_process_group("gloo")
nm.init(persistent_time_interval=0)
dist.barrier()
if rank == 0:
    nm.Checkpoint("global_step1", 1).save("x", 1)
assert nm.flush_persistence("global_step1")
dist.barrier()
""",
        ranks=2,
    )
    assert finished.code == 0, finished.output[-3000:]
    assert ranks_by_step(launcher) == {1: [0]}


# DeepSpeed up to 0.19.6 as far as Nebula's module knows it; each rank has a disk of its own.
OLD_DEEPSPEED = (
    NEBULA
    + """
import types
module = types.ModuleType("deepspeed.runtime.engine")
class NebulaCheckpointEngine: pass
class DeepSpeedEngine:
    checkpoint_engine = NebulaCheckpointEngine()
    def load_checkpoint(self, load_dir, tag=None):
        return tag
module.DeepSpeedEngine = DeepSpeedEngine
sys.modules["deepspeed.runtime.engine"] = module
from stepfast.nebula import deepspeedmodule as torch_nebula
dist.init_process_group("gloo")
torch_nebula.init(persistent_time_interval=0)
c = torch_nebula.Checkpoint("global_step1"); c.save("x", rank); c.commit()
dist.barrier()
folder = f"node{rank}"
os.makedirs(folder, exist_ok=True)
if rank == 0:
    open(f"{folder}/latest", "w").write("global_step1")  # DeepSpeed's rank 0 writes it
tag = DeepSpeedEngine().load_checkpoint(folder)
print(f"LOADS {tag} {os.path.exists(f'{folder}/global_step1/x')}", flush=True)  # in one write: two ranks share a pipe
dist.barrier()
"""
)


def test_node_whose_disk_is_empty_does_not_wait_for_those_whose_is_not(launcher: Any) -> None:
    finished = launcher.run(OLD_DEEPSPEED, ranks=2, timeout_seconds=120)
    assert finished.code == 0, finished.output[-3000:]
    assert finished.output.count("LOADS global_step1 True") == 2, finished.output[-3000:]
