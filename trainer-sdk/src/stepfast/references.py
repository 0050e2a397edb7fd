"""What a rank's file says of the tensors that it leaves out: which file of an older step holds each. Pure.

References are flat: they name the file that has the bytes, never one that refers itself, so that a reader follows one
step, and what a step needs is what its manifest lists (`layout.Manifest.refers`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stepfast.layout import (
    FileEntry,
    Manifest,
    PartRef,
    RecordInvalid,
    check_manifest,
    check_part,
    manifest_path,
    parse_data_path,
)

REFERRED = "stepfast.referred"  # the key in the metadata of a file's header
STATE_VERSION = 2  # of the description of a rank's state in its file
REFERRING_VERSION = 3  # of one some of which is in other files: who does not know of that must not read it
MAX_REFERRED = 8  # steps that one step may refer to: each is kept by retention as long as it is, and named in its slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where a tensor is: the path of an older step's file, relative to the job's folder, and its name there."""

    path: str
    name: str

    @property
    def step(self) -> int:
        """The step of that file. Raises RecordInvalid."""
        parsed = parse_data_path(self.path)
        if parsed is None:
            raise RecordInvalid(f"{self.path!r} is no file of a step")
        return parsed.step


def steps_of(references: Iterable[Reference]) -> tuple[int, ...]:
    """The steps that these are in, ascending."""
    return tuple(sorted({reference.step for reference in references}))


def to_text(references: Mapping[str, Reference]) -> str:
    """As it stands in the metadata: by file, each tensor's name; with the one that it has there where that differs."""
    by_path: dict[str, list[str | list[str]]] = {}
    for name, reference in references.items():
        entry: str | list[str] = name if name == reference.name else [name, reference.name]
        by_path.setdefault(reference.path, []).append(entry)
    return json.dumps(by_path, separators=(",", ":"))


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Reference]:
    """The tensors that the file leaves out, by name; none of most files. Raises RecordInvalid."""
    text = metadata.get(REFERRED)
    if text is None:
        return {}
    found = {}
    try:
        for path, entries in json.loads(text).items():
            for entry in entries:
                name, there = (entry, entry) if isinstance(entry, str) else entry
                found[str(name)] = Reference(path=path, name=str(there))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordInvalid(f"the header's {REFERRED} does not parse: {error}") from error
    steps_of(found.values())
    return found


def part_of(path: str, manifest: Manifest) -> PartRef:
    """The part that names that file, of the step that it is in. Raises RecordInvalid."""
    parsed = parse_data_path(path)
    if parsed is None or (parsed.step, parsed.run) != (manifest.step, manifest.run):
        raise RecordInvalid(f"step {manifest.step} is committed by the run {manifest.run}, which {path} is not of")
    for part in manifest.parts:
        if parsed.rank in part.ranks:
            return part
    raise RecordInvalid(f"step {manifest.step} has no rank {parsed.rank}")


def referred_file(path: str, manifest: Manifest, read: Callable[[str], bytes]) -> FileEntry:
    """An older step's file that this one refers to, as that step's own part names it.

    `read` gives a record's bytes by its path. Raises RecordInvalid, and whatever `read` does.
    """
    older = Reference(path=path, name="").step
    if older not in manifest.refers:
        raise RecordInvalid(f"step {manifest.step} does not say that it refers to step {older}")
    ref = part_of(path, check_manifest(read(manifest_path(older)), older))
    for file in check_part(ref, read(ref.path)).files:
        if file.path == path:
            return file
    raise RecordInvalid(f"{ref.path} names no such file")
