"""The safetensors format without tensors: what is planned opens with the safetensors package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from stepfast.tensorfile import CACHE_LINE, DTYPE_BITS, PAGE, HeaderInvalid, HeaderPlan, TensorSpec, parse_header

_SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable()),
        dtype=st.sampled_from(sorted(DTYPE_BITS)),
        shape=st.lists(st.integers(0, 5) | st.sampled_from([8, 64]), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@given(specs=_SPECS, variable=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3))
@settings(max_examples=150)
def test_file_opens_with_the_safetensors_package(specs: list[TensorSpec], variable: dict[str, str]) -> None:
    plan = HeaderPlan(specs, constant={"format": "pt"}, variable_bytes=256)
    tail = plan.tail({key: value for key, value in variable.items() if key != "format"})
    assert tail is not None
    header = plan.prefix + tail
    assert len(header) == plan.data_begin
    assert plan.data_begin % PAGE == 0
    file = header + bytes(range(256)) * ((plan.size_bytes - len(header)) // 256 + 1)
    file = file[: plan.size_bytes]
    opened = {name: entry for name, entry in deserialize(file)}
    assert sorted(opened) == sorted(spec.name for spec in specs)
    for place in plan.places:
        assert bytes(opened[place.spec.name]["data"]) == file[place.begin : place.end]
        assert tuple(opened[place.spec.name]["shape"]) == place.spec.shape
        width = max(1, DTYPE_BITS[place.spec.dtype] // 8)
        assert place.begin % width == 0
        if place.spec.size_bytes % CACHE_LINE == 0:
            assert place.begin % CACHE_LINE == 0
    parsed = parse_header(file)
    assert parsed.size_bytes == plan.size_bytes
    assert {place.spec.name: place for place in plan.places} == dict(parsed.places)


def test_metadata_that_outgrows_its_room_is_refused_rather_than_moved() -> None:
    plan = HeaderPlan([TensorSpec(name="a", dtype="F32", shape=(4,))], constant={}, variable_bytes=10)
    assert plan.tail({"a": "x" * 10}) is not None
    assert plan.tail({"a": "x" * 10_000}) is None


def _file(document: Any) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(body).to_bytes(8, "little") + body


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 16,
        (1000).to_bytes(8, "little") + b"{}",
        _file(b"{"),
        _file(b"[" * 50_000),
        _file([]),
        _file({"a": 5}),
        _file({"a": {}}),
        _file(_tensor(dtype="F7")),
        _file(_tensor(dtype=["U8"])),
        _file(_tensor(shape=[-4])),
        _file(_tensor(shape=[True, 4])),
        _file(_tensor(shape="4")),
        _file(_tensor(data_offsets=[0])),
        _file(_tensor(data_offsets=[1, 5])),
        _file(_tensor(data_offsets=[0, 5])),
        _file(_tensor(data_offsets=[-4, 0])),
        _file({**_tensor(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}),
        _file({**_tensor(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]}}),
        _file({**_tensor(), "__metadata__": []}),
        _file({**_tensor(), "__metadata__": {"a": 5}}),
    ],
    ids=lambda data: f"{data[8:50]!r}({len(data)})",
)
def test_header_that_cannot_be_is_invalid(data: bytes) -> None:
    with pytest.raises(HeaderInvalid):
        parse_header(data)


@given(data=st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes_are_an_invalid_header(data: bytes) -> None:
    for candidate in (data, _file(data)):
        try:
            parse_header(candidate)
        except HeaderInvalid:
            continue
