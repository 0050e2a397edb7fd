"""A rank's file with all that it leaves to older steps' files: as it would have been without them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO

from stepfast import catalog
from stepfast.layout import FileEntry, Manifest
from stepfast.references import REFERRED, STATE_VERSION
from stepfast.storage import Store
from stepfast.tensorfile import HeaderPlan, TensorPlace, TensorSpec

_STATE = "stepfast"  # the key in a file's metadata under which its state is described


def write_whole(store: Store, manifest: Manifest, file: FileEntry, out: BinaryIO) -> None:
    """Writes the file's tensors, and those that its header says to be elsewhere, each chunk checked before.

    `store` is the job's folder. Raises CheckpointDamaged, StorageError.
    """
    step = manifest.step
    header = catalog.read_header(store, "", file, step)
    references = catalog.read_references(store, "", file, step)
    others = {other.path: other for other in catalog.check_references(store, "", manifest, file)}
    held = {path: catalog.read_header(store, "", other, step).places for path, other in others.items()}
    # By the name that it is to have: the file that it is in, and where.
    found: dict[str, tuple[FileEntry, TensorPlace]] = {name: (file, place) for name, place in header.places.items()}
    found |= {name: (others[there.path], held[there.path][there.name]) for name, there in references.items()}
    plan = HeaderPlan(
        [TensorSpec(name=name, dtype=at.spec.dtype, shape=at.spec.shape) for name, (_, at) in found.items()],
        constant=_metadata(header.metadata),
        variable_bytes=0,
    )
    tail = plan.tail({})
    if tail is None:
        raise AssertionError("a header without variable parts does not fit")
    out.write(plan.prefix + tail)
    for source in (file, *others.values()):
        places = [(found[place.spec.name][1], place) for place in plan.places if found[place.spec.name][0] is source]
        begin = 0
        for chunk in catalog.read_file(store, "", source, step):
            for at, to in places:
                low, high = max(at.begin, begin), min(at.end, begin + len(chunk))
                if low < high:
                    out.seek(to.begin + low - at.begin)
                    out.write(chunk[low - begin : high - begin])
            begin += len(chunk)


def _metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in metadata.items() if key != REFERRED}
    if REFERRED in metadata and _STATE in kept:
        kept[_STATE] = json.dumps({**json.loads(kept[_STATE]), "version": STATE_VERSION}, separators=(",", ":"))
    return kept
