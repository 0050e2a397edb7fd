"""torch.distributed.checkpoint on one rank: what its planners hand over is what they get back."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepfast.errors import CheckpointMismatch, CheckpointNotFound, CheckpointUnsafe, StateUnsupported
from stepfast.torch.dcp import (
    Sharing,
    StepfastStager,
    StepfastStorageReader,
    StepfastStorageWriter,
    TaggedCheckpoints,
)  # fmt: skip
from stepfast.torch.tagged import OpenTag

Make = Callable[..., TaggedCheckpoints]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def make(any_bench: Any) -> Iterator[Make]:
    """Checkpoints of one job, each of a run of its own; without and with an agent."""
    made: list[TaggedCheckpoints] = []

    def begin(**options: Any) -> TaggedCheckpoints:
        for earlier in made:
            earlier.close()
        environment = any_bench.environment()
        made.append(TaggedCheckpoints(sharing=Sharing.EVERY_RANK, environment=environment, persist_all=True, **options))
        return made[-1]

    with ExitStack() as stack:
        stack.callback(lambda: [checkpoints.close() for checkpoints in made])
        yield begin


def save(checkpoints: TaggedCheckpoints, state: dict[str, Any], tag: str = "global_step1", **options: Any) -> None:
    dcp.save(state, checkpoint_id=tag, storage_writer=StepfastStorageWriter(checkpoints), **options)
    checkpoints.flush()  # the newest is persisted first


def load(checkpoints: TaggedCheckpoints, state: dict[str, Any], tag: str | None = None, **options: Any) -> None:
    dcp.load(state, checkpoint_id=tag, storage_reader=StepfastStorageReader(checkpoints), **options)


def cause(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What rank 0 raised, of which torch makes an exception of its own."""
    found: BaseException = error.value.failures[0][0]
    return found


def a_state(mesh: DeviceMesh, fill: float) -> dict[str, Any]:
    tied = torch.full((4, 3), fill)
    return {
        "model": {
            "sharded": distribute_tensor(torch.full((6, 4), fill), mesh, [Shard(0)]),
            "half": torch.full((3, 5), fill, dtype=torch.bfloat16),
            "complex": torch.full((2, 2), complex(fill, -fill), dtype=torch.complex128),
            "columns": torch.arange(24.0).reshape(4, 6)[:, ::2] + fill,
            "turned": (torch.arange(12.0).reshape(3, 4) * fill).t(),
            "none": torch.empty(0, 3),
            "scalar": torch.tensor(fill, dtype=torch.float64),
            "weight": tied,
            "tied": tied,
            "part": tied[1:3],
            "flags": torch.tensor([fill > 0, False]),
        },
        "optimizer": {"param_groups": [{"lr": fill / 3, "betas": (0.9, fill), "params": ["a", "b"]}], "state": {}},
        "step": int(fill),
        "name@2,0": torch.full((2,), fill),
        ".metadata": torch.full((1,), fill),
    }


def test_what_is_saved_comes_back(make: Make, mesh: DeviceMesh, assert_same: Any) -> None:
    save(make(), a_state(mesh, 7.0))
    state = a_state(mesh, 0.0)
    load(make(), state)
    expected = a_state(mesh, 7.0)
    for of_one in (state, expected):
        of_one["model"]["sharded"] = of_one["model"]["sharded"].to_local()
    assert_same(state, expected)


def test_tensors_in_host_memory_are_filled_in_place(make: Make) -> None:
    save(make(), {"of_one": torch.arange(1000.0), "turned": torch.arange(6.0).reshape(2, 3)})
    plain, turned = torch.zeros(1000), torch.zeros(3, 2).t()
    version = plain._version
    load(make(), {"of_one": plain, "turned": turned})
    assert plain.tolist() == list(range(1000))
    assert turned.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert plain._version > version, "what autograd holds of it would go unnoticed"


def test_a_tensor_takes_its_values_as_another_dtype(make: Make) -> None:
    save(make(), {"weight": torch.arange(4.0)})
    half = torch.zeros(4, dtype=torch.bfloat16)
    load(make(), {"weight": half})
    assert half.tolist() == [0, 1, 2, 3]


