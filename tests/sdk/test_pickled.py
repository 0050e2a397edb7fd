"""Objects that only travel pickled: what comes back is what torch.save and torch.load make of them."""

from __future__ import annotations

import io
import warnings
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from stepfast.errors import CheckpointUnsafe, StateUnsupported

RoundTrip = Callable[..., dict[Any, Any]]
Same = Callable[..., None]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    weight: torch.Tensor
    rest: Any = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    weight: torch.Tensor
    rest: Any = None


class Bag(dict[Any, Any]):
    """A dict with a word of its own."""

    word = "none"


class OrderedBag(OrderedDict[Any, Any]):
    """An ordered one."""


class Twice(torch.Tensor):
    """A tensor of another class."""


class Reading:
    """Looks at its tensor when it is put together."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.total = weight, 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "total": float(state["weight"].sum())}


def with_attributes(tensor: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def trained() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2, dtype=torch.float32))
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # torch's own example


def stepped() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.rand(5))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return optimizer


def recursive() -> Namespace:
    found = Namespace(weight=torch.rand(3))
    found.me, found.list = found, [found]
    return found


OBJECTS: dict[str, Callable[[], Any]] = {
    "module": trained,
    "module in bfloat16": lambda: nn.Linear(8, 8, dtype=torch.bfloat16),
    "frozen module": lambda: nn.Embedding(8, 8).requires_grad_(False),
    "lazy module": lambda: nn.LazyLinear(3),
    "module on the meta device": lambda: nn.Linear(3, 3, device="meta"),
    "optimizer": stepped,
    "named tuple": lambda: Pair(torch.rand(3), [torch.rand(2), 1, "x"]),
    "dataclass": lambda: Record(torch.rand(3), {"a": torch.rand(2), "n": 7}),
    "dataclass with slots": lambda: Slotted(torch.rand(3), (torch.rand(2),)),
    "namespace": lambda: Namespace(weight=torch.rand(3), name="x", nothing=None),
    "dict of another class": lambda: with_attributes(Bag(a=torch.rand(3), b={1: torch.rand(2)}), word="mine"),
    "ordered dict of another class": lambda: OrderedBag(b=torch.rand(3), a=torch.rand(2)),
    "deque": lambda: deque([torch.rand(2), torch.rand(3)], maxlen=2),
    "object without tensors": lambda: Record(None, slice("a", "b")),  # type: ignore[arg-type]
    "object that holds itself": recursive,
    "arrays": lambda: Namespace(a=np.arange(6.0).reshape(2, 3).T, b=np.arange(3, dtype=">f4"), c=np.array("x")),
    "parameter and its gradient": lambda: Record(with_attributes(nn.Parameter(torch.rand(3)), grad=torch.rand(3))),
    "tensor that wants gradients": lambda: Record(torch.rand(3, requires_grad=True)),
    "tensor that was computed": lambda: Record(torch.rand(3, requires_grad=True) * 2),
    "tensor with attributes": lambda: Record(with_attributes(torch.rand(3), name_="x", other=torch.rand(2))),
    "parameter with attributes": lambda: Record(with_attributes(nn.Parameter(torch.rand(3)), tensor_parallel=True)),
    "buffer": lambda: Record(nn.Buffer(torch.rand(3), persistent=False)),
    "one tensor twice": lambda: Record(t := torch.rand(3), [t, t]),
    "tensor as a key": lambda: Record(torch.rand(1), len({torch.rand(2): 1})),
    "nothing in it": lambda: Record(torch.empty(0, 3), [torch.empty(2, 0, dtype=torch.bfloat16), torch.tensor(3.5)]),
    "float8": lambda: Record(torch.rand(5).to(torch.float8_e4m3fn), torch.rand(5).to(torch.float8_e5m2)),
    "complex": lambda: Record(torch.rand(4, dtype=torch.complex128), torch.rand(4, dtype=torch.complex64)),
    "conjugated": lambda: Record(torch.rand(4, dtype=torch.complex64).conj()),
    "negated": lambda: Record(torch.rand(4, dtype=torch.complex64).conj().imag),
    "bits": lambda: Record(torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.uint16)),
    "expanded": lambda: Record(torch.rand(1).expand(100), torch.rand(2, 1).expand(2, 3)),
    "cut": lambda: Record(torch.rand(100)[3:7], [torch.rand(8)[::2], torch.rand(4, 6)[1:, 2:4]]),
    "transposed": lambda: Record(torch.rand(3, 4).t(), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "storage": lambda: Record(torch.rand(4), torch.rand(4).untyped_storage()),
    "tensor of another class": lambda: Record(t := torch.rand(4).as_subclass(Twice), [t[1:], t.view(2, 2)]),
    "tensor of another class and a newer dtype": lambda: Record(torch.ones(4, dtype=torch.uint16).as_subclass(Twice)),
    "sparse": lambda: Record(torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()),
}  # fmt: skip


def opened(node: Any, met: dict[int, int] | None = None) -> Any:  # noqa: C901  # a table: one case a kind
    """An object as plain containers, down to what `assert_same` compares."""
    met = {} if met is None else met
    if id(node) in met:
        return f"again {met[id(node)]}"
    if isinstance(node, torch.Tensor | torch.UntypedStorage | list | dict) or hasattr(node, "__dict__"):
        met[id(node)] = len(met)
    if isinstance(node, nn.UninitializedParameter):
        return type(node).__name__
    if isinstance(node, torch.Tensor):
        inner = node.to_dense() if node.layout is not torch.strided else node
        plain = f"{inner.shape} {inner.dtype}" if inner.is_meta else inner.detach().as_subclass(torch.Tensor)
        about = [type(node).__name__, node.layout, node.requires_grad, node.is_leaf, node.grad, node.is_meta]
        about += [node.is_conj(), node.is_neg()]
        return [*about, plain, opened(vars(node), met)]
    if isinstance(node, torch.UntypedStorage):
        return bytes(node)
    if isinstance(node, dict):
        parts = {str(key): opened(value, met) for key, value in node.items()}
        return [type(node).__name__, parts, {k: opened(v, met) for k, v in getattr(node, "__dict__", {}).items()}]
    if isinstance(node, list | tuple | deque):
        return [type(node).__name__, *(opened(item, met) for item in node)]
    if hasattr(node, "__dict__") and not callable(node) | isinstance(node, np.ndarray):
        return [type(node).__name__, opened(vars(node), met)]
    if isinstance(node, Slotted):
        return [type(node).__name__, opened([node.weight, node.rest], met)]
    if isinstance(node, nn.Module):
        return [type(node).__name__, opened(vars(node), met)]
    return getattr(node, "__qualname__", type(node)) if callable(node) else node


def torchs(node: Any) -> Any:
    """What torch itself brings back."""
    buffer = io.BytesIO()
    torch.save(node, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", OBJECTS)
def test_object_comes_back_as_torch_brings_it_back(name: str, round_trip: RoundTrip, assert_same: Same) -> None:
    node = OBJECTS[name]()

    back = round_trip({"object": node, "in a list": [node]}, weights_only=False)

    assert_same(opened(torchs(node)), opened(back["object"]))
    assert_same(opened(torchs(node)), opened(back["in a list"][0]))


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz", "ignore:.*prototype", "ignore:TypedStorage is deprecated")
def test_tensors_without_plain_bytes_come_back_too(round_trip: RoundTrip) -> None:
    per_tensor = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)
    per_channel = torch.quantize_per_channel(torch.rand(2, 3), torch.rand(2), torch.zeros(2), 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    typed = torch.rand(3).storage()

    back = round_trip({"object": Record(per_tensor, [per_channel, nested, typed])}, weights_only=False)["object"]

    assert torch.equal(back.weight, per_tensor)
    assert torch.equal(back.rest[0], per_channel)
    assert all(torch.equal(one, two) for one, two in zip(back.rest[1].unbind(), nested.unbind(), strict=True))
    assert back.rest[2].dtype is torch.float32
    assert back.rest[2].tolist() == typed.tolist()


def test_model_output_of_transformers_comes_back(round_trip: RoundTrip, assert_same: Same) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    states = (torch.rand(2, 3), torch.rand(2, 4))
    output = CausalLMOutput(loss=torch.rand(()), logits=torch.rand(3, requires_grad=True) * 2, hidden_states=states)

    back = round_trip({"output": output}, weights_only=False)["output"]

    assert_same(opened(torchs(output)), opened(back))
    assert torch.equal(back.logits, output.logits)


def test_arrays_in_an_object_can_be_written_and_resized(round_trip: RoundTrip) -> None:
    array = np.arange(3)
    array.setflags(write=False)

    back = round_trip({"object": Record(torch.rand(1), array)}, weights_only=False)["object"]

    back.rest.resize(5, refcheck=False)
    assert back.rest.tolist() == [0, 1, 2, 0, 0]


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_hooks_stay_behind_as_torch_leaves_them(kind: type[torch.Tensor], bench: Any, round_trip: RoundTrip) -> None:
    weight = torch.rand(3, requires_grad=True) if kind is torch.Tensor else nn.Parameter(torch.rand(3))
    weight.register_hook(lambda grad: grad * 2)

    def warnings_of(work: Callable[[], object]) -> set[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        return {str(warning.message) for warning in caught}

    expected = warnings_of(lambda: torchs(Record(weight)))
    assert warnings_of(lambda: bench.make(state={"object": Record(weight)}).save(1)) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = round_trip({"object": Record(weight)}, weights_only=False)["object"].weight
    assert not back._backward_hooks


def test_sparse_tensors_do_not_live_on_in_torchs_own_list(round_trip: RoundTrip) -> None:
    """It checks what it rebuilt at the end of a load: in the end of ours too."""
    round_trip({"object": Record(torch.eye(3).to_sparse())}, weights_only=False)

    known = getattr(torch._utils, "_get_sparse_tensors_to_validate", lambda: torch._utils._sparse_tensors_to_validate)  # type: ignore[attr-defined]
    assert not known()


# ---------------------------------------------------------------- what is tied


def test_parameters_are_tied_within_an_object_and_beyond_it(round_trip: RoundTrip) -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    row = module["embed"].weight.detach()[2]

    back = round_trip({"before": row, "module": module, "state": module.state_dict()}, weights_only=False)

    restored = back["module"]
    assert restored["head"].weight is restored["embed"].weight
    with torch.no_grad():
        restored["embed"].weight.fill_(7.0)
    assert back["state"]["head.weight"].tolist() == [[7.0] * 4] * 5
    assert back["before"].tolist() == [7.0] * 4


def test_one_tensor_of_two_objects_is_one_tensor_again(round_trip: RoundTrip) -> None:
    """As an optimizer's parameters are the module's: with others it would train nothing."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    back = round_trip({"model": model, "optimizer": optimizer}, weights_only=False)

    assert back["optimizer"].param_groups[0]["params"][0] is back["model"].weight
    back["model"].weight.sum().backward()
    back["optimizer"].step()
    assert torch.equal(back["model"].weight, model.weight - 1.0)


