"""Hugging Face Accelerate, saved and resumed through Stepfast."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interpreters import TRANSFORMERS

RUNS_ARE_FORKS_OF = TRANSFORMERS

# Shuffled data, dropout, a schedule, an object of one's own, a hook; in the middle of epochs and at their ends. The
# attempt that ends trains once more, undisturbed, by Accelerate alone.
TRAINING = """
import json, os, shutil, signal, sys
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from stepfast.integrations.accelerate import StepfastAccelerator

ranks, is_seedable, saves_behind = int(sys.argv[1]), sys.argv[3] == "seedable", sys.argv[4:] == ["behind"]
attempt = os.environ["STEPFAST_ATTEMPT"]
crash_at = dict(enumerate(sys.argv[2].split(","), start=1)).get(int(attempt))

class Counter:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def train(kind, out):
    is_ours = kind is StepfastAccelerator
    set_seed(7)
    accelerator = kind(
        cpu=True, gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=is_seedable),
    )
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    if attempt != "1" and is_ours:
        torch.nn.init.zeros_(layers[0].weight)  # what is not restored shows
        torch.manual_seed(int(attempt))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(3)))
    loader = torch.utils.data.DataLoader(data, batch_size=4 // ranks, shuffle=True)
    evaluated = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)))
    model, optimizer, loader, evaluated, schedule = accelerator.prepare(model, optimizer, loader, evaluated, schedule)
    counter, noted = Counter(), []
    accelerator.register_for_checkpointing(counter)
    def note(models, weights, folder):
        if accelerator.is_main_process:
            open(os.path.join(folder, "note.txt"), "w").write(str(counter.steps))
    accelerator.register_save_state_pre_hook(note)
    accelerator.register_load_state_pre_hook(
        lambda models, folder: noted.append(open(os.path.join(folder, "note.txt")).read())
    )
    if is_ours and accelerator.latest_checkpoint() is not None:
        accelerator.load_state()
    losses, per_epoch = {}, len(loader)
    for epoch in range(counter.steps // per_epoch, 3):
        skipped = counter.steps - epoch * per_epoch
        for (batch,) in skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses[counter.steps] = loss.item().hex()
            counter.steps += 1
            if counter.steps == 16 if saves_behind else counter.steps % 4 == 0:
                accelerator.save_state()
            if is_ours and str(counter.steps) == crash_at and accelerator.process_index == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if saves_behind:
            assert len(list(evaluated)) == 4
            accelerator.save_state()
    generator = torch.get_rng_state().tolist()
    accelerator.wait_for_everyone()
    folders = sorted(os.listdir(os.path.join(out, "checkpoints")))
    weights = [value.flatten().tolist() for value in model.state_dict().values()]
    if is_ours:
        accelerator._folders.finish()
    return {
        "losses": losses, "noted": noted, "generator": generator, "weights": weights, "folders": folders,
        "iterations": [loader.iteration, evaluated.iteration],
    }

if attempt != "1" and int(os.environ["LOCAL_RANK"]) == 0:
    shutil.rmtree("out")  # the next attempt finds an empty disk
found = [train(StepfastAccelerator, "out"), train(Accelerator, "plain")]
with open(f"found.{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize(("ranks", "sampler"), [(1, "seedable"), (2, "default")])
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(
    runs: Any, tmp_path: Path, ranks: int, sampler: str
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    summary = runs.run("--nproc-per-node", str(ranks), "train.py", str(ranks), "22", sampler)
    # Batch 20 of 36: in the middle of the second epoch, and behind ten of the optimizer's steps.
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 10)
    for rank in range(ranks):
        ours, plain = json.loads((tmp_path / f"found.{rank}").read_text())
        assert ours["losses"] == {step: plain["losses"][step] for step in map(str, range(20, 36))}
        for key in ("weights", "generator", "folders"):
            assert ours[key] == plain[key], key
        assert ours["noted"] == ["20"]
        assert ours["folders"] == ["checkpoint_7", "checkpoint_8"]
    assert runs.committed() == [16, 18]


def test_epoch_behind_one_that_was_gone_on_within_has_an_order_of_its_own(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    # Killed in the second epoch of three, and in the third, behind the save between them.
    summary = runs.run("train.py", "1", "18,26", "seedable", "behind")
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (2, 12)
    ours, plain = json.loads((tmp_path / "found.0").read_text())
    assert ours["losses"] == {step: plain["losses"][step] for step in map(str, range(24, 36))}
    assert (ours["weights"], ours["iterations"]) == (plain["weights"], [3, 3])


ALONE = """
from stepfast.errors import StateUnsupported
from stepfast.integrations.accelerate import StepfastAccelerator
accelerator = StepfastAccelerator()
try:
    accelerator.save_state("state")
except StateUnsupported as error:
    print(f"refused: {error}", flush=True)
"""


def test_ranks_that_do_not_see_each_other_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    told = TRANSFORMERS.output_of_gang(2, ["train.py"], cwd=tmp_path)
    assert told.count("refused: the job has 2 ranks, of which Accelerate sees 1") == 2, told[-3000:]


MAIN_ALONE = """
import os, torch
from stepfast.integrations.accelerate import StepfastAccelerator
accelerator = StepfastAccelerator(cpu=True)
if accelerator.is_main_process:
    accelerator.log({"lr": 0.1}, step=0)
try:
    accelerator.export("a", "b")
except Exception as error:
    print(type(error).__name__, flush=True)
accelerator.prepare(torch.nn.Linear(2, 2))
if accelerator.is_main_process:
    accelerator.log({"lr": 0.1}, step=0)
print("gathered", accelerator.gather(torch.tensor([accelerator.process_index])).tolist(), flush=True)
"""


def test_what_the_main_process_does_alone_waits_for_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MAIN_ALONE)
    told = TRANSFORMERS.output_of_gang(2, ["train.py"], cwd=tmp_path)
    assert told.count("CheckpointNotFound") == 1, told[-3000:]
    assert told.count("gathered [0, 1]") == 2, told[-3000:]


PROJECTS = """
import os, signal, sys, torch
from accelerate.utils import ProjectConfiguration
from stepfast.integrations.accelerate import StepfastAccelerator

class Project:
    def __init__(self, folder):
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3)
        self.folder, self.accelerator = folder, StepfastAccelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(4, 2)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def save(self, count):
        for _ in range(count):
            self.accelerator.backward(self.model(torch.rand(3, 4)).sum())
            self.optimizer.step(); self.optimizer.zero_grad()
            self.accelerator.save_state()

    @property
    def states(self):
        return sorted(os.listdir(f"{self.folder}/checkpoints"))
"""

KILLED = """
from projects import *
project = Project("out")
accelerator = project.accelerator
def hook(models, weights, folder):
    with open(os.path.join(folder, "config.json"), "w") as file:
        file.write("{}")
    if folder.endswith("checkpoint_2") and sys.argv[1] == "1":
        accelerator._folders.finish()
        os.mkdir("out/checkpoints/checkpoint_3")  # and this one before anything was in it
        os.kill(os.getpid(), signal.SIGKILL)
accelerator.register_save_state_pre_hook(hook)
if accelerator.latest_checkpoint() is not None:
    accelerator.load_state()
    assert project.states == ["checkpoint_0", "checkpoint_1"], project.states
project.save(4 - accelerator._steps)
accelerator.end_training()
assert project.states == ["checkpoint_1", "checkpoint_2", "checkpoint_3"], project.states
"""

TWO = """
from projects import *
one, two = Project("one"), Project("two")
one.save(2)
assert two.accelerator.latest_checkpoint() is None
two.save(3)
one.accelerator.load_state("one/checkpoints/checkpoint_0")  # back, and on from there
one.save(1)
assert one.states == ["checkpoint_0", "checkpoint_1", "checkpoint_2"], one.states
assert two.states == ["checkpoint_0", "checkpoint_1", "checkpoint_2"], two.states
assert one.accelerator.latest_checkpoint() == "one/checkpoints/checkpoint_2"
weight = one.model.weight.clone()
two.accelerator.load_state()
one.accelerator.load_state()
assert weight.equal(one.model.weight) and not weight.equal(two.model.weight)
"""


def attempt(folder: Path, script: str, number: int) -> subprocess.CompletedProcess[str]:
    (folder / "projects.py").write_text(PROJECTS)
    (folder / "train.py").write_text(script)
    return TRANSFORMERS.run(["train.py", str(number)], cwd=folder)  # which has imported Accelerate


def test_a_state_that_was_killed_as_it_was_saved_is_saved_by_the_next_attempt(tmp_path: Path) -> None:
    killed = attempt(tmp_path, KILLED, 1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    done = attempt(tmp_path, KILLED, 2)
    assert done.returncode == 0, done.stderr[-4000:]


def test_projects_of_a_process_save_each_its_own_states_and_go_back_to_older_ones(tmp_path: Path) -> None:
    done = attempt(tmp_path, TWO, 1)
    assert done.returncode == 0, done.stderr[-4000:]


BESIDE = """
import os, threading, time, torch
from pathlib import Path
from stepfast.integrations.accelerate import StepfastAccelerator

accelerator, folder = StepfastAccelerator(cpu=True), Path("state")
accelerator.prepare(torch.nn.Linear(2, 2))

def until(is_so):
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)

def hook(models, weights, folder):
    if accelerator.is_main_process:
        Path(folder, "note.txt").write_text("of the hook")
accelerator.register_save_state_pre_hook(hook)
"""

# Rank 0 looks for what hooks have written while rank 1 is in the middle of writing what the folder stands for.
POINTING = """
from beside import *
if accelerator.is_main_process:
    def wait_for_everyone(really=accelerator.wait_for_everyone):
        really()
        until(lambda: list(folder.glob(".stepfast.json.*")))
    accelerator.wait_for_everyone = wait_for_everyone
else:
    def replace(source, target, really=os.replace):
        if os.path.basename(target) == "stepfast.json":
            until(Path(target).exists)  # rank 0's, which writes it when it has looked
        really(source, target)
    os.replace = replace
os.getpid = lambda: 77  # as in two pods that have the folder
accelerator.save_state("state")
names = accelerator.checkpoints.names(accelerator.checkpoints.steps()[-1].step)
print("of hooks", [name for name in names if name.startswith("files/")], flush=True)
accelerator.end_training()
"""

# As of a hook in another process that builds aside what it writes.
COMING_AND_GOING = """
from beside import *
is_over = threading.Event()
def come_and_go():
    while not is_over.is_set():
        (folder / "aside").mkdir(parents=True)
        (folder / "aside" / "file").write_text("x")
        (folder / "aside" / "file").unlink()
        (folder / "aside").rmdir()
other = threading.Thread(target=come_and_go)
other.start()
try:
    for _ in range(40):
        accelerator.save_state("state")
finally:
    is_over.set()
    other.join()
accelerator.end_training()
print("saved", flush=True)
"""


def test_what_ranks_do_in_a_folder_meanwhile_is_nothing_of_the_hooks(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "train.py").write_text(POINTING)
    told = TRANSFORMERS.output_of_gang(2, ["train.py"], cwd=tmp_path)
    assert "of hooks ['files/note.txt']" in told, told[-3000:]
    assert told.count("of hooks []") == 1, told[-3000:]


def test_files_that_go_while_a_state_is_saved_fail_no_save(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "train.py").write_text(COMING_AND_GOING)
    told = TRANSFORMERS.output_of_gang(1, ["train.py"], cwd=tmp_path)
    assert "saved" in told, told[-3000:]


EXPORT = """
import os, shutil, torch
from accelerate import Accelerator
from stepfast.integrations.accelerate import StepfastAccelerator

def begin(kind):
    torch.manual_seed(0)
    accelerator = kind(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)

def train(accelerator, model, optimizer, schedule):
    accelerator.backward(model(torch.rand(3, 4)).square().sum())
    optimizer.step(); schedule.step(); optimizer.zero_grad()

ours = begin(StepfastAccelerator)
for name in ("gone", "a", "b"):
    train(*ours)
    ours[0].save_state(name)
shutil.rmtree("gone")  # as scripts that keep the newest few do
ours[0].save_state("b")  # again
ours[0]._folders.finish()
assert [found.tag for found in ours[0].checkpoints.steps()] == ["a", "b"]
ours[0].export("a", "regular")
for _ in range(2):
    train(*ours)
ours[0].load_state("a")  # an older one, by its folder
for _ in range(3):
    train(*ours)
theirs = begin(Accelerator)
theirs[0].load_state("regular")
for _ in range(3):
    train(*theirs)
assert all(one.equal(other) for one, other in zip(ours[1].parameters(), theirs[1].parameters()))
theirs[0].save_state("plain")
ours[0].load_state("plain")  # what Accelerate itself has written
train(*ours); train(*theirs)
assert ours[3].get_last_lr() == theirs[3].get_last_lr()
ours[0].end_training()
print("the same", sorted(os.listdir("regular")), flush=True)
"""


def test_states_go_out_to_plain_accelerate_and_come_in_from_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXPORT)
    told = TRANSFORMERS.output_of_gang(1, ["train.py"], cwd=tmp_path)
    assert "the same ['model.safetensors', 'optimizer.bin', 'random_states_0.pkl', 'scheduler.bin']" in told


EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate" / "train.py"


def test_example_is_killed_and_goes_on(runs: Any) -> None:
    summary = runs.run("--nproc-per-node", "2", str(EXAMPLE), "--crash-at-step", "45")
    assert (summary["state"], summary["restarts"], summary["checkpoint"]["restoredStep"]) == ("Complete", 1, 40)
    assert "80 batches, loss" in runs.log


# Nothing but the end of the job has a state saved behind the fifth step.
STOPPED = """
import sys, torch
from stepfast.integrations.accelerate import StepfastAccelerator

accelerator = StepfastAccelerator(cpu=True)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if accelerator.latest_checkpoint() is not None:
    accelerator.load_state()
for step in range(1, int(sys.argv[1]) + 1):
    accelerator.backward(model(torch.rand(3, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_last_step() or step == 5:
        accelerator.save_state("state")
accelerator.end_training()
"""


def test_a_job_that_is_to_be_stopped_saves_its_last_step_and_goes_on_from_it(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STOPPED)
    arguments = ["--nproc-per-node", "2", "train.py"]
    process = runs.start(*arguments, "1000000000")
    runs.wait_for(lambda: runs.committed() == [5], process)
    process.send_signal(signal.SIGINT)
    assert runs.finish(process) == 130
    last = runs.summary["checkpoint"]["latestPersistedStep"]
    assert last == runs.summary["trainerStatus"]["globalStep"] > 5, "steps that were trained were not saved"
    assert runs.run(*arguments, "1")["checkpoint"]["restoredStep"] == last


# What makes a training one of these wants a GPU, or a package.
REFUSED = """
from accelerate.utils import DistributedType
from stepfast.errors import StateUnsupported
from stepfast.integrations.accelerate import StepfastAccelerator

accelerator = StepfastAccelerator(cpu=True)
for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
    accelerator.state.distributed_type = DistributedType(kind)
    for action in (accelerator.save_state, accelerator.load_state):
        try:
            action("state")
        except StateUnsupported as error:
            print(f"{kind}: {error}")
"""


def test_training_whose_state_is_not_saved_is_refused_and_what_to_use_instead_is_said(tmp_path: Path) -> None:
    done = attempt(tmp_path, REFUSED, 1)
    for kind, instead in (
        ("DEEPSPEED", "with DeepSpeed: train with stepfast.integrations.deepspeed.initialize"),
        ("FSDP", "with FSDP: save its shards with stepfast.torch.dcp"),
        ("MEGATRON_LM", "with Megatron-LM: save with Accelerate's own Accelerator"),
        ("XLA", "on XLA: save with Accelerate's own Accelerator"),
    ):
        told = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}: ")]
        assert told == [f"{kind}: StepfastAccelerator saves no training {instead}"] * 2, done.stdout + done.stderr
