"""A restore reads into the tensors that the caller has, where it may; where it may not, what comes of it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepfast.checksum import checksum
from stepfast.errors import CheckpointDamaged, CheckpointMismatch, ObjectsUndefined, StorageError
from stepfast.layout import manifest_of, manifest_path, parse_part
from stepfast.slot import CONTROL_BYTES


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.head.weight = self.embed.weight


class Halved(nn.Module):
    """Keeps half of what its state says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.register_state_dict_post_hook(self._doubled)
        self.register_load_state_dict_pre_hook(self._halved)

    @staticmethod
    def _doubled(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _halved(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class Extra(nn.Linear):
    """Has a word beside its tensors."""

    word = "first"

    def get_extra_state(self) -> str:
        return self.word

    def set_extra_state(self, state: str) -> None:
        self.word = state


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own example


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(300, 400), nn.LayerNorm(400), nn.Linear(400, 7)),
    "with running statistics": lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)),
    "with tied weights": Tied,
    "with hooks of its own": Halved,
    "with a state of its own": lambda: Extra(3, 3),
    "in channels-last": channels_last,
    "in bfloat16": lambda: nn.Linear(64, 64, dtype=torch.bfloat16),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
}


def state_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in module.state_dict().items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_module_of_any_kind_has_the_saved_state_in_its_own_tensors(
    name: str, any_bench: Any, assert_same: Callable[..., None]
) -> None:
    saved, restored = MODULES[name](), MODULES[name]()
    if isinstance(saved, Extra):
        saved.word = "second"
    any_bench.make(model=saved).save(1).wait(timeout_seconds=60)
    before = {key: (tensor.data_ptr(), tensor._version) for key, tensor in restored.named_parameters()}

    assert any_bench.make(model=restored).restore() == 1
    assert_same(state_of(saved), state_of(restored))
    for key, tensor in restored.named_parameters():
        assert tensor.data_ptr() == before[key][0], "a restore gives no parameter other memory"
        assert tensor._version > before[key][1], "what autograd kept of it is stale"
        assert tensor.requires_grad is dict(saved.named_parameters())[key].requires_grad
    if isinstance(restored, Extra):
        assert restored.word == "second"
    if isinstance(restored, Tied):
        assert restored.head.weight is restored.embed.weight


@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "that has stepped"])
def test_optimizer_has_the_saved_state_and_goes_on_alike(has_stepped: bool, any_bench: Any) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(1)
    model, other = nn.Linear(30, 40), nn.Linear(30, 40)
    optimizer, again = (torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, other))
    for _ in range(3):
        train(model, optimizer)
    any_bench.make(model=model, optimizer=optimizer).save(3).wait(timeout_seconds=60)
    if has_stepped:
        train(other, again)
    held = {id(value) for state in again.state.values() for value in state.values()}

    assert any_bench.make(model=other, optimizer=again).restore() == 3
    if has_stepped:
        assert held == {id(value) for state in again.state.values() for value in state.values()}
    for one in ((model, optimizer), (other, again)):
        train(*one)
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)


def test_tensors_that_overlap_are_not_written_through_each_other(any_bench: Any) -> None:
    saved = {"x": torch.arange(6.0), "y": torch.arange(10.0, 16.0)}
    any_bench.make(state=saved).save(1).wait(timeout_seconds=60)
    memory = torch.zeros(9)
    state = {"x": memory[0:6], "y": memory[3:9]}

    assert any_bench.make(state=state).restore() == 1
    assert torch.equal(state["y"], saved["y"])
    assert torch.equal(state["x"][:3], saved["x"][:3])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 6),
        lambda: torch.zeros(6, 4).t(),
        lambda: torch.zeros(8, 12)[::2, ::2],
        lambda: torch.zeros(4, 6, dtype=torch.float64),
        lambda: torch.zeros(6, 4),
        lambda: torch.zeros(4, 6, requires_grad=True),
        lambda: nn.Parameter(torch.zeros(4, 6)),
        lambda: torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(1).expand(4, 6),
    ],
    ids=["alike", "transposed", "with gaps", "another dtype", "another shape", "wants gradients", "a parameter",
         "lazily negated", "expanded"],
)  # fmt: skip
def test_whatever_stands_in_a_dict_becomes_what_was_saved(make: Callable[[], torch.Tensor], any_bench: Any) -> None:
    saved = {"nest": [{"x": torch.rand(4, 6)}, 3], "other": torch.rand(5)}
    any_bench.make(state=saved).save(1).wait(timeout_seconds=60)
    state: dict[str, Any] = {"nest": [{"x": make()}, 4], "other": torch.zeros(5), "gone": torch.zeros(2)}
    other = state["other"]

    assert any_bench.make(state=state).restore() == 1
    assert torch.equal(state["nest"][0]["x"], saved["nest"][0]["x"])  # type: ignore[index]
    assert not state["nest"][0]["x"].requires_grad
    assert state["nest"][1] == 3
    assert state["other"] is other
    assert torch.equal(other, saved["other"])
    assert "gone" not in state


