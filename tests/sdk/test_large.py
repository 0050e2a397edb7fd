"""Many tensors, and one larger than 32 bits can count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

GIB = 1 << 30


def test_twenty_thousand_small_tensors_come_back(shared_agent: Any, any_bench: Any) -> None:
    state = {f"layer.{i}.weight": torch.full((1 + i % 7,), float(i)) for i in range(20_000)}
    checkpointer = any_bench.make(state=state)
    checkpointer.save(1)
    for tensor in state.values():
        tensor.add_(1.0)
    checkpointer.save(2).wait(timeout_seconds=60.0)
    back: dict[str, Any] = {}

    assert any_bench.make(state=back).restore() == 2
    assert list(back) == list(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("is_windowed", [False, True], ids=["in one piece", "in windows"])
def test_large_tensors_come_back_wherever_in_a_cache_line_they_begin(
    start_agent: Callable[..., Any], bench: Any, is_windowed: bool
) -> None:
    bench.socket = start_agent(limit_bytes=(20 if is_windowed else 200) << 20).socket
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        for odd in range(1, 6):
            values = torch.randint(0, 255, (odd, 300_001), generator=generator).to(dtype)
            state[f"{dtype}.{odd}"] = values
    state["weight"] = torch.nn.Parameter(torch.rand(300_003, generator=generator))
    checkpointer = bench.make(state=state)
    checkpointer.save(1).wait(timeout_seconds=60.0)
    state["torch.float32.5"] = state["torch.float32.5"].t().contiguous().t()  # of the same shape, laid out otherwise
    with torch.no_grad():
        for tensor in state.values():
            tensor.add_(1)
    checkpointer.save(2).wait(timeout_seconds=60.0)
    back: dict[str, Any] = {}

    assert bench.make(state=back).restore() == 2
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_tensor_of_three_gibibytes_comes_back(
    await_memory: Callable[[int], None], start_agent: Callable[..., Any], bench: Any
) -> None:
    # The tensor, which is restored where it lies, and one slot; 6 GiB are taken, and other tests take some meanwhile.
    await_memory(9 * GIB)
    agent = start_agent(limit_bytes=3 * GIB + (64 << 20))
    bench.socket = agent.socket
    state = {"large": torch.zeros(3 * GIB, dtype=torch.uint8)}
    places = [0, 1, 2**31 - 1, 2**31, 2**32 // 2 + 4097, 3 * GIB - 1]
    for number, place in enumerate(places, start=1):
        state["large"][place] = number
    checkpointer = bench.make(state=state)
    checkpointer.save(1).wait(timeout_seconds=120.0)
    bench.leave(checkpointer)
    assert bench.step_folder(1).joinpath("manifest.json").exists()
    state["large"].zero_()

    assert bench.make(state=state).restore() == 1
    assert [int(state["large"][place]) for place in places] == list(range(1, len(places) + 1))
    assert int(torch.count_nonzero(state["large"])) == len(places)
