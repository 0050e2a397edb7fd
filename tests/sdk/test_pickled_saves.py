"""Objects that only travel pickled, from save to save: what their files hold, and what a change of theirs costs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

Same = Callable[..., None]


class Bag(dict[Any, Any]):
    """A dict of another class: `assert_same` looks into it."""


class Counted:
    """Counts how often it is pickled."""

    def __init__(self, **parts: Any) -> None:
        self.parts, self.pickled = parts, 0

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return {"parts": self.parts, "pickled": 0}


def ranges_of(file: Path) -> dict[str, Any]:
    """Where everything lies in a file, from its header alone."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    return {name: entry["data_offsets"] for name, entry in header.items()} | {"": file.stat().st_size}


# ---------------------------------------------------------------- the file


def test_files_show_the_tensors_of_objects_by_name(bench: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400))
    bag = Bag({"x": torch.rand(3), "a#b": torch.rand(2), 3: torch.rand(4)})
    bench.make(state={"model": model, "bag": bag, "again": Bag(x=bag["x"])}).save(1)

    (file,) = bench.step_folder(1).glob("*.safetensors")
    opened = load_file(file)

    for name, tensor in model.state_dict().items():
        assert torch.equal(opened[f"state.model.{name}"], tensor), name
    assert torch.equal(opened["state.bag.x"], bag["x"])
    assert torch.equal(opened["state.bag.a%23b"], bag["a#b"])
    assert torch.equal(opened["state.bag.2"], bag[3])
    assert "state.again.x" not in opened
    for name in ("model", "bag", "again"):
        assert opened[f"state.{name}"].dtype is torch.uint8
    assert opened["state.model"].nbytes < 16 * 1024
    with safe_open(file, "pt") as reader:
        assert '"p"' in reader.metadata()["stepfast"]


def test_names_of_an_objects_tensors_collide_with_no_others(bench: Any, assert_same: Same) -> None:
    state = {
        "bag": Bag({"x": torch.ones(1), "0": torch.ones(2), 5: torch.ones(3), "": torch.ones(4)}),
        "odd": Bag({"\ud800": torch.ones(5)}),
        "bag.x": torch.ones(6), "bag.0": torch.ones(7), "": {"bag": Bag(x=torch.ones(8))},
    }  # fmt: skip
    bench.make(state=state).save(1)
    back: dict[str, Any] = {}
    bench.make(state=back, weights_only=False).restore()
    assert_same(state, back)


# ---------------------------------------------------------------- from save to save


T, U, V = torch.rand(3), torch.rand(3), torch.rand(5)
CHANGES: dict[str, list[Any]] = {
    "a tensor more, a tensor less": [Bag(a=T), Bag(a=T, b=U), Bag(a=T, b=U, c=V), Bag()],
    "a tensor becomes a number": [Bag(a=T), Bag(a=1), Bag(a=T)],
    "a tensor becomes a parameter": [Bag(a=T), Bag(a=nn.Parameter(T.clone()))],
    "gradients are wanted": [Bag(a=T), Bag(a=T.clone().requires_grad_()), Bag(a=T)],
    "another order": [Bag(a=T, b=U), Bag(b=U, a=T), Bag(a=U, b=T)],
    "another name": [Bag(a=T), Bag(b=T)],
    "another shape": [Bag(a=T), Bag(a=V), Bag(a=T.view(1, 3))],
    "another dtype": [Bag(a=T), Bag(a=T.int()), Bag(a=T.view(torch.int32))],
    "a tie": [Bag(a=T, b=T), Bag(a=T, b=T.clone()), Bag(a=T, b=T.view(3)), Bag(a=T, b=T)],
    "a tie to another": [[Bag(a=T), Bag(a=T)], [Bag(a=T), Bag(a=T.clone())], [Bag(a=T), Bag(a=T.view(3))]],
    "a tie between others": [[Bag(a=T), Bag(a=U), Bag(a=T)], [Bag(a=T), Bag(a=U), Bag(a=U)]],
    "an object becomes a container": [Bag(a=T), {"a": T}, Bag(a=T), [T], 3],
    "objects of several sizes": [[Bag(a=T), Bag(a="x" * 9000)], [Bag(a="x" * 9000, b=T), Bag(a=1)]],
    "it grows by a byte": [Bag(a=10 ** (2 * n), t=T) for n in range(5)],
    "it grows by kibibytes": [Bag(a="x" * 3000 * n, t=T) for n in range(1, 6)],
    "it shrinks": [Bag(a="x" * 1_000_000, t=T), Bag(a=1, t=T), Bag(a="x" * 3000, t=T)],
}


