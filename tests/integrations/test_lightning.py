"""Lightning's own Trainer, saved and resumed through Stepfast."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreters import LIGHTNING

RUNS_ARE_FORKS_OF = LIGHTNING

DOCUMENT = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning" / "train.py"

# Shuffled data, dropout, a schedule; checkpoints by Lightning's own ModelCheckpoint.
TRAINING = """
import json, os, shutil, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from stepfast.integrations.lightning import (
    StepfastCallback, StepfastCheckpointIO, StepfastDDPStrategy, StepfastFSDPStrategy, StepfastModelParallelStrategy,
)

way, crash_at, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ranks = int(os.environ["WORLD_SIZE"])
attempt = os.environ["STEPFAST_ATTEMPT"]
seed_everything(7)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)
        self.losses = {}
    def configure_model(self):
        if self.device_mesh is not None:
            torch.distributed.fsdp.fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
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
if way == "io":
    strategy, io = "auto", StepfastCheckpointIO()
    plugins = [io]
else:
    strategy = {
        "ddp": lambda: StepfastDDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: StepfastModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "fsdp": StepfastFSDPStrategy,
    }[way]()
    io, plugins = strategy.checkpoint_io, []
trainer = Trainer(
    accelerator="gpu" if way == "fsdp" else "cpu", devices=ranks, strategy=strategy, plugins=plugins, max_epochs=5,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        StepfastCallback(), Crash(),
        ModelCheckpoint(folder, save_top_k=2, monitor="epoch", mode="max", save_last=True),
    ],
)
torch.manual_seed(int(attempt))
path = io.latest_checkpoint(folder)
trainer.fit(model, data, ckpt_path=path, weights_only=False)
with open(f"{out}.{trainer.global_rank}", "w") as file:
    values = [getattr(value, "to_local", lambda: value)() for value in model.state_dict().values()]
    weights = [value.float().flatten().tolist() for value in values]
    json.dump({"losses": model.losses, "weights": weights, "files": sorted(os.listdir(folder))}, file)
"""


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: torch's first FSDP wants a GPU")


@pytest.mark.parametrize(("way", "ranks"), [("io", 1), ("ddp", 2), ("fsdp2", 2), pytest.param("fsdp", 1, marks=on_gpu)])
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(runs: Any, tmp_path: Path, way: str, ranks: int) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    environment = os.environ | {"STEPFAST_JOB": "local/undisturbed", "STEPFAST_ATTEMPT": "1"}
    LIGHTNING.output_of_gang(ranks, ["train.py", way, "0", "one"], cwd=tmp_path, env=environment)
    per_epoch = 12 // ranks
    crash_at = str(2 * per_epoch + 3)
    summary = runs.run("--name", "disturbed", "--nproc-per-node", str(ranks), "train.py", way, crash_at, "other")
    # Of an epoch's end there are two checkpoints, and `last` is the second: the step after.
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 2 * per_epoch + 1)
    for rank in range(ranks):
        one, other = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("one", "other"))
        went_on = [str(step) for step in range(2 * per_epoch, 5 * per_epoch)]
        assert other["losses"] == {step: one["losses"][step] for step in went_on}
        assert other["weights"] == one["weights"]
    assert len(runs.committed("undisturbed")) == 3, runs.committed("undisturbed")  # two best, and the last
    assert len(runs.committed("disturbed")) == 3, runs.committed("disturbed")


@pytest.mark.parametrize("options", [[], ["--fsdp"]])
def test_example_is_killed_and_goes_on(runs: Any, tmp_path: Path, options: list[str]) -> None:
    summary = runs.run("--nproc-per-node", "2", str(EXAMPLE), "--crash-at-step", "50", *options)
    assert (summary["state"], summary["restarts"], summary["checkpoint"]["restoredStep"]) == ("Complete", 1, 40)
    assert runs.committed() == [40, 80, 100]  # ModelCheckpoint never removes what its Trainer went on from
    if not options:
        exported = torch.load(tmp_path / "digits" / "exported" / "digits.ckpt", weights_only=True)
        assert exported["global_step"] == 100


EXPORT = """
from stepfast.integrations.lightning import StepfastCheckpointIO
io = StepfastCheckpointIO()
try:
    io.export_checkpoint(io.latest_checkpoint(), "exported.ckpt")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_shards_of_two_ranks_are_loaded_by_one(runs: Any, tmp_path: Path) -> None:
    LIGHTNING.output_of_gang(2, [str(EXAMPLE), "--fsdp", "--steps", "40"], cwd=tmp_path)
    (tmp_path / "export.py").write_text(EXPORT)
    told = LIGHTNING.output_of_gang(1, ["export.py"], cwd=tmp_path)
    assert "StateUnsupported: step 40 (digits/epoch=2-step=40) was saved by its shards" in told
    summary = runs.run(str(EXAMPLE), "--fsdp", "--steps", "60")
    assert summary["checkpoint"]["restoredStep"] == 40
    assert runs.committed() == [40, 60]


