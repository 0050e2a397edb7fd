"""From bytes to a committed step: upload a file with its checksums, write a node's part, write the manifest.

The same code serves the agent's persister and an SDK without an agent. What may happen in which order is I1 and I2
(`layout`): files, then the part that names them, then the manifest that names the parts; each whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future, wait

from stepfast.checksum import checksum
from stepfast.errors import ObjectNotFound, ReferenceMissing
from stepfast.layout import (
    CHUNK_BYTES,
    FileEntry,
    Manifest,
    Part,
    PartSeen,
    RecordInvalid,
    check_manifest,
    classify,
    join,
    manifest_of_seen,
    manifest_path,
    parse_data_path,
    parse_part,
    see_part,
    step_folder,
)
from stepfast.storage.base import Store, Upload


class FileUpload:
    """One rank's file on its way to the storage, chunk by chunk, in any order, checksummed on the way.

    `put` takes a run of bytes that begins on a chunk boundary; it returns when they are stored. After the last one,
    `finish` makes the file visible and returns its entry for the part record.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        path: str,
        *,
        name: str,
        rank: int,
        size_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._upload: Upload = store.upload(join(folder, path), size_bytes, chunk_bytes=chunk_bytes)
        self._path, self._name, self._rank, self._size = path, name, rank, size_bytes
        self.chunk_bytes = self._upload.chunk_bytes
        self._checksums: list[str | None] = [None] * -(-size_bytes // self.chunk_bytes)

    def put(self, begin: int, data: memoryview, executor: Executor | None = None) -> None:
        """Stores the bytes; with an executor its threads share the chunks. Raises StorageError."""
        if begin % self.chunk_bytes:
            raise ValueError(f"offset {begin} is not on a chunk boundary")
        chunks = range(0, len(data), self.chunk_bytes)
        if executor is None or len(chunks) == 1:
            for offset in chunks:
                self._put_chunk(begin + offset, data[offset : offset + self.chunk_bytes])
            return
        jobs: list[Future[None]] = [
            executor.submit(self._put_chunk, begin + offset, data[offset : offset + self.chunk_bytes])
            for offset in chunks
        ]
        wait(jobs)
        for job in jobs:
            job.result()

    def _put_chunk(self, offset: int, chunk: memoryview) -> None:
        digest = checksum(chunk)
        self._upload.put(offset, chunk)
        self._checksums[offset // self.chunk_bytes] = digest

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was put."""
        return None not in self._checksums

    def finish(self) -> FileEntry:
        """Makes the file visible, durably. Raises StorageError."""
        checksums = [digest for digest in self._checksums if digest is not None]
        if len(checksums) != len(self._checksums):
            raise ValueError(f"{self._path}: not every chunk was put")
        self._upload.finish()
        return FileEntry(
            path=self._path,
            name=self._name,
            rank=self._rank,
            size_bytes=self._size,
            chunk_bytes=self.chunk_bytes,
            checksums=tuple(checksums),
        )

    def abort(self) -> None:
        """Forgets what was put."""
        self._upload.abort()


def write_part(store: Store, folder: str, part: Part) -> PartSeen | None:
    """Makes the part record exist. A part that is already there stays (None): its files are whole and named by it."""
    record = part.to_bytes()
    return see_part(part, record) if store.create(join(folder, part.path), record) else None


def read_manifest(store: Store, folder: str, step: int) -> Manifest | None:
    """The step's manifest, or None when the step does not exist. Raises RecordInvalid when it is damaged."""
    try:
        return check_manifest(store.read(join(folder, manifest_path(step))), step)
    except ObjectNotFound:
        return None


class StepParts:
    """The part records of one (step, run) as they come: each is read once, since it never changes.

    What is kept of them is what a manifest needs. Not to be used by two threads at once.
    """

    def __init__(self, store: Store, folder: str, step: int, run: str) -> None:
        self._store, self._folder, self._step, self._run = store, folder, step, run
        self._seen: dict[str, PartSeen] = {}

    def note(self, part: PartSeen) -> None:
        """A part that was written here need not be looked for."""
        self._seen[part.ref.path.rpartition("/")[2]] = part

    @property
    def are_complete(self) -> bool:
        """Whether what was seen names every rank."""
        seen = self._seen.values()
        named = {rank for part in seen for rank in part.ref.ranks}
        return bool(seen) and len(named) == next(iter(seen)).world_size

    def look(self, *, is_eager: bool = True, executor: Executor | None = None) -> Collection[PartSeen]:
        """Lists the step's folder and reads the parts that are new, with an executor several at once.

        Unless eager, nothing is read while a rank's file is missing: then no part names it, and the step is not whole.
        Raises StorageError, RecordInvalid.
        """
        if self.are_complete:
            return self._seen.values()
        names = {entry.name for entry in self._store.list(join(self._folder, step_folder(self._step)))}
        # What a later attempt made room with is no part of the step any more.
        self._seen = {name: part for name, part in self._seen.items() if name in names}
        kinds = [(name, classify(name)) for name in sorted(names)]
        mine = [(name, kind.kind) for name, kind in kinds if kind.run == self._run]
        if not is_eager and self._lacks_a_file([name for name, kind in mine if kind == "data"]):
            return self._seen.values()
        new = [name for name, kind in mine if kind == "part" and name not in self._seen]
        found = map(self._read, new) if executor is None else executor.map(self._read, new)
        self._seen.update(zip(new, found, strict=True))
        return self._seen.values()

    def _lacks_a_file(self, names: Sequence[str]) -> bool:
        parsed = [parse_data_path(f"{step_folder(self._step)}/{name}") for name in names]
        files = [file for file in parsed if file is not None]
        return bool(files) and len({file.rank for file in files}) < files[0].world_size

    def _read(self, name: str) -> PartSeen:
        record = self._store.read(join(self._folder, f"{step_folder(self._step)}/{name}"))
        return see_part(parse_part(record), record)


def missing_references(store: Store, folder: str, manifest: Manifest) -> tuple[int, ...]:
    """Of the steps that it refers to, those that are not committed by its run, or whose manifest is damaged.

    Raises StorageError.
    """
    missing = []
    for step in manifest.refers:
        try:
            found = read_manifest(store, folder, step)
        except RecordInvalid:
            found = None
        if found is None or found.run != manifest.run:
            missing.append(step)
    return tuple(missing)


def try_commit(
    store: Store,
    folder: str,
    step: int,
    run: str,
    parts: StepParts | None = None,
    *,
    is_eager: bool = True,
    executor: Executor | None = None,
) -> Manifest | None:
    """Writes the manifest if the parts of (step, run) cover all ranks; returns the step's manifest, or None.

    A manifest that is already there wins, whichever run wrote it: a committed step is never replaced. `parts`: what was
    seen of them before; `is_eager` and `executor`: see `StepParts.look`.
    Raises StorageError, ReferenceMissing when a step that it refers to is not committed, and RecordInvalid for a
    damaged record.
    """
    parts = parts or StepParts(store, folder, step, run)
    # With all parts at hand there is nothing to ask first: a manifest that is there is not written over.
    if not parts.are_complete and (existing := read_manifest(store, folder, step)) is not None:
        return existing
    manifest = manifest_of_seen(parts.look(is_eager=is_eager, executor=executor))
    if manifest is None:
        return None
    missing = missing_references(store, folder, manifest)
    if missing:
        existing = read_manifest(store, folder, step)
        if existing is not None:
            return existing
        gone = ", ".join(map(str, missing))
        raise ReferenceMissing(
            f"step {step} refers to step {gone}, which is not committed by its run {run} (any more): it could not be "
            "restored, and is not committed",
            missing,
        )
    if store.create(join(folder, manifest_path(step)), manifest.to_bytes()):
        return manifest
    existing = read_manifest(store, folder, step)
    if existing is None:
        raise RecordInvalid(f"step {step}: its manifest was there and is gone")
    return existing
