"""Hugging Face's own Trainer, saved and resumed through Stepfast."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from interpreters import TRANSFORMERS

RUNS_ARE_FORKS_OF = TRANSFORMERS

# Shuffled data, dropout, a schedule, evaluation with a best model; all of it Trainer's own. The attempt that ends
# trains once more, undisturbed, by the plain Trainer.
TRAINING = """
import json, os, shutil, signal, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from stepfast.integrations.transformers import StepfastTrainerMixin

ranks, crash_at = int(sys.argv[1]), int(sys.argv[2])
extra = json.loads(sys.argv[3])
attempt = os.environ["STEPFAST_ATTEMPT"]
tokens = torch.randint(32, (40, 8), generator=torch.Generator().manual_seed(3))
data = [{"input_ids": row, "labels": row} for row in tokens]

class Noting(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.setdefault(self.state.global_step, []).append(loss.item().hex())
        return loss
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs) | {"eval_nearness": -abs(self.state.global_step - 4)}

class MyTrainer(StepfastTrainerMixin, Noting):
    pass

class Crash(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == crash_at and attempt == "1" and args.process_index == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

def train(kind, folder):
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    if attempt != "1" and kind is MyTrainer:
        torch.nn.init.zeros_(model.transformer.wpe.weight)  # what is not restored shows
    trainer = kind(
        model=model, train_dataset=data, eval_dataset=data[:4], callbacks=[Crash()],
        args=TrainingArguments(**{
            "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 4 // ranks, "num_train_epochs": 3,
            "learning_rate": 0.01, "gradient_accumulation_steps": 2, "save_steps": 2, "logging_steps": 1,
            "report_to": [], "disable_tqdm": True, "lr_scheduler_type": "cosine", "warmup_steps": 2, **extra,
        }),
    )
    trainer.losses = {}
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return {
        "losses": trainer.losses, "best": best and os.path.basename(best), "generator": torch.get_rng_state().tolist(),
        "weights": {name: value.flatten().tolist() for name, value in model.state_dict().items()},
        "logs": [[log["step"], log["loss"]] for log in trainer.state.log_history if "loss" in log],
        "folders": sorted(name for name in os.listdir(folder) if name.startswith("checkpoint")),
    }

if attempt != "1" and int(os.environ["LOCAL_RANK"]) == 0:
    shutil.rmtree("out", ignore_errors=True)  # the next attempt finds an empty disk
found = [train(MyTrainer, "out")]
if crash_at:
    found.append(train(Noting, "plain"))
with open(f"found.{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
"""


def results(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


# The best is step 4: older than what save_total_limit alone would keep, and from before the kill.
BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "nearness",
    "greater_is_better": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "extra", "kept"),
    [pytest.param(1, BEST, [4, 15], id="1-best"), pytest.param(2, {}, [14, 15], id="2")],
)
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(
    runs: Any, tmp_path: Path, ranks: int, extra: dict[str, Any], kept: list[int]
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    arguments = json.dumps({"save_total_limit": 2, **extra})
    summary = runs.run("--nproc-per-node", str(ranks), "train.py", str(ranks), "9", arguments)
    assert (summary["restarts"], summary["checkpoint"]["restoredStep"]) == (1, 8)
    for ours, plain in results(tmp_path, ranks):
        assert ours["losses"] == {step: plain["losses"][step] for step in map(str, range(8, 15))}
        for key in ("weights", "logs", "folders", "generator", "best"):
            assert ours[key] == plain[key], key
        assert (ours["best"] == "checkpoint-4") is bool(extra)
    assert runs.committed() == kept


def test_best_model_alone_is_kept_when_trainer_keeps_but_one(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    runs.run("train.py", "1", "0", json.dumps({"save_total_limit": 1, **BEST}))
    ((found,),) = results(tmp_path, 1)
    assert (found["best"], found["folders"]) == ("checkpoint-4", ["checkpoint-4"])
    assert runs.committed() == [4]


# Without a launcher: the same process saves, exports, and has Trainer itself go on from there.
EXPORT = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stepfast.integrations.transformers import StepfastTrainerMixin

class MyTrainer(StepfastTrainerMixin, Trainer):
    pass

data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]

def make(kind, folder):
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, save_steps=5,
        report_to=[], disable_tqdm=True,
    )
    return kind(model=GPT2LMHeadModel(config), args=args, train_dataset=data)

ours, plain = make(MyTrainer, "ours"), make(Trainer, "plain")
ours.train()
ours.export(5, "exported")
read = AutoModelForCausalLM.from_pretrained("exported").state_dict()
plain.train(resume_from_checkpoint="exported")
assert plain.state.global_step == 12
for name, value in ours.model.state_dict().items():
    assert torch.equal(value, plain.model.state_dict()[name]), name
assert any(not torch.equal(value, read[name]) for name, value in ours.model.state_dict().items())
again = make(MyTrainer, "ours")
again.train(resume_from_checkpoint="exported")  # a real folder
assert torch.equal(again.model.lm_head.weight, ours.model.lm_head.weight)
try:
    ours.export(7, "nowhere")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


# On a CPU Trainer sees the other ranks only if it is told that this is one.
APART = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stepfast.integrations.transformers import StepfastTrainerMixin

class MyTrainer(StepfastTrainerMixin, Trainer):
    pass

model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
trainer = MyTrainer(model=model, args=TrainingArguments("out", report_to=[]), train_dataset=[{"input_ids": [1, 2]}])
try:
    trainer.train()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_ranks_that_would_train_each_for_itself_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(APART)
    told = TRANSFORMERS.output_of_gang(2, ["train.py"], cwd=tmp_path)
    assert "StateUnsupported: the job has 2 ranks, of which Trainer sees 1: each of them would train" in told
    assert "use_cpu=True" in told


def test_exported_checkpoint_is_read_by_the_plain_framework(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXPORT)
    done = TRANSFORMERS.run(["train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "CheckpointNotFound: global step 7 is not committed: checkpoint-5" in done.stdout, done.stdout


# Several launches of one job without a launcher, each with more to train; an argument says what each begins with.
LAUNCHES = """
import json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stepfast.integrations.transformers import StepfastTrainerMixin

class MyTrainer(StepfastTrainerMixin, Trainer):
    batches = 0
    def training_step(self, *args, **kwargs):
        self.batches += 1
        return super().training_step(*args, **kwargs)
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs) | {"eval_nearness": -abs(self.state.global_step - 2)}

def make(folder, steps, **more):
    torch.manual_seed(len(folder))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(**{
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": steps, "save_steps": 2,
        "save_total_limit": 1, "report_to": [], "disable_tqdm": True, **more,
    })
    return MyTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data, eval_dataset=data[:4])

