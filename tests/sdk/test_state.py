"""Any state: every kind of value comes back to the last bit, or is refused by a clear error at the save."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepfast.errors import CheckpointUnsafe, StateUnsupported

RoundTrip = Callable[..., dict[Any, Any]]
Same = Callable[..., None]

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of that dtype with random bytes behind it."""
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,))
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*support is experimental")  # half-precision complex numbers
        empty = torch.empty(0, dtype=dtype)
    return empty.set_(data.to(torch.uint8).untyped_storage(), 0, shape, strides)


# ---------------------------------------------------------------- dtypes and layouts


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTISED], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, round_trip: RoundTrip, assert_same: Same) -> None:
    whole = raw(dtype, 4, 6)
    state = {
        "whole": whole, "scalar": raw(dtype), "empty": raw(dtype, 0, 3), "other": raw(dtype, 5),
        "transposed": raw(dtype, 3, 4).t(), "strided": raw(dtype, 6, 6)[1:4, ::2], "row": whole[1],
    }  # fmt: skip

    assert_same(state, round_trip(state))


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised", id="qint8"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantised", id="quint8"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint32), "quantised", id="qint32"),
        pytest.param(lambda: torch.eye(3).to_sparse(), "sparse", id="sparse"),
        pytest.param(lambda: torch.empty(3, device="meta"), "meta", id="meta"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested", id="nested"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged",
            id="jagged",
        ),
    ],
)  # fmt: skip
def test_tensor_without_plain_bytes_is_refused_by_name(make: Callable[[], torch.Tensor], said: str, bench: Any) -> None:
    state: dict[str, Any] = {"deep": {"odd one": torch.ones(1)}}
    checkpointer = bench.make(state=state)
    checkpointer.save(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(prototype|[Qq]uantiz)")
        state["deep"]["odd one"] = make()

        with pytest.raises(StateUnsupported, match=said) as caught:
            checkpointer.save(2)
        with pytest.raises(StateUnsupported, match=said):
            bench.make(state=state).save(2)

    assert "state.deep.odd one" in str(caught.value)
    state["deep"]["odd one"] = torch.zeros(1)
    assert checkpointer.save(3).saved


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.tensor(3.5), id="0-d"),
        pytest.param(lambda: torch.empty(0), id="empty"),
        pytest.param(lambda: torch.empty(0, 3), id="no rows"),
        pytest.param(lambda: torch.empty(3, 0, 2, dtype=torch.bfloat16), id="no columns"),
        pytest.param(lambda: torch.empty(3, 0, 2)[1:], id="part of an empty one"),
        pytest.param(lambda: torch.ones(1).expand(1000), id="expanded"),
        pytest.param(lambda: torch.arange(6.0).reshape(2, 3).expand(4, 2, 3), id="expanded matrix"),
        pytest.param(lambda: torch.arange(6.0)[::2], id="every other"),
        pytest.param(lambda: torch.arange(6.0)[::6], id="one element with a stride"),
        pytest.param(
            lambda: torch.zeros(4, dtype=torch.complex32)[::4], id="one element of half complex with a stride"
        ),
        pytest.param(lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), id="permuted"),
        pytest.param(lambda: torch.randn(4, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(lambda: torch.randn(4, dtype=torch.complex128).conj(), id="conjugated doubles"),
        pytest.param(lambda: torch.randn(4, dtype=torch.complex64).conj().imag, id="negated"),
        pytest.param(lambda: torch.as_strided(torch.arange(10.0), (4, 3), (2, 1)), id="rows that overlap"),
        pytest.param(lambda: torch.tensor([math.nan, math.inf, -math.inf, -0.0]), id="not finite"),
    ],
)
def test_any_layout_comes_back(make: Callable[[], torch.Tensor], round_trip: RoundTrip, assert_same: Same) -> None:
    alone, twice = make(), make()
    state = {"alone": alone, "with a view": [twice, twice.view(twice.shape)]}

    assert_same(state, round_trip(state))


def test_channels_last_strides_are_kept(round_trip: RoundTrip) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    volume = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64).to(memory_format=torch.channels_last_3d)
    complex_image = torch.randn(2, 3, 4, 5, dtype=torch.complex128).to(memory_format=torch.channels_last)

    back = round_trip({"image": image, "volume": volume, "complex": complex_image})

    assert back["image"].stride() == image.stride()
    assert back["volume"].stride() == volume.stride()
    assert back["complex"].stride() == complex_image.stride()


def test_nan_payloads_survive_in_every_float(round_trip: RoundTrip, assert_same: Same) -> None:
    single = torch.tensor([0x7FC12345, 0x7F812345, -4190209], dtype=torch.int32).view(torch.float32)
    half = torch.tensor([0x7E01, 0x7D55, -1], dtype=torch.int16).view(torch.bfloat16)
    double = struct.unpack("<d", bytes.fromhex("efbeaddeefbef87f"))[0]

    assert_same(
        {"single": single, "half": half, "double": [double, -double], "key": {double: 1}},
        round_trip({"single": single, "half": half, "double": [double, -double], "key": {double: 1}}),
    )


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.arange(10)[::-1], id="negative stride"),
        pytest.param(lambda: np.arange(24.0).reshape(4, 6)[::-1, ::-2], id="two negative strides"),
        pytest.param(lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)), id="Fortran order"),
        pytest.param(lambda: np.broadcast_to(np.ones(1), (5,)), id="read-only, stride 0"),
        pytest.param(lambda: np.array(2.5), id="0-d"),
        pytest.param(lambda: np.empty((0, 3), dtype=np.uint16), id="empty"),
        pytest.param(lambda: np.zeros(4, dtype=[("a", "i1"), ("b", "f4")])["b"], id="field of a record"),
        pytest.param(lambda: np.frombuffer(bytearray(range(33)), dtype=np.uint8)[1:].view(np.int64), id="misaligned"),
        *(pytest.param(lambda d=d: np.arange(3).astype(d), id=d) for d in ("?", "u2", "u4", "u8", "f2", "c8", "c16")),
    ],
)
def test_arrays_come_back(make: Callable[[], Any], round_trip: RoundTrip, assert_same: Same) -> None:
    assert_same({"array": make(), "in a list": [make()]}, round_trip({"array": make(), "in a list": [make()]}))


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.5), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j),
        np.float16(math.nan), np.str_("ü"), np.str_(""), np.bytes_(b"x"), np.bytes_(b""), np.datetime64("2026-01-01"),
        np.timedelta64(3, "ns"), np.longdouble(1) / 3,
    ],
    ids=repr,
)  # fmt: skip
def test_array_scalars_come_back(scalar: Any, round_trip: RoundTrip, assert_same: Same) -> None:
    assert_same({"scalar": scalar, "key": {scalar: 1}}, round_trip({"scalar": scalar, "key": {scalar: 1}}))


# ---------------------------------------------------------------- shared memory


def test_partial_views_of_one_storage_share_it_again(round_trip: RoundTrip, assert_same: Same) -> None:
    memory = torch.arange(20.0)
    state = {"low": memory[0:12], "high": memory[8:20], "even": memory[::2], "x#storage": torch.ones(3)}
    state["low#storage"] = torch.ones(4)

    back = round_trip(state)

    assert_same(state, back)
    back["high"][0] = 99.0
    assert back["low"][8] == 99.0
    assert back["even"][4] == 99.0


@pytest.mark.parametrize(("first", "wide"), [(1, 1), (2, 0), (3, 2), (5, 1)])
def test_views_of_other_widths_keep_their_place(
    first: int, wide: int, round_trip: RoundTrip, assert_same: Same
) -> None:
    memory = torch.arange(100, dtype=torch.int16)
    storage = memory.untyped_storage()
    state = {
        "bytes": torch.empty(0, dtype=torch.uint8).set_(storage, first, (60,), (1,)),
        "words": torch.empty(0, dtype=torch.int64).set_(storage, wide, (3,), (1,)),
        "rest": memory[first : first + 20],
    }

    assert_same(state, round_trip(state))


