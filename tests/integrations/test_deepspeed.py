"""DeepSpeed's own engine and optimizers, saved and loaded through Stepfast: what goes on is what would have gone on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interpreters import DEEPSPEED
from smallengines import run_alone

RUNS_ARE_FORKS_OF = DEEPSPEED

# A model with dropout (random generators count), a schedule, clipping; `changes` are the mode's.
MODEL = """
import json, os, signal, sys
import torch, deepspeed
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn
from stepfast.integrations.deepspeed import initialize

# On a CPU alone, where it is not worth a minute of compiling.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()

class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.middle = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.ReLU())
        self.register_buffer("seen", torch.zeros(()))
        self.checkpointed = checkpointed
    def forward(self, x):
        self.seen += 1
        x = self.first(x) * (1 + self.seen / 64)
        if self.checkpointed == "torch":
            x = torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False)
        elif self.checkpointed == "deepspeed":
            x = checkpointing.checkpoint(self.middle, x)
        else:
            x = self.middle(x)
        return self.last(x)

class Sign(torch.optim.Optimizer):
    # A client's own, with state of its own.
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    moment = state.setdefault("moment", torch.zeros_like(parameter))
                    moment.mul_(0.9).add_(parameter.grad)
                    parameter.add_(moment.sign(), alpha=-group["lr"])

def make(changes, seed):
    changes = dict(changes)
    checkpointed, client = changes.pop("checkpointed", None), changes.pop("client", None)
    torch.manual_seed(seed)
    model = Net(checkpointed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "nebula": {"enabled": True, "persistent_time_interval": 0},
    } | changes
    optimizer = None
    if client == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    elif client == "Sign":
        optimizer = Sign(model.parameters(), lr=0.01)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters(), optimizer=optimizer)
    return engine

