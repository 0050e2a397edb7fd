"""What torch.distributed.checkpoint says of a step: which tensors there are, of which chunks, and where each lies.

It stands beside the chunks, in the file of the rank that coordinated the save, as JSON: nothing of it is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip

from stepfast.errors import CheckpointMismatch
from stepfast.torch.dtypes import dtype_name, parse_dtype

METADATA, PLANNER_DATA = ".metadata", ".planner_data"  # the names that they are saved under
_VERSION = 1
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_PRESERVE = "preserve"


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank saved an item, and under which name."""

    rank: int
    name: str


def encode(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """The objects to save, by name. `places`: where each item of the step is."""
    tensors, others = {}, {}
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            tensors[name] = {"size": list(about.size), **_encode_properties(about.properties), "chunks": [
                [list(chunk.offsets), list(chunk.sizes), *_encode_place(places[MetadataIndex(name, chunk.offsets)])]
                for chunk in about.chunks
            ]}  # fmt: skip
        else:
            others[name] = _encode_place(places[MetadataIndex(name)])
    document: dict[str, Any] = {"version": _VERSION, "tensors": tensors, "others": others}
    planner_data, beside = metadata.planner_data, dict[str, Any]()
    if planner_data is not None and not _are_paths(planner_data):
        beside[PLANNER_DATA], planner_data = planner_data, PLANNER_DATA
    document["plannerData"] = planner_data
    save = metadata.storage_meta or StorageMeta()
    document["save"] = {"checkpointId": save.checkpoint_id, "saveId": save.save_id}
    return {METADATA: json.dumps(document, separators=(",", ":")).encode(), **beside}


def decode(load: Callable[[str], Any], *, step: int) -> Metadata:
    """The metadata, with each item's `Place` as its storage data. `load`: reads the object of that name.

    Raises CheckpointMismatch when it was written by a newer version.
    """
    document = json.loads(load(METADATA))
    if document["version"] != _VERSION:
        raise CheckpointMismatch(f"step {step} has the sharded state's version {document['version']}")
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, about in document["tensors"].items():
        chunks = []
        for offsets, sizes, rank, key in about["chunks"]:
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            chunks.append(chunk)
            places[MetadataIndex(name, chunk.offsets)] = Place(rank, key)
        found[name] = TensorStorageMetadata(_decode_properties(about), torch.Size(about["size"]), chunks)
    for name, (rank, key) in document["others"].items():
        found[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = Place(rank, key)
    planner_data = document["plannerData"]
    if planner_data == PLANNER_DATA:
        planner_data = load(PLANNER_DATA)
    elif planner_data is not None:
        planner_data = {name: tuple(path) for name, path in planner_data.items()}
    storage_meta = StorageMeta(checkpoint_id=document["save"]["checkpointId"], save_id=document["save"]["saveId"])
    return Metadata(
        state_dict_metadata=found, planner_data=planner_data, storage_data=places, storage_meta=storage_meta
    )


def _encode_place(place: Place) -> list[Any]:
    return [place.rank, place.name]


def _encode_properties(properties: TensorProperties) -> dict[str, Any]:
    known = (name for name, memory_format in _FORMATS.items() if memory_format is properties.memory_format)
    strides = getattr(properties, "strides", None)  # since torch 2.10
    return {
        "dtype": dtype_name(properties.dtype),
        "requiresGrad": properties.requires_grad,
        "pinMemory": properties.pin_memory,
        "memoryFormat": next(known, _PRESERVE),
        **({"strides": list(strides)} if strides is not None else {}),
    }


def _decode_properties(about: Mapping[str, Any]) -> TensorProperties:
    properties = TensorProperties(
        dtype=parse_dtype(about["dtype"]),
        requires_grad=about["requiresGrad"],
        pin_memory=about["pinMemory"],
        memory_format=_FORMATS.get(about["memoryFormat"], torch.preserve_format),
    )
    if "strides" in about and hasattr(properties, "strides"):
        properties.strides = tuple(about["strides"])
    return properties


def _are_paths(planner_data: Any) -> bool:
    """Whether it is what torch's own planners have: the keys and indices that lead to each item of the state."""
    return isinstance(planner_data, dict) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    )