def test_views_of_any_kind_of_tensor_share_its_memory_again(round_trip: RoundTrip) -> None:
    memory = torch.zeros(8)
    parts = {"storage": memory.untyped_storage(), "integers": memory.view(torch.int32)}
    record = Record(memory[2:], {"other class": memory.as_subclass(Twice), **parts})

    back = round_trip({"object": record, "plain": memory[:4], "other": Record(memory[4:])}, weights_only=False)

    back["object"].rest["other class"].fill_(1.0)
    assert back["object"].weight.tolist() == [1.0] * 6
    assert back["object"].rest["integers"].tolist() == [0x3F800000] * 8
    assert bytes(back["object"].rest["storage"].tolist()) == bytes(torch.ones(8).untyped_storage())
    assert back["plain"].tolist() == [1.0] * 4
    assert back["other"].weight.tolist() == [1.0] * 4


def test_lazily_conjugated_tensor_is_tied_to_what_it_is_of(round_trip: RoundTrip) -> None:
    plain = torch.rand(4, dtype=torch.complex64)

    back = round_trip({"object": Record(plain, [plain.conj(), plain.conj().imag])}, weights_only=False)["object"]
    assert torch.equal(back.weight, plain)
    back.weight.fill_(2 + 3j)
    assert back.rest[0].tolist() == [2 - 3j] * 4
    assert back.rest[1].tolist() == [-3.0] * 4