@pytest.mark.parametrize("is_known", [True, False], ids=["walked quickly", "walked anew"])
@pytest.mark.parametrize("name", CHANGES)
def test_objects_may_change_between_saves(name: str, is_known: bool, bench: Any, assert_same: Same) -> None:
    state: dict[Any, Any] = {}
    checkpointer = bench.make(state=state)
    versions = CHANGES[name] + CHANGES[name][:1]
    for step, version in enumerate(versions, start=1):
        state.clear()
        state["it"], state["tensor"] = version, V
        if not is_known:
            state[2.5] = "a key that the quick walk does not judge"
        checkpointer.save(step)

    for step, version in enumerate(versions, start=1):
        back: dict[Any, Any] = {}
        bench.make(state=back, weights_only=False).restore(step)
        assert_same(version, back["it"])
        (file,) = bench.step_folder(step).glob("*.safetensors")
        if name in ("another order", "another name"):
            opened = load_file(file)
            assert all(torch.equal(opened[f"state.it.{key}"], tensor) for key, tensor in version.items())


@pytest.mark.parametrize("is_known", [True, False], ids=["walked quickly", "walked anew"])
def test_object_that_grows_and_shrinks_a_little_moves_nothing(is_known: bool, bench: Any) -> None:
    bag = Bag(history=[], weight=torch.rand(1000))
    checkpointer = bench.make(state={"bag": bag, "after": torch.rand(10)} | ({} if is_known else {2.5: 1}))
    found, sizes = [], [0, 1, 2, 700, 701, 820, 830, 600, 0]
    for step, size in enumerate(sizes, start=1):
        bag["history"] = b"x" * size
        checkpointer.save(step)
        (file,) = bench.step_folder(step).glob("*.safetensors")
        if ranges_of(file) not in found:
            found.append(ranges_of(file))

    assert len(found) <= 2


@pytest.mark.parametrize("is_known", [True, False], ids=["walked quickly", "walked anew"])
def test_object_is_pickled_once_a_save(is_known: bool, bench: Any) -> None:
    one, other = Counted(weight=torch.rand(3)), Counted()
    state = {"one": one, "again": one, "list": [other]} | ({} if is_known else {2.5: 1})
    checkpointer = bench.make(state=state)

    checkpointer.save(1)  # which has been planned before
    one.pickled = other.pickled = 0
    for step, change in enumerate([{}, {}, {"more": torch.rand(2)}, {"text": "x" * 5000}, {"weight": 1}], start=2):
        one.parts.update(change)
        checkpointer.save(step)
        assert (one.pickled, other.pickled) == (step - 1, step - 1)


def test_save_holds_on_to_no_tensor_of_an_object(bench: Any) -> None:
    state: dict[str, Any] = {"object": Bag(weight=torch.rand(3), cut=torch.rand(3, requires_grad=True) * 2)}
    checkpointer = bench.make(state=state)
    checkpointer.save(1)
    checkpointer.save(2)
    refs = [weakref.ref(tensor) for tensor in state["object"].values()]
    gc.disable()
    try:
        state.clear()
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_module_is_saved_as_it_is_at_each_step(any_bench: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3))
    checkpointer = any_bench.make(state={"model": model})
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        checkpointer.save(step).wait(timeout_seconds=60)

    for step in (1, 2, 3):
        back: dict[str, Any] = {}
        assert any_bench.make(state=back, weights_only=False).restore(step) == step
        assert all((parameter == step).all() for parameter in back["model"].parameters())
        assert back["model"](torch.ones(1, 300)).shape == (1, 3)


# ---------------------------------------------------------------- several ranks


REPLICATED = """
import sys, torch, torch.distributed as dist
from argparse import Namespace
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "save":
    # The tensors are equal on all ranks; what their pickles look like is not.
    state = {"it": Namespace(weight=torch.arange(300_000.0), words={str(i) for i in range(20_000)}, rank="x" * rank)}
    state["same"] = Namespace(weight=state["it"].weight)
    ckpt = Checkpointer(state=state, own={"it": Namespace(rank=torch.tensor(rank))}, replicated=["state"])
    ckpt.save(1)
    ckpt.save(2)
else:
    state, own = {}, {}
    ckpt = Checkpointer(state=state, own=own, replicated=["state"], weights_only=False)
    assert ckpt.restore() == 2
    it = state["it"]
    assert torch.equal(it.weight, torch.arange(300_000.0)) and state["same"].weight is it.weight
    assert it.words == {str(i) for i in range(20_000)} and it.rank == "x" * rank
    assert own["it"].rank.item() == rank
ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_tensors_of_replicated_objects_are_divided_and_their_pickles_each_ranks_own(launcher: Any) -> None:
    script = launcher.write(REPLICATED)
    saved = launcher.run(script, "save", ranks=2)
    assert saved.code == 0, saved.output
    restored = launcher.run(script, "restore", ranks=2, attempt=2)
    assert restored.code == 0, restored.output

    opened = [load_file(file) for file in sorted(launcher.bench.step_folder(2).glob("*.safetensors"))]
    rows = [sum(t.numel() for name, t in found.items() if name.startswith("state.it.weight#rows")) for found in opened]
    assert sum(rows) == 300_000
    assert min(rows) > 140_000
    assert all("state.it" in found for found in opened)
