"""The documentation's own lines, in its order, run as they stand (but for what it leaves to the reader in brackets)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreters import TORCH

RUNS_ARE_FORKS_OF = TORCH

# Between the documentation's lines is only what a script needs around them.
DOCUMENT = """
import json, torch
model = torch.nn.Linear(3, 2)

# Import the Nebula package for fast-checkpointing
import nebulaml as nm
nm.init(persistent_storage_path="/tmp/nebula-of-the-document") # initialize Nebula

# Initialize Nebula with variables that helps Nebula to know where and how often to save your checkpoints
persistent_storage_path="/tmp/test",
nm.init(persistent_storage_path, persistent_time_interval=2)

checkpoint = nm.Checkpoint('global_step500')
checkpoint.save('<CKPT_NAME>', model)
before = [parameter.clone() for parameter in model.parameters()]

latest_ckpt = nm.get_latest_checkpoint()
p0 = latest_ckpt.load('<CKPT_NAME>')
assert type(p0) is torch.nn.Linear and all(map(torch.equal, before, p0.parameters()))

checkpoint = nm.Checkpoint('global_step1000', 1)
checkpoint.save('checkpoint', {"state_dict": model.state_dict()})

# Managing checkpoints
## List all checkpoints
ckpts = nm.list_checkpoints()
## Get Latest checkpoint path
persisted_storage_path = persistent_storage_path[0]
latest_ckpt_path = nm.get_latest_checkpoint_path("checkpoint", persisted_storage_path)

assert torch.equal(torch.load(latest_ckpt_path)["state_dict"]["weight"], before[0])
print(json.dumps([found["tag"] for found in ckpts]), flush=True)
"""
MEMORY = {"NEBULA_MEMORY_BUFFER_SIZE": "200000000"}  # as in the documentation: about 200 MB
LISTED = '["global_step500", "global_step1000"]'


def test_document_runs_under_stepfast_run(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DOCUMENT)
    summary = runs.run("train.py", **MEMORY)
    assert LISTED in runs.log
    assert "is taken" in runs.log  # the tuple is explained
    assert "persistent_storage_path '/tmp/test' is not used: this job's storage is file://" in runs.log
    assert (summary["state"], runs.committed()) == ("Complete", [500, 1000])
    histories = (tmp_path / ".stepfast/checkpoints/local/train/checkpointHistories.csv").read_text().splitlines()
    assert histories[0].split(",")[5:8] == ["duration_seconds", "throughput_mb_per_second", "size_bytes"]
    assert [line.split(",")[0] for line in histories[1:]] == ["500", "1000"]


@pytest.mark.parametrize("first", ["import stepfast.nebula.aliases\n", "import stepfast.nebula as nm\n"])
def test_document_runs_without_a_launcher_after_one_import(first: str, tmp_path: Path) -> None:
    script = DOCUMENT.replace("/tmp/test", str(tmp_path / "storage"))
    if "aliases" not in first:
        script = script.replace("import nebulaml as nm\n", "")
    (tmp_path / "train.py").write_text(first + script)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("STEPFAST_", "NEBULA_"))}
    done = TORCH.run(["train.py"], cwd=tmp_path, env={**environment, **MEMORY})
    assert done.returncode == 0, done.stderr
    assert LISTED in done.stdout
    steps = sorted(path.name for path in (tmp_path / "storage/local/train").iterdir() if path.is_dir())
    assert steps == ["global_step1000", "global_step500"]


# A script as its user wrote it for Azure ML: rank 0 alone saves.
TRAINING = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import nebulaml as nm

def main(crash_at):
    nm.init(persistent_storage_path="/mnt/azureml/checkpoints", persistent_time_interval=0)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, is_first_attempt = 1, True
    latest = nm.get_latest_checkpoint()
    if latest is not None:
        state = latest.load("checkpoint", map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, is_first_attempt = state["step"] + 1, False
        print(f"goes on from {latest.tag}", flush=True)
    for step in range(first, 21):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 2 == 0:
            checkpoint = nm.Checkpoint(f"global_step{step}", 1)
            checkpoint.save("checkpoint", {
                "model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
            })
        if step == crash_at and is_first_attempt and dist.get_rank() == 1:
            while not any(found["tag"] == "global_step10" for found in nm.list_checkpoints()):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0:
        torch.save([p.detach() for p in model.parameters()], sys.argv[2])
    dist.destroy_process_group()

main(int(sys.argv[1]))
"""


def test_killed_script_for_nebula_goes_on_and_ends_bit_for_bit_like_an_undisturbed_one(
    runs: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    runs.run("--name", "undisturbed", "--nproc-per-node", "2", "train.py", "0", "one.pt")
    summary = runs.run("--name", "disturbed", "--nproc-per-node", "2", "train.py", "11", "other.pt")
    assert (summary["attempt"], summary["restarts"]) == (2, 1)
    assert "goes on from global_step10" in runs.log, runs.log[-3000:]
    assert summary["checkpoint"]["latestPersistedStep"] == 20
    one, other = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "other.pt")
    assert len(one) == 2
    assert all(map(torch.equal, one, other))