def test_tensor_among_its_own_attributes_is_itself_again(round_trip: RoundTrip) -> None:
    for weight in (torch.rand(3), nn.Parameter(torch.rand(3))):
        node = Record(with_attributes(weight, me=[weight]))
        back = round_trip({"object": node}, weights_only=False)["object"].weight
        assert back.me[0] is back


# ---------------------------------------------------------------- what is refused


def deep(depth: int) -> Record:
    found = Record(torch.rand(1))
    for _ in range(depth):
        found = Record(torch.rand(1), found)
    return found


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: lambda: 1, "type function", id="lambda"),
        pytest.param(lambda: Record(torch.rand(1), lambda: 1), "type Record.*lambda", id="lambda within"),
        pytest.param(lambda: Record(torch.rand(1), (i for i in "ab")), "type Record.*generator", id="generator"),
        pytest.param(lambda: deep(100_000), "type Record.*recursion", id="nested too deeply"),
    ],
)
def test_object_that_cannot_be_pickled_is_refused_by_type(make: Callable[[], Any], said: str, bench: Any) -> None:
    state = {"object": [make()]}
    checkpointer = bench.make(state=state)
    with pytest.raises(StateUnsupported, match=f"an object of {said}"):
        checkpointer.save(1)

    state["object"] = [Record(torch.rand(1))]
    assert checkpointer.save(2).saved
    state["object"] = [make()]
    with pytest.raises(StateUnsupported, match=f"an object of {said}"):
        checkpointer.save(3)


