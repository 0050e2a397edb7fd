"""What a job's folder holds: its committed steps, their parts and files, and whether the bytes are still those saved.

Reads the storage; changes it only to roll back (`supersede_after`), to keep no more than is wanted (`retain`), and to
remove a step (`remove_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepfast.checksum import checksum
from stepfast.commit import read_manifest
from stepfast.errors import CheckpointDamaged, CheckpointNotFound, ObjectNotFound
from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_part,
    join,
    manifest_path,
    parse_step_folder,
    step_folder,
    superseded_path,
)
from stepfast.retention import abandoned, leftovers, steps_to_remove
from stepfast.storage.base import Store
from stepfast.tensorfile import Header, HeaderInvalid, header_bytes, parse_header


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step whose manifest is there. Times are seconds since the epoch; `damage` says why the manifest is unusable."""

    step: int
    run: str = ""
    world_size: int = 0
    size_bytes: int = 0
    saved_time: float = 0.0
    committed_time: float = 0.0
    damage: str | None = None


def committed_steps(store: Store, folder: str) -> list[CommittedStep]:
    """All committed steps of the job, newest last; a step with a damaged manifest is listed, with the damage."""
    found = []
    for step in _steps(store, folder):
        try:
            manifest = read_manifest(store, folder, step)
        except RecordInvalid as error:
            found.append(CommittedStep(step=step, damage=f"{manifest_path(step)}: {error}"))
            continue
        if manifest is not None:
            found.append(
                CommittedStep(
                    step=step,
                    run=manifest.run,
                    world_size=manifest.world_size,
                    size_bytes=manifest.size_bytes,
                    saved_time=manifest.saved_time,
                    committed_time=manifest.committed_time,
                )
            )
    return found


def latest_step(store: Store, folder: str) -> int | None:
    """The highest committed step whose manifest is whole, or None."""
    for step in reversed(_steps(store, folder)):
        try:
            if read_manifest(store, folder, step) is not None:
                return step
        except RecordInvalid:
            continue
    return None


def older_step(store: Store, folder: str, step: int) -> int | None:
    """The highest whole committed step below this one, or None."""
    older = [found.step for found in committed_steps(store, folder) if found.step < step and found.damage is None]
    return older[-1] if older else None


def open_step(store: Store, folder: str, step: int) -> tuple[Manifest, Sequence[Part]]:
    """A committed step's manifest and parts, each checked. Raises CheckpointNotFound, CheckpointDamaged."""
    try:
        manifest = read_manifest(store, folder, step)
    except RecordInvalid as error:
        raise _damaged(store, folder, manifest_path(step), step, str(error)) from error
    if manifest is None:
        raise CheckpointNotFound(f"step {step} is not committed in {store.uri}/{folder}")
    parts = []
    for ref in manifest.parts:
        try:
            parts.append(check_part(ref, store.read(join(folder, ref.path))))
        except (RecordInvalid, ObjectNotFound) as error:
            raise _damaged(store, folder, ref.path, step, str(error)) from error
    return manifest, parts


def verify_step(store: Store, folder: str, step: int) -> Iterator[FileEntry]:
    """Reads every byte of the step against its checksums; yields each file that is whole. Raises CheckpointDamaged."""
    _, parts = open_step(store, folder, step)
    for part in parts:
        for file in part.files:
            buffer = memoryview(bytearray(min(file.chunk_bytes, file.size_bytes)))
            for index, expected in enumerate(file.checksums):
                begin = index * file.chunk_bytes
                chunk = buffer[: min(file.chunk_bytes, file.size_bytes - begin)]
                try:
                    store.read_range(join(folder, file.path), begin, chunk)
                except ObjectNotFound as error:
                    raise _damaged(store, folder, file.path, step, f"missing or cut short ({error})") from error
                if checksum(chunk) != expected:
                    reason = f"bytes {begin} to {begin + len(chunk)} are not those that were saved"
                    raise _damaged(store, folder, file.path, step, reason)
            yield file


def read_header(store: Store, folder: str, file: FileEntry, step: int) -> Header:
    """A data file's header, unverified but for its own shape. Raises CheckpointDamaged."""
    path = join(folder, file.path)
    try:
        first = bytearray(8)
        store.read_range(path, 0, memoryview(first))
        data = bytearray(min(header_bytes(bytes(first)), file.size_bytes))
        store.read_range(path, 0, memoryview(data))
        return parse_header(bytes(data))
    except (HeaderInvalid, ObjectNotFound) as error:
        raise _damaged(store, folder, file.path, step, str(error)) from error


def supersede_after(store: Store, folder: str, step: int, *, but_of_run: str | None = None) -> list[int]:
    """Rolls back: marks every committed step above this one superseded, keeping its bytes; returns those steps.

    Steps of `but_of_run`, which goes on, stay.
    The mark is written before the manifest goes, so that a kill in between leaves a step that is still committed, and
    the next call finishes the work.
    """
    rolled_back = []
    for later in _steps(store, folder):
        if later <= step:
            continue
        try:
            data = store.read(join(folder, manifest_path(later)))
        except ObjectNotFound:
            continue
        try:
            manifest = read_manifest(store, folder, later)
            run = manifest.run if manifest is not None else "unknown"
        except RecordInvalid:
            run = "damaged"
        if run == but_of_run:
            continue
        store.create(join(folder, superseded_path(later, run)), data)
        store.delete(join(folder, manifest_path(later)))
        rolled_back.append(later)
    return rolled_back


def retain(store: Store, folder: str, *, run: str, max_to_keep: int, protected: Sequence[int]) -> list[int]:
    """Removes steps beyond `max_to_keep` and what earlier attempts left unfinished; returns the removed steps.

    Called after a commit of `run`, by its leader alone. Raises StorageError.
    """
    found = committed_steps(store, folder)
    # A step that cannot be restored must not push one out that can.
    whole = [step.step for step in found if step.damage is None]
    removed = steps_to_remove(whole, max_to_keep=max_to_keep, protected=protected)
    for step in removed:
        remove_step(store, folder, step)
    kept = {step.step for step in found} - set(removed)
    newest = max(kept, default=0)
    unfinished, temporary = {}, {}
    for step in _steps(store, folder):
        if step < newest and step not in removed:
            temporary[step] = store.list_temporary(join(folder, step_folder(step)))
            if step not in kept:
                unfinished[step] = [file.name for file in store.list(join(folder, step_folder(step)))]
    swept = leftovers(unfinished, newest_committed=newest, run=run)
    swept += abandoned(temporary, committed=kept, run=run)
    # A folder is never removed here, however empty it looks: a step may be on its way into it.
    for step, name in swept:
        store.delete(join(folder, join(step_folder(step), name)))
    return removed


def remove_step(store: Store, folder: str, step: int) -> None:
    """Removes a step: first its manifest, so that a kill in between leaves no step that looks committed."""
    store.delete(join(folder, manifest_path(step)))
    store.delete_folder(join(folder, step_folder(step)))


def _steps(store: Store, folder: str) -> list[int]:
    steps = [parse_step_folder(entry.name) for entry in store.list(folder) if entry.is_folder]
    return sorted(step for step in steps if step is not None)


def _damaged(store: Store, folder: str, path: str, step: int, reason: str) -> CheckpointDamaged:
    return CheckpointDamaged(join(folder, path), step, reason, older_step(store, folder, step))
