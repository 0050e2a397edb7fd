"""`stepfast anatomy predict` and `measure`, as they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from interpreters import STEPFAST, TRANSFORMERS
from stepfast.cli import anatomy
from stepfast.footprint import ANNOTATION, footprint_from_json

Call = Callable[..., Result]
CONFIG = {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "vocab_size": 1000,
}  # fmt: skip
MODULE = """
import torch

def net():
    return torch.nn.Linear(512, 512)

def batch(count):
    return torch.randn(count, 512)

def loss(model, batch):
    return model(batch).sum()

def net_of(parameters):
    return net()

def no_net():
    raise ValueError("no such size")

def no_batch(count):
    return [][count]

def wrong_loss(model, batch):
    return model(batch[:, :3]).sum()

def batch_of_one():
    return torch.randn(1, 512)

def losses(model, batch):
    return model(batch)

def no_optimizer(parameters):
    raise KeyError("rate")
"""
FUNCTIONS = ("--model", "my_model:net", "--batch", "my_model:batch", "--loss", "my_model:loss")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "my_model.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """The command in this process, which has torch already; modules of the folder are forgotten again."""
    app = typer.Typer()
    anatomy.register(app)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield lambda *arguments: CliRunner().invoke(app, ["anatomy", *arguments])
    for name in ("my_model", "broken"):
        sys.modules.pop(name, None)


def stepfast(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `python -m stepfast.cli anatomy …` in that folder."""
    return TRANSFORMERS.run([*STEPFAST, "anatomy", *arguments], cwd=folder)