@pytest.mark.parametrize("name", ["module", "dict of another class", "object without tensors"])
def test_no_object_is_put_together_where_only_weights_are_wanted(name: str, bench: Any) -> None:
    bench.make(state={"object": OBJECTS[name](), "weight": torch.ones(3)}).save(1)
    state: dict[str, Any] = {"weight": torch.zeros(3), "mine": 1}

    with pytest.raises(CheckpointUnsafe, match="weights_only=False"):
        bench.make(state=state).restore()

    assert state["mine"] == 1
    assert state["weight"].tolist() == [0.0] * 3


# ---------------------------------------------------------------- what a restore may touch


def test_object_meets_its_values_when_it_is_put_together(any_bench: Any) -> None:
    """Also where a tensor of it is one of the caller's, which takes its bytes last."""
    weight = torch.ones(4)
    any_bench.make(state={"weight": weight, "object": Reading(weight)}).save(1).wait(timeout_seconds=60)
    mine = torch.zeros(4)
    state: dict[str, Any] = {"weight": mine, "object": Reading(torch.zeros(4))}

    assert any_bench.make(state=state, weights_only=False).restore() == 1
    assert state["weight"] is mine
    assert mine.tolist() == [1.0] * 4
    assert state["object"].weight.tolist() == [1.0] * 4
    assert state["object"].total == 4.0


def test_callers_own_containers_are_not_taken_for_the_objects(any_bench: Any) -> None:
    any_bench.make(state={"bag": Bag(a=torch.ones(3)), "pair": Pair(torch.ones(2), 1)}).save(1).wait(timeout_seconds=60)
    theirs = torch.zeros(3), torch.zeros(2)
    state: dict[str, Any] = {"bag": {"a": theirs[0]}, "pair": [theirs[1], 2]}

    assert any_bench.make(state=state, weights_only=False).restore() == 1
    assert type(state["bag"]) is Bag
    assert state["bag"]["a"].tolist() == [1.0] * 3
    assert type(state["pair"]) is Pair
    assert all(not tensor.any() for tensor in theirs)
