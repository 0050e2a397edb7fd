"""What another number of ranks restores: replicated state, generators of its own, rank 0's buffers; what it may not."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gangs import be_rank, run_gang
from stepfast.errors import CheckpointError, CheckpointMismatch
from stepfast.torch import Checkpointer

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    """The next numbers of each of the process' generators."""
    return [random.random(), float(np.random.random()), *torch.rand(2).tolist()]


class Messages(logging.Handler):
    """What the SDK said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("stepfast").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def from_guide(line: str, **given: Any) -> dict[str, Any]:
    """The names that the guide's example with that line makes, run as it stands."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if line in code]
    names = {"dist": dist, "torch": torch, "DataLoader": DataLoader, **given}
    exec(code, names)
    return names


# ---------------------------------------------------------------- random generators

SEED = 7


def draw_and_save(folder: Path, attempt: int) -> list[float]:
    """Saves step 5; what would have been drawn next."""
    be_rank(folder, "generators", attempt)
    seed_everything(SEED + dist.get_rank())
    draws()
    checkpointer = Checkpointer(state={"n": 1}, replicated=["state"])
    checkpointer.save(5)
    checkpointer.close()
    return draws()


def restore_and_draw(folder: Path, attempt: int) -> tuple[list[float], list[float], list[str]]:
    """What a script draws at its start, then what it draws behind a restore; and what it is told."""
    be_rank(folder, "generators", attempt)
    messages = Messages()
    seed_everything(SEED + dist.get_rank())
    at_start = draws()
    seed_everything(SEED + dist.get_rank())
    checkpointer = Checkpointer(state={"n": 0}, replicated=["state"])
    assert checkpointer.restore() == 5
    restored = draws()
    checkpointer.close()
    return at_start, restored, [text for text in messages.texts if "generators" in text]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1), (1, 2)], ids=str)
def test_generators_are_others_on_each_rank_and_the_same_in_each_attempt(
    before: int, after: int, tmp_path: Path
) -> None:
    next_draws = run_gang(before, draw_and_save, tmp_path, 1)
    first = run_gang(after, restore_and_draw, tmp_path, 2)
    again = run_gang(after, restore_and_draw, tmp_path, 3)

    restored = [drawn for _, drawn, _ in first]
    assert restored == [drawn for _, drawn, _ in again]
    seen = [*next_draws, *(at_start for at_start, _, _ in first), *restored]
    numbers = [number for drawn in restored for number in drawn]
    assert len(set(numbers)) == len(numbers), "ranks draw the same"
    assert all(seen.count(drawn) == 1 for drawn in restored), "they draw what was drawn before"
    told = [texts for _, _, texts in first]
    assert [len(texts) for texts in told] == [1] + [0] * (after - 1)
    ranks = "1 rank" if before == 1 else f"{before} ranks"
    assert f"step 5 was saved by {ranks} and these are {after}" in told[0][0]


def test_generators_of_another_step_and_another_number_of_ranks_are_others(tmp_path: Path) -> None:
    run_gang(2, draw_and_save, tmp_path, 1)
    of_three = [drawn for _, drawn, _ in run_gang(3, restore_and_draw, tmp_path, 2)]
    of_four = [drawn for _, drawn, _ in run_gang(4, restore_and_draw, tmp_path, 3)]

    numbers = [number for drawn in of_three + of_four for number in drawn]
    assert len(set(numbers)) == len(numbers)


def test_the_same_number_of_ranks_draws_on(tmp_path: Path) -> None:
    next_draws = run_gang(2, draw_and_save, tmp_path, 1)
    again = run_gang(2, restore_and_draw, tmp_path, 2)

    assert [drawn for _, drawn, _ in again] == next_draws
    assert [texts for _, _, texts in again] == [[], []]


# ---------------------------------------------------------------- buffers under DDP


def norm_of(folder: Path, attempt: int) -> tuple[DistributedDataParallel, Checkpointer]:
    be_rank(folder, "buffers", attempt)
    torch.manual_seed(attempt)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    return model, Checkpointer(model=model)


def state_of(model: DistributedDataParallel) -> tuple[list[float], list[float]]:
    norm, linear = model.module[1], model.module[0]
    return norm.running_mean.tolist(), linear.weight.flatten().tolist()


def train_and_save_a_norm(folder: Path) -> tuple[list[float], list[float]]:
    model, checkpointer = norm_of(folder, 1)
    model(torch.full((4, 3), float(dist.get_rank() + 1)))
    checkpointer.save(1)
    checkpointer.close()
    return state_of(model)


def restore_a_norm(folder: Path, attempt: int) -> tuple[list[float], list[float]]:
    model, checkpointer = norm_of(folder, attempt)
    assert checkpointer.restore() == 1
    checkpointer.close()
    return state_of(model)