def test_a_job_that_is_to_be_stopped_saves_its_last_step_and_goes_on_from_it(runs: Any, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", "2", str(EXAMPLE), "--steps"]
    process = runs.start(*arguments, "1000000")
    runs.wait_for(lambda: len(runs.committed()) >= 1, process)
    process.send_signal(signal.SIGINT)
    assert runs.finish(process) == 130
    stopped = runs.summary
    last = stopped["checkpoint"]["latestPersistedStep"]
    assert last == stopped["trainerStatus"]["globalStep"], "steps that were trained were not saved"
    assert (tmp_path / "digits" / "stopped.ckpt").exists()
    again = runs.run(*arguments, str(last + 10))
    assert again["checkpoint"]["restoredStep"] == last


# Rank 0 alone is given the checkpoints, as by any strategy of Lightning's own; each rank is to wait for its step.
PLAIN_DDP = """
import os
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from stepfast.integrations.lightning import StepfastCallback, StepfastCheckpointIO

class Endless(BoringModel):
    def val_dataloader(self):
        return []

trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", plugins=[StepfastCheckpointIO()], max_steps=10**6, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[StepfastCallback(), ModelCheckpoint("out", every_n_train_steps=20)],
)
trainer.fit(Endless())
"""


def test_ranks_that_save_nothing_wait_for_the_last_step_too(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN_DDP)
    process = runs.start("--nproc-per-node", "2", "train.py")
    runs.wait_for(lambda: len(runs.committed()) >= 1, process)
    process.send_signal(signal.SIGINT)
    assert runs.finish(process) == 130
    assert runs.summary["checkpoint"]["latestPersistedStep"] == runs.summary["trainerStatus"]["globalStep"]


# The newest step holds weights alone when the job is killed; at the end each rank loads what rank 0 has just saved.
PLAIN_DDP_IS_KILLED = """
import os, signal, warnings
warnings.filterwarnings("ignore")
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from stepfast.integrations.lightning import StepfastCallback, StepfastCheckpointIO

rank, attempt = int(os.environ["RANK"]), os.environ["STEPFAST_ATTEMPT"]
io = StepfastCheckpointIO()

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("big", torch.zeros(5_000_000))  # takes a while to persist

class Crash(Callback):
    first = None
    def on_train_batch_end(self, trainer, *_):
        self.first = self.first or torch.rand(1, generator=torch.Generator().set_state(torch.get_rng_state())).item()
        if trainer.global_step == 5 and attempt == "1" and rank == 0:
            io.teardown()  # what is saved is persisted
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(100 + rank)  # dropout of its own
crash = Crash()
weights = ModelCheckpoint("weights", every_n_train_steps=4, save_weights_only=True, monitor="step", mode="max")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=6, limit_val_batches=0, logger=False, plugins=[io],
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[StepfastCallback(), crash, ModelCheckpoint("out", every_n_train_steps=4), weights],
)
model = Model()
trainer.fit(model, ckpt_path=io.latest_checkpoint(), weights_only=False)
for value in (1.0, 2.0):
    model.big.fill_(value)
    trainer.save_checkpoint("last.ckpt")
    found = io.load_checkpoint("last.ckpt")["state_dict"]["big"][0].item()
    trainer.strategy.barrier()
with open(f"told.{rank}", "w") as file:
    file.write(f"{crash.first:.6f} {found} {io.latest_checkpoint('.')}")
"""


def test_lightnings_own_ddp_goes_on_with_generators_of_its_own_and_reads_what_rank_0_has_saved(
    runs: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PLAIN_DDP_IS_KILLED)
    summary = runs.run("--nproc-per-node", "2", "train.py")
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 4)
    (first, *found), (other_first, *other_found) = ((tmp_path / f"told.{rank}").read_text().split() for rank in (0, 1))
    assert first != other_first, "both ranks draw the same"
    assert found == other_found == ["2.0", "last.ckpt"]


