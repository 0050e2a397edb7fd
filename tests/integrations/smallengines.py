"""Trainings by DeepSpeed's engines of one small layer: how their scripts begin, and what they find."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interpreters import DEEPSPEED

# `make` makes an engine all of whose weights are that number; a script that has one calls it `engine`.
BEGIN = """
import json, os, sys
import torch, deepspeed
from stepfast.integrations.deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()

def make(weight, **nebula):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, weight)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "nebula": nebula,
    }
    return initialize(model=model, config=config, model_parameters=model.parameters())[0]

def weight(engine):
    return engine.module.weight[0, 0].item()

def steps():
    return [found.tag for found in engine.checkpoint_engine.checkpoints.steps()]

def end(found):
    engine.checkpoint_engine.cleanup()
    if rank == 0:
        print("FOUND", json.dumps(found))
    torch.distributed.destroy_process_group()
"""


def run_alone(
    folder: Path, script: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The script as the only rank of its job. `environment`: other than that of a rank without an agent."""
    (folder / "train.py").write_text(script)
    if environment is None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STEPFAST_")}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return DEEPSPEED.run(["train.py", *arguments], cwd=folder, env={**environment, **alone})


def found(folder: Path, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """What a training on one rank ends with."""
    done = run_alone(folder, BEGIN + script, *arguments, environment=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def save_by_deepspeed(folder: Path, save_dir: str, tag: str) -> None:
    """Leaves a checkpoint of DeepSpeed's own in there, whose weights are 7."""
    script = f"""
engine = make(7.0, enabled=False)
engine.save_checkpoint({save_dir!r}, tag={tag!r})
print("FOUND null"); sys.exit()
"""
    found(folder, script)


__all__ = ["BEGIN", "found", "run_alone", "save_by_deepspeed"]
