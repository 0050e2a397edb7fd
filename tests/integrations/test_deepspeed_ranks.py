"""What N ranks have saved is loaded on M: ZeRO 1 to 3, with DeepSpeed's own engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreters import DEEPSPEED

# All modes in one process, one after the other; a step's batch is the same, however many ranks it is divided among.
TRAINING = """
import hashlib, json, os, sys
import torch, deepspeed
from torch import nn
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from stepfast.integrations.deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
out, until, modes = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])

def hashed(item):
    return hashlib.sha256(item.detach().float().flatten().cpu().numpy().tobytes()).hexdigest()[:8]

def digest(engine):
    if not engine.zero_optimization():  # each rank has all of it
        leaves = torch.utils._pytree.tree_leaves([engine.optimizer.state_dict(), list(engine.module.parameters())])
        return [hashed(leaf) for leaf in leaves if torch.is_tensor(leaf)]
    # Every rank takes part: the whole of what is divided.
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links all groups' states when the first group is stepped, before the others have any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    digests = []
    for parameter in engine.module.parameters():
        whole = [safe_get_full_fp32_param(parameter)]
        whole += [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        digests += map(hashed, whole)
    return digests

def begin(mode, changes):
    torch.manual_seed(size if os.path.exists(out) else 0)  # what is not loaded shows
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    groups = [{"params": list(model[:2].parameters()), "weight_decay": 0.1}, {"params": list(model[2:].parameters())}]
    config = {
        "train_batch_size": 12, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.05}},
        "nebula": {"persistent_time_interval": 0, "num_of_version_in_retention": 100}, **changes,
    }
    engine, *_ = initialize(model=model, model_parameters=groups, config=config)
    if not os.path.exists(out):
        return engine, 1, None
    _, client = engine.load_checkpoint(f"{out}-checkpoints", tag=mode)
    return engine, client["step"] + 1, digest(engine)

def train(engine, first):
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    losses = {}
    for step in range(first, until + 1):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        mine = x.chunk(size)[rank]
        loss = (engine(mine) - mine[:, :3].sin()).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses[step] = total.item() / size
    return losses

# All of them before the first is saved: what is newer than the step that a training goes on from is left behind.
begun, found = {mode: begin(mode, changes) for mode, changes in modes.items()}, {}
for mode, (engine, first, loaded) in begun.items():
    losses = train(engine, first)
    engine.save_checkpoint(f"{out}-checkpoints", tag=mode, client_state={"step": until})
    checkpoints = engine.checkpoint_engine.checkpoints
    checkpoints.flush()
    found[mode] = {"first": first, "losses": losses, "loaded": loaded, "saved": digest(engine)}
checkpoints.close()
torch.distributed.barrier()
if rank == 0:
    with open(out, "w") as file:
        json.dump(found, file)
torch.distributed.destroy_process_group()
"""

MODES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
    "zero0-bf16": {"bf16": {"enabled": True}},
    "zero2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero3-bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "zero3-offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}


@dataclass(frozen=True)
class Moved:
    """What one job did on 2, 1, 2 and 3 ranks, by mode; and another one, on one rank all the time."""

    parts: list[dict[str, Any]]
    whole: dict[str, Any]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    def train(folder: Path, ranks: int, until: int) -> dict[str, Any]:
        (folder / "train.py").write_text(TRAINING)
        DEEPSPEED.output_of_gang(ranks, ["train.py", "told", str(until), json.dumps(MODES)], cwd=folder)
        found: dict[str, Any] = json.loads((folder / "told").read_text())
        return found

    moving, whole = tmp_path_factory.mktemp("moving"), tmp_path_factory.mktemp("whole")
    parts = [train(moving, ranks, until) for ranks, until in [(2, 3), (1, 6), (2, 9), (3, 12)]]
    return Moved(parts, train(whole, 1, 12))


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_of_the_state_is_there_on_another_number_of_ranks(moved: Moved, mode: str) -> None:
    for before, after in pairwise(moved.parts):
        assert after[mode]["first"] == before[mode]["first"] + 3
        assert after[mode]["loaded"] == before[mode]["saved"]


@pytest.mark.parametrize("mode", [mode for mode in MODES if "bf16" not in mode])
def test_losses_are_those_of_a_training_that_was_never_moved(moved: Moved, mode: str) -> None:
    losses = {step: loss for part in moved.parts for step, loss in part[mode]["losses"].items()}
    assert losses == pytest.approx(moved.whole[mode]["losses"], rel=0, abs=1e-6)


OWN = """
import json, sys
import torch, deepspeed
from stepfast.integrations.deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.Linear(5, 3)
model.register_buffer("own", torch.tensor(0.0))
config = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
if sys.argv[1] == "save":
    model.own.fill_(10 + rank)
    torch.manual_seed(100 + rank)
    engine.save_checkpoint("checkpoints")
else:
    torch.manual_seed(200 + rank)
    engine.load_checkpoint("checkpoints")
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump([model.own.item(), torch.rand(1).item()], file)
engine.checkpoint_engine.cleanup()
torch.distributed.destroy_process_group()
"""


def test_a_rank_that_was_not_there_before_has_the_buffers_of_rank_0_and_generators_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    for ranks, what in ((2, "save"), (3, "load")):
        DEEPSPEED.output_of_gang(ranks, ["train.py", what], cwd=tmp_path)
    saved = [json.loads((tmp_path / f"save.{rank}").read_text()) for rank in range(2)]
    drawn = torch.rand(1, generator=torch.Generator().manual_seed(202)).item()
    assert [buffer for buffer, _ in saved] == [10, 11]
    loaded = [json.loads((tmp_path / f"load.{rank}").read_text()) for rank in range(3)]
    assert loaded == [*saved, [10, drawn]]