# Without a launcher: two trainers of a process, one after the other; what they leave behind.
TRAINERS = """
import copy, os, warnings
warnings.filterwarnings("ignore")
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from stepfast.integrations.lightning import StepfastCallback, StepfastCheckpointIO

def make(folder, io, **more):
    saving = ModelCheckpoint(folder, every_n_train_steps=2, **{"save_top_k": -1, **more})
    return Trainer(
        accelerator="cpu", devices=1, max_steps=6, limit_val_batches=0, logger=False, plugins=[io],
        enable_progress_bar=False, enable_model_summary=False, callbacks=[StepfastCallback(), saving],
    )

seed_everything(7)
first, second = StepfastCheckpointIO(), StepfastCheckpointIO()
model = BoringModel()
trainer = make("one", first)
trainer.fit(model)
make("two", second, save_top_k=1, save_last=True).fit(BoringModel())
print("files", sorted(os.listdir("one")), sorted(os.listdir("two")))

found = first.load_checkpoint("one/epoch=0-step=6.ckpt", weights_only=True)
assert found["global_step"] == 6
assert torch.equal(found["state_dict"]["layer.weight"], model.layer.weight)
first.export_checkpoint("one/epoch=0-step=4.ckpt", "exported/four.ckpt")
exported = BoringModel.load_from_checkpoint("exported/four.ckpt")
saved = first.load_checkpoint("one/epoch=0-step=4.ckpt")["state_dict"]
assert torch.equal(exported.layer.weight, saved["layer.weight"])
plain = Trainer(accelerator="cpu", devices=1, max_steps=6, limit_val_batches=0, logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False)
plain.validate(BoringModel(), ckpt_path="exported/four.ckpt", verbose=False)
plain.fit(BoringModel(), ckpt_path="exported/four.ckpt")
assert plain.global_step == 6

again = copy.deepcopy(trainer).strategy.checkpoint_io.load_checkpoint("one/epoch=0-step=6.ckpt")
assert again["global_step"] == 6

read = BoringModel()
make("three", first).validate(read, ckpt_path="one/epoch=0-step=2.ckpt", verbose=False)
trainer.strategy.checkpoint_io.remove_checkpoint("one/epoch=0-step=2.ckpt")
trainer.save_checkpoint("one/whatever.ckpt", storage_options={"is_best": True, "persist_path": "elsewhere"})
for action in (
    lambda: first.load_checkpoint("one/epoch=0-step=2.ckpt"),
    lambda: first.load_checkpoint("nowhere.ckpt"),
    lambda: trainer.save_checkpoint("one/other.ckpt", storage_options={"fast": True}),
):
    try:
        action()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
first.teardown()
print("steps", sorted(found.tag for found in first.checkpoints.steps()))
"""