def test_a_configuration_is_predicted_and_its_report_kept(folder: Path) -> None:
    ran = stepfast(
        folder, "predict", "--model", "config.json", "--batch-size", "4", "--precision", "bf16-mixed",
        "--out", "report.json", "--html", "report.html",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["settings"]["batch size"] == "4"
    assert report["memory"]["peak_bytes"] > 0
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    shown = stepfast(folder, "report", "report.json")
    assert shown.returncode == 0, shown.stderr
    assert "bf16-mixed" in shown.stdout


def test_functions_are_predicted_for_a_device_of_a_size_of_ones_own(folder: Path) -> None:
    functions = ("--model", "my_model:net", "--batch", "my_model:batch", "--loss", "my_model:loss")
    ran = stepfast(folder, "predict", *functions, "--memory", "600MiB", "--largest-batch", "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["memory"]["limit_bytes"] == 600 * 2**20
    assert f"largest batch that fits: {report['settings']['batch size']} samples" in ran.stderr
    assert ran.stderr.startswith("1 sample a rank: fits\n2 samples a rank: ")
    assert " samples a rank: does not fit\n" in ran.stderr


def test_the_same_functions_are_measured(folder: Path) -> None:
    functions = ("--model", "my_model:net", "--batch", "my_model:batch", "--loss", "my_model:loss", "--batch-size", "3")
    measured = stepfast(folder, "measure", *functions, "--device", "cpu", "--json")
    assert measured.returncode == 0, measured.stderr
    predicted = json.loads(stepfast(folder, "predict", *functions, "--device", "cpu", "--json").stdout)
    report = json.loads(measured.stdout)
    assert (report["kind"], predicted["kind"]) == ("measured", "predicted")
    assert report["memory"]["peak_bytes"] == predicted["memory"]["peak_bytes"]


def test_pictures_come_in_the_models_dtype(folder: Path) -> None:
    config = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}
    (folder / "pictures.json").write_text(json.dumps(config), encoding="utf-8")
    for command, model in (("predict", "resnet"), ("measure", "pictures.json")):  # a small one where it really trains
        ran = stepfast(folder, command, "--model", model, "--precision", "bf16", "--device", "cpu", "--batch-size", "2")
        assert ran.returncode == 0, ran.stderr[-2000:]


def test_one_rank_of_several_is_predicted(folder: Path) -> None:
    alone = json.loads(stepfast(folder, "predict", "--model", "config.json", "--json").stdout)
    shared = json.loads(stepfast(folder, "predict", "--model", "config.json", "--json", "--parallel", "fsdp2:8").stdout)
    assert shared["memory"]["component_peaks"]["optimizer"] < alone["memory"]["component_peaks"]["optimizer"] / 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "nothing.json"), "no file, and no kind of model"),
        (("--model", "my_model:net"), "name one that makes a batch, too, with --batch"),
        (("--model", "config.json", "--device", "abacus"), "no device is known as 'abacus'; known: cpu, v100-16gb"),
        (("--model", "config.json", "--memory", "lots"), "--memory: lots is no size, as 24GiB"),
        (("--model", "config.json", "--precision", "int3"), "precision: 'int3' is none of fp32"),
        (("--model", "config.json", "--parallel", "tensor:8"), "parallel: 'tensor:8' is no KIND:RANKS"),
        (("--model", "config.json", "--optimizer", "magic"), "--optimizer magic: none of adamw"),
        (("--model", "config.json", "--task", "magic"), "--task magic: none of"),
        (("--model", "config.json", "--memory", "0"), "--memory: 0 is no size"),
        (("--model", "config.json", "--clip-norm", "nan"), "--clip-norm: nan is no norm"),
        (("--model", "config.json", "--clip-norm", "-1"), "--clip-norm: -1.0 is no norm"),
        (("--model", "config.json", "--batch-size", "2", "--largest-batch"), "name one of them"),
        (("--model", "config.json", "--name", "job"), "--name: is of the manifest that --annotate names"),
        (("--model", "config.json", "--sequence-length", "1024"), "takes 512 at most"),
        (("--model", "my_model:net", "--task", "causal-lm"), "--task and --sequence-length are for configurations"),
        (("--model", "config.json", "--out", "config.json"), "--out: config.json exists already"),
        (("--model", "config.json", "--html", "nowhere/page.html"), "--html: nowhere/page.html: there is no folder"),
        (("--model", "config.json", "--annotate", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--model", "config.json", "--memory", "-5GiB"), "--memory: -5GiB is no size"),
        (("--model", "config.json", "--attention", "magic"), "attention: 'magic' is none of"),
        (("--model", "config.json", "--out", "page", "--html", "page"), "--html: page is the file of --out, too"),
        (("--model", "config.json", "--device", "cpu", "--largest-batch"), "say with --memory how much it has"),
        (("--model", "vit", "--sequence-length", "8"), "ViTForImageClassification takes pictures, no sequences"),
        (("--model", "config.json", "--batch", "my_model:batch", "--sequence-length", "8"), "--batch makes others"),
        ((*FUNCTIONS, "--checkpointing"), "--checkpointing: Linear: only models of Transformers"),
        (
            ("--model", "resnet", "--checkpointing"),
            "--checkpointing: ResNetForImageClassification: Transformers cannot",
        ),
    ],
)
def test_a_wrong_option_is_told_in_one_line_before_anything_runs(
    call: Call, arguments: tuple[str, ...], says: str
) -> None:
    ran = call("predict", *arguments)
    assert ran.exit_code == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "abacus"), "--device: 'abacus' is none of torch's"),
        (("--device", "meta"), "--device: meta cannot be measured"),
        (("--device", "cuda:99"), "--device: there is no cuda:99 here"),
        (("--clip-norm", "-1"), "--clip-norm: -1.0 is no norm"),
        (("--precision", "fp8"), "precision: 'fp8' is none of"),
        (("--device", "cpu", "--checkpointing"), "--checkpointing: Linear: only models of Transformers"),
    ],
)
def test_a_wrong_option_of_measure_is_told_in_one_line(call: Call, arguments: tuple[str, ...], says: str) -> None:
    ran = call("measure", *FUNCTIONS, *arguments)
    assert ran.exit_code == 2
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""


