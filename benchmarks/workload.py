"""What is saved and restored: states of the shapes that the field's benchmarks use, and marks that tell whose save a
tensor is of. Needs torch; every process of a benchmark builds the same state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

GIB = 2**30
MIB = 2**20

State = dict[str, Any]
"""A nest of dicts whose leaves are tensors (float32, CPU) or numbers."""


def gpt_state(size_bytes: int, layers: int = 48, *, odd: bool = False) -> State:
    """Parameters and Adam moments of a GPT-2-XL-shaped model (2,320 tensors with 48 layers) of about that many bytes.

    With `odd` no large tensor's size is a whole number of cache lines.
    """
    width = 16
    while _parameters(width + 8, layers) * 12 <= size_bytes:
        width += 8
    width -= odd
    shapes = dict(_gpt_shapes(width, layers))
    model = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
    moments = {
        name: {
            "step": torch.zeros(()),
            "exp_avg": torch.full(shape, 0.5),
            "exp_avg_sq": torch.full(shape, 0.5),
        }
        for name, shape in shapes.items()
    }
    return {"model": model, "optimizer": {"state": moments, "param_groups": {"lr": 1e-4, "weight_decay": 0.1}}}


def small_state(count: int = 20_000, tensor_bytes: int = 10_000) -> State:
    """Many small tensors: what mixtures of experts and adapters look like."""
    return {
        "model": {
            f"blocks.{index // 20}.experts.{index % 20}.weight": torch.full((tensor_bytes // 4,), 0.5)
            for index in range(count)
        }
    }


def state_of(layout: str) -> State:
    """The state that a layout's name asks for: `gpt:<GiB>`, `odd:<GiB>` (no large tensor ends with a cache line) or
    `small:<number of tensors>`. Raises ValueError.
    """
    kind, _, amount = layout.partition(":")
    if kind == "gpt":
        return gpt_state(int(float(amount) * GIB))
    if kind == "odd":
        return gpt_state(int(float(amount) * GIB), odd=True)
    if kind == "small":
        return small_state(int(amount))
    raise ValueError(f"layout {layout!r} is none of gpt:<GiB>, odd:<GiB>, small:<number of tensors>")


def tensors_of(state: State, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its path, in order."""
    for name, value in state.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict):
            yield from tensors_of(value, path)
        elif isinstance(value, torch.Tensor):
            yield path, value


def size_of(state: State) -> int:
    """The bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(state))


def stamp(state: State, value: float) -> None:
    """Writes the value into the first, a middle and the last element of every tensor, as a training step would."""
    for _ in stamps(state, value, sys.maxsize):
        pass


def stamps(state: State, value: float, at_once: int) -> Iterator[None]:
    """The same, so many tensors each time that the next item is asked for."""
    tensors = (tensor for _, tensor in tensors_of(state))
    while batch := list(islice(tensors, at_once)):
        with torch.no_grad():
            for tensor in batch:
                flat = tensor.view(-1)
                flat[0] = flat[flat.numel() // 2] = flat[-1] = value
        yield


def fill(state: State, value: float) -> None:
    """Writes the value into every element: what a restore leaves out is seen, and all memory is there before it."""
    for _, tensor in tensors_of(state):
        tensor.fill_(value)


def wrong_elements(state: State, expected: State) -> int:
    """How many elements of all tensors differ."""
    pairs = zip(tensors_of(state), tensors_of(expected), strict=True)
    return sum(int((tensor != other).sum()) for (_, tensor), (_, other) in pairs)


def wrong_tensors(state: State, value: float) -> int:
    """How many tensors do not carry the value that `stamp` wrote."""
    wrong = 0
    for _, tensor in tensors_of(state):
        flat = tensor.view(-1)
        wrong += not (float(flat[0]) == float(flat[flat.numel() // 2]) == float(flat[-1]) == value)
    return wrong


def _parameters(width: int, layers: int) -> int:
    return layers * (12 * width * width + 13 * width) + int(50257 * width / 1600) * width + 1026 * width


def _gpt_shapes(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (int(50257 * width / 1600), width)
    yield "wpe.weight", (1024, width)
    for layer in range(layers):
        for name, shape in (
            ("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("attn.c_attn.weight", (width, 3 * width)),
            ("attn.c_attn.bias", (3 * width,)), ("attn.c_proj.weight", (width, width)), ("attn.c_proj.bias", (width,)),
            ("ln_2.weight", (width,)), ("ln_2.bias", (width,)), ("mlp.c_fc.weight", (width, 4 * width)),
            ("mlp.c_fc.bias", (4 * width,)), ("mlp.c_proj.weight", (4 * width, width)), ("mlp.c_proj.bias", (width,)),
        ):  # fmt: skip
            yield f"h.{layer}.{name}", shape
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)