def test_two_trainers_of_a_process_list_remove_and_export_what_they_saved(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINERS)
    done = LIGHTNING.run(["train.py"], cwd=tmp_path)
    told = done.stdout
    assert done.returncode == 0, told[-2000:] + done.stderr[-4000:]
    of_one = [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6)]
    assert f"files {of_one} {['epoch=0-step=6.ckpt', 'last.ckpt']}" in told
    assert "FileNotFoundError: Checkpoint file not found: one/epoch=0-step=2.ckpt is no checkpoint of this job" in told
    assert "FileNotFoundError: Checkpoint file not found: nowhere.ckpt is no checkpoint of this job" in told
    assert "TypeError: storage_options may say is_best and persist_path; these are {'fast': True}" in told
    assert "persist_path 'elsewhere' is not used" in done.stderr
    left = ["one/epoch=0-step=4", "one/epoch=0-step=6", "one/whatever", "two/epoch=0-step=6", "two/last"]
    assert f"steps {left}" in told


# One Trainer after the other in a process, without a launcher; each test's lines come behind.
ALONE = """
import os, warnings
warnings.filterwarnings("ignore")
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from stepfast.integrations.lightning import (
    StepfastCallback, StepfastCheckpointIO, StepfastDDPStrategy, StepfastModelParallelStrategy,
)

def make(*callbacks, **more):
    common = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    more = {"max_steps": 4, "limit_val_batches": 0, **more}
    return Trainer(**common, **more, callbacks=[StepfastCallback(), *callbacks])

def saving(folder, **more):
    return ModelCheckpoint(folder, every_n_train_steps=2, **{"save_top_k": 1, **more})
"""


