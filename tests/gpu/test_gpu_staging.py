"""GPU tensors, staged while training goes on: runs by itself where torch sees a GPU, and says loudly where not.

Asserted is that what is restored is what was saved, bit for bit; speed is printed, for whoever reads the log.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import Trainee, measure, pinned_bytes_per_second, say
from benchmarks.processes.agentprocess import running_agent
from torch import nn

from stepfast.admission import Interval
from stepfast.environment import Environment
from stepfast.errors import CheckpointNotFound
from stepfast.step import JobKey, OnBusy, Tier
from stepfast.torch import Checkpointer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT TESTED: torch sees no GPU here, so nothing of what is copied from one was run",
)

SECONDS = 120.0
WIDTH = 1024
Make = Callable[..., Checkpointer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(model=…)`: a checkpointer of a run of its own, on one agent and one storage."""
    made: list[Checkpointer] = []
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder, running_agent(Path(folder), 4 << 30) as agent:

        def one(**objects: Any) -> Checkpointer:
            environment = Environment(
                job=JobKey(namespace="local", name="gpu"), run=f"{uuid.uuid4().hex[:8]}-1", rank=0, local_rank=0,
                world_size=1, local_world_size=1, node=0, storage_uri=(tmp_path / "storage").as_uri(),
                socket=agent.socket, resume_step=None, memory_bytes=0, interval=Interval(steps=10**6),
                persist_interval_seconds=0.0, max_to_keep=100, on_busy=OnBusy.WAIT, mtbf_seconds=3600.0,
            )  # fmt: skip
            made.append(Checkpointer(environment=environment, overlap=True, **objects))
            return made[-1]

        try:
            yield one
        finally:
            for checkpointer in made:
                checkpointer.__exit__(RuntimeError, RuntimeError(), None)


class Spread(nn.Module):
    """Layers and buffers on every device that there is, or on so many."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(f"cuda:{index}")
            for index in range(devices)
            for _ in range(8)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch.to(next(layer.parameters()).device)).relu()
        return batch


class Run:
    """A model, Adam and a checkpointer."""

    def __init__(self, make: Make, devices: int = 1, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.model = Spread(devices).to(dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.dtype = dtype
        self.checkpointer = make(model=self.model, optimizer=self.optimizer)

    def train(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(64, WIDTH, device="cuda:0", dtype=self.dtype)
        self.model(batch).float().square().mean().backward()
        self.optimizer.step()

    def copy(self) -> list[torch.Tensor]:
        """Every tensor as it is now, on the host."""
        held = [*self.model.state_dict().values()]
        held += [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        return [tensor.detach().cpu().clone() for tensor in held]


def assert_bits(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def device_counts() -> list[int]:
    return list(range(1, max(1, torch.cuda.device_count()) + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("devices", device_counts())
def test_state_of_a_gpu_comes_back_bit_for_bit_though_training_goes_on(
    make: Make, devices: int, dtype: torch.dtype
) -> None:
    run = Run(make, devices, dtype)
    expected = {}
    for step in range(1, 9):
        run.train()
        expected[step] = run.copy()
        saved = run.checkpointer.save(step)
        for _ in range(3):
            run.train()
        saved.wait(timeout_seconds=SECONDS)

    for step in (8, 3):
        other = Run(make, devices, dtype)
        other.train()  # so that its optimizer has a state to be written over
        assert other.checkpointer.restore(step) == step
        assert all(tensor.is_cuda for tensor in other.model.state_dict().values())
        assert_bits(expected[step], other.copy())


def test_save_returns_before_its_copies_are_done(make: Make) -> None:
    run = Run(make)
    run.train()
    run.checkpointer.save(1).wait(timeout_seconds=SECONDS)
    run.train()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second in which nothing can be copied
    saved = run.checkpointer.save(2)
    reported = run.checkpointer._report().step
    saved.wait(Tier.MEMORY, SECONDS)

    assert saved.stall_seconds < 0.5
    assert reported == 1
    assert run.checkpointer._report().step == 2


def test_parameter_changed_too_early_gives_the_step_up_and_the_next_save_waits(make: Make) -> None:
    run = Run(make)
    run.train()
    run.checkpointer.save(1).wait(timeout_seconds=SECONDS)
    run.train()
    torch.cuda._sleep(2_000_000_000)
    saved = run.checkpointer.save(2)
    with torch.no_grad():
        run.model.layers[0][0].weight.zero_()
    run.train()
    with pytest.raises(CheckpointNotFound, match=r"layers\.0\.0\.weight"):
        saved.wait(timeout_seconds=SECONDS)

    expected = run.copy()
    run.checkpointer.save(3).wait(timeout_seconds=SECONDS)
    other = Run(make)
    assert other.checkpointer.restore() == 3
    assert_bits(expected, other.copy())


def test_step_recorded_in_a_graph_is_never_torn(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    checkpointer = make(state={"weight": weight}, optimizer=optimizer)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    checkpointer.save(1).wait(Tier.MEMORY, SECONDS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(2, 6):
        graph.replay()
        expected = weight.detach().cpu().clone()
        saved = checkpointer.save(step)
        graph.replay()
        saved.wait(timeout_seconds=SECONDS)
        back: dict[str, Any] = {}
        fresh = nn.Parameter(torch.zeros(1 << 22, device="cuda"))
        make(state=back, optimizer=torch.optim.Adam([fresh], capturable=True)).restore(step)
        assert_bits([expected], [back["weight"].detach().cpu()])


def test_slots_are_page_locked(make: Make) -> None:
    run = Run(make)
    run.train()
    run.checkpointer.save(1).wait(timeout_seconds=SECONDS)
    assert run.checkpointer._link is not None
    maps = run.checkpointer._link.maps._maps.values()

    assert any(mapped._is_pinned for mapped in maps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_speed_is_told(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda", 0)
    limit = pinned_bytes_per_second(device)
    measured = measure(Trainee(2 << 30, dtype, device, width=4096))
    with capsys.disabled():
        print(f"\n{say(str(dtype), measured, limit)} (goals: at least 90%, at most x 1.03)")

    assert measured.size_bytes > 1 << 30