def test_a_part_of_what_was_saved_is_enough(make: Make) -> None:
    save(make(), {"one": torch.ones(3), "two": torch.ones(3)})
    state = {"two": torch.zeros(3)}
    load(make(), state)
    assert state["two"].tolist() == [1, 1, 1]


def test_steps_are_found_by_tag_by_number_and_by_themselves(make: Make) -> None:
    checkpoints = make()
    for step in (1, 2, 3):
        save(checkpoints, {"at": torch.tensor(step)}, f"global_step{step}")
    checkpoints = make()
    state = {"at": torch.tensor(0)}
    load(checkpoints, state, "global_step2")
    assert state["at"] == 2
    load(checkpoints, state)
    assert state["at"] == 3
    dcp.load(state, storage_reader=StepfastStorageReader(checkpoints, step=1))
    assert state["at"] == 1


@pytest.mark.parametrize("first", ["global_step1", "global_step9"], ids=["one-that-is-there", "one-that-is-not"])
def test_a_reader_without_a_name_takes_the_step_to_go_on_from_whatever_it_read_before(make: Make, first: str) -> None:
    checkpoints = make()
    for step in (1, 2, 3):
        save(checkpoints, {"at": torch.tensor(step)}, f"global_step{step}")
    reader, state = StepfastStorageReader(checkpoints), {"at": torch.tensor(0)}
    try:
        dcp.load(state, checkpoint_id=first, storage_reader=reader)
    except CheckpointException:
        assert first == "global_step9"
    assert state["at"] == (1 if first == "global_step1" else 0)
    dcp.load(state, storage_reader=reader)
    assert state["at"] == 3


def test_what_is_not_there_is_said(make: Make) -> None:
    checkpoints = make()
    with pytest.raises(CheckpointException) as error:
        load(checkpoints, {"at": torch.tensor(0)})
    assert "no committed step" in str(cause(error))
    save(checkpoints, {"at": torch.tensor(1)})
    with pytest.raises(CheckpointException) as error:
        load(checkpoints, {"at": torch.tensor(0)}, "global_step9")
    assert "'global_step9'" in str(cause(error))
    with pytest.raises(CheckpointException) as error:
        load(checkpoints, {"other": torch.tensor(0)})
    assert "other" in str(cause(error))
    with pytest.raises(CheckpointException) as error:
        load(checkpoints, {"at": torch.zeros(3)})
    assert "at" in str(cause(error))


def test_steps_that_were_saved_otherwise_are_said_to_be(make: Make) -> None:
    checkpoints = make()
    opened = checkpoints.open("global_step5")
    opened.put("model", torch.ones(3))
    opened.commit().wait()
    reader = StepfastStorageReader(checkpoints)
    reader.reset("global_step5")
    with pytest.raises(CheckpointMismatch, match=r"not saved by torch\.distributed\.checkpoint"):
        reader.read_metadata()


def test_a_save_needs_a_name_each_time(make: Make) -> None:
    writer = StepfastStorageWriter(make())
    for _ in range(2):
        with pytest.raises(CheckpointException) as error:
            dcp.save({"at": torch.tensor(1)}, storage_writer=writer)
        assert "checkpoint_id" in str(cause(error))
        dcp.save({"at": torch.tensor(1)}, checkpoint_id="first", storage_writer=writer)


def test_ranks_that_do_not_agree_make_no_step(make: Make) -> None:
    with pytest.raises(ValueError, match="use_collectives"):
        save(make(), {"at": torch.tensor(1)}, use_collectives=False)


def test_a_writer_stays_in_its_process(make: Make) -> None:
    with pytest.raises(TypeError, match="THREAD"):
        pickle.dumps(StepfastStorageWriter(make()))


