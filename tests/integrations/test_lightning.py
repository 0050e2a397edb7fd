"""Lightning's own Trainer, saved and resumed through Stepfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# Shuffled data, dropout, a schedule; checkpoints by Lightning's own ModelCheckpoint.
TRAINING = """
import json, os, shutil, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from stepfast.integrations.lightning import StepfastCallback, StepfastCheckpointIO, StepfastDDPStrategy

ranks, crash_at, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
attempt = os.environ["STEPFAST_ATTEMPT"]
seed_everything(7)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)
        self.losses = {}
    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.losses[self.trainer.global_step] = loss.item().hex()
        self.log("loss", loss, on_step=True)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]

class Crash(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == crash_at and attempt == "1" and trainer.global_rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

model = Model()
if attempt != "1":
    torch.nn.init.zeros_(model.net[0].weight)  # what is not restored shows
data = torch.utils.data.DataLoader(
    torch.randn(48, 8, generator=torch.Generator().manual_seed(3)), batch_size=4, shuffle=True,
)
folder = out
if attempt != "1" and int(os.environ["LOCAL_RANK"]) == 0:
    shutil.rmtree(folder)  # the next attempt finds an empty disk
if ranks > 1:
    strategy = StepfastDDPStrategy(process_group_backend="gloo")
    io, plugins = strategy.checkpoint_io, []
else:
    strategy, io = "auto", StepfastCheckpointIO()
    plugins = [io]
trainer = Trainer(
    accelerator="cpu", devices=ranks, strategy=strategy, plugins=plugins, max_epochs=5, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        StepfastCallback(), Crash(),
        ModelCheckpoint(folder, save_top_k=2, monitor="epoch", mode="max", save_last=True),
    ],
)
torch.manual_seed(int(attempt))
path = io.latest_checkpoint(folder)
trainer.fit(model, data, ckpt_path=path, weights_only=False)
with open(f"{out}.{trainer.global_rank}", "w") as file:
    weights = [value.float().flatten().tolist() for value in model.state_dict().values()]
    json.dump({"losses": model.losses, "weights": weights, "files": sorted(os.listdir(folder))}, file)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(runs: Any, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    common = ["--nproc-per-node", str(ranks), "train.py", str(ranks)]
    runs.run("--name", "undisturbed", *common, "0", "one")
    per_epoch = 12 // ranks
    summary = runs.run("--name", "disturbed", *common, str(2 * per_epoch + 3), "other")
    # Of an epoch's end there are two checkpoints, and `last` is the second: the step after.
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 2 * per_epoch + 1)
    for rank in range(ranks):
        one, other = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("one", "other"))
        went_on = [str(step) for step in range(2 * per_epoch, 5 * per_epoch)]
        assert other["losses"] == {step: one["losses"][step] for step in went_on}
        assert other["weights"] == one["weights"]
    assert len(runs.committed("undisturbed")) == 3, runs.committed("undisturbed")  # two best, and the last
    assert len(runs.committed("disturbed")) == 3, runs.committed("disturbed")
