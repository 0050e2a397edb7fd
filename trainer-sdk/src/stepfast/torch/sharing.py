"""Which tensors are views of the same memory, and how that is written down and restored.

Tensors that overlap in memory are saved once: the largest contiguous one of them that covers the others, or else the
covered span of their storage as plain bytes. The others are described as views of it, so that what was tied is tied
again after restore. A tensor that overlaps itself, as an expanded one does, is a view of its span, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stepfast.torch.dtypes import check_saveable, dtype_name, parse_dtype

_WIDEST_BYTES = 16  # of an element: what begins on a multiple of it begins on an element of any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor as a view of a saved one: `begin` in bytes from that one's first, size and stride in elements."""

    base: int
    begin: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Base(NamedTuple):  # one a tensor: a dataclass is made ten times as slowly
    """A tensor that is saved. `stride` is kept when it is dense but not row-major, so that it is laid out again so.

    `tensor` is its index among the collected tensors, or -1 when it is a span of storage made for its views.
    """

    name: str
    tensor: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What a tensor is besides its bytes."""

    device: str = "cpu"
    requires_grad: bool = False
    is_parameter: bool = False


_PLAIN = Flags()


@dataclass(slots=True)
class Sharing:
    """`bases` are saved; `places[i]` says what collected tensor i is: a base (by index) or a view of one."""

    bases: list[Base]
    places: list[int | View]
    flags: list[Flags]
    spans: dict[int, tuple[int, int]]  # base index -> (a tensor whose storage it spans, byte offset in it)

    def source(self, base: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor to copy for a base, out of newly collected ones."""
        entry = self.bases[base]
        if entry.tensor >= 0:
            return tensors[entry.tensor].detach()
        member, begin = self.spans[base]
        return _bytes_of(tensors[member], begin, entry.shape[0])

    @property
    def views(self) -> list[tuple[int, View]]:
        """The collected tensors that are views of a base, by their indexes."""
        return [(index, place) for index, place in enumerate(self.places) if isinstance(place, View)]

    def is_still(self, view: View, tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensor is still that view of its base's bytes: else its own would be lost."""
        entry = self.bases[view.base]
        if not is_plain(tensor):
            return False  # the same memory no longer means the same values
        if entry.tensor >= 0:
            base = tensors[entry.tensor]
            if not is_plain(base) or not base.is_contiguous():
                return False
            first = base.data_ptr()
        else:
            member, begin = self.spans[view.base]
            first = tensors[member].untyped_storage().data_ptr() + begin
        return tensor.data_ptr() - first == view.begin and tuple(tensor.stride()) == view.stride


def find_sharing(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Sharing:
    """Groups the tensors. Raises StateUnsupported for those that have no plain bytes."""
    for tensor, name in zip(tensors, names, strict=True):
        check_saveable(tensor, name)
    found = Sharing([], [0] * len(tensors), [_flags(tensor) for tensor in tensors], {})
    for cluster in _clusters(tensors):
        _place(cluster, tensors, names, found)
    return found


def _place(cluster: list[int], tensors: Sequence[torch.Tensor], names: Sequence[str], found: Sharing) -> None:
    spans = {index: span(tensors[index]) for index in cluster}
    low, high = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
    whole = [i for i in cluster if spans[i] == (low, high) and tensors[i].is_contiguous() and is_plain(tensors[i])]
    if any((spans[i][0] - low) % tensors[i].element_size() for i in cluster):
        whole = []  # a view of another width would not begin on one of its own elements
    if whole or (len(cluster) == 1 and not _overlaps_itself(tensors[cluster[0]])):
        main = whole[0] if whole else cluster[0]
        tensor = tensors[main]
        found.bases.append(
            Base(
                name=names[main],
                tensor=main,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                stride=None if tensor.is_contiguous() else _dense_stride(tensor),
            )
        )
        found.places[main] = len(found.bases) - 1
    else:
        main = cluster[0]
        storage = tensors[main].untyped_storage().data_ptr()
        low -= (low - storage) % _WIDEST_BYTES
        size = high - low
        found.bases.append(Base(name=f"{names[main]}#storage", tensor=-1, dtype="uint8", shape=(size,)))
        found.spans[len(found.bases) - 1] = (main, low - storage)
    base = len(found.bases) - 1
    for index in cluster:
        if index == found.bases[base].tensor:
            continue
        tensor = tensors[index]
        found.places[index] = View(
            base=base,
            begin=spans[index][0] - low,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
        )


def _clusters(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indexes of tensors whose memory overlaps, in the order of each cluster's first tensor."""
    by_storage: dict[tuple[str, int], list[int]] = defaultdict(list)
    alone: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0 or not is_plain(tensor):
            alone.append([index])
        else:
            by_storage[(str(tensor.device), tensor.untyped_storage().data_ptr())].append(index)
    clusters = alone
    for members in by_storage.values():
        if len(members) == 1:
            clusters.append(members)
            continue
        reached = -1
        for index in sorted(members, key=lambda i: span(tensors[i])):
            begin, end = span(tensors[index])
            if begin >= reached:
                clusters.append([])
            clusters[-1].append(index)
            reached = max(reached, end)
    return sorted((sorted(cluster) for cluster in clusters), key=lambda cluster: cluster[0])


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its values as they are (no lazy conjugation or negation)."""
    return not (tensor.dtype.is_complex and tensor.is_conj()) and not tensor.is_neg()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from the tensor's first to its last element, as addresses."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are the same bytes."""
    if tensor.numel() == 0 or not is_plain(tensor):
        return False
    begin, end = span(tensor)
    return tensor.numel() * tensor.element_size() > end - begin


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides, when the elements fill their span without gaps or overlaps (as channels-last does)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def _flags(tensor: torch.Tensor) -> Flags:
    return Flags(
        device=tensor.device.type,
        requires_grad=tensor.requires_grad and tensor.is_leaf,
        is_parameter=type(tensor) is torch.nn.Parameter,
    )


def _bytes_of(tensor: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (size,), (1,))


# ---------------------------------------------------------------- on disk and back


def to_document(found: Sharing) -> dict[str, Any]:
    """As JSON: each field left out where it says nothing."""
    return {
        "bases": [
            [base.name, base.dtype, list(base.shape), *([list(base.stride)] if base.stride else [])]
            for base in found.bases
        ],
        "places": [
            place
            if isinstance(place, int)
            else [place.base, place.begin, place.dtype, list(place.shape), list(place.stride)]
            for place in found.places
        ],
        "flags": [
            [flag.device, int(flag.requires_grad), int(flag.is_parameter)] if flag != Flags() else 0
            for flag in found.flags
        ],
    }


def from_document(document: Any) -> Sharing:
    """Reads `to_document`'s result (the bases without their sources)."""
    return Sharing(
        bases=[
            Base(base[0], -1, base[1], tuple(base[2]), tuple(base[3]) if len(base) > 3 else None)
            for base in document["bases"]
        ],
        places=[
            place
            if isinstance(place, int)
            else View(base=place[0], begin=place[1], dtype=place[2], shape=tuple(place[3]), stride=tuple(place[4]))
            for place in document["places"]
        ],
        flags=[
            Flags(device=flag[0], requires_grad=bool(flag[1]), is_parameter=bool(flag[2])) if flag else _PLAIN
            for flag in document["flags"]
        ],
        spans={},
    )


def own_device(device: str) -> str:
    """The device of that kind, where this process has one; else the host."""
    return device if device == "cuda" and torch.cuda.is_available() else "cpu"


def materialise(
    found: Sharing,
    bases: Mapping[int, torch.Tensor],
    own: Mapping[int, torch.Tensor],
    device_of: Callable[[str], str] = own_device,
) -> list[torch.Tensor]:
    """The collected tensors again, views tied to their bases; each on `device_of` the kind of device it came from.

    `bases`: by index; what is of none of them comes back empty. `own`: those that are the caller's tensors already, and
    stay them.
    """
    moved: dict[int, torch.Tensor] = {}
    tensors: list[torch.Tensor] = []
    nothing = torch.empty(0)
    for place, flags in zip(found.places, found.flags, strict=True):
        index = place if isinstance(place, int) else place.base
        if index not in bases:
            tensors.append(nothing)
            continue
        if isinstance(place, int) and index in own:
            tensors.append(own[index])
            continue
        if index not in moved:
            moved[index] = bases[index] if index in own else bases[index].to(device_of(flags.device))
        base = moved[index]
        tensors.append(_dress(base if isinstance(place, int) else _view(base, place), flags))
    return tensors


def _view(base: torch.Tensor, view: View) -> torch.Tensor:
    dtype = parse_dtype(view.dtype)
    offset = base.storage_offset() * base.element_size() + view.begin
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset // dtype.itemsize, view.shape, view.stride)


def _dress(tensor: torch.Tensor, flags: Flags) -> torch.Tensor:
    if flags.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=flags.requires_grad)
    if flags.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor
