"""Any nest of containers, tensors, arrays and values comes back bit for bit: a property over random nests."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepfast.torch.dtypes import flat_bytes
from stepfast.torch.pickled import Skeletons
from stepfast.torch.retrace import Retrace
from stepfast.torch.state import collect

DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.float64,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of up to three dimensions: whole, transposed, sliced, expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    whole = torch.empty(shape, dtype=dtype)
    if count:
        whole = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    match draw(st.sampled_from(["whole", "transposed", "sliced", "expanded"])):
        case "transposed":
            return whole.permute(list(reversed(range(whole.dim()))))
        case "sliced" if whole.dim():
            return whole[:: draw(st.integers(1, 2))]
        case "expanded":
            return whole.expand(2, *whole.shape)
    return whole


TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=True) | TEXT | st.binary(max_size=8)
    | st.complex_numbers() | st.builds(range, st.integers(0, 5)) | st.builds(slice, st.none() | st.integers())
    | st.builds(np.float32, st.floats(width=32))
    | st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([1])])
    | st.frozensets(st.integers() | TEXT, max_size=3)
)  # fmt: skip
KEYS = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
ARRAYS = tensors().filter(lambda t: t.dtype in (torch.float32, torch.uint16, torch.bool)).map(lambda t: t.numpy())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(KEYS, inner, max_size=4)
    return (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | pairs | pairs.map(OrderedDict)
        | pairs.map(lambda d: defaultdict(list, d)) | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    )  # fmt: skip


NESTS = st.recursive(VALUES | tensors() | ARRAYS, containers, max_leaves=12)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(state=st.dictionaries(KEYS, NESTS, max_size=4))
def test_any_nest_comes_back_bit_for_bit(
    state: dict[Any, Any], round_trip: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    assert_same(state, round_trip(state))


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(known=NESTS, other=NESTS)
def test_known_nest_is_walked_again_alike_and_no_other_is_taken_for_it(known: Any, other: Any) -> None:
    """The quick walk of a save finds what the slow one finds, or leaves the nest to it."""
    retrace = Retrace(known, collect(known).objects)
    for nest in (known, other):
        collected, found = collect(nest), retrace.collect(nest, Skeletons())
        if found is None:
            continue
        assert collected.tokens == collect(known).tokens
        assert list(map(id, found.values)) == list(map(id, collected.values))
        assert len(found.tensors) == len(collected.tensors)
        for one, same in zip(found.tensors, collected.tensors, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (same.dtype, same.shape, same.stride())
            assert bytes(flat_bytes(one).numpy()) == bytes(flat_bytes(same).numpy())


def test_ordinary_state_is_walked_quickly() -> None:
    """Else every save would describe it anew."""

    def state() -> dict[str, Any]:
        moments = {index: {"step": torch.zeros(()), "exp_avg": torch.zeros(3)} for index in range(3)}
        return {
            "model": OrderedDict(a=torch.zeros(2), b=torch.nn.Parameter(torch.zeros(2))),
            "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1, 2]}]},
            "data": {"epoch": 1, "name": "train", "order": np.arange(5), "seed": None},
        }

    known, again = state(), state()
    again["optimizer"]["param_groups"][0]["lr"] = 1
    again["data"]["seed"] = 3
    assert Retrace(known, ()).collect(again, Skeletons()) is not None
