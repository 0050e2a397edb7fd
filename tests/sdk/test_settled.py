"""Tensors that an object says to be settled are saved once: later steps refer to the file that holds them, and what is
restored is what was saved (I5).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepfast import catalog
from stepfast.errors import CheckpointDamaged, CheckpointNotFound
from stepfast.layout import check_manifest
from stepfast.references import MAX_REFERRED
from stepfast.storage import open_store
from stepfast.torch.reader import StepReader
from stepfast.torch.sources import DirectSource

FLOATS = 4096


class Layers:
    """Layers of one size. The frozen ones do not change; a count for each tells one freezing from the next."""

    def __init__(self, count: int, floats: int = FLOATS, *, value: float = 0.0) -> None:
        self.layers = [torch.full((floats,), value) for _ in range(count)]
        self.frozen: set[int] = set()  # by identity, as the layers may change places
        self.thaws = dict.fromkeys(map(id, self.layers), 0)

    def freeze(self, *numbers: int) -> None:
        self.frozen |= {id(self.layers[number]) for number in numbers}

    def thaw(self, number: int) -> None:
        layer = self.layers[number]
        if id(layer) in self.frozen:
            self.frozen.remove(id(layer))
            self.thaws[id(layer)] += 1

    def train(self) -> None:
        """Past torch's own count of changes."""
        for layer in self.layers:
            if id(layer) not in self.frozen:
                layer.data.add_(torch.rand(layer.shape))

    def copies(self) -> list[torch.Tensor]:
        return [layer.clone() for layer in self.layers]

    def state_dict(self) -> dict[str, Any]:
        return {"layers": [layer.detach() for layer in self.layers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.layers = list(state["layers"])

    def settled(self) -> list[tuple[torch.Tensor, int]]:
        return [(layer, self.thaws[id(layer)]) for layer in self.layers if id(layer) in self.frozen]


def step_bytes(folder: Path) -> int:
    """What a step's files take in the storage."""
    return sum(path.stat().st_size for path in folder.iterdir())


def restored(bench: Any, step: int | None = None, count: int = 2) -> tuple[int, list[torch.Tensor]]:
    """What another run's process would go on from."""
    back = Layers(count)
    checkpointer = bench.make(model=back)
    try:
        return checkpointer.restore(step), back.layers
    finally:
        bench.leave(checkpointer)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def refers(bench: Any, step: int) -> tuple[int, ...]:
    return check_manifest((bench.step_folder(step) / "manifest.json").read_bytes(), step).refers


def save(checkpointer: Any, step: int) -> None:
    checkpointer.save(step).wait(timeout_seconds=60.0)


def half_frozen(bench: Any, *, steps: int = 3, floats: int = 200_000) -> tuple[Any, list[list[torch.Tensor]]]:
    """A training of two layers, the first of which is frozen, and what it held at each step, from 1 on."""
    model = Layers(2, floats, value=1.0)
    model.freeze(0)
    checkpointer, held = bench.make(model=model), []
    for step in range(1, steps + 1):
        model.train()
        save(checkpointer, step)
        held.append(model.copies())
    return checkpointer, held


# ---------------------------------------------------------------- what it is for


def test_saves_with_half_of_the_layers_frozen_take_half_of_the_bytes_and_come_back(any_bench: Any) -> None:
    _, held = half_frozen(any_bench, steps=4)

    full = step_bytes(any_bench.step_folder(1))
    assert all(step_bytes(any_bench.step_folder(step)) <= 0.55 * full for step in (2, 3, 4))
    assert [refers(any_bench, step) for step in (1, 2, 3, 4)] == [(), (1,), (1,), (1,)]
    for step, layers in enumerate(held, start=1):
        found, back = restored(any_bench, step)
        assert (found, same(back, layers)) == (step, True)


def test_another_process_restores_it(any_bench: Any, tmp_path: Path) -> None:
    checkpointer, held = half_frozen(any_bench)
    any_bench.leave(checkpointer)
    script = (
        "import sys, torch; from stepfast.torch import Checkpointer; state = {}\n"
        "class Model:\n"
        "    state_dict, load_state_dict = (lambda self: {}), (lambda self, found: state.update(found))\n"
        "assert Checkpointer(model=Model()).restore() == 3; torch.save(state['layers'], sys.argv[1])"
    )
    told = {
        "STEPFAST_JOB": str(any_bench.job), "STEPFAST_RUN": "another-2", "STEPFAST_SOCKET": any_bench.socket or "",
        "STEPFAST_STORAGE_URI": any_bench.storage.as_uri(),
    }  # fmt: skip
    command = [sys.executable, "-c", script, str(tmp_path / "found.pt")]
    subprocess.run(command, check=True, timeout=180, env={**os.environ, **told})

    assert same(torch.load(tmp_path / "found.pt"), held[-1])


def test_saves_in_quick_succession_of_which_one_is_kept_lose_none_that_is_referred_to(
    start_agent: Callable[..., Any], bench: Any
) -> None:
    agent = start_agent()
    bench.socket = agent.socket
    model = Layers(6, 20_000)
    checkpointer, held = bench.make(bench.environment(max_to_keep=1), model=model), dict[int, list[torch.Tensor]]()
    for step in range(1, 61):
        if step % 10 == 5:
            model.freeze(step // 10)
        if step == 40:
            model.thaw(0)
        model.train()
        checkpointer.save(step)
        held[step] = model.copies()
        with closing(open_store(bench.folder.as_uri())) as store:
            found = [one for one in catalog.committed_steps(store, "") if one.damage is None]
        assert all({*one.refers} <= {other.step for other in found} for one in found)
    checkpointer.close()

    assert "refers to" not in agent.log
    found_step, layers = restored(bench, count=6)
    assert (found_step, same(layers, held[60])) == (60, True)


def test_steps_that_stay_in_memory_do_not_hide_the_one_that_is_committed(shared_agent: Any, bench: Any) -> None:
    bench.socket = shared_agent.socket
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(bench.environment(persist_interval_seconds=3600.0), model=model)
    first = checkpointer.save(1)
    for step in range(2, 32):
        checkpointer.save(step)
    first.wait(timeout_seconds=60.0)
    save(checkpointer, 32)

    assert refers(bench, 32) == (1,)
    assert same(restored(bench, 32)[1], model.layers)


def test_files_larger_than_the_ranks_share_of_memory_refer_too(start_agent: Callable[..., Any], bench: Any) -> None:
    bench.socket = start_agent(limit_bytes=20 << 20).socket
    _, held = half_frozen(bench, floats=6 << 20)

    assert step_bytes(bench.step_folder(3)) <= 0.55 * step_bytes(bench.step_folder(1))
    assert refers(bench, 3) == (1,)
    assert same(restored(bench)[1], held[-1])


def test_share_that_is_frozen_may_grow_and_shrink(any_bench: Any) -> None:
    model = Layers(10, 50_000)
    checkpointer = any_bench.make(model=model)
    for step, frozen in enumerate([0, 9, 9, 9, 0, 5, 5], start=1):
        for number in range(10):
            if number < frozen:
                model.freeze(number)
            else:
                model.thaw(number)
        model.train()
        save(checkpointer, step)
        assert same(restored(any_bench, step, count=10)[1], model.layers)

    layer = 50_000 * 4
    sizes = [round(step_bytes(any_bench.step_folder(step)) / layer) for step in range(1, 8)]
    assert sizes == [10, 10, 1, 1, 10, 10, 5]


def test_frozen_modules_name_their_parameters(any_bench: Any) -> None:
    class Frozen(nn.Sequential):
        def settled(self) -> list[tuple[torch.Tensor, int]]:
            return [(parameter, 1) for parameter in self[0].parameters()]

    model = Frozen(nn.Linear(200, 200), nn.Linear(200, 200))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    checkpointer = any_bench.make(model=model, optimizer=optimizer)
    for step in (1, 2):
        model(torch.rand(4, 200)).sum().backward()
        optimizer.step()
        save(checkpointer, step)
    other = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    back = any_bench.make(model=other, optimizer=torch.optim.AdamW(other[1].parameters()))

    assert back.restore() == 2
    assert refers(any_bench, 2) == (1,)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


DDP = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
class Net(nn.Sequential):
    def settled(self):
        return [(parameter, 1) for parameter in self[0].parameters()]
class Own(dict):
    pass
class Stage:
    def __init__(self, value):
        self.tensors = {"frozen": torch.full((50_000 + 1000 * rank,), value), "free": torch.full((5_000,), value)}
    def state_dict(self):
        return dict(self.tensors)
    def load_state_dict(self, state):
        self.tensors = dict(state)
    def settled(self):
        return [(self.tensors["frozen"], 0)] if rank else []
torch.manual_seed(0)
def build():
    net = Net(nn.Linear(300, 700), nn.Linear(700, 300))
    net[0].requires_grad_(False)
    return DistributedDataParallel(net)
model, stage = build(), Stage(1.0 + rank)
ckpt = Checkpointer(model=model, stage=stage)
for step in (1, 2, 3):
    with torch.no_grad():
        for parameter in model.module[1].parameters():
            parameter.add_(step)
    stage.tensors["free"].add_(step)
    ckpt.save(step).wait(timeout_seconds=60)
ckpt.close()
dist.barrier()
other, other_stage = build(), Stage(-1.0)
again = Checkpointer(model=other, stage=other_stage)
assert again.restore() == 3
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
assert all(torch.equal(stage.tensors[key], other_stage.tensors[key]) for key in stage.tensors)
again.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("with_agent", [False, True], ids=["no agent", "agent"])
def test_every_rank_leaves_out_what_is_settled_of_its_own_and_of_its_share(
    with_agent: bool, launcher: Any, request: pytest.FixtureRequest
) -> None:
    agent = request.getfixturevalue("start_agent")() if with_agent else None
    finished = launcher.run(DDP, ranks=2, agent=agent)
    assert finished.code == 0, finished.output

    bench = launcher.bench
    assert refers(bench, 3) == (1,)
    sizes = [[path.stat().st_size for path in sorted(bench.step_folder(step).glob("state-*"))] for step in (1, 3)]
    layer = 300 * 700 * 4  # of the two the first is frozen, and is rank 0's share; rank 1 has a frozen tensor, too
    assert sizes[0][0] - sizes[1][0] > 0.9 * layer
    assert sizes[0][1] - sizes[1][1] > 0.9 * 51_000 * 4


# ---------------------------------------------------------------- which file it is taken from


def test_layer_that_was_trained_and_frozen_again_is_saved_anew(bench: Any) -> None:
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(model=model)
    save(checkpointer, 1)
    save(checkpointer, 2)
    model.thaw(0)
    model.train()
    model.freeze(0)  # between two saves: only its number tells
    save(checkpointer, 3)
    expected = model.copies()
    save(checkpointer, 4)

    assert [refers(bench, step) for step in (1, 2, 3, 4)] == [(), (1,), (), (3,)]
    assert same(restored(bench, 3)[1], expected)
    assert same(restored(bench, 4)[1], expected)


def test_layer_that_changed_while_it_was_called_settled_is_saved_anew(bench: Any) -> None:
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(model=model)
    save(checkpointer, 1)
    model.layers[0].add_(1)  # against what it says
    save(checkpointer, 2)

    assert refers(bench, 2) == ()
    assert same(restored(bench)[1], model.layers)


def test_layers_that_changed_places_are_found_under_their_old_names(bench: Any) -> None:
    model = Layers(3)
    model.train()
    model.freeze(0, 1)
    checkpointer = bench.make(model=model)
    save(checkpointer, 1)
    model.layers.reverse()
    save(checkpointer, 2)

    assert refers(bench, 2) == (1,)
    assert same(restored(bench, count=3)[1], model.layers)


def test_another_layer_of_the_same_name_and_number_is_not_taken_for_it(bench: Any) -> None:
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(model=model)
    save(checkpointer, 1)
    model.layers[0] = torch.full((FLOATS,), 5.0)
    model.thaws[id(model.layers[0])] = 0
    model.freeze(0)
    save(checkpointer, 2)

    assert refers(bench, 2) == ()
    assert same(restored(bench)[1], model.layers)


def test_step_that_is_not_committed_is_not_referred_to(bench: Any) -> None:
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(model=model)
    save(checkpointer, 1)
    (bench.step_folder(1) / "manifest.json").unlink()
    save(checkpointer, 2)
    save(checkpointer, 3)

    assert [refers(bench, step) for step in (2, 3)] == [(), (2,)]
    assert same(restored(bench)[1], model.layers)


def test_newest_of_several_files_that_hold_a_layer_is_referred_to(bench: Any) -> None:
    model = Layers(2, value=1.0)
    model.freeze(0)
    checkpointer = bench.make(model=model)
    manifest = bench.step_folder(1) / "manifest.json"
    save(checkpointer, 1)
    manifest.rename(bench.folder / "late")
    save(checkpointer, 2)
    (bench.folder / "late").rename(manifest)
    save(checkpointer, 3)

    assert refers(bench, 3) == (2,)  # so that the older one may go


def test_first_save_of_a_run_and_the_first_after_a_restore_are_full(bench: Any) -> None:
    checkpointer, held = half_frozen(bench, steps=2, floats=FLOATS)
    bench.leave(checkpointer)
    model = Layers(2)
    again = bench.make(model=model)
    assert again.restore() == 2
    model.thaws = dict.fromkeys(map(id, model.layers), 0)
    model.freeze(0)
    save(again, 3)
    save(again, 4)

    assert [refers(bench, step) for step in (3, 4)] == [(), (3,)]
    assert same(restored(bench)[1], held[-1])


def test_step_refers_to_few_however_often_layers_were_frozen(bench: Any) -> None:
    count = MAX_REFERRED + 3
    model = Layers(count + 1)
    checkpointer = bench.make(model=model)
    for step in range(1, 2 * count + 1):
        model.freeze(min(step, count) - 1)
        model.train()
        save(checkpointer, step)
        assert len(refers(bench, step)) <= MAX_REFERRED
        assert same(restored(bench, count=count + 1)[1], model.layers)

    assert step_bytes(bench.step_folder(2 * count)) < 0.5 * step_bytes(bench.step_folder(1))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([torch.zeros(3)], "pairs of a tensor and a number"),
        ([("layers.0", 1)], "pair of str and int"),
        ([(torch.zeros(3), None)], "pair of Tensor and NoneType"),
        (7, "pairs of a tensor and a number"),
    ],
    ids=["tensors alone", "names", "no number", "no pairs"],
)
def test_object_that_says_something_else_is_named(given: object, says: str, bench: Any) -> None:
    model = Layers(1)
    model.settled = lambda: given  # type: ignore[assignment, method-assign, return-value]  # wrong on purpose
    with pytest.raises(TypeError, match=rf"model.settled\(\) gives .*{says}"):
        bench.make(model=model).save(1)


# ---------------------------------------------------------------- what it is taken from is gone


def test_damage_of_what_a_step_refers_to_names_that_file_and_an_older_step_is_restored(
    any_bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Layers(2, value=1.0)
    checkpointer = any_bench.make(model=model)
    save(checkpointer, 1)
    expected = model.copies()
    model.freeze(0)
    for step in (2, 3):
        model.train()
        save(checkpointer, step)
    any_bench.leave(checkpointer)
    (file,) = any_bench.step_folder(2).glob("state-*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    if any_bench.socket is not None:  # what memory holds is whole: another node's ranks read the storage
        any_bench.socket = None

    with pytest.raises(CheckpointDamaged, match="step 3 refers to it") as caught:
        restored(any_bench, 3)
    assert (caught.value.path, caught.value.step) == (f"global_step2/{file.name}", 3)
    with caplog.at_level(logging.ERROR):
        assert restored(any_bench)[0] == 1
    assert file.name in caplog.text
    assert same(restored(any_bench)[1], expected)


@pytest.mark.parametrize("gone", ["manifest.json", "part-*", "state-*", ""], ids=["manifest", "part", "file", "folder"])
def test_step_whose_reference_is_gone_is_damaged_by_name(gone: str, bench: Any) -> None:
    half_frozen(bench, floats=FLOATS)
    folder = bench.step_folder(1)
    if gone:
        (lost,) = folder.glob(gone)
        lost.unlink()
    else:
        shutil.rmtree(folder)

    with pytest.raises(CheckpointDamaged, match="global_step1/") as caught:
        restored(bench, 3)
    assert caught.value.path == f"global_step1/{lost.name if gone else 'manifest.json'}"
    with closing(open_store(bench.folder.as_uri())) as store, pytest.raises(CheckpointDamaged, match="global_step1/"):
        list(catalog.verify_step(store, "", 3))


def test_step_that_another_run_has_committed_in_place_of_what_is_referred_to_is_not_taken_for_it(bench: Any) -> None:
    half_frozen(bench, steps=2, floats=FLOATS)
    shutil.rmtree(bench.step_folder(1))
    (bench.step_folder(2)).rename(bench.folder / "aside")
    half_frozen(bench, steps=1, floats=FLOATS)
    (bench.folder / "aside").rename(bench.step_folder(2))

    with pytest.raises(CheckpointDamaged, match=r"which .* is not of"):
        restored(bench, 2)


def test_save_whose_reference_goes_before_its_commit_is_given_up_and_the_next_is_full(any_bench: Any) -> None:
    class Unlucky(Layers):
        lost: Path | None = None

        def state_dict(self) -> dict[str, Any]:
            if self.lost is not None:
                shutil.rmtree(self.lost)  # after the decision, before the commit
                self.lost = None
            return super().state_dict()

    model = Unlucky(2, value=1.0)
    model.freeze(0)
    checkpointer = any_bench.make(model=model)
    for step in (1, 2):
        save(checkpointer, step)
    model.lost = any_bench.step_folder(1)
    with pytest.raises(CheckpointNotFound, match=r"step 3 (was given up|refers to step 1)"):
        save(checkpointer, 3)
    assert not (any_bench.step_folder(3) / "manifest.json").exists()

    save(checkpointer, 4)
    assert refers(any_bench, 4) == ()
    assert same(restored(any_bench, 4)[1], model.layers)


# ---------------------------------------------------------------- whatever is done in whatever order


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["freeze", "thaw"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["train", "save", "save", "save", "swap", "uncommit", "restart"]), st.just(0)),
)


@settings(max_examples=60)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=30), max_to_keep=st.integers(1, 4))
def test_what_is_restored_is_what_was_saved(
    operations: list[tuple[str, int]], max_to_keep: int, tmp_path_factory: pytest.TempPathFactory, make_bench: Any
) -> None:
    bench = make_bench(tmp_path_factory.mktemp("settled"))
    try:
        model = Layers(4, 1024)
        checkpointer = bench.make(bench.environment(max_to_keep=max_to_keep), model=model)
        step, held = 0, dict[int, list[torch.Tensor]]()
        for operation, number in operations:
            match operation:
                case "freeze":
                    model.freeze(number)
                case "thaw":
                    model.thaw(number)
                case "train":
                    model.train()
                case "swap":
                    model.layers.insert(0, model.layers.pop())
                case "save":
                    step += 1
                    save(checkpointer, step)
                    held[step] = model.copies()
                case "uncommit":  # as if a rank's part were missing still
                    (bench.step_folder(step) / "manifest.json").unlink(missing_ok=True)
                case _:
                    bench.leave(checkpointer)
                    model = Layers(4, 1024)
                    checkpointer = bench.make(bench.environment(max_to_keep=max_to_keep), model=model)
                    step = max(step, checkpointer.restore())
                    model.thaws = dict.fromkeys(map(id, model.layers), 0)
        bench.leave(checkpointer)
        with closing(open_store(bench.folder.as_uri())) as store:
            committed = [found.step for found in catalog.committed_steps(store, "")] if step else []
            for found in committed:
                assert list(catalog.verify_step(store, "", found))
        for found in committed:
            assert same(restored(bench, found, count=4)[1], held[found])
    finally:
        bench.end()
        shutil.rmtree(bench.storage, ignore_errors=True)


