"""Nebula's names for Lightning's users, as `nebulaml` has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from interpreters import LIGHTNING

RUNS_ARE_FORKS_OF = LIGHTNING

TRAINING = """
import json, os, signal, sys, warnings
warnings.filterwarnings("ignore")
import nebulaml as nm
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

class Crash(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == int(sys.argv[1]) and os.environ["STEPFAST_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

seed_everything(7)
io = nm.NebulaCheckpointIO()
saving = nm.NebulaCallback("out", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max",
                           config_params={"persistent_storage_path": "elsewhere", "persistent_time_interval": 2})
trainer = Trainer(
    accelerator="cpu", devices=1, max_steps=12, limit_val_batches=0, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[saving, Crash()], plugins=[io] if sys.argv[2] == "io" else [],
)
trainer.fit(BoringModel(), ckpt_path=io.latest_checkpoint())
trainer.save_checkpoint("out/best.ckpt", storage_options={"is_best": True})
json.dump(sorted(os.listdir("out")), open("files.json", "w"))
"""


def test_callback_saves_what_model_checkpoint_lists_and_a_killed_job_goes_on(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    for options in ("io", "no-plugin"):  # the callback alone is enough
        summary = runs.run("--name", options, "train.py", "6", options)
        assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 4)
        assert summary["trainerStatus"]["globalStep"] >= 12, "no progress is told"
        files = json.loads((tmp_path / "files.json").read_text())
        assert {"best.ckpt", "epoch=0-step=8.ckpt", "epoch=0-step=12.ckpt"} <= set(files)
        assert "is not used: this job's storage is" in runs.log


def test_what_the_callback_cannot_be_told_is_said(tmp_path: Path) -> None:
    script = "from stepfast import nebula\nnebula.NebulaCallback(config_params={'persistent_path': 1})"
    done = LIGHTNING.run(["-c", script], cwd=tmp_path)
    assert "config_params.persistent_path" in done.stderr
    assert "persistent_storage_path" in done.stderr


def test_a_name_that_there_is_not_is_an_attribute_error(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom stepfast import nebula\nprint(hasattr(nebula, 'NebulaSomething'), 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
