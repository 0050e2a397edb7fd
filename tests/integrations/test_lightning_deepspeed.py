"""Lightning's DeepSpeed strategy through Stepfast, which on a CPU runs only where its look for a GPU is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from interpreters import LIGHTNING

RUNS_ARE_FORKS_OF = LIGHTNING

BEGIN = """
import json, os, shutil, signal, sys, warnings
warnings.filterwarnings("ignore")
import deepspeed
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from stepfast.integrations.lightning import StepfastCallback
from stepfast.nebula import NebulaDeepspeedStrategy

stage, crash_at, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
attempt, ranks = os.environ["STEPFAST_ATTEMPT"], int(os.environ["WORLD_SIZE"])
seed_everything(7)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling

class OnCpu(NebulaDeepspeedStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)
    @property
    def root_device(self):
        return torch.device("cpu", 0)  # DeepSpeed asks for its number
    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)
        self.losses = {}
    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.losses[self.trainer.global_step] = loss.item().hex()
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

class Crash(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == crash_at and attempt == "1" and trainer.global_rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

data = torch.utils.data.DataLoader(
    torch.randn(48, 8, generator=torch.Generator().manual_seed(3)), batch_size=4, shuffle=True,
)
if attempt != "1" and int(os.environ["LOCAL_RANK"]) == 0:
    shutil.rmtree(out)  # the next attempt finds an empty disk
strategy = OnCpu(config={
    "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": stage}, "nebula": {"enabled": True, "persistent_time_interval": 1},
})

def make(*callbacks, **limit):
    return Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **limit,
    )
"""

TRAINING = (
    BEGIN
    + """
saving = ModelCheckpoint(out, save_top_k=2, monitor="step", mode="max", every_n_epochs=1)
trainer = make(StepfastCallback(), Crash(), saving, max_epochs=4)
torch.manual_seed(int(attempt))
model = Model()
trainer.fit(model, data, ckpt_path=strategy.checkpoint_io.latest_checkpoint(), weights_only=False)
with open(f"{out}.{trainer.global_rank}", "w") as file:
    json.dump({"losses": model.losses, "folders": sorted(os.listdir(out))}, file)
"""
)


@pytest.mark.parametrize("stage", [1, 3])
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(runs: Any, tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    common = ["--nproc-per-node", "2", "train.py", str(stage)]
    runs.run("--name", "undisturbed", *common, "0", "one", DS_ACCELERATOR="cpu")
    summary = runs.run("--name", "disturbed", *common, "15", "other", DS_ACCELERATOR="cpu")
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 12)
    for rank in range(2):
        one, other = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("one", "other"))
        assert other["losses"] == {str(step): one["losses"][str(step)] for step in range(12, 24)}
    assert runs.committed("undisturbed") == [18, 24]
    assert runs.committed("disturbed") == [12, 18, 24]  # ModelCheckpoint never removes what its Trainer went on from


ON_NVME = """
from stepfast.integrations.lightningdeepspeed import StepfastDeepSpeedStrategy
StepfastDeepSpeedStrategy(stage=3, offload_optimizer=True, offload_optimizer_device="nvme")
"""


def test_optimizer_on_nvme_is_refused(tmp_path: Path) -> None:
    done = LIGHTNING.run(["-c", ON_NVME], cwd=tmp_path, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert "StateUnsupported: offload_optimizer to NVMe: " in done.stderr


WEIGHTS_ALONE = (
    BEGIN
    + """
full = ModelCheckpoint("full", every_n_train_steps=2)
make(full, ModelCheckpoint("weights", every_n_train_steps=3, save_weights_only=True), max_steps=3).fit(Model(), data)
io = strategy.checkpoint_io
print("latest", io.latest_checkpoint(), "of weights", io.latest_checkpoint("weights"), flush=True)
"""
)


def test_weights_alone_are_nothing_to_go_on_from(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WEIGHTS_ALONE)
    runs.run("train.py", "1", "0", "out", DS_ACCELERATOR="cpu")
    assert runs.committed() == [2, 3]
    assert "latest full/epoch=0-step=2.ckpt of weights None" in runs.log, runs.log[-3000:]
