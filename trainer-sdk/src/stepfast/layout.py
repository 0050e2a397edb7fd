"""The persistent tier's paths, records and commit rule. No I/O; nobody else joins paths or names files.

Invariants owned here:
 I1 A step exists if and only if its manifest does. The manifest is written last, names every part with size and
    checksum, and names parts of one run only: ranks of two attempts are never mixed.
 I2 A commit needs nobody in particular: `manifest_of(parts)` yields the same bytes to whoever calls it.

    <storage root>/<namespace>/<job>/
      global_step500/
        state-00000-of-00008-<run>.safetensors   one file per name and rank; the slot's bytes
        part-<node index>-<run>.json             files, sizes, checksums of this node's ranks
        manifest.json                            committed
        manifest-superseded-<run>.json           committed once, rolled back since
      checkpointHistories.csv
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepfast.errors import CheckpointError
from stepfast.ranks import EVERY_RANK, RankSet
from stepfast.step import MAX_STEP, MAX_WORLD_SIZE, JobKey, is_file_name, is_run, is_tag

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HISTORIES = "checkpointHistories.csv"
CHUNK_BYTES = 8 * 1024 * 1024
CHECKSUM = "xxh3-128"

_STEP_FOLDER = re.compile(r"global_step(0|[1-9][0-9]{0,18})")
_PART = re.compile(r"part-([0-9]{5,})-(.+)\.json")
_SUPERSEDED = re.compile(r"manifest-superseded-(.+)\.json")
_DATA = re.compile(r"([A-Za-z0-9._-]+?)-([0-9]{5,})-of-([0-9]{5,})-(.+)\.safetensors")


class RecordInvalid(CheckpointError):
    """A part record or manifest is not what Stepfast wrote."""


def job_folder(job: JobKey) -> str:
    """The job's folder, relative to the storage root."""
    return f"{job.namespace}/{job.name}"


def join(folder: str, path: str) -> str:
    """A path within the job's folder as one of the store; an empty folder is the store's own root."""
    return f"{folder}/{path}" if folder else path


def step_folder(step: int) -> str:
    """A step's folder, relative to the job's."""
    return f"global_step{step}"


def parse_step_folder(name: str) -> int | None:
    """The step of a folder's name, or None when it is no step's folder."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def manifest_path(step: int) -> str:
    return f"{step_folder(step)}/{MANIFEST}"


def superseded_path(step: int, run: str) -> str:
    return f"{step_folder(step)}/manifest-superseded-{run}.json"


def part_path(step: int, run: str, node: int) -> str:
    return f"{step_folder(step)}/part-{node:05d}-{run}.json"


def data_path(step: int, run: str, name: str, rank: int, world_size: int) -> str:
    return f"{step_folder(step)}/{name}-{rank:05d}-of-{world_size:05d}-{run}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """What a file's name in a step's folder says of it. `run` is None for `manifest.json` and unknown files."""

    kind: str  # manifest | superseded | part | data | other
    run: str | None = None


def classify(name: str) -> FileKind:
    """Reads the name of a file within a step's folder."""
    if name == MANIFEST:
        return FileKind(kind="manifest")
    for kind, pattern, group in (("superseded", _SUPERSEDED, 1), ("part", _PART, 2), ("data", _DATA, 4)):
        if (match := pattern.fullmatch(name)) and is_run(match.group(group)):
            return FileKind(kind=kind, run=match.group(group))
    return FileKind(kind="other")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """What a data file's path, relative to the job's folder, says of it."""

    step: int
    run: str
    name: str
    rank: int
    world_size: int


def parse_data_path(path: str) -> DataName | None:
    """Reads `data_path`'s result, or None when the path is not one."""
    folder, _, file = path.partition("/")
    step, match = parse_step_folder(folder), _DATA.fullmatch(file)
    if step is None or match is None:
        return None
    name, rank, world_size, run = match.groups()
    return DataName(step=step, run=run, name=name, rank=int(rank), world_size=int(world_size))


