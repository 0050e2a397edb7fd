"""A checkpoint loaded in part, on as many ranks and on others: what plain DeepSpeed makes of the same, exported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from interpreters import DEEPSPEED

TRAINING = """
import hashlib, json, sys
import torch, deepspeed
from torch import nn
from stepfast.errors import StateUnsupported
from stepfast.integrations.deepspeed import initialize

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
who, modes, ways = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
CLIENT = {"step": 3, "words": {"a", "b"}, "nest": [(1, None), {"x": torch.arange(3)}], "layer": nn.Linear}

def make(changes, seed):
    changes = dict(changes)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("seen", torch.tensor(float(seed)))
    if changes.pop("frozen", False):
        model[2].requires_grad_(False)
    config = {
        "train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.05}}, **changes,
    }
    if who != "plain":
        config["nebula"] = {"persistent_time_interval": 0, "num_of_version_in_retention": 100}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of = deepspeed.initialize if who == "plain" else initialize
    return of(model=model, model_parameters=trained, config=config)[0]

def train(engine, first, last):
    losses = []
    for step in range(first, last + 1):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(size)[rank]
        loss = (engine(mine) - mine[:, :3].sin()).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / size)
    return losses

def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:8] for name, value in whole.items()}

def is_clients(client):
    return (
        client["words"] == {"a", "b"} and client["nest"][0] == (1, None) and client["layer"] is nn.Linear
        and torch.equal(client["nest"][1]["x"], torch.arange(3))
    )

found = {}
for mode, changes in modes.items():
    if who == "saver":
        engine = make(changes, 1)
        train(engine, 1, 3)
        engine.save_checkpoint("saved", tag=mode, client_state=CLIENT)
        continue
    folder = "saved" if who == "ours" else f"exported-{mode}"  # of each a latest: DeepSpeed asks for it with ZeRO 3
    for way, options in ways.items():
        engine = make(changes, 2)
        try:
            _, client = engine.load_checkpoint(folder, mode, **options)
        except StateUnsupported as error:
            found[f"{mode} {way}"] = {"refused": str(error)}
            continue
        found[f"{mode} {way}"] = {
            "weights": weights(engine), "counted": [engine.global_steps, engine.global_samples],
            "rates": engine.lr_scheduler.state_dict()["last_batch_iteration"], "client": sorted(client),
            "whole": is_clients(client), "losses": train(engine, 4, 6),
        }
if who == "saver":
    engine.checkpoint_engine.cleanup()
elif rank == 0:
    with open(f"{who}-{size}.json", "w") as file:
        json.dump(found, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

MODES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "zero1-round-robin": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "zero2-frozen": {"zero_optimization": {"stage": 2}, "frozen": True},
    "zero3-frozen": {"zero_optimization": {"stage": 3}, "frozen": True},
}
WAYS: dict[str, dict[str, bool]] = {
    "whole": {},
    "module": {"load_module_only": True},
    "weights": {"load_module_only": True, "load_optimizer_states": False},
    "no-optimizer": {"load_optimizer_states": False},
    "no-scheduler": {"load_lr_scheduler_states": False},
}
CASES = [f"{mode} {way}" for mode in MODES for way in WAYS]
REFUSED = [f"zero1-round-robin {way}" for way in ("whole", "no-scheduler")]  # on another number of ranks


@dataclass(frozen=True)
class Loaded:
    """What was loaded, by mode and way: by plain DeepSpeed on 2 ranks, and by ours on 1, 2 and 3."""

    plain: dict[str, Any]
    ours: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder, arguments = tmp_path_factory.mktemp("partial"), [json.dumps(MODES), json.dumps(WAYS)]
    (folder / "train.py").write_text(TRAINING)
    uri = folder / ".stepfast" / "checkpoints" / "local" / "train"

    def run(ranks: int, *command: str) -> None:
        DEEPSPEED.output_of_gang(ranks, command, cwd=folder)

    def found(who: str, ranks: int) -> dict[str, Any]:
        results: dict[str, Any] = json.loads((folder / f"{who}-{ranks}.json").read_text())
        return results

    export = "import sys; from stepfast.integrations.deepspeed import export_checkpoint as export; "
    export += "[export(sys.argv[1], 'exported-' + tag, tag) for tag in sys.argv[2:]]"
    run(2, "train.py", "saver", *arguments)
    run(1, "-c", export, str(uri), *MODES)
    run(2, "train.py", "plain", *arguments)
    for ranks in (2, 3, 1):
        run(ranks, "train.py", "ours", *arguments)
    return Loaded(found("plain", 2), {ranks: found("ours", ranks) for ranks in (1, 2, 3)})


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_plain_deepspeed_loads(loaded: Loaded, case: str) -> None:
    assert loaded.ours[2][case] == loaded.plain[case]
    assert loaded.plain[case]["whole"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_on_another_number_of_ranks_it_is_the_same(loaded: Loaded, case: str, ranks: int) -> None:
    moved, plain = dict(loaded.ours[ranks][case]), dict(loaded.plain[case])
    assert moved.pop("losses") == pytest.approx(plain.pop("losses"), rel=0, abs=1e-6)
    assert moved == plain


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_state_that_lies_otherwise_on_another_number_of_ranks_is_refused(loaded: Loaded, case: str, ranks: int) -> None:
    assert "round_robin_gradients is loaded on as many ranks" in loaded.ours[ranks][case]["refused"]


def test_what_is_left_out_is_not_loaded(loaded: Loaded) -> None:
    for mode in MODES:
        of = {way: loaded.ours[2][f"{mode} {way}"] for way in WAYS}
        assert of["no-optimizer"]["weights"] == of["weights"]["weights"] == of["whole"]["weights"]
        assert len({tuple(of[way]["losses"]) for way in ("whole", "no-optimizer", "no-scheduler")}) == 3
        assert [of[way]["counted"] for way in ("whole", "weights")] == [[3, 36], [0, 0]]
        assert [of[way]["rates"] for way in ("whole", "weights", "no-scheduler")] == [2, -1, -1]