class Whatever:
    """A class of the user's own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Whatever)

    __hash__ = None  # type: ignore[assignment]  # it is equal to others


def test_pickles_are_refused_where_the_user_wants_it(make: Make) -> None:
    save(make(), {"plain": {"lr": 0.1}, "own": Whatever(), "at": torch.tensor(1)})
    state: dict[str, Any] = {"plain": {"lr": 0.0}, "own": None, "at": torch.tensor(0)}
    with pytest.raises(CheckpointException) as error:
        load(make(weights_only=True), state)
    assert isinstance(cause(error), CheckpointUnsafe)
    load(make(weights_only=True), plain := {"plain": {"lr": 0.0}, "at": torch.tensor(0)})
    assert plain["plain"] == {"lr": 0.1}
    load(make(), state)
    assert state == {"plain": {"lr": 0.1}, "own": Whatever(), "at": torch.tensor(1)}


class Noting(DefaultSavePlanner):
    """Has something of its own to say of a step."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"note": {1, 2}}
        return plans, metadata


def test_a_planners_own_data_travels_along(make: Make) -> None:
    save(make(), {"at": torch.tensor(1)}, planner=Noting())
    assert StepfastStorageReader(make()).read_metadata().planner_data == {"note": {1, 2}}


def test_metadata_is_what_torchs_own_store_would_say(make: Make, mesh: DeviceMesh, tmp_path: Any) -> None:
    state = a_state(mesh, 2.0)
    dcp.save(state, checkpoint_id=str(tmp_path / "torchs"))
    checkpoints = make()
    writer = StepfastStorageWriter(checkpoints)
    dcp.save(state, checkpoint_id="global_step1", storage_writer=writer)
    checkpoints.flush()
    expected = dcp.FileSystemReader(str(tmp_path / "torchs")).read_metadata()
    reader = StepfastStorageReader(make())
    found = reader.read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.storage_data.keys() == expected.storage_data.keys()
    assert found.storage_meta == StorageMeta("global_step1", save_id=writer.save_id, load_id=reader.load_id)


def test_a_damaged_step_is_said_and_the_older_one_comes_next(make: Make, any_bench: Any) -> None:
    checkpoints = make()
    for step in (1, 2):
        save(checkpoints, {"weight": torch.full((1000,), float(step))}, f"global_step{step}")
    checkpoints.close()
    (file,) = any_bench.step_folder(2).glob("state-*")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    any_bench.socket = None  # the memory tier has it whole still
    state = {"weight": torch.zeros(1000)}
    with pytest.raises(CheckpointException) as error:
        load(make(), state)
    assert "step 2 is damaged" in str(cause(error))
    load(make(), state)
    assert state["weight"].eq(1).all()


def test_an_async_save_is_of_the_moment_when_it_was_called(make: Make, mesh: DeviceMesh) -> None:
    checkpoints = make()
    writer = StepfastStorageWriter(checkpoints)
    assert isinstance(writer, StorageWriter)
    state = {"plain": torch.zeros(50_000), "sharded": distribute_tensor(torch.zeros(50, 10), mesh, [Shard(0)]), "at": 0}
    for step in range(1, 6):
        for tensor in (state["plain"], state["sharded"].to_local()):
            tensor.fill_(step)
        state["at"] = step
        future = dcp.async_save(state, checkpoint_id=f"global_step{step}", storage_writer=writer)
        for tensor in (state["plain"], state["sharded"].to_local()):
            tensor.fill_(-1)
        future.result()
        checkpoints.flush()
    for step in range(1, 6):
        load(checkpoints, state, f"global_step{step}")
        assert state["plain"].eq(step).all()
        assert state["sharded"].to_local().eq(step).all()
        assert state["at"] == step


@pytest.mark.filterwarnings("ignore:Please use DTensor")  # torch tells its own planners so
def test_sharded_tensors_are_saved_by_their_shards(make: Make) -> None:
    def sharded(fill: float) -> ShardedTensor:
        shards = [
            LocalShard(torch.full((2, 3), fill), ShardMetadata([0, 0], [2, 3], "rank:0/cpu")),
            LocalShard(torch.full((1, 3), -fill), ShardMetadata([2, 0], [1, 3], "rank:0/cpu")),
        ]
        return ShardedTensor._init_from_local_shards(shards, 3, 3)

    checkpoints = make()
    writer = StepfastStorageWriter(checkpoints)
    state = {"weight": sharded(4.0)}
    future = dcp.async_save(state, checkpoint_id="global_step1", storage_writer=writer)
    for shard in state["weight"].local_shards():
        shard.tensor.zero_()
    future.result()
    load(checkpoints, state)
    assert [shard.tensor.unique().tolist() for shard in state["weight"].local_shards()] == [[4.0], [-4.0]]


def test_what_cannot_be_staged_is_said() -> None:
    with pytest.raises(StateUnsupported, match="sparse"):
        StepfastStager().stage({"weight": torch.eye(3).to_sparse()})


def test_staged_memory_is_used_again_only_once_nobody_holds_it(mesh: DeviceMesh) -> None:
    stager = StepfastStager()
    state = {"plain": torch.ones(100), "sharded": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}

    def addresses(staged: dict[str, Any]) -> list[int]:
        return [staged["plain"].data_ptr(), staged["sharded"].to_local().data_ptr()]

    first = stager.stage(state)
    assert isinstance(first["sharded"], DTensor)
    held = addresses(first)
    state["plain"].fill_(2)
    second = stager.stage(state)
    assert not set(addresses(second)) & set(held)
    assert (first["plain"][0], second["plain"][0]) == (1, 2)
    del first
    gc.collect()
    third = stager.stage(state)
    assert addresses(third) == held
    state["plain"] = torch.ones(101)
    del third
    assert stager.stage(state)["plain"].shape == (101,), "a state of another form"
    stager.close()
    stager.close()


def part_of(staged: dict[str, Any], what: str) -> Any:
    match what:
        case "dict":
            return staged["model"]
        case "tensor":
            return staged["model"]["weight"]
        case "view":
            return staged["model"]["weight"][1:]
        case "array":
            return staged["model"]["weight"].numpy()
        case "sharded":
            return staged["model"]["sharded"]
        case _:
            return staged["model"]["sharded"].to_local().view(-1)


def first_of(part: Any) -> float:
    while isinstance(part, dict):
        part = part["weight"]
    return float((part.to_local() if isinstance(part, DTensor) else part).reshape(-1)[0])


@pytest.mark.parametrize("what", ["dict", "tensor", "view", "array", "sharded", "local"])
def test_staged_memory_is_not_used_again_while_a_part_of_it_is_held(mesh: DeviceMesh, what: str) -> None:
    stager = StepfastStager()
    sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    state = {"model": {"weight": torch.ones(4), "sharded": sharded}}

    def address() -> int:
        staged = stager.stage(state)
        assert isinstance(staged, dict)
        return int(staged["model"]["weight"].data_ptr())

    assert address() == address()
    staged = stager.stage(state)
    assert isinstance(staged, dict)
    part = part_of(staged, what)
    held = staged["model"]["weight"].data_ptr()
    del staged
    gc.collect()
    for tensor in (state["model"]["weight"], sharded.to_local()):
        tensor.fill_(2)
    assert address() != held
    assert first_of(part) == 1
    del part
    gc.collect()
    assert held in [address(), address()]


def test_a_failed_save_leaves_no_step_and_the_next_one_is_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    checkpoints = make()
    writer = StepfastStorageWriter(checkpoints)
    with monkeypatch.context() as patch:
        patch.setattr(OpenTag, "commit", lambda self: 1 / 0)
        with pytest.raises(CheckpointException):
            dcp.save({"at": torch.tensor(1)}, checkpoint_id="first", storage_writer=writer)
    dcp.save({"at": torch.tensor(2)}, checkpoint_id="first", storage_writer=writer)
    assert [found.tag for found in checkpoints.steps()] == ["first"]
    state = {"at": torch.tensor(0)}
    load(checkpoints, state, "first")
    assert state["at"] == 2


def test_a_model_and_its_optimizer_go_through_torchs_state_dicts(make: Make) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def train(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = train(1, 3)
    weights, moments = get_state_dict(model, optimizer)
    save(make(), {"model": weights, "optimizer": moments})
    other, others = train(2, 1)
    weights, moments = get_state_dict(other, others)
    load(make(), state := {"model": weights, "optimizer": moments})
    set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.equal(two)
        assert optimizer.state[one]["exp_avg"].equal(others.state[two]["exp_avg"])
        assert others.state[two]["step"] == 3


def test_the_step_that_is_not_there_is_not_found_by_number(make: Make) -> None:
    with pytest.raises(CheckpointNotFound):
        StepfastStorageReader(make(), step=17).read_metadata()