def train(engine, first, last):
    losses = []
    for step in range(first, last + 1):
        for micro in range(engine.gradient_accumulation_steps()):
            data = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
            dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
            loss = engine(data.to(dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
    return losses
"""

IN_PROCESS = """
for name, changes in json.loads(sys.argv[1]).items():
    engine = make(changes, 1)
    train(engine, 1, 3)
    engine.save_checkpoint("checkpoints", tag=name, client_state={"step": 3, "name": name})
    went_on = train(engine, 4, 6)
    other = make(changes, 2)
    path, client = other.load_checkpoint("checkpoints", tag=name)
    assert (client["step"], client["name"]) == (3, name), client
    again = train(other, 4, 6)
    outcome = "same" if again == went_on else f"{went_on} became {again}"
    os.write(1, f"RESULT {name}: {outcome}\\n".encode())  # in one piece: the ranks share their output
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def zero(stage: int, **values: Any) -> dict[str, Any]:
    return {"stage": stage, **values}


MODES: dict[str, dict[str, Any]] = {
    "zero-0": {},
    "zero-1": {"zero_optimization": zero(1)},
    "zero-2": {"zero_optimization": zero(2)},
    "zero-3": {"zero_optimization": zero(3, stage3_param_persistence_threshold=0)},
    "bf16-zero-0": {"bf16": {"enabled": True}},
    "bf16-zero-2": {"bf16": {"enabled": True}, "zero_optimization": zero(2)},
    "bf16-zero-3": {"bf16": {"enabled": True}, "zero_optimization": zero(3)},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": zero(1)},
    "offloaded-optimizer": {
        "zero_optimization": zero(2, offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False,
    },
    "offloaded-parameters": {
        "zero_optimization": zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}),
        "zero_force_ds_cpu_optimizer": False,
    },
    "accumulation": {"gradient_accumulation_steps": 3, "zero_optimization": zero(1)},
    "torchs-activation-checkpointing": {"checkpointed": "torch", "zero_optimization": zero(2)},
    "deepspeeds-activation-checkpointing": {"checkpointed": "deepspeed", "zero_optimization": zero(1)},
    "client-sgd": {"client": "SGD", "zero_optimization": zero(1)},
    "clients-own-optimizer": {"client": "Sign"},
    "communication": {
        "zero_optimization": zero(2, overlap_comm=True, reduce_bucket_size=1000, allgather_bucket_size=1000,
                                  reduce_scatter=True, contiguous_gradients=True),
        "communication_data_type": "fp32",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """What each mode that is asked for came to, all of them trained by one gang."""
    folder = tmp_path_factory.mktemp("deepspeed")
    (folder / "train.py").write_text(MODEL + IN_PROCESS)
    asked_for = {item.name for item in request.session.items if item.path == request.path}
    name = test_loaded_engine_goes_on_bit_for_bit_as_the_saved_one.__name__
    modes = {mode: changes for mode, changes in MODES.items() if f"{name}[{mode}]" in asked_for}
    told = DEEPSPEED.output_of_gang(2, ["train.py", json.dumps(modes)], cwd=folder)
    found: dict[str, str] = {}
    for name, outcome in re.findall(r"RESULT (\S+): (.*)", told):
        found[name] = outcome if found.get(name, "same") == "same" else found[name]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_loaded_engine_goes_on_bit_for_bit_as_the_saved_one(results: dict[str, str], mode: str) -> None:
    assert results[mode] == "same"


KILLED = """
stage, crash_at, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
engine = make({"zero_optimization": {"stage": stage}}, int(os.environ["STEPFAST_ATTEMPT"]))
# Another node's disk: nothing of the attempt before is on it.
folder = f"{out}-checkpoints-{os.environ['STEPFAST_ATTEMPT']}"
path, client = engine.load_checkpoint(folder)
first = client["step"] + 1 if path is not None else 1
print(f"rank {rank} begins at {first}", flush=True)
losses = {}
for step in range(first, 13):
    losses[step] = train(engine, step, step)
    if step % 3 == 0:
        engine.save_checkpoint(folder, client_state={"step": step})
    if step == crash_at and first == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
with open(f"{out}.{rank}", "w") as file:
    json.dump(losses, file)
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_killed_training_goes_on_bit_for_bit_on_an_empty_disk(runs: Any, tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(MODEL + KILLED)
    common = ["--nproc-per-node", "2", "train.py", str(stage)]
    runs.run("--name", "undisturbed", *common, "0", "one", STEPFAST_ATTEMPT="1")
    summary = runs.run("--name", "disturbed", *common, "8", "other")
    assert (summary["restarts"], summary["recoveries"][0]["stepsLost"]) == (1, 2)
    assert runs.log.count("begins at 7") == 2, runs.log[-3000:]
    for rank in range(2):
        one, other = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("one", "other"))
        assert other == {step: one[step] for step in map(str, range(7, 13))}


def in_one_process(script: str, folder: Path) -> str:
    done = run_alone(folder, MODEL + script)
    return done.stdout + done.stderr


def test_exported_model_is_a_real_file_and_no_step(tmp_path: Path) -> None:
    output = in_one_process(
        """
engine = make({}, 1)
assert engine.save_16bit_model("exported", "model.bin")
assert torch.equal(torch.load("exported/model.bin")["first.weight"], engine.module.first.weight)
print([step.tag for step in engine.checkpoint_engine.checkpoints.steps()])
""",
        tmp_path,
    )
    assert "[]" in output.splitlines(), output


def test_checkpoint_that_deepspeed_wrote_itself_is_loaded_too(tmp_path: Path) -> None:
    output = in_one_process(
        """
engine = make({"nebula": {"enabled": False}}, 1)
train(engine, 1, 2)
engine.save_checkpoint("old")
went_on = train(engine, 3, 4)
other = make({}, 2)
path, _ = other.load_checkpoint("old")
assert path is not None
torch.manual_seed(0)
saved = torch.load(path, weights_only=False)["module"]["first.weight"]
print("same" if torch.equal(other.module.first.weight, saved) else "other")
""",
        tmp_path,
    )
    assert "same" in output.splitlines(), output


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    output = in_one_process("print(make({}, 1).load_checkpoint('nowhere'))", tmp_path)
    assert "(None, None)" in output.splitlines(), output


CONFIGURED = """
import argparse, base64

def write(name, block):
    text = json.dumps({"train_micro_batch_size_per_gpu": 3, "nebula": block})
    open(name, "w").write("# samples\\n" + text)
    return name, base64.urlsafe_b64encode(text.encode()).decode()

def engine_of(*arguments, **more):
    return initialize(*arguments, **more, model=nn.Linear(2, 2))[0]

def by_position(config):
    return initialize(None, nn.Linear(2, 2), None, None, None, None, 29500, None, None, None, config)[0]

for block in ({"enabled": True}, {"enabled": False}):
    path, text = write("ds.json", block)
    for way, engine in (
        ("position", by_position(path)), ("base64", engine_of(config=text)),
        ("config_params", engine_of(config_params=path)),
        *((f"arguments {given[:4]}", engine_of(argparse.Namespace(deepspeed_config=given))) for given in (path, text)),
        ("old name", engine_of(argparse.Namespace(deepscale_config=path))),
    ):
        print(way, engine.train_micro_batch_size_per_gpu(), type(engine.checkpoint_engine).__name__)
arguments = argparse.Namespace(deepspeed_config=path)
engine_of(arguments)
assert arguments.deepspeed_config == path
open("twice.json", "w").write('{"train_batch_size": 4, "train_batch_size": 8}')
for given in ("twice.json", "nowhere.json"):
    for of in (initialize, deepspeed.initialize):
        try:
            of(argparse.Namespace(deepspeed_config=given), nn.Linear(2, 2))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""


def test_configuration_is_taken_wherever_deepspeed_takes_it(tmp_path: Path) -> None:
    told = in_one_process(CONFIGURED, tmp_path)
    for way in ("position", "base64", "config_params", "arguments ds.j", "arguments eyJ0", "old name"):
        for engine in ("StepfastCheckpointEngine", "TorchCheckpointEngine"):
            assert f"{way} 3 {engine}" in told.splitlines(), told[-3000:]
    for path, said in (("twice.json", "Duplicate keys"), ("nowhere.json", "Expected a string path")):
        assert f"SpecError: config: '{path}' cannot be read: {said}" in told, told[-3000:]
        assert f"ValueError: {said}" in told  # DeepSpeed's own


def test_optimizer_on_nvme_is_refused_before_deepspeed_makes_files_there(tmp_path: Path) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}
    output = in_one_process(f"make({{'zero_optimization': {offload}}}, 1)", tmp_path)
    assert "StateUnsupported: offload_optimizer to NVMe: " in output, output
    assert "offload to the CPU, or keep DeepSpeed's checkpoints" in output
    assert not (tmp_path / "nvme").exists()


HEARTBEAT = """
batches = ((torch.ones(4, 16), torch.zeros(4, 4)) for _ in range(100))
if sys.argv[1] == "pipeline":
    layers = deepspeed.pipe.PipelineModule([nn.Linear(16, 8), nn.Linear(8, 4)], 1, loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine, *_ = initialize(model=layers, model_parameters=layers.parameters(), config=config)
    for _ in range(5):
        engine.train_batch(batches)
else:
    train(make({"gradient_accumulation_steps": 2}, 1), 1, 5)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_each_step_of_the_optimizer_is_a_heartbeat(runs: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(MODEL + HEARTBEAT)
    assert runs.run("train.py", kind)["trainerStatus"]["globalStep"] == 5


@pytest.mark.parametrize(
    ("block", "said"),
    [("7", "config.nebula"), ("{'persistent_path': '/x'}", "config.nebula.persistent_path"),
     ("{'persistent_time_interval': 'soon'}", "persistent_time_interval")],
)  # fmt: skip
def test_nebula_block_that_cannot_be_is_refused_by_name(tmp_path: Path, block: str, said: str) -> None:
    output = in_one_process(f"make({{'nebula': {block}}}, 1)", tmp_path)
    assert f"SpecError: {said}" in output, output


def test_framework_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError('no such module', name='deepspeed')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import stepfast.integrations.deepspeed"], cwd=tmp_path, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert "ImportError: stepfast.integrations needs deepspeed here" in done.stderr
    assert "pip install deepspeed" in done.stderr
