"""A nest of containers as a list of tensors, a list of other values and a structure that holds the two together.

The structure is what stays the same from save to save; it is described once. Values (numbers, strings, generator
states) are encoded as JSON at each save. Any object beyond that travels only pickled (`stepfast.torch.pickled`), and is
refused at load unless `weights_only=False`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from stepfast.errors import StateUnsupported
from stepfast.torch.dtypes import PLAIN_TENSORS, dtype_name, parse_dtype
from stepfast.torch.pickled import Placed, Skeletons, load_skeleton, pickle_value, unpickle_value

Json = Any  # what json.dumps takes

DICTS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None, "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict,
    "set": set, "tuple": tuple,
}  # fmt: skip
_MAX_DEPTH = 200
_BLOB_LENGTH = 64 * 1024  # longer bytes and strings are stored as tensors
_DECIMAL_BITS = 1024  # Python writes larger integers in decimal slowly, and from 4300 digits on not at all


@dataclass(slots=True)
class Found:
    """What one walk found, in order."""

    skeletons: Skeletons
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    objects: list[Placed] = field(default_factory=list)  # those that only travel pickled
    _numbers: dict[int, int] = field(default_factory=dict)  # of their tensors, by identity

    def add_object(self, node: object) -> Placed:
        """Places an object's tensors, unless one before it has them too, and its skeleton behind them."""
        skeleton = self.skeletons.of(node)
        added = []
        for tensor, name in zip(skeleton.tensors, skeleton.names, strict=True):
            if id(tensor) not in self._numbers:
                self._numbers[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
                added.append((name, type(tensor), tensor.requires_grad))
        numbers = tuple(self._numbers[id(tensor)] for tensor in skeleton.tensors)
        placed = Placed(len(self.tensors), numbers, tuple(added))
        room = self.skeletons.room(len(self.objects), len(skeleton.data))
        self.tensors.append(skeleton.tensor(room))
        self.objects.append(placed)
        return placed


@dataclass(slots=True)
class Collected(Found):
    """With the structure: `tokens` is equal for two walks exactly when it is the same."""

    tokens: list[object] = field(default_factory=list)


def collect(root: object, skeletons: Skeletons | None = None) -> Collected:
    """Walks the nest. Raises StateUnsupported for a nest that contains itself or is nested too deeply, and for an
    object in it that cannot be pickled.
    """
    found = Collected(skeletons or Skeletons())
    _collect(root, found, 0)
    return found


def _collect(node: Any, found: Collected, depth: int) -> None:
    kind = type(node)
    if kind in PLAIN_TENSORS or _is_nested(node):
        found.tensors.append(node)
        found.tokens.append((kind, node.requires_grad))
        return
    if depth > _MAX_DEPTH:
        raise StateUnsupported(f"the state is nested more than {_MAX_DEPTH} deep, or contains itself")
    if kind in DICTS or (kind is defaultdict and _factory_name(node) is not None):
        factory = _factory_name(node) if kind is defaultdict else None
        found.tokens.append((kind, factory, tuple(map(_key_token, node))))
        for child in node.values():
            _collect(child, found, depth + 1)
    elif kind in SEQUENCES:
        found.tokens.append((kind, len(node)))
        for child in node:
            _collect(child, found, depth + 1)
    elif (tag := leaf_tag(node)) == "v":
        found.values.append(node)
        found.tokens.append("v")
    elif tag == "p":
        found.tokens.append(found.add_object(node))
    else:
        found.tensors.append(leaf_tensor(tag, node))
        found.tokens.append(tag)


def describe(root: object, prefix: str, objects: Sequence[Placed]) -> tuple[Json, list[str]]:
    """The structure as JSON, and a name for each tensor that `collect` yields, in its order; names are unique.

    `objects`: as `collect` found them.
    """
    names: list[str] = []
    used = {f"{prefix}.__metadata__"}  # the one name that the file format keeps for itself
    values, left = count(), iter(objects)

    def unique(path: str) -> str:
        name, n = path, 1
        while name in used:
            n += 1
            name = f"{path}~{n}"
        used.add(name)
        return name

    def leaf(kind: str, path: str) -> Json:
        names.append(unique(path))
        return [kind, len(names) - 1]

    def pickled(path: str) -> Json:
        placed = next(left)
        names.extend(unique(f"{path}.{_key_text(name)}") for name, _, _ in placed.added)
        names.append(unique(path))
        return ["p", [placed.skeleton, placed.tensors]]

    def walk(node: Any, path: str) -> Json:
        kind = type(node)
        if kind in PLAIN_TENSORS or _is_nested(node):
            return leaf("t", path)
        if kind in DICTS or (kind is defaultdict and _factory_name(node) is not None):
            tag: str = DICTS.get(kind) or f"ddict:{_factory_name(node)}"
            return [
                tag,
                [[encode_value(key), walk(child, f"{path}.{_key_text(key)}")] for key, child in node.items()],
            ]
        if kind in SEQUENCES:
            return [SEQUENCES[kind], [walk(child, f"{path}.{i}") for i, child in enumerate(node)]]
        tag = leaf_tag(node)
        if tag == "p":
            return pickled(path)
        return ["v", next(values)] if tag == "v" else leaf(tag, path)

    return walk(root, prefix), names


def leaves(structure: Json) -> Iterator[tuple[str, Any]]:
    """What `describe` says of each leaf: a tag, and the number of its tensor or value; of an object (`p`) those of its
    skeleton and of its tensors.
    """
    left = [structure]
    while left:
        tag, content = left.pop()
        if tag in ("list", "tuple"):
            left += content
        elif isinstance(content, list) and tag != "p":
            left += [child for _, child in content]
        else:
            yield tag, content


def tensors_in(structure: Json) -> Iterator[int]:
    """The numbers of all tensors that a nest, or a part of it, is rebuilt from."""
    for tag, content in leaves(structure):
        if tag == "p":
            skeleton, own = content
            yield from (skeleton, *own)
        elif tag != "v":
            yield content


def rebuild(  # noqa: C901  # a table: one case a tag
    structure: Json, tensors: Sequence[torch.Tensor], values: Sequence[Json], *, weights_only: bool
) -> Any:
    """The nest again. Raises CheckpointUnsafe for pickled objects when `weights_only`."""

    def walk(node: Json) -> Any:
        tag, content = node
        match tag:
            case "t":
                return tensors[content]
            case "v":
                return decode_value(values[content], weights_only=weights_only)
            case "n" | "bytes" | "bytearray" | "str":
                return _LEAVES[tag][1](tensors[content].numpy())
            case "p":
                skeleton, own = content
                return load_skeleton(tensors[skeleton], [tensors[i] for i in own], weights_only=weights_only)
            case "list":
                return [walk(child) for child in content]
            case "tuple":
                return tuple(walk(child) for child in content)
            case "dict":
                return _pairs(content)
            case "odict":
                return OrderedDict(_pairs(content))
            case "counter":
                return Counter(_pairs(content))
            case _:
                return defaultdict(_FACTORIES[tag.removeprefix("ddict:")], _pairs(content))

    def _pairs(content: Json) -> dict[Any, Any]:
        return {decode_value(key, weights_only=weights_only): walk(child) for key, child in content}

    return walk(structure)


def has_pickles(collected: Collected) -> bool:
    """Whether some object can only travel pickled."""
    return bool(collected.objects)


# ---------------------------------------------------------------- values


def encode_value(value: Any) -> Json:  # noqa: C901  # a table: one line a type
    """A value that is no tensor as JSON: plain where JSON has it, `[tag, …]` where it has not."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _DECIMAL_BITS else ["int", hex(value)]
    if kind is float:
        return value if value - value == 0 else ["float", struct.pack("<d", value).hex()]
    if kind is complex:
        return ["complex", struct.pack("<dd", value.real, value.imag).hex()]
    if kind in (bytes, bytearray):
        return [kind.__name__, base64.b64encode(value).decode()]
    if kind in (tuple, set, frozenset, list, torch.Size):
        items = [encode_value(item) for item in value]
        return [kind.__name__, sorted(items, key=json.dumps) if kind in (set, frozenset) else items]
    if _is_value(value) and kind in (range, slice):
        return [kind.__name__, [encode_value(part) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.dtype):
        return ["dtype", dtype_name(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if _is_numpy_scalar(value):
        return ["numpy", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    return ["pickle", base64.b64encode(pickle_value(value)).decode()]


def decode_value(value: Json, *, weights_only: bool) -> Any:  # noqa: C901  # a table: one case a tag
    """`encode_value`'s inverse, bit for bit. Raises CheckpointUnsafe for pickles when `weights_only`."""
    if not isinstance(value, list):
        return value
    tag, content = value[0], value[1]
    match tag:
        case "float":
            return struct.unpack("<d", bytes.fromhex(content))[0]
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*struct.unpack("<dd", bytes.fromhex(content)))
        case "bytes" | "bytearray":
            data = base64.b64decode(content)
            return data if tag == "bytes" else bytearray(data)
        case "tuple" | "set" | "frozenset" | "list" | "Size":
            items = [decode_value(item, weights_only=weights_only) for item in content]
            makers = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list, "Size": torch.Size}
            return makers[tag](items)
        case "range" | "slice":
            parts = [decode_value(part, weights_only=weights_only) for part in content]
            return (range if tag == "range" else slice)(*parts)
        case "dtype":
            return parse_dtype(content)
        case "device":
            return torch.device(content)
        case "numpy":
            import numpy as np

            dtype = np.dtype(content)
            return np.frombuffer(base64.b64decode(value[2]), dtype=dtype)[0] if dtype.itemsize else dtype.type()
        case _:
            return unpickle_value(base64.b64decode(content), weights_only=weights_only)