def test_object_is_untouched_when_the_only_step_is_damaged_in_the_storage(bench: Any) -> None:
    any_bench, state = bench, {"x": torch.ones(100_000)}
    any_bench.make(state=state).save(1)
    (file,) = any_bench.step_folder(1).glob("state-*")
    flip(file, file.stat().st_size - 50)
    state = {"x": torch.full((100_000,), 7.0)}

    assert any_bench.make(state=state).restore() == 0
    assert bool((state["x"] == 7.0).all())


_WITHIN_X = 12_000_000  # bytes into a file: in a chunk that holds nothing else


def _save_and_damage(bench: Any, steps: Sequence[int], damaged: Sequence[int]) -> None:
    state = {"x": torch.zeros(8_000_000)}
    checkpointer = bench.make(state=state)
    for step in steps:
        state["x"].fill_(step)
        checkpointer.save(step).wait(timeout_seconds=60)
    checkpointer.close()
    for step in damaged:
        (file,) = bench.step_folder(step).glob("state-*")
        flip(file, _WITHIN_X)


def test_step_asked_for_by_number_is_whole_or_the_object_untouched(bench: Any) -> None:
    _save_and_damage(bench, [1, 2], [2])
    state = {"x": torch.full((8_000_000,), 7.0)}
    checkpointer = bench.make(state=state)
    with pytest.raises(CheckpointDamaged):
        checkpointer.restore(step=2)
    assert bool((state["x"] == 7.0).all())
    assert checkpointer.save(8).saved


def test_older_step_takes_the_place_of_what_damage_has_half_filled(bench: Any) -> None:
    _save_and_damage(bench, [1, 2, 3], [2, 3])
    state = {"x": torch.full((8_000_000,), 7.0)}
    checkpointer = bench.make(state=state)
    assert checkpointer.restore() == 1
    assert bool((state["x"] == 1.0).all())
    assert checkpointer.save(4).saved


def test_what_damage_of_every_step_has_half_filled_is_not_saved(bench: Any) -> None:
    _save_and_damage(bench, [1, 2], [1, 2])
    checkpointer = bench.make(state={"x": torch.full((8_000_000,), 7.0)})
    with pytest.raises(CheckpointDamaged, match=r"step 1 is damaged.*no older"):
        checkpointer.restore()
    with pytest.raises(ObjectsUndefined, match="new objects"):
        checkpointer.step(3)
    with pytest.raises(ObjectsUndefined):
        checkpointer.save(3)


def test_object_that_damage_in_both_tiers_has_half_filled_is_not_taken_for_a_new_one(
    start_agent: Callable[..., Any], bench: Any
) -> None:
    agent = start_agent()
    bench.socket = agent.socket
    any_bench, state = bench, {"x": torch.ones(8_000_000)}
    any_bench.make(state=state).save(1).wait(timeout_seconds=60)
    (file,) = any_bench.step_folder(1).glob("state-*")
    flip(file, _WITHIN_X)
    for slot in agent.memory.glob("*/*/*/slot-*"):
        flip(slot, CONTROL_BYTES + _WITHIN_X)

    checkpointer = any_bench.make(state={"x": torch.zeros(8_000_000)})
    with pytest.raises(CheckpointDamaged, match=file.name):
        checkpointer.restore()
    with pytest.raises(ObjectsUndefined):
        checkpointer.save(2)