def test_wide_view_at_odd_place_of_a_narrow_tensor_comes_back(round_trip: RoundTrip, assert_same: Same) -> None:
    memory = torch.arange(100, dtype=torch.int16)
    words = torch.empty(0, dtype=torch.int64).set_(memory.untyped_storage(), 1, (3,), (1,))
    state = {"narrow": memory[1:50], "words": words}

    assert_same(state, round_trip(state))


def test_tied_tensors_are_tied_again(round_trip: RoundTrip) -> None:
    shared = torch.arange(6.0)
    state = {"a": shared, "b": {"c": shared}, "transposed": shared.view(2, 3).t(), "part": shared[2:4]}

    back = round_trip(state)
    back["a"].fill_(7.0)

    assert back["b"]["c"].tolist() == [7.0] * 6
    assert back["transposed"].tolist() == [[7.0] * 2] * 3
    assert back["part"].tolist() == [7.0] * 2


def test_tied_parameters_of_a_model_stay_tied(bench: Any) -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    model, other = build(), build()
    bench.make(model=model).save(1)
    assert bench.make(model=other).restore() == 1

    assert torch.equal(other["head"].weight, model["embedding"].weight)
    with torch.no_grad():
        other["embedding"].weight.fill_(3.0)
    assert (other["head"].weight == 3.0).all()


def test_lazily_conjugated_view_that_takes_a_plain_ones_place_is_saved_as_it_is(bench: Any, assert_same: Same) -> None:
    plain = torch.randn(4, dtype=torch.complex64)
    state = {"z": plain, "view": plain.view(4)}
    checkpointer = bench.make(state=state)
    checkpointer.save(1)
    state["view"] = plain.conj()
    checkpointer.save(2)
    state["z"], state["view"] = plain.conj(), plain
    checkpointer.save(3)

    for step, expected in ((2, {"z": plain, "view": plain.conj()}), (3, {"z": plain.conj(), "view": plain})):
        back: dict[str, Any] = {}
        bench.make(state=back).restore(step)
        assert_same(expected, back)


def test_parameters_and_gradients_wanted_come_back(round_trip: RoundTrip, assert_same: Same) -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    state = {
        "wanted": nn.Parameter(torch.ones(3)),
        "frozen": frozen,
        "leaf": torch.ones(2, requires_grad=True),
    }

    assert_same(state, round_trip(state))


def test_freezing_between_saves_is_kept(bench: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    checkpointer = bench.make(state={"weight": weight})
    checkpointer.save(1)
    weight.requires_grad_(False)
    checkpointer.save(2)

    back: dict[str, Any] = {}
    bench.make(state=back).restore(2)

    assert not back["weight"].requires_grad


# ---------------------------------------------------------------- values and containers


NESTS: dict[str, Any] = {
    "dict": {"a": 1, "b": {}},
    "ordered dict": OrderedDict(b=1, a=OrderedDict()),
    "default dict": defaultdict(list, {"a": [1]}),
    "default dict of nothing": defaultdict(None, {1: 2}),
    "counter": Counter("aab"),
    "list": [1, [2, [3, []]]],
    "tuple": (1, (2, ()), [(), {}]),
    "set": {1, "a", (1, b"x"), None},
    "frozenset": frozenset({1.5, frozenset({2})}),
    "none": None,
    "booleans and integers": [True, 1, False, 0, -1],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
    "complex": [1j, complex(-0.0, math.nan)],
    "huge integers": [2**64, -(10**4000), 10**5000, -(10**5000)],
    "strings": ["", "ü€😀", "\x00\n\"\\", "\ud800 alone", "x" * 100_000],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab"), bytes(1 << 20)],
    "torch values": [torch.float8_e5m2, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 0])],
    "ranges and slices": [range(0), range(5, -5, -2), range(10**5000), slice(None), slice(1, None, -1)],
    "keys": {
        None: 1, 1: 2, -(2**70): 3, 10**5000: 4, 2.5: 5, -0.0: 6, math.inf: 7, (1, "a", (None, b"")): 8, b"x": 9,
        frozenset({1}): 10, torch.float32: 11, 1j: 13,
    },
    "tensors under odd keys": {
        "": torch.ones(1), ".": torch.ones(2), "a.b": torch.ones(3), "a": {"b": torch.ones(4), "": torch.ones(5)},
        "__metadata__": torch.ones(6), "\ud800": torch.ones(7), "ü😀": torch.ones(8),
        "\udfff": torch.ones(7),  # noqa: F601  # another lone surrogate, another key
        "x" * 5000: torch.ones(9), "x" * 5001: torch.ones(10), 1: torch.ones(11), "1": torch.ones(12),
        (1,): torch.ones(13), "(1,)": torch.ones(14), None: torch.ones(15), "a.b~2": torch.ones(16),
        "\x00": torch.ones(17),
        "q#rows=0:1": torch.ones(18), b"k": torch.ones(19),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NESTS)
def test_nests_come_back(name: str, round_trip: RoundTrip, assert_same: Same) -> None:
    state = {"nest": NESTS[name], "list": [NESTS[name]]}

    assert_same(state, round_trip(state))


def test_blobs_larger_than_any_header_come_back(round_trip: RoundTrip) -> None:
    state = {
        "bytes": bytes(range(256)) * (304 << 10),
        "text": "ü\ud800" * (1 << 20),
        "changes": bytearray(1 << 20),
    }

    assert round_trip(state) == state


@pytest.mark.parametrize("kind", ["dict", "list", "both"])
def test_container_that_contains_itself_is_refused(kind: str, bench: Any) -> None:
    nest: dict[str, Any] = {"list": []}
    nest["list"] += {"dict": [nest], "list": [nest["list"]], "both": [nest, nest["list"]]}[kind]

    with pytest.raises(StateUnsupported, match="contains itself"):
        bench.make(state=nest).save(1)


@dataclass
class Custom:
    """An object that only travels pickled."""

    number: int


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"object": Custom(3)}, id="object"),
        pytest.param({"list": [Custom(3)]}, id="in a list"),
        pytest.param({"value": slice("a", "b")}, id="slice of strings"),
        pytest.param({"array": np.arange(3, dtype=">f4")}, id="array of the other byte order"),
        pytest.param({"dtype": np.dtype("f4")}, id="numpy dtype"),
        pytest.param({"default": defaultdict(Custom)}, id="default dict of a class"),
    ],
)
def test_other_objects_need_weights_only_false(state: dict[str, Any], bench: Any) -> None:
    bench.make(state=state).save(1)

    back: dict[str, Any] = {"untouched": 1}
    with pytest.raises(CheckpointUnsafe, match="weights_only=False"):
        bench.make(state=back).restore()
    assert back == {"untouched": 1}
    assert bench.make(state=back, weights_only=False).restore() == 1
    assert repr(back) == repr(state).replace("'>f4'", "float32")  # NumPy's own pickling turns the bytes round


def test_object_that_cannot_be_pickled_is_refused_by_type(bench: Any) -> None:
    with pytest.raises(StateUnsupported, match="function"):
        bench.make(state={"f": [lambda: 1]}).save(1)


# ---------------------------------------------------------------- from save to save


CHANGES: dict[str, tuple[Any, Any]] = {
    "a key more": ({"a": 1}, {"a": 1, "b": 2}),
    "a key less": ({"a": 1, "b": 2}, {"b": 2}),
    "another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "an integer key becomes a boolean": ({1: "x"}, {True: "x"}),
    "an integer key becomes a float": ({1: "x"}, {1.0: "x"}),
    "a zero key changes its sign": ({0.0: "x"}, {-0.0: "x"}),
    "a key within a tuple key changes its type": ({(1,): "x"}, {(True,): "x"}),
    "a value becomes a tensor": ({"a": 1}, {"a": torch.ones(1)}),
    "a tensor becomes an array": ({"a": torch.ones(1)}, {"a": np.ones(1, dtype=np.float32)}),
    "a tensor becomes a parameter": ({"a": torch.ones(1)}, {"a": nn.Parameter(torch.ones(1))}),
    "a list becomes a tuple": ({"a": [1]}, {"a": (1,)}),
    "another shape": ({"a": torch.ones(2)}, {"a": torch.ones(3)}),
    "another dtype": ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.int32)}),
    "a value outgrows the header": ({"a": ""}, {"a": "x" * 50_000}),
    "many values outgrow the header": ({"a": [0] * 1000}, {"a": [2**60] * 1000}),
    "a default dict of something else": ({"a": defaultdict(int)}, {"a": defaultdict(float)}),
    "an object of another size": ({"a": Custom(1)}, {"a": Custom(10**100)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_may_change_between_saves(name: str, bench: Any, assert_same: Same) -> None:
    state: dict[str, Any] = {}
    checkpointer = bench.make(state=state)
    for step, version in enumerate((*CHANGES[name], *CHANGES[name]), start=1):
        state.clear()
        state["it"] = version
        checkpointer.save(step)

    for step, version in enumerate((*CHANGES[name], *CHANGES[name]), start=1):
        back: dict[str, Any] = {}
        bench.make(state=back, weights_only=False).restore(step)
        assert_same({"it": version}, back)


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "transposed": lambda t: t.t_(),
    "one dimension more": lambda t: t.unsqueeze_(0),
    "cut short": lambda t: t.resize_(1, 3),
    "other memory": lambda t: setattr(t, "data", torch.full((3, 3), 7.0)),
    "other memory of another dtype": lambda t: setattr(t, "data", torch.full((3, 3), 7, dtype=torch.int64)),
    "every second element": lambda t: t.set_(torch.arange(18.0).untyped_storage(), 0, (3, 3), (6, 2)),
    "lazily negated": lambda t: t.set_(torch.complex(torch.ones(3, 3), torch.rand(3, 3)).conj().imag),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("is_tied", [False, True], ids=["alone", "with a view of it beside it"])
def test_tensor_that_changes_in_place_between_saves_is_saved_as_it_is(
    name: str, is_tied: bool, bench: Any, assert_same: Same
) -> None:
    changing = torch.arange(9.0).reshape(3, 3)
    state = {"before": torch.rand(3, 3), "changing": changing, "behind": torch.rand(3, 3)}
    if is_tied:
        state["row"] = changing[1]
    checkpointer = bench.make(state=state)
    checkpointer.save(1)
    IN_PLACE[name](changing)
    checkpointer.save(2)
    back: dict[str, Any] = {}
    bench.make(state=back).restore(2)
    assert_same({key: value.resolve_neg() for key, value in state.items()}, back)


def test_small_tensors_of_every_dtype_and_shape_lie_side_by_side(bench: Any, assert_same: Same) -> None:
    generator = torch.Generator().manual_seed(5)
    state = {
        f"{dtype}.{index}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool,
                      torch.uint8, torch.float8_e5m2, torch.complex64, torch.complex128)
        for index, shape in enumerate([(3, 5), (2, 5), (), (7,), (1, 5), (9,), (4, 1, 5), (0, 5), (6, 5)])
    }  # fmt: skip
    state["torch.float32.0"] = state["torch.float32.0"].t().contiguous().t()
    checkpointer = bench.make(state=state)
    for step in (1, 2):
        checkpointer.save(step)
    back: dict[str, Any] = {}
    bench.make(state=back).restore(2)
    assert_same(state, back)


def test_views_may_part_and_meet_between_saves(bench: Any, assert_same: Same) -> None:
    a, b = torch.arange(10.0), torch.arange(10.0, 20.0)
    versions = [
        {"x": a, "y": a[2:5]}, {"x": a, "y": b[2:5]}, {"x": a, "y": a}, {"x": a, "y": b},
        {"x": a[0:6], "y": a[4:10]}, {"x": a[0:6], "y": b[4:10]}, {"x": a[0:6], "y": b[0:6]},
    ]  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    checkpointer = bench.make(state=state)
    for step, version in enumerate(versions, start=1):
        state.update(version)
        checkpointer.save(step)

    for step, version in enumerate(versions, start=1):
        back: dict[str, Any] = {}
        bench.make(state=back).restore(step)
        assert_same(version, back)
        tied = version["x"].untyped_storage().data_ptr() == version["y"].untyped_storage().data_ptr()
        assert (back["x"].untyped_storage().data_ptr() == back["y"].untyped_storage().data_ptr()) is tied, step