def _is_nested(node: Any) -> bool:
    """A jagged tensor is of a class of its own; taken as a tensor, it is refused by name."""
    return isinstance(node, torch.Tensor) and node.is_nested


def _is_value(node: Any) -> bool:
    kind = type(node)
    if node is None or kind in (
        bool,
        int,
        str,
        float,
        complex,
        bytes,
        bytearray,
        range,
        torch.Size,
        torch.device,
    ):
        return True
    if kind is slice:
        return all(part is None or type(part) is int for part in (node.start, node.stop, node.step))
    if kind in (set, frozenset):
        return all(_is_value(item) or (type(item) is tuple and all(map(_is_value, item))) for item in node)
    return isinstance(node, torch.dtype) or _is_numpy_scalar(node)


def _is_numpy_scalar(node: Any) -> bool:
    kind = type(node)
    if kind.__module__ != "numpy":
        return False
    import numpy as np

    return isinstance(node, np.generic) and not node.dtype.hasobject and node.dtype.names is None


def _is_array(node: Any) -> bool:
    """A NumPy array whose elements torch knows too, in this machine's byte order."""
    if type(node).__module__ != "numpy" or type(node).__name__ != "ndarray":
        return False
    return str(node.dtype) in _ARRAY_DTYPES and node.dtype.isnative


_ARRAY_DTYPES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def _tensor_of(array: Any) -> torch.Tensor:
    import numpy as np

    # A view where torch can have one: it takes no read-only arrays (without a warning), no negative or odd strides.
    plain = array.flags.writeable and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return torch.from_numpy(array if plain else np.array(array, order="C"))


def _tensor_of_bytes(data: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# What is neither tensor nor value nor pickled, by tag: to a tensor, and back from its array.
_LEAVES: dict[str, tuple[Callable[[Any], torch.Tensor], Callable[[Any], Any]]] = {
    "n": (_tensor_of, lambda array: array),
    "bytes": (_tensor_of_bytes, lambda array: array.tobytes()),
    "bytearray": (_tensor_of_bytes, lambda array: bytearray(array.tobytes())),
    "str": (
        lambda text: _tensor_of_bytes(text.encode("utf-8", "surrogatepass")),
        lambda array: array.tobytes().decode("utf-8", "surrogatepass"),
    ),
}


def leaf_tensor(tag: str, node: Any) -> torch.Tensor:
    """The leaf as a tensor, by its tag (which is neither `v` nor `p`)."""
    return _LEAVES[tag][0](node)


def leaf_tag(node: Any) -> str:
    """`v`: a value, into the header; `p`: an object, pickled; else how the leaf becomes a tensor."""
    kind = type(node)
    if kind in (bytes, bytearray, str) and len(node) > _BLOB_LENGTH:
        return str(kind.__name__)  # a header has an upper limit, and is encoded anew at each save
    if _is_array(node):
        return "n"
    return "v" if _is_value(node) else "p"


def _factory_name(node: Any) -> str | None:
    for name, factory in _FACTORIES.items():
        if node.default_factory is factory:
            return name
    return None


def _key_token(key: object) -> object:
    """Equal for two keys exactly when they are the same: to a dict 1, 1.0 and True are one key."""
    kind = type(key)
    return key if kind is str else (kind, key) if kind in (int, bool) else (kind, json.dumps(encode_value(key)))


def _key_text(key: object) -> str:
    # Valid Unicode, as the format wants; and no "#", which begins the suffix of a name that stands for a part.
    try:
        text = key if isinstance(key, str) else repr(key)
    except ValueError:  # an integer of thousands of digits is in it
        text = type(key).__name__
    return text[:200].replace("#", "%23").encode("utf-8", "backslashreplace").decode()


__all__ = [
    "DICTS", "SEQUENCES", "Collected", "Found", "collect", "decode_value", "describe", "encode_value", "has_pickles",
    "leaf_tag", "leaf_tensor", "leaves", "rebuild", "tensors_in",
]  # fmt: skip