def test_object_that_is_half_filled_when_the_storage_goes_away_is_not_saved(
    start_agent: Callable[..., Any], bench: Any
) -> None:
    """The memory tier is wrong, and what would make it good is gone for now."""
    agent = start_agent()
    bench.socket = agent.socket
    bench.make(state={"x": torch.ones(8_000_000)}).save(1).wait(timeout_seconds=60)
    for slot in agent.memory.glob("*/*/*/slot-*"):
        flip(slot, CONTROL_BYTES + 20_000_000)
    (file,) = bench.step_folder(1).glob("state-*")
    whole = file.read_bytes()
    file.unlink()
    file.symlink_to(file.name)  # neither there nor missing: an error of the storage, and no damage

    state = {"x": torch.full((8_000_000,), 7.0)}
    checkpointer = bench.make(state=state)
    with pytest.raises(StorageError):
        checkpointer.restore()
    assert bool((state["x"] == 1.0).any())
    with pytest.raises(ObjectsUndefined):
        checkpointer.save(2)
    file.unlink()
    file.write_bytes(whole)
    assert checkpointer.restore() == 1
    assert bool((state["x"] == 1.0).all())
    assert checkpointer.save(2).saved


def test_objects_of_which_one_does_not_take_its_state_are_not_saved(bench: Any) -> None:
    class Refusing(Extra):
        def set_extra_state(self, state: str) -> None:
            raise RuntimeError("not this one")

    bench.make(first=nn.Linear(3, 3), second=Extra(3, 3)).save(1).wait(timeout_seconds=60)
    checkpointer = bench.make(first=nn.Linear(3, 3), second=Refusing(3, 3))
    with pytest.raises(CheckpointMismatch, match="not this one"):
        checkpointer.restore()
    with pytest.raises(ObjectsUndefined):
        checkpointer.save(2)


def test_damaged_memory_is_made_good_from_the_storage(start_agent: Callable[..., Any], bench: Any) -> None:
    agent = start_agent()
    bench.socket = agent.socket
    values = torch.arange(8_000_000.0)
    bench.make(state={"x": values.clone()}).save(1).wait(timeout_seconds=60)
    for slot in agent.memory.glob("*/*/*/slot-*"):
        flip(slot, CONTROL_BYTES + 20_000_000)
    state = {"x": torch.zeros(8_000_000)}
    mine = state["x"]

    assert bench.make(state=state).restore() == 1
    assert state["x"] is mine
    assert torch.equal(mine, values)


def test_file_that_contradicts_itself_is_damaged_and_writes_beyond_no_tensor(bench: Any) -> None:
    """Its checksums are right: whoever wrote it says of a tensor that it is smaller than its bytes."""
    bench.make(state={"x": torch.ones(1000)}).save(1).wait(timeout_seconds=60)
    (file,) = bench.step_folder(1).glob("state-*")
    data = file.read_bytes()
    assert data.count(b"[1000]]") == 1, "where the state is described"
    file.write_bytes(data.replace(b"[1000]]", b"[  10]]"))
    (record,) = bench.step_folder(1).glob("*part*")
    part = parse_part(record.read_bytes())
    (entry,) = part.files
    part = replace(part, files=(replace(entry, checksums=(checksum(file.read_bytes()),)),))
    record.write_bytes(part.to_bytes())
    manifest = manifest_of([part])
    assert manifest is not None
    (bench.step_folder(1) / Path(manifest_path(1)).name).write_bytes(manifest.to_bytes())
    state = {"x": torch.full((10,), 7.0)}

    with pytest.raises(CheckpointDamaged, match=r"'state\.x' has 4000 bytes"):
        bench.make(state=state).restore()
    assert bool((state["x"] == 7.0).all())


def flip(file: Path, place: int) -> None:
    """Turns one bit."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 4]))
