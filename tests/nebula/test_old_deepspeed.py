"""DeepSpeed 0.19.6, the last release with a `nebula` block: it imports `torch_nebula`, and finds Stepfast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interpreters import TORCH

RUNS_ARE_FORKS_OF = TORCH

RELEASE = "0.19.6"
CACHE = Path(__file__).parents[2] / ".stepfast" / "cache" / f"deepspeed-{RELEASE}"

# As its user wrote it; but for the first lines, with which nothing is compiled for a minute.
TRAINING = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

import json, os, signal, sys, torch
assert deepspeed.__version__ == "0.19.6", deepspeed.__version__
stage, crash_at, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": stage},
    "nebula": {
        "enabled": True, "persistent_storage_path": "/mnt/azureml/checkpoints", "persistent_time_interval": 0,
        "num_of_version_in_retention": 2, "enable_nebula_load": True,
    },
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
folder = f"{out}-{os.environ['STEPFAST_ATTEMPT']}"  # the next attempt finds an empty disk
path, client = engine.load_checkpoint(folder)
first = client["step"] + 1 if path is not None else 1
print(f"rank {rank} begins at {first}", flush=True)
losses = {}
for step in range(first, 13):
    data = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = engine(data).square().mean()
    engine.backward(loss)
    engine.step()
    losses[step] = loss.item().hex()
    if step % 3 == 0:
        engine.save_checkpoint(folder, client_state={"step": step})
    if step == crash_at and first == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
with open(f"{out}.{rank}", "w") as file:
    json.dump(losses, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def old_deepspeed() -> Path:
    """The release in a folder of its own, beside the dependencies that the newest has brought along."""
    if not (CACHE / "deepspeed").is_dir():
        building = CACHE.with_name(f".{CACHE.name}-{os.getpid()}")
        done = subprocess.run(
            [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(building),
             f"deepspeed=={RELEASE}"],
            env={**os.environ, "DS_BUILD_OPS": "0"}, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"DEEPSPEED {RELEASE} COULD NOT BE INSTALLED, nothing of it was run: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
        building.rename(CACHE)
    return CACHE


@pytest.mark.parametrize("stage", [0, 2])
def test_training_with_a_nebula_block_is_killed_and_goes_on_unchanged(
    old_deepspeed: Path, runs: Any, tmp_path: Path, stage: int
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    path = os.pathsep.join([str(old_deepspeed), os.environ.get("PYTHONPATH", "")])
    common = ["--env", f"PYTHONPATH={path}", "--nproc-per-node", "2", "train.py", str(stage)]
    runs.run("--name", "undisturbed", *common, "0", "one")
    summary = runs.run("--name", "disturbed", *common, "8", "other")
    assert summary["restarts"] == 1
    assert runs.log.count("begins at 7") == 2, runs.log[-3000:]
    for rank in range(2):
        one, other = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("one", "other"))
        assert other == {step: one[step] for step in map(str, range(7, 13))}