@pytest.mark.parametrize("command", ["predict", "measure"])
@pytest.mark.parametrize(
    ("named", "says"),
    [
        (("--model", "my_model:no_net"), "ValueError: no such size"),
        (("--batch", "my_model:no_batch"), "IndexError: list index out of range"),
        (("--loss", "my_model:wrong_loss"), "RuntimeError: "),
        (("--optimizer", "my_model:no_optimizer"), "KeyError: 'rate'"),
        (("--model", "broken:net"), "RuntimeError: at import"),
    ],
)
def test_what_a_named_function_raises_is_told_with_its_option_and_its_line(
    folder: Path, call: Call, command: str, named: tuple[str, str], says: str
) -> None:
    (folder / "broken.py").write_text('raise RuntimeError("at import")', encoding="utf-8")
    ran = call(command, *FUNCTIONS, *named, "--device", "cpu")
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"stepfast: {' '.join(named)} raised {says}")
    assert f'{named[1].partition(":")[0]}.py", line' in ran.stderr
    assert "site-packages" not in ran.stderr
    assert len(ran.stderr.splitlines()) < 12


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (("--batch", "my_model:batch_of_one"), "--batch takes no argument, so it cannot follow --batch-size"),
        (("--loss", "my_model:losses"), "--loss returned a tensor of (1, 512), not one number"),
        (("--model", "builtins:dict"), "--model returned a dict, not a torch.nn.Module"),
        (("--optimizer", "my_model:net_of"), "--optimizer returned a Linear, not a torch.optim.Optimizer"),
        (("--precision", "fp8"), "--precision: 'fp8' is none of"),
    ],
)
def test_messages_name_options_and_no_parameters(call: Call, named: tuple[str, str], says: str) -> None:
    ran = call("predict", *FUNCTIONS, *named)
    assert ran.stderr.startswith(f"stepfast: {says}")
    assert len(ran.stderr.splitlines()) == 1


def test_a_model_without_a_loss_is_told_of_the_option(call: Call) -> None:
    ran = call("predict", "--model", "my_model:net", "--batch", "my_model:batch", "--batch-size", "3")
    assert ran.exit_code == 1
    assert ran.stderr.endswith("or say how the loss is computed, with --loss\n")


def test_a_file_is_not_replaced_unless_that_is_asked_for(folder: Path) -> None:
    (folder / "report.json").write_text("mine", encoding="utf-8")
    command = ("predict", "--model", "config.json", "--out", "report.json")
    assert stepfast(folder, *command).returncode != 0
    assert (folder / "report.json").read_text(encoding="utf-8") == "mine"
    assert stepfast(folder, *command, "--force").returncode == 0


JOB = """# what we train
apiVersion: stepfast.dev/v1alpha1
kind: TrainingJob
metadata:
  name: bert  # ours
spec:
  trainer: {image: registry.example/bert, command: [torchrun], args: [train.py], numNodes: 4, numProcPerNode: 2}
"""


def test_a_manifest_carries_the_prediction_and_nothing_else_of_it_changes(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    ran = stepfast(
        folder, "predict", "--model", "config.json", "--parallel", "fsdp2:8", "--annotate", "job.yaml", "--json"
    )
    assert ran.returncode == 0, ran.stderr
    assert "job.yaml: bert carries the prediction" in ran.stderr
    text = (folder / "job.yaml").read_text(encoding="utf-8")
    assert [
        line for line in text.splitlines() if "annotations" not in line and ANNOTATION not in line
    ] == JOB.splitlines()
    footprint = footprint_from_json(yaml.safe_load(text)["metadata"]["annotations"][ANNOTATION])
    report = json.loads(ran.stdout)
    assert footprint.world_size == 8
    assert footprint.occupied_bytes == report["memory"]["reserved_bytes"] + report["memory"]["context_bytes"]
    states = ("weights", "buffers", "optimizer")
    assert footprint.checkpoint_bytes == sum(report["memory"]["steady_components"].get(name, 0) for name in states)


def test_ranks_that_hold_the_same_share_its_saves(folder: Path) -> None:
    kept: dict[str, int] = {}
    for parallel in ("none", "ddp:8"):
        (folder / "job.yaml").write_text(JOB, encoding="utf-8")
        ran = stepfast(folder, "predict", "--model", "config.json", "--parallel", parallel, "--annotate", "job.yaml")
        assert ran.returncode == 0, ran.stderr
        annotations = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))["metadata"]["annotations"]
        kept[parallel] = footprint_from_json(annotations[ANNOTATION]).checkpoint_bytes
    assert kept["ddp:8"] == -(-kept["none"] // 8)


def test_a_file_that_is_no_manifest_is_left_as_it_is(folder: Path) -> None:
    (folder / "job.yaml").write_text("kind: Pod\n", encoding="utf-8")
    ran = stepfast(folder, "predict", "--model", "config.json", "--annotate", "job.yaml")
    assert ran.returncode != 0
    assert "holds no TrainingJob" in ran.stderr
    assert (folder / "job.yaml").read_text(encoding="utf-8") == "kind: Pod\n"