# ---------------------------------------------------------------- reading some of it


def test_objects_are_read_by_name_from_the_files_that_they_are_in(bench: Any) -> None:
    model, rest = Layers(2, value=1.0), {"value": torch.ones(3)}
    model.freeze(0, 1)
    checkpointer = bench.make(model=model, rest=rest)
    for step in (1, 2):
        save(checkpointer, step)

    with closing(open_store(bench.folder.as_uri())) as store:
        reader = StepReader(DirectSource(store, "", run=""), 2, name="state")
        with closing(reader):
            assert reader.read_objects(0, ["rest"], str, weights_only=True)["rest"]["value"].tolist() == [1.0] * 3
            found = reader.read_objects(0, ["model"], str, weights_only=True)["model"]["layers"]
    assert same(found, model.layers)


def test_what_memory_holds_of_both_steps_is_read_there(shared_agent: Any, any_bench: Any) -> None:
    if any_bench.socket is None:
        any_bench.socket = shared_agent.socket
    _, held = half_frozen(any_bench, steps=2)
    for step in (1, 2):
        for file in any_bench.step_folder(step).glob("state-*"):
            file.write_bytes(b"gone")  # only memory has it

    assert same(restored(any_bench)[1], held[-1])


def test_header_of_a_file_says_what_it_leaves_out_and_where_that_is(bench: Any) -> None:
    half_frozen(bench, floats=FLOATS)
    (file,), (first,) = (list(bench.step_folder(step).glob("state-*")) for step in (3, 1))
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))

    assert "model.layers.0" not in header
    assert json.loads(header["__metadata__"]["stepfast.referred"]) == {f"global_step1/{first.name}": ["model.layers.0"]}
