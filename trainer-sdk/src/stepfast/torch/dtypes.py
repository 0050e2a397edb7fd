"""How torch's dtypes stand in a safetensors file."""

from __future__ import annotations

import torch

from stepfast.errors import StateUnsupported

NATIVE: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    NATIVE[torch.float8_e8m0fnu] = "F8_E8M0"

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # classes that say no more of a tensor than its flags do
_TWINS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUANTISED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises StateUnsupported when this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateUnsupported(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def check_saveable(tensor: torch.Tensor, where: str) -> None:
    """Raises StateUnsupported, saying where and why, for tensors that have no plain bytes."""
    if (why_not := unsaveable(tensor)) is not None:
        raise StateUnsupported(f"{where} {why_not}")


def unsaveable(tensor: torch.Tensor) -> str | None:
    """Why the tensor has no plain bytes; None when it has."""
    name = dtype_name(tensor.dtype)
    if tensor.is_quantized or name in _QUANTISED:
        return f"is quantised ({name}): save its int_repr(), scales and zero points instead"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: save its indices and values instead"
    if tensor.device.type == "meta":
        return "is on the meta device: it has no bytes"
    if tensor.is_nested:
        return "is a nested tensor: save its values and offsets instead"
    return None


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its file shows it: itself, or flat bytes where safetensors has no such dtype."""
    if tensor.dtype in NATIVE:
        if tensor.dtype.is_complex:
            return tensor.resolve_conj().resolve_neg()
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    if tensor.dtype.is_complex:
        tensor = tensor.resolve_conj().resolve_neg()
    return flat_bytes(as_movable(tensor))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in row-major order: uint8, one-dimensional; a copy where they do not lie so."""
    row = tensor.contiguous().reshape(-1)
    if row.stride(0) != 1:  # a single element counts as contiguous whatever its stride is, and cannot be viewed
        row = row.clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8)


def as_movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements under a dtype that torch can copy: it has no kernels for those below a byte."""
    twin = _TWINS.get(tensor.dtype.itemsize) if tensor.dtype not in NATIVE else None
    return tensor if twin is None else tensor.view(twin)


def stored_form(dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape of `as_stored`'s result."""
    if dtype in NATIVE:
        return NATIVE[dtype], shape
    return "U8", (numel * dtype.itemsize,)