@pytest.mark.parametrize("after", [1, 3], ids=str)
def test_buffers_of_a_ddp_module_are_rank_0s_on_another_number_of_ranks(after: int, tmp_path: Path) -> None:
    saved = run_gang(2, train_and_save_a_norm, tmp_path)
    restored = run_gang(after, restore_a_norm, tmp_path, 2)

    assert saved[0][0] != saved[1][0]
    assert saved[0][1] == saved[1][1]
    assert restored == [saved[0]] * after


# ---------------------------------------------------------------- each rank's own


class Counts:
    """Samples that a rank has seen: nobody says what another number of ranks is to make of it."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def sharded_module() -> nn.Module:
    model = nn.Linear(4, 4)
    fully_shard(model)
    return model


def objects_of(names: list[str]) -> dict[str, Any]:
    rank = dist.get_rank()
    made = {
        "counts": lambda: Counts(rank),
        "replays": lambda: from_guide("class Replays")["Replays"]([10 * rank, 10 * rank + 1]),
        "latest": lambda: {"loss": float(rank)},
        "sharded": sharded_module,
        "common": lambda: {"n": 3},
    }
    return {name: made[name]() for name in names}


def save_objects(folder: Path, names: list[str]) -> None:
    be_rank(folder, "objects", 1)
    objects = objects_of(names)
    checkpointer = Checkpointer(**objects, replicated=["common"])
    checkpointer.save(1)
    checkpointer.close()


def restore_objects(folder: Path, attempt: int, names: list[str]) -> dict[str, Any] | str:
    """What was restored, or why nothing was."""
    be_rank(folder, "objects", attempt)
    objects = objects_of(names)
    checkpointer = Checkpointer(**objects, replicated=["common"], weights_only=False)
    try:
        assert checkpointer.restore() == 1
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    return {name: item if isinstance(item, dict) else vars(item) for name, item in objects.items()}


@pytest.mark.parametrize("after", [1, 3], ids=str)
def test_what_is_each_ranks_own_is_refused_by_its_name_and_with_what_to_do(after: int, tmp_path: Path) -> None:
    run_gang(2, save_objects, tmp_path, ["common", "counts", "latest"])
    for told in run_gang(after, restore_objects, tmp_path, 2, ["common", "counts", "latest"]):
        assert told.startswith(f"{CheckpointMismatch.__name__}: step 1 was saved by 2 ranks and these are {after}")
        assert "counts, latest" in told
        assert "common" not in told
        assert "replicated" in told
        assert "load_rank_states" in told
        assert "leave" in told


def test_what_is_left_out_keeps_no_other_number_of_ranks_from_restoring(tmp_path: Path) -> None:
    run_gang(2, save_objects, tmp_path, ["common", "counts", "latest"])
    assert run_gang(3, restore_objects, tmp_path, 2, ["common"]) == [{"common": {"n": 3}}] * 3


def test_sharded_state_is_refused_with_who_can_divide_it_anew(tmp_path: Path) -> None:
    run_gang(2, save_objects, tmp_path, ["common", "sharded"])
    (told,) = run_gang(1, restore_objects, tmp_path, 2, ["common", "sharded"])
    assert "sharded: each rank's own" in told
    assert "stepfast.torch.dcp" in told


@pytest.mark.parametrize(("after", "shares"), [(1, [[0, 1, 10, 11]]), (3, [[0, 11], [1], [10]])], ids=str)
def test_an_object_divides_anew_what_all_ranks_saved(after: int, shares: list[list[int]], tmp_path: Path) -> None:
    run_gang(2, save_objects, tmp_path, ["common", "replays"])
    restored = run_gang(after, restore_objects, tmp_path, 2, ["common", "replays"])
    assert [state["replays"]["samples"] for state in restored] == shares


# ---------------------------------------------------------------- the guide's loop


def train_as_the_guide_does(folder: Path, attempt: int, epochs: int) -> tuple[int, int]:
    be_rank(folder, "guide", attempt)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    made = from_guide(
        "GlobalBatchSampler(", data=TensorDataset(torch.rand(70, 3), torch.rand(70, 1)), model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mean_loss=nn.functional.mse_loss, epochs=epochs,
    )  # fmt: skip
    return made["step"], made["sampler"].position


def test_the_guides_loop_runs_as_it_stands(tmp_path: Path) -> None:
    assert run_gang(2, train_as_the_guide_does, tmp_path, 1, 1) == [(3, 3)] * 2
    assert run_gang(3, train_as_the_guide_does, tmp_path, 2, 2) == [(6, 6)] * 3
