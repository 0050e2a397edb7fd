"""What is exported is what DeepSpeed itself would have written: its engine goes on from it, its tools read it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from interpreters import DEEPSPEED, STEPFAST

# With Stepfast two steps more are trained behind the save; without, the exported tag is loaded, saved again by
# DeepSpeed's own engine, and the same two steps are trained.
TRAINING = """
import json, os, sys
import torch, deepspeed
from torch import nn
from deepspeed.utils import safe_get_full_fp32_param
from stepfast.integrations.deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
# ZeRO-3 pads the last rank's part with memory that nobody sets. By this it is NaN, which may be there by chance, too.
torch.use_deterministic_algorithms(True, warn_only=True)
plain, modes, found = sys.argv[1] == "plain", json.loads(sys.argv[2]), {}

class Counted(nn.Linear):
    def __init__(self):
        super().__init__(6, 33)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return super().forward(x) * (1 + self.seen / 64)

def train(engine, first, last):
    losses = []
    for step in range(first, last + 1):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        x = x.to(torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses

for mode, changes in modes.items():
    torch.manual_seed(2 if plain else 1)
    model = nn.Sequential(Counted(), nn.ReLU(), nn.Linear(33, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **changes,
    }
    if plain:
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        _, client = engine.load_checkpoint("exported", tag=mode)
        engine.save_checkpoint("again", tag=mode, client_state={"step": client["step"], "words": client["words"]})
    else:
        config["nebula"] = {"persistent_time_interval": 0, "num_of_version_in_retention": 100}
        engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
        train(engine, 1, 3)
        engine.save_checkpoint("saved", tag=mode, client_state={"step": 3, "words": {"a", "b"}})
        checkpoints = engine.checkpoint_engine.checkpoints
        checkpoints.flush()
        weights = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
        if rank == 0:
            torch.save({name: weight.clone() for name, weight in weights.items() if weight is not None}, f"{mode}.pt")
    found[mode] = train(engine, 4, 5)
if not plain:
    checkpoints.close()
torch.distributed.barrier()
with open(f"{sys.argv[1]}-{rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""

MODES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "zero2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}


# In a process of its own: to import DeepSpeed changes the logging and torch of the one that it is imported into.
CHECKS = """
import json, sys
from pathlib import Path
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

def octets(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)

def same(one, other):
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and octets(one).equal(octets(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return one == other

found = {}
for mode in json.loads(sys.argv[1]):
    exported, again = ({file.name: file for file in Path(name, mode).iterdir()} for name in ("exported", "again"))
    files = {
        name: same(*(torch.load(file, weights_only=False, mmap=True) for file in (exported[name], again[name])))
        for name in exported.keys() & again.keys()
    }
    found[mode] = {"files": files, "alone": sorted(exported.keys() ^ again.keys())}
    if mode != "zero0":  # which has nothing to put together
        expected = torch.load(f"{mode}.pt")
        weights = get_fp32_state_dict_from_zero_checkpoint("exported", mode)
        found[mode]["weights"] = same({name: weights[name] for name in expected}, expected)
        found[mode]["others"] = sorted(weights.keys() - expected.keys())
Path("checks.json").write_text(json.dumps(found))
"""


def run(folder: Path, *command: str | Path, ranks: int = 1) -> str:
    """The output of processes without a launcher."""
    return DEEPSPEED.output_of_gang(ranks, list(map(str, command)), cwd=folder)


def uri(folder: Path) -> str:
    return str(folder / ".stepfast" / "checkpoints" / "local" / "train")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished job, and what two ranks of plain DeepSpeed made of its exported tags."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "train.py").write_text(TRAINING)
    export = "import sys; from stepfast.integrations.deepspeed import export_checkpoint as export; "
    export += "assert all(export(sys.argv[1], 'exported', tag) == tag for tag in sys.argv[2:])"
    run(folder, "train.py", "stepfast", json.dumps(MODES), ranks=2)
    run(folder, "-c", export, uri(folder), *MODES)
    run(folder, "train.py", "plain", json.dumps(MODES), ranks=2)
    run(folder, "-c", CHECKS, json.dumps(list(MODES)))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_plain_deepspeed_goes_on_from_it_bit_for_bit(trained: Path, mode: str) -> None:
    for rank in range(2):
        ours, plain = (json.loads((trained / f"{name}-{rank}.json").read_text()) for name in ("stepfast", "plain"))
        assert plain[mode] == ours[mode]


@pytest.mark.parametrize("mode", MODES)
def test_every_file_is_the_one_that_plain_deepspeed_writes(trained: Path, mode: str) -> None:
    found = json.loads((trained / "checks.json").read_text())[mode]
    assert found["alone"] == []
    assert len(found["files"]) == {"zero0": 1, "zero3": 4}.get(mode, 3)
    assert [name for name, is_same in found["files"].items() if not is_same] == []
    for name in found["files"]:
        exported, again = ((trained / folder / mode / name).stat().st_size for folder in ("exported", "again"))
        assert exported <= 1.1 * again, name  # a view brings no more than its own bytes


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "zero0"])
def test_deepspeeds_own_tools_put_the_weights_together(trained: Path, mode: str) -> None:
    found = json.loads((trained / "checks.json").read_text())[mode]
    assert (found["weights"], found["others"]) == (True, ["0.seen"])


def test_beside_the_tags_lies_what_deepspeed_leaves_there(trained: Path, tmp_path: Path) -> None:
    exported, again = ({file.name for file in (trained / name).iterdir()} for name in ("exported", "again"))
    assert exported == again
    assert (trained / "exported" / "latest").read_text() == (trained / "again" / "latest").read_text()
    assert os.access(trained / "exported" / "zero_to_fp32.py", os.X_OK)
    run(trained / "exported", "zero_to_fp32.py", ".", tmp_path, "--max_shard_size", "1GB", "--tag", "zero3")
    assert (tmp_path / "pytorch_model.bin").is_file()


def test_command_exports_the_latest_beside_others_and_replaces_by_force(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"

    def export(*options: str) -> tuple[int, str]:
        command = [*STEPFAST, "checkpoints", "export", uri(trained), str(target), "--deepspeed", *options]
        done = DEEPSPEED.run(command, cwd=tmp_path)
        return done.returncode, done.stderr

    code, said = export("--step", "9")
    assert (code, "step 9 is not committed" in said) == (2, True), said
    code, said = export("--step", "1")
    assert (code, "--no-weights-only" in said) == (1, True), said
    assert not list(target.iterdir())
    assert export("--no-weights-only", "--step", "1")[0] == 0
    assert export("--no-weights-only")[0] == 0
    assert (target / "latest").read_text() == "zero2-bf16"
    assert {file.name for file in target.iterdir() if file.is_dir()} == {"zero1", "zero2-bf16"}
    code, said = export("--no-weights-only")
    assert (code, "--force" in said) == (2, True), said
    assert export("--no-weights-only", "--force")[0] == 0
    (target / "zero1" / "notes.txt").touch()
    code, said = export("--no-weights-only", "--force", "--step", "1")
    assert (code, "notes.txt" in said) == (2, True), said
