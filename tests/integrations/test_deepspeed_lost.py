"""Saves and loads that come to nothing: killed, refused; and which step the ranks of a gang take."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eventual import wait_until
from interpreters import DEEPSPEED
from smallengines import BEGIN, found
from stepfast.storage import open_store
from turnedfolder import TURN, lay_turned

RUNS_ARE_FORKS_OF = DEEPSPEED

KILLED = (
    BEGIN
    + """
import signal
engine = make(1.0)
attempt = os.environ["STEPFAST_ATTEMPT"]
path, _ = engine.load_checkpoint("checkpoints")
print("attempt", attempt, "rank", rank, "loaded", path, flush=True)
if attempt == "1" and rank == 1:
    def killed(info):
        import time
        while not os.path.exists("checkpoints/latest"):  # rank 0 has committed
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    engine.checkpoint_engine.commit = killed
engine.save_checkpoint("checkpoints", tag="global_step3", client_state={"step": 3})
engine.checkpoint_engine.cleanup()
torch.distributed.barrier()
"""
)


def test_a_job_killed_within_its_first_save_begins_anew(runs: Any) -> None:
    """Of that save only names and `latest` are left."""
    (runs.folder / "train.py").write_text(KILLED)
    process = runs.start("--name", "train", "--nproc-per-node", "2", "--max-restarts", "2", "train.py")
    assert runs.finish(process) == 0, runs.log[-3000:]


def trained(folder: Path, ranks: int, *what: str) -> subprocess.CompletedProcess[str]:
    return DEEPSPEED.run_gang(ranks, ["train.py", *what], cwd=folder)


REFUSED = (
    BEGIN
    + """
from stepfast.errors import StateUnsupported
changes = json.loads(sys.argv[2])
def special(value):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}},
              **changes}
    return initialize(model=model, config=config, model_parameters=model.parameters())[0]
if sys.argv[1] == "save":
    engine = special(5.0)
    engine.global_steps = 7
    engine.save_checkpoint("checkpoints")
else:
    engine = special(1.0)
    try:
        engine.load_checkpoint("checkpoints")
    except StateUnsupported as error:
        print("FOUND", json.dumps([weight(engine), engine.global_steps, str(error)]), flush=True)
engine.checkpoint_engine.cleanup()
"""
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "a state with round_robin_gradients",
            id="round robin",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "the state of a BF16_Optimizer", id="bf16 with gradients in fp32",
        ),
    ],
)  # fmt: skip
def test_a_refused_load_leaves_the_engine_as_it_was(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "train.py").write_text(REFUSED)
    saved = trained(tmp_path, 2, "save", json.dumps(changes))
    assert saved.returncode == 0, saved.stderr[-2000:]
    loaded = trained(tmp_path, 1, "load", json.dumps(changes))
    refused = json.dumps([1.0, 0, f"{said} is loaded on as many ranks as have saved it"])
    assert f"FOUND {refused}" in loaded.stdout, loaded.stdout + loaded.stderr[-2000:]


LATE = (
    BEGIN
    + """
from stepfast.errors import CheckpointNotFound
engine = make(1.0)
if sys.argv[1] == "save":
    for step in (1, 2):
        with torch.no_grad():
            engine.module.weight.fill_(step)
        engine.save_checkpoint("checkpoints", tag=f"global_step{step}")
elif sys.argv[1] == f"late{rank}":
    checkpoints = engine.checkpoint_engine.checkpoints
    steps = checkpoints.steps
    checkpoints.steps = lambda: steps()[:-1]  # listed before the last was committed
if sys.argv[1] != "save":
    try:
        engine.load_checkpoint("checkpoints")
        os.write(1, f"FOUND {rank} {weight(engine)}\\n".encode())
    except CheckpointNotFound as error:
        os.write(1, f"FOUND {rank} {error}\\n".encode())
        os._exit(1)
engine.checkpoint_engine.cleanup()
"""
)


def test_ranks_that_see_different_steps_load_the_one_that_rank_0_sees(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LATE)
    saved = trained(tmp_path, 2, "save")
    assert saved.returncode == 0, saved.stderr[-2000:]
    agreed = trained(tmp_path, 2, "late0").stdout
    assert "FOUND 0 1.0" in agreed
    assert "FOUND 1 1.0" in agreed
    assert "rank 1 does not see step 2, which rank 0 loads" in trained(tmp_path, 2, "late1").stdout


BUSY = """
from pathlib import Path
engine, job = make(1.0, persistent_time_interval=0), Path(sys.argv[1])

def save(step):
    folder = Path(f"checkpoints/global_step{step}")
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"as it was")
    before = files()
    # With 4 MiB the agent has memory for two of them.
    saved = engine.save_checkpoint("checkpoints", f"global_step{step}", {"big": torch.zeros(1 << 20)})
    return saved, files() == before

def files():
    paths = [path for path in Path("checkpoints").rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

outcomes = [save(1)]
engine.checkpoint_engine.saved.wait()
turn(job, "file")  # nothing can be persisted
while outcomes[-1][0] and len(outcomes) < 9:
    outcomes.append(save(len(outcomes) + 1))
latest = Path("checkpoints/latest").read_text()
turn(job, "folder")
end([outcomes, latest])
"""


def found_on(node: Any, folder: Path, job: str, script: str) -> Any:
    """What a training on one rank ends with, on a node whose agent has the job's folder."""
    settings = {"STEPFAST_SETTINGS": '{"onBusy": "Skip", "maxToKeep": 0}'}
    environment = {**node.rank_environment(), **settings}
    return found(folder, script, str(folder / "storage" / job), environment=environment)


def test_where_memory_is_exhausted_and_the_job_skips_nothing_is_touched(
    start_node: Any, bench: Any, tmp_path: Path
) -> None:
    lay_turned(tmp_path / "storage" / str(bench.JOB), tmp_path)
    node = start_node((tmp_path / "storage").as_uri(), memory_limit=10 << 20)
    outcomes, latest = found_on(node, tmp_path, str(bench.JOB), TURN + BUSY)
    saved = list(range(1, len(outcomes)))
    assert outcomes == [[True, False]] * len(saved) + [[False, True]]
    assert latest == f"global_step{saved[-1]}"
    with closing(open_store(node.storage_uri)) as store:
        wait_until(lambda: bench.committed(store) == saved, "what was saved is committed")


AWAY = """
from pathlib import Path
engine, job = make(1.0, persistent_time_interval=0), Path(sys.argv[1])
job.parent.mkdir(parents=True)
job.symlink_to(job)  # whatever is to be listed or written there fails
saved = [engine.save_checkpoint("checkpoints", f"global_step{step}") for step in (1, 2)]
job.unlink()
end(saved)
"""


def test_the_first_saves_do_not_wait_for_a_storage_that_is_away(start_node: Any, bench: Any, tmp_path: Path) -> None:
    node = start_node((tmp_path / "storage").as_uri())
    assert found_on(node, tmp_path, str(bench.JOB), AWAY) == [True, True]
    with closing(open_store(node.storage_uri)) as store:
        assert bench.committed(store)[-1] == 2