def folders(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))

def tags(trainer):
    return sorted(found.tag for found in trainer.checkpoints.steps())
"""

FOLDS = """
from launches import *
one, two = make("one", 4), make("second", 4)
for trainer in (one, two):
    trainer.train()
    assert trainer.batches == 4, trainer.batches
assert not torch.equal(one.model.lm_head.weight, two.model.lm_head.weight)
assert tags(one) == ["one/checkpoint-4", "second/checkpoint-4"], tags(one)
assert folders("one") == folders("second") == ["checkpoint-4"]
anew, again = make("one", 4), make("one", 6)
os.utime("one/checkpoint-4")  # Trainer doubts the dates of folders that are made within a second, and goes by numbers
anew.train()
again.train(resume_from_checkpoint=True)
assert (anew.batches, again.batches) == (4, 2)
assert tags(again) == ["one/checkpoint-6", "second/checkpoint-4"], tags(again)

weights = make("weights", 2, save_only_model=True)
weights.train()
try:
    make("weights", 4).train(resume_from_checkpoint=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
begun = make("weights", 4)
begun.train(resume_from_checkpoint="weights/checkpoint-2")  # as it was asked for
assert begun.batches == 2
with open("one/checkpoint-6/stepfast.json", "r+") as file:
    text = file.read().replace("local/train", "local/other")
    file.seek(0); file.write(text)
try:
    make("one", 8).train(resume_from_checkpoint="one/checkpoint-6")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def launch(folder: Path, script: str, **environment: str) -> str:
    """Runs it in that folder, as the job `train`; what it has printed."""
    (folder / "launches.py").write_text(LAUNCHES)
    (folder / "train.py").write_text(script)
    done = TRANSFORMERS.run(["train.py"], cwd=folder, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_trainers_of_one_process_train_each_its_own_and_go_on_from_what_is_whole(tmp_path: Path) -> None:
    told = launch(tmp_path, FOLDS)
    assert "CheckpointNotFound: step" in told
    assert "(weights/checkpoint-2) has weights alone, by save_only_model" in told
    assert "CheckpointNotFound: one/checkpoint-6 stands for step" in told
    assert "of the job local/other" in told


NAMED = """
from launches import *
best = dict(
    eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="nearness",
    greater_is_better=True, save_total_limit=2,
)
asked, steps = json.loads(os.environ["ASKED"])
trainer = make("out", steps, **best)
trainer.train(resume_from_checkpoint=asked)
best = os.path.basename(trainer.state.best_model_checkpoint)
print(json.dumps([trainer.batches, folders("out"), best, tags(trainer)]))
"""


def test_named_folder_keeps_the_best_and_removes_what_is_too_many_on_an_empty_disk(tmp_path: Path) -> None:
    def train(asked: str | bool | None, steps: int, **environment: str) -> Any:
        told = launch(tmp_path, NAMED, ASKED=json.dumps([asked, steps]), **environment)
        return json.loads(told.splitlines()[-1])

    def kept(last: int) -> list[Any]:
        names = ["checkpoint-2", f"checkpoint-{last}"]
        return [names, "checkpoint-2", [f"out/{name}" for name in names]]

    assert train(None, 4) == [4, *kept(4)]
    shutil.rmtree(tmp_path / "out")
    assert train("out/checkpoint-4", 7) == [3, *kept(7)]
    # From scratch, and killed since, or suspended, which is no interruption: what was trained since stays.
    assert train(False, 8, STEPFAST_SETTINGS='{"interruptions": 1}') == [1, *kept(8)]
    assert train(False, 9, STEPFAST_RUN="uid-2", STEPFAST_SETTINGS='{"interruptions": 0}') == [1, *kept(9)]


EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers" / "train.py"


def test_example_is_killed_and_goes_on(runs: Any, tmp_path: Path) -> None:
    summary = runs.run("--nproc-per-node", "2", str(EXAMPLE), "--crash-at-step", "45")
    assert (summary["state"], summary["restarts"], summary["checkpoint"]["restoredStep"]) == ("Complete", 1, 40)
    assert (tmp_path / "counting" / "exported" / "model.safetensors").exists()


def test_a_job_that_is_to_be_stopped_saves_its_last_step_and_goes_on_from_it(runs: Any) -> None:
    arguments = ["--nproc-per-node", "2", str(EXAMPLE), "--steps"]
    process = runs.start(*arguments, "100000")
    runs.wait_for(lambda: len(runs.committed()) >= 1, process)
    process.send_signal(signal.SIGINT)
    assert runs.finish(process) == 130
    stopped = runs.summary
    last = stopped["checkpoint"]["latestPersistedStep"]
    assert last == stopped["trainerStatus"]["globalStep"], "steps that were trained were not saved"
    again = runs.run(*arguments, str(last + 10))
    assert again["checkpoint"]["restoredStep"] == last


# The plain Trainer, with our callback beside it.
BESIDE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stepfast.integrations.transformers import StepfastCallback

data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
args = TrainingArguments(
    output_dir="out", use_cpu=True, per_device_train_batch_size=4, max_steps=4, save_steps=2, logging_steps=1,
    report_to=[], disable_tqdm=True,
)
Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data, callbacks=[StepfastCallback()]).train()
"""


def test_callback_alone_tells_of_steps_and_logs_and_leaves_saves_to_trainer(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BESIDE)
    told = runs.run("train.py")["trainerStatus"]
    assert told["globalStep"] == 4
    assert {"loss", "learning_rate"} <= {metric["name"] for metric in told["metrics"]}
    assert runs.committed() == []
    assert sorted(path.parent.name for path in tmp_path.glob("out/*/optimizer.pt")) == ["checkpoint-2", "checkpoint-4"]


PUSHED = """
from launches import *
MyTrainer.init_hf_repo = MyTrainer.push_to_hub = lambda *_, **__: None  # no hub is asked
for strategy in ("end", "every_save", "checkpoint", "all_checkpoints"):
    trainer = make(strategy, 1, push_to_hub=True, hub_strategy=strategy)
    try:
        trainer.train()
    except Exception as error:
        print(f"{strategy}: {type(error).__name__}: {error}")
    print(f"{strategy}: {trainer.batches} batches")
"""


def test_checkpoints_that_would_be_pushed_as_they_are_saved_are_refused(tmp_path: Path) -> None:
    told = launch(tmp_path, PUSHED).splitlines()
    assert "end: 1 batches" in told
    for strategy in ("every_save", "checkpoint", "all_checkpoints"):
        refused = 'StepfastTrainerMixin saves no training that is pushed as it is saved: take hub_strategy="end"'
        assert f"{strategy}: StateUnsupported: {refused}" in told, told
        assert f"{strategy}: 0 batches" in told, told
