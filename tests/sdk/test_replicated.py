"""Replicated state is divided over the ranks, each byte saved once; what is each rank's own stays so."""

from __future__ import annotations

import itertools
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.torch.plan import divide, piece_name, row_dimension
from stepfast.torch.sharing import Base

SMALL_BYTES = 64 * 1024  # smaller tensors stay whole

SHAPES = st.lists(st.integers(0, 4) | st.integers(0, 3000), max_size=3).filter(lambda shape: prod(shape) < 10**8)
DTYPES = st.sampled_from(["float32", "bfloat16", "int64", "complex128", "bool"])


@st.composite
def bases(draw: st.DrawFn) -> list[Base]:
    kinds = draw(st.lists(st.tuples(DTYPES, SHAPES), max_size=12))
    return [
        Base(name=f"t{index}", tensor=index, dtype=dtype, shape=tuple(shape))
        for index, (dtype, shape) in enumerate(kinds)
    ]


WIDTHS = {"float32": 4, "bfloat16": 2, "int64": 8, "complex128": 16, "bool": 1}


@settings(max_examples=300)
@given(found=bases(), world_size=st.integers(1, 70))
def test_division_covers_every_row_once_and_evenly(found: list[Base], world_size: int) -> None:
    owned = divide(found, world_size)
    taken = [0] * world_size
    coarsest = 0
    for base, pieces in zip(found, owned, strict=True):
        rows = base.shape[row_dimension(base.shape)] if base.shape and base.dtype != "complex128" else 1
        size = prod(base.shape) * WIDTHS[base.dtype]
        borders = [(piece.begin, piece.end) for piece in pieces]
        assert borders[0][0] == 0
        assert borders[-1][1] == rows
        assert all(left[1] == right[0] for left, right in itertools.pairwise(borders))
        assert len({piece.rank for piece in pieces}) == len(pieces)
        assert len({piece_name(base, piece) for piece in pieces}) == len(pieces)
        for piece in pieces:
            taken[piece.rank] += size * (piece.end - piece.begin) // rows if rows else 0
        is_whole = size < SMALL_BYTES or rows <= 1
        coarsest = max(coarsest, size if is_whole else -(-size // rows))

    assert divide(found, world_size) == owned
    assert max(taken) <= sum(taken) / world_size + 2 * coarsest + 1


# A model under DDP with an optimizer, as every rank holds it; digests tell whether the ranks restored the same.
DDP = """
import hashlib, json, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Linear(700, 300), nn.LayerNorm(300))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)
def digest(*states):
    found = hashlib.sha256()
    for state in states:
        for key, value in sorted(state.items(), key=lambda item: str(item[0])):
            for part in value.values() if isinstance(value, dict) else [value]:
                found.update(str(key).encode() + torch.as_tensor(part).numpy().tobytes())
    return found.hexdigest()
def describe(model, optimizer):
    return {
        "rank": rank,
        "parameters": digest({k: v.detach() for k, v in model.module.named_parameters()}),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "buffers": digest(dict(model.module.named_buffers())),
    }
model, optimizer = build(0)
torch.manual_seed(rank)
for _ in range(2):
    optimizer.zero_grad(); model(torch.randn(16, 300)).square().sum().backward(); optimizer.step()
before = describe(model, optimizer)
ckpt = Checkpointer(model=model, optimizer=optimizer, replicated=["optimizer"])
ckpt.save(1).wait(timeout_seconds=60)
ckpt.close()
dist.barrier()
other, other_optimizer = build(5)
again = Checkpointer(model=other, optimizer=other_optimizer, replicated=["optimizer"])
assert again.restore() == 1
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump([before, describe(other, other_optimizer)], file)
again.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("ranks", "with_agent"), [(2, False), (4, True)], ids=["2 ranks", "4 ranks, agent"])
def test_ranks_under_ddp_save_a_share_each_and_restore_the_same(
    ranks: int, with_agent: bool, launcher: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    agent = request.getfixturevalue("start_agent")() if with_agent else None
    finished = launcher.run(DDP, str(tmp_path / "out"), ranks=ranks, agent=agent)
    assert finished.code == 0, finished.output

    found = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(ranks)]
    assert all(before == after for before, after in found)
    assert len({before["parameters"] for before, _ in found}) == 1
    assert len({before["optimizer"] for before, _ in found}) == 1
    assert len({before["buffers"] for before, _ in found}) == ranks
    sizes = [file.stat().st_size for file in sorted(launcher.bench.step_folder(1).glob("state-*"))]
    assert len(sizes) == ranks
    # Parameters and two moments, divided; 12 KB of buffers, header and generators are each rank's own.
    share = 3 * 4 * (300 * 700 * 2 + 700 * 3 + 300 * 3) / ranks
    assert max(sizes) < share + 64 * 1024


SCALE = """
import sys, torch, torch.distributed as dist
from stepfast.errors import CheckpointMismatch, GangError
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mode, replicated = sys.argv[1], sys.argv[2:]
state = {"a": torch.zeros(100_000), "n": 0}
if mode == "differ" and rank == 1:
    state["b"] = torch.zeros(1)
ckpt = Checkpointer(state=state, replicated=replicated)
try:
    if mode == "restore":
        print(f"rank {rank} restored {ckpt.restore()} {state['n']} {state['a'].sum().item()}", flush=True)
    else:
        for step in (1, 2):
            state["a"].fill_(1.0)
            state["n"] = 7
            ckpt.save(step)
        ckpt.close()
except (CheckpointMismatch, GangError) as error:
    print(f"rank {rank} {type(error).__name__}: {error}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=str)
def test_replicated_state_is_restored_by_another_number_of_ranks(before: int, after: int, launcher: Any) -> None:
    script = launcher.write(SCALE)
    saved = launcher.run(script, "save", "state", ranks=before)
    assert saved.code == 0, saved.output
    restored = launcher.run(script, "restore", "state", ranks=after, attempt=2)

    assert restored.code == 0, restored.output
    for rank in range(after):
        assert f"rank {rank} restored 2 7 100000.0" in restored.output


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=str)
def test_state_of_each_ranks_own_is_refused_by_another_number_of_ranks(before: int, after: int, launcher: Any) -> None:
    script = launcher.write(SCALE)
    assert launcher.run(script, "save", ranks=before).code == 0
    restored = launcher.run(script, "restore", ranks=after, attempt=2)

    for rank in range(after):
        assert f"rank {rank} CheckpointMismatch: step 2 was saved by {before} rank" in restored.output
    assert "state: each rank's own" in restored.output


def test_state_of_one_rank_may_become_replicated(launcher: Any) -> None:
    script = launcher.write(SCALE)
    assert launcher.run(script, "save", ranks=1).code == 0
    restored = launcher.run(script, "restore", "state", ranks=2, attempt=2)

    for rank in (0, 1):
        assert f"rank {rank} restored 2 7 100000.0" in restored.output


@pytest.mark.parametrize("with_agent", [False, True], ids=["no agent", "agent"])
def test_replicated_state_that_differs_is_an_error_on_all_ranks(
    with_agent: bool, launcher: Any, request: pytest.FixtureRequest
) -> None:
    agent = request.getfixturevalue("start_agent")() if with_agent else None
    finished = launcher.run(SCALE, "differ", "state", ranks=2, agent=agent)

    for rank in (0, 1):
        assert f"rank {rank} GangError: objects declared replicated are laid out differently" in finished.output
    assert not list(launcher.bench.folder.glob("*/manifest.json"))