def is_readable_path(path: str) -> bool:
    """Whether the path, relative to the job's folder, names a file of a step: what a rank may ask the agent for."""
    folder, _, file = path.partition("/")
    return parse_step_folder(folder) is not None and classify(file).kind in ("manifest", "part", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One rank's file: its name in the step's folder, size, and a checksum for each chunk of `chunk_bytes`."""

    path: str  # relative to the job's folder
    name: str
    rank: int
    size_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]  # xxh3-128, hexadecimal

    def to_document(self) -> dict[str, object]:
        return {
            "path": self.path, "name": self.name, "rank": self.rank, "sizeBytes": self.size_bytes,
            "chunkBytes": self.chunk_bytes, "checksum": CHECKSUM, "checksums": list(self.checksums),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One node's persisted share of a step. Times are seconds since the epoch."""

    step: int
    run: str
    node: int
    world_size: int
    ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]
    saved_time: float  # when the last rank of this node had staged it
    persisted_time: float
    replicated: str = ""  # digest of the replicated state's layout; equal on all ranks of a run
    tag: str = ""  # what its user calls the step; equal in all parts
    refers: tuple[int, ...] = ()  # older steps of the run whose files hold what these leave out, ascending

    @property
    def path(self) -> str:
        return part_path(self.step, self.run, self.node)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        return _seal(
            {
                "formatVersion": FORMAT_VERSION, "step": self.step, "run": self.run, "node": self.node,
                "worldSize": self.world_size, "ranks": list(self.ranks), "savedTime": self.saved_time,
                "persistedTime": self.persisted_time, "replicated": self.replicated,
                "files": [file.to_document() for file in self.files], **_tagged(self.tag), **_referring(self.refers),
            }
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """How a manifest names a part: path, size and SHA-256 of the record itself, the ranks and bytes it covers."""

    path: str
    record_bytes: int
    sha256: str
    node: int
    ranks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed step."""

    step: int
    run: str
    world_size: int
    saved_time: float
    committed_time: float  # when its last part was persisted: the same for every writer
    parts: tuple[PartRef, ...] = field(default=())
    tag: str = ""
    refers: tuple[int, ...] = ()  # what any of its parts refers to

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        return _seal(
            {
                "formatVersion": FORMAT_VERSION, "step": self.step, "run": self.run, "worldSize": self.world_size,
                "savedTime": self.saved_time, "committedTime": self.committed_time, "sizeBytes": self.size_bytes,
                "parts": [
                    {
                        "path": part.path, "recordBytes": part.record_bytes, "sha256": part.sha256,
                        "node": part.node, "ranks": list(part.ranks), "sizeBytes": part.size_bytes,
                    }
                    for part in self.parts
                ],
                **_tagged(self.tag),
                **_referring(self.refers),
            }
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSeen:
    """What a manifest needs of a part: without its files' checksums, of which a large gang has millions."""

    ref: PartRef
    step: int
    run: str
    world_size: int
    saved_time: float
    persisted_time: float
    replicated: str
    tag: str
    refers: tuple[int, ...]


def named_ranks(ranks: Iterable[int], sharers: str, world_size: int) -> tuple[int, ...]:
    """The ranks that a part with files of these names: of a step that some ranks of the gang alone share in (`ranks`),
    the part of the first of them speaks for all that have nothing in it, so that a manifest names every rank.
    """
    own = set(ranks)
    if sharers != EVERY_RANK and (share := RankSet.parse(sharers, world_size)).first in own:
        own |= set(range(world_size)).difference(share)
    return tuple(sorted(own))


def see_part(part: Part, record: bytes) -> PartSeen:
    """The part that was read from that record."""
    return PartSeen(
        ref=PartRef(
            path=part.path,
            record_bytes=len(record),
            sha256=hashlib.sha256(record).hexdigest(),
            node=part.node,
            ranks=part.ranks,
            size_bytes=part.size_bytes,
        ),
        step=part.step,
        run=part.run,
        world_size=part.world_size,
        saved_time=part.saved_time,
        persisted_time=part.persisted_time,
        replicated=part.replicated,
        tag=part.tag,
        refers=part.refers,
    )


def manifest_of(parts: Iterable[Part]) -> Manifest | None:
    """`manifest_of_seen` for parts that are at hand."""
    return manifest_of_seen(see_part(part, part.to_bytes()) for part in parts)


def manifest_of_seen(parts: Iterable[PartSeen]) -> Manifest | None:
    """The commit rule: the manifest of these parts, or None while they do not cover all ranks.

    All parts must be of one (step, run); where two parts claim a rank (a rank that moved between nodes within a
    run), nothing is committed. Raises RecordInvalid when they contradict each other.
    """
    ordered = sorted(parts, key=lambda part: part.ref.node)
    if not ordered:
        return None
    first = ordered[0]
    for part in ordered[1:]:
        if (part.step, part.run, part.world_size) != (first.step, first.run, first.world_size):
            raise RecordInvalid(f"{part.ref.path} and {first.ref.path} are not of one step, run and world size")
        if part.replicated != first.replicated:
            raise RecordInvalid(f"{part.ref.path} and {first.ref.path} divide the replicated state differently")
        if part.tag != first.tag:
            raise RecordInvalid(f"{part.ref.path} and {first.ref.path} are of steps with different tags")
    ranks = sorted(rank for part in ordered for rank in part.ref.ranks)
    if ranks != list(range(first.world_size)):
        return None
    return Manifest(
        step=first.step,
        run=first.run,
        world_size=first.world_size,
        saved_time=max(part.saved_time for part in ordered),
        committed_time=max(part.persisted_time for part in ordered),
        parts=tuple(part.ref for part in ordered),
        tag=first.tag,
        refers=tuple(sorted({step for part in ordered for step in part.refers})),
    )


def parse_part(data: bytes) -> Part:
    """Reads a part record; every value is checked. Raises RecordInvalid."""
    doc = _unseal(data)
    files = tuple(_parse_file(entry) for entry in doc.items_of("files"))
    part = Part(
        step=doc.integer("step", 0, MAX_STEP),
        run=doc.run("run"),
        node=doc.integer("node", 0, MAX_WORLD_SIZE),
        world_size=doc.integer("worldSize", 1, MAX_WORLD_SIZE),
        ranks=doc.ranks("ranks"),
        files=files,
        saved_time=doc.number("savedTime"),
        persisted_time=doc.number("persistedTime"),
        replicated=doc.text("replicated"),
        tag=doc.tag(),
        refers=doc.refers(),
    )
    for file in files:
        expected = data_path(part.step, part.run, file.name, file.rank, part.world_size)
        if file.rank not in part.ranks or file.path != expected:
            raise RecordInvalid(f"the part names {file.path!r}, which is not a file of its own ranks")
    return part


def parse_manifest(data: bytes) -> Manifest:
    """Reads a manifest; every value is checked. Raises RecordInvalid."""
    doc = _unseal(data)
    manifest = Manifest(
        step=doc.integer("step", 0, MAX_STEP),
        run=doc.run("run"),
        world_size=doc.integer("worldSize", 1, MAX_WORLD_SIZE),
        saved_time=doc.number("savedTime"),
        committed_time=doc.number("committedTime"),
        parts=tuple(
            PartRef(
                path=ref.text("path"),
                record_bytes=ref.integer("recordBytes", 1, 2**40),
                sha256=ref.text("sha256"),
                node=ref.integer("node", 0, MAX_WORLD_SIZE),
                ranks=ref.ranks("ranks"),
                size_bytes=ref.integer("sizeBytes", 0, 2**62),
            )
            for ref in doc.items_of("parts")
        ),
        tag=doc.tag(),
        refers=doc.refers(),
    )
    if sorted(rank for part in manifest.parts for rank in part.ranks) != list(range(manifest.world_size)):
        raise RecordInvalid("the manifest does not name every rank once")
    for part in manifest.parts:
        if part.path != part_path(manifest.step, manifest.run, part.node):
            raise RecordInvalid(f"the manifest names {part.path!r}, which is no part of its step and run")
    return manifest


def check_manifest(data: bytes, step: int) -> Manifest:
    """The manifest that stands in that step's folder. Raises RecordInvalid, also when it is another step's."""
    manifest = parse_manifest(data)
    if manifest.step != step:
        raise RecordInvalid(f"it is the manifest of step {manifest.step}")
    return manifest


def check_part(ref: PartRef, record: bytes) -> Part:
    """The part that a manifest names, after checking the record against it. Raises RecordInvalid."""
    if len(record) != ref.record_bytes or hashlib.sha256(record).hexdigest() != ref.sha256:
        raise RecordInvalid(f"{ref.path} is not the record that the manifest names (SHA-256 differs)")
    return parse_part(record)


def parse_file_entry(document: Mapping[str, object]) -> FileEntry:
    """Reads `FileEntry.to_document`'s result; every value is checked. Raises RecordInvalid."""
    return _parse_file(_Document(document))


def _parse_file(doc: _Document) -> FileEntry:
    chunk_bytes = doc.integer("chunkBytes", 1, 2**40)
    size = doc.integer("sizeBytes", 0, 2**62)
    name = doc.text("name")
    if not is_file_name(name):
        raise RecordInvalid(f"{name!r} cannot be a file's name")
    checksums = doc.texts("checksums")
    if doc.text("checksum") != CHECKSUM or len(checksums) != -(-size // chunk_bytes):
        raise RecordInvalid(f"the checksums of {name!r} do not fit its size")
    return FileEntry(
        path=doc.text("path"),
        name=name,
        rank=doc.integer("rank", 0, MAX_WORLD_SIZE),
        size_bytes=size,
        chunk_bytes=chunk_bytes,
        checksums=tuple(checksums),
    )


def _tagged(tag: str) -> dict[str, object]:
    return {"tag": tag} if tag else {}


def _referring(refers: Sequence[int]) -> dict[str, object]:
    return {"refers": list(refers)} if refers else {}


def _seal(document: dict[str, object]) -> bytes:
    """Canonical JSON that carries the SHA-256 of itself without that field."""
    body = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _unseal(data: bytes) -> _Document:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RecordInvalid("not a JSON object")
    seal = document.pop("sha256", None)
    body = json.dumps(document, sort_keys=True, separators=(",", ":"))
    if seal != hashlib.sha256(body.encode()).hexdigest():
        raise RecordInvalid("its own SHA-256 does not fit: it was changed or cut short")
    if document.get("formatVersion") != FORMAT_VERSION:
        raise RecordInvalid(f"format version {document.get('formatVersion')!r} is not {FORMAT_VERSION}")
    return _Document(document)


class _Document:
    """A JSON object whose values are read with their types checked."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def integer(self, key: str, low: int, high: int) -> int:
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RecordInvalid(f"{key} is {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**63:
            raise RecordInvalid(f"{key} is {value!r:.80}")
        return float(value)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise RecordInvalid(f"{key} is {value!r}")
        return value

    def run(self, key: str) -> str:
        value = self.text(key)
        if not is_run(value):
            raise RecordInvalid(f"{value!r} cannot be a run")
        return value

    def tag(self) -> str:
        value = self._values.get("tag", "")
        if not isinstance(value, str) or (value and not is_tag(value)):
            raise RecordInvalid(f"{value!r} cannot be a tag")
        return value

    def refers(self) -> tuple[int, ...]:
        """Ascending, and all of them older than the step itself: what refers to each other cannot be read."""
        values = self._list("refers") if "refers" in self._values else []
        steps = [value for value in values if type(value) is int and 0 <= value < self.integer("step", 0, MAX_STEP)]
        if len(steps) != len(values) or sorted(set(steps)) != steps:
            raise RecordInvalid("refers is not a list of older steps in order")
        return tuple(steps)

    def _list(self, key: str) -> Sequence[object]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise RecordInvalid(f"{key} is not a list")
        return value

    def texts(self, key: str) -> list[str]:
        values = self._list(key)
        if not all(isinstance(value, str) for value in values):
            raise RecordInvalid(f"{key} is not a list of strings")
        return [str(value) for value in values]

    def ranks(self, key: str) -> tuple[int, ...]:
        values = self._list(key)
        ranks = [value for value in values if type(value) is int and 0 <= value < MAX_WORLD_SIZE]
        if len(ranks) != len(values) or sorted(set(ranks)) != ranks:
            raise RecordInvalid(f"{key} is not a list of ranks in order")
        return tuple(ranks)

    def items_of(self, key: str) -> list[_Document]:
        values = self._list(key)
        documents = [_Document(value) for value in values if isinstance(value, dict)]
        if len(documents) != len(values):
            raise RecordInvalid(f"{key} is not a list of objects")
        return documents