def alone(folder: Path, script: str) -> str:
    """What the script says that comes behind ALONE."""
    (folder / "train.py").write_text(ALONE + script)
    done = LIGHTNING.run(["train.py"], cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


OF_ITS_OWN = """
io = StepfastCheckpointIO()
for folder in ("A", "B"):
    make(saving(folder), plugins=[io]).fit(BoringModel())
make(saving("B/val", filename="loss={step}"), max_steps=2, plugins=[io]).fit(BoringModel())
for folder in ("A", os.path.abspath("B"), "nowhere", None):
    print("latest", io.latest_checkpoint(folder))
"""


def test_latest_checkpoint_of_a_folder_is_none_of_another_trainers(tmp_path: Path) -> None:
    told = [line for line in alone(tmp_path, OF_ITS_OWN).splitlines() if line.startswith("latest")]
    assert told == [
        "latest A/epoch=0-step=4.ckpt", "latest B/val/loss=step=2.ckpt", "latest None",
        "latest B/val/loss=step=2.ckpt",
    ]  # fmt: skip
    assert json.loads((tmp_path / "A" / "epoch=0-step=4.ckpt").read_text())["tag"] == "A/epoch=0-step=4"


WEIGHTS_ALONE = """
io = StepfastCheckpointIO()
weights = saving("weights", save_weights_only=True, monitor="step", mode="max")
make(saving("full"), weights, plugins=[io]).fit(BoringModel())
print("latest", io.latest_checkpoint())
print("of weights", io.latest_checkpoint("weights"))
assert set(io.load_checkpoint(weights.best_model_path)) >= {"state_dict", "loops"}
assert not any(name.startswith("stepfast") for name in io.load_checkpoint(weights.best_model_path))
"""


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    told = alone(tmp_path, WEIGHTS_ALONE)
    assert "latest full/epoch=0-step=4.ckpt" in told
    assert "of weights None" in told


WEIGHTS_ALONE_OF_SHARDS = """
strategy = StepfastModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
weights = saving("weights", save_weights_only=True, monitor="step", mode="max")
class Divided(BoringModel):
    def configure_model(self):
        torch.distributed.fsdp.fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

make(saving("full"), weights, strategy=strategy).fit(Divided())
io = strategy.checkpoint_io
print("latest", io.latest_checkpoint())
print("of weights", io.latest_checkpoint("weights"))
full = strategy.load_checkpoint("full/epoch=0-step=4.ckpt", weights_only=True)
print("step", full["global_step"], "generators", "torch" in io.rng)
"""


def test_shards_of_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    told = alone(tmp_path, WEIGHTS_ALONE_OF_SHARDS)
    assert "latest full/epoch=0-step=4.ckpt" in told
    assert "of weights None" in told
    assert "step 4 generators True" in told


# What Lightning's own strategy has saved: a folder of shards, and a file.
LIGHTNINGS_OWN = """
from lightning.pytorch.strategies import ModelParallelStrategy

class Divided(BoringModel):
    def configure_model(self):
        torch.distributed.fsdp.fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 32, generator=torch.Generator().manual_seed(3)))

def fit(kind, steps, path=None, **how):
    strategy = kind(data_parallel_size=1, tensor_parallel_size=1, **how)
    trainer, model = make(strategy=strategy, max_steps=steps, enable_checkpointing=False), Divided()
    trainer.fit(model, ckpt_path=path, weights_only=False)
    return trainer, model.layer.weight.full_tensor()

for name, is_file in (("folder.ckpt", False), ("file.ckpt", True)):
    how = {"save_distributed_checkpoint": not is_file}
    fit(ModelParallelStrategy, 2, **how)[0].save_checkpoint(name)
    assert os.path.isfile(name) is is_file
    _, theirs = fit(ModelParallelStrategy, 4, name, **how)
    trainer, ours = fit(StepfastModelParallelStrategy, 4, name)
    print(name, "step", trainer.global_step, "the same", torch.equal(theirs, ours))
    trainer.save_checkpoint(name)
    print("latest", trainer.strategy.checkpoint_io.latest_checkpoint())
"""


def test_sharded_strategy_goes_on_from_what_lightnings_own_has_saved(tmp_path: Path) -> None:
    told = alone(tmp_path, LIGHTNINGS_OWN)
    for name in ("folder.ckpt", "file.ckpt"):
        assert f"{name} step 4 the same True" in told
        assert f"latest {name}" in told


RUNNING_CODE = """
class Evil:
    def __reduce__(self):
        return print, ("code of the checkpoint has run",)

io = StepfastCheckpointIO()
opened = io.checkpoints.open("evil", step=50)
opened.put("state_dict", {"w": torch.ones(1)})
opened.put("stepfast.rng.0", Evil(), copy=False)
io.saved_at("evil.ckpt", opened.commit(), "evil")
try:
    io.load_checkpoint("evil.ckpt", weights_only=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_generators_run_no_code_of_the_checkpoint_under_weights_only(tmp_path: Path) -> None:
    told = alone(tmp_path, RUNNING_CODE)
    assert "code of the checkpoint has run" not in told
    assert "CheckpointUnsafe: " in told


RUNNING_CODE_OF_SHARDS = """
import torch.distributed.checkpoint as dcp
from stepfast.torch.dcp import Sharing, StepfastStorageReader, StepfastStorageWriter, TaggedCheckpoints

class Evil:
    def __reduce__(self):
        return print, ("code of the checkpoint has run",)

checkpoints = TaggedCheckpoints(sharing=Sharing.EVERY_RANK)
dcp.save({"trainer": Evil()}, checkpoint_id="evil", storage_writer=StepfastStorageWriter(checkpoints))
checkpoints.flush()
try:
    reader = StepfastStorageReader(checkpoints, weights_only=True)
    dcp.load({"trainer": b""}, checkpoint_id="evil", storage_reader=reader)
except BaseException as error:  # torch's own, around ours
    print(f"{type(error).__name__}: {error}")
"""


def test_shards_run_no_code_of_the_checkpoint_under_weights_only(tmp_path: Path) -> None:
    told = alone(tmp_path, RUNNING_CODE_OF_SHARDS)
    assert "code of the checkpoint has run" not in told
    assert "CheckpointUnsafe" in told


VALIDATING = """
class First(Callback):
    def __init__(self):
        self.seen = None
    def on_train_batch_end(self, *_):
        self.seen = torch.get_rng_state() if self.seen is None else self.seen

io = StepfastCheckpointIO()
def fit(validates):
    first = First()
    trainer = make(first, limit_val_batches=1, enable_checkpointing=False, plugins=[io])
    model = BoringModel()
    if validates:
        trainer.validate(model, ckpt_path="one.ckpt", verbose=False)
    seed_everything(1, verbose=False)
    trainer.fit(model)
    return trainer, first.seen

trainer, plain = fit(False)
torch.rand(1000)
trainer.save_checkpoint("one.ckpt")
_, validated = fit(True)
print("the same", torch.equal(plain, validated))
"""


def test_a_checkpoint_that_was_validated_leaves_the_generators_of_fit_alone(tmp_path: Path) -> None:
    assert "the same True" in alone(tmp_path, VALIDATING)


# The agent's word that the job is to be stopped, and the wait for its end, are the launcher's.
STOPPED = """
class Counting(Callback):  # as an average of weights would
    seen = 0
    def on_train_batch_end(self, *_):
        self.seen += 1
    def state_dict(self):
        return {"seen": self.seen}

class Late(ModelCheckpoint):
    def on_train_batch_end(self, trainer, *arguments):
        super().on_train_batch_end(trainer, *arguments)
        self.last = trainer.global_step
    def state_dict(self):
        return {**super().state_dict(), "last": self.last}

io = StepfastCheckpointIO()
io.checkpoints.is_last_step = lambda step: step == 3
io.checkpoints.wait_to_be_stopped = lambda step: print("waits", step)
trainer = make(Counting(), Late("out", every_n_train_steps=2), plugins=[io])
trainer.fit(BoringModel())
assert type(trainer.checkpoint_callback) is Late
stopped = io.load_checkpoint("out/stopped.ckpt")
[seen] = [state["seen"] for name, state in stopped["callbacks"].items() if "Counting" in name]
[last] = [state["last"] for name, state in stopped["callbacks"].items() if "Late" in name]
print("stopped", stopped["global_step"], "seen", seen, "last", last)
"""


def test_the_last_step_of_a_job_that_is_to_be_stopped_has_all_that_callbacks_keep(tmp_path: Path) -> None:
    told = alone(tmp_path, STOPPED)
    assert "waits 3" in told
    assert "stopped 3 seen 3 last 3" in told


SNIPPETS = re.findall(
    r"```python\n(.*?)```", DOCUMENT.partition("\n## Lightning\n")[2].partition("\n## ")[0], re.DOTALL
)
SURROUNDINGS = """
from torch.utils.data import DataLoader
from lightning.pytorch.demos.boring_classes import BoringModel as MyModel, RandomDataset
model, data = MyModel(), DataLoader(RandomDataset(32, 8))
"""


@pytest.mark.parametrize("number", range(2), ids=["one rank", "several ranks"])
def test_the_documents_lines_run_as_they_stand(tmp_path: Path, number: int) -> None:
    [*trainings, export] = SNIPPETS
    assert len(trainings) == 2
    told = alone(tmp_path, SURROUNDINGS + trainings[number] + export + "print('trained', trainer.global_step)")
    assert "trained 24" in told
    again = alone(tmp_path, SURROUNDINGS + trainings[number].replace("max_epochs=3", "max_epochs=4"))
    assert "trained 24" not in again
    assert torch.load(tmp_path / "regular.ckpt", weights_only=True)["global_step"] == 24


READING = """
from stepfast.integrations.lightning import StepfastCheckpointIO
io = StepfastCheckpointIO()
try:
    path = io.latest_checkpoint()
    print(path, io.load_checkpoint(path)["global_step"])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_comes_next(tmp_path: Path) -> None:
    def run(script: str) -> str:
        (tmp_path / "train.py").write_text(script)  # the job goes by its name
        done = LIGHTNING.run(["train.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    run(TRAINERS.split("print(", maxsplit=1)[0] + "first.teardown()")
    assert run(READING).startswith("two/last.ckpt 6")
    newest = max(
        tmp_path.rglob("global_step*/state-*"), key=lambda file: int(file.parent.name.removeprefix("global_step"))
    )
    data = bytearray(newest.read_bytes())
    data[-10] ^= 1
    newest.write_bytes(data)
    assert "CheckpointDamaged" in run(READING)
    assert run(READING).startswith("two/epoch=0-step=6.ckpt 6")
