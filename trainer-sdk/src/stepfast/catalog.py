"""What a job's folder holds: its committed steps, their parts and files, and whether the bytes are still those saved.

Reads the storage; changes it only to roll back (`supersede_after`), to leave out what is damaged (`set_aside`) and to
undo either (`reinstate`), to keep no more than is wanted (`retain`), and to remove a step (`remove_step`,
`remove_committed`, `remove_superseded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepfast.checksum import checksum
from stepfast.commit import read_manifest
from stepfast.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ObjectNotFound
from stepfast.layout import (
    FileEntry,
    Manifest,
    Part,
    RecordInvalid,
    check_manifest,
    check_part,
    classify,
    join,
    manifest_path,
    parse_step_folder,
    step_folder,
    superseded_path,
)
from stepfast.retention import abandoned, leftovers, steps_to_remove
from stepfast.storage.base import Store
from stepfast.tensorfile import Header, HeaderInvalid, header_bytes, parse_header


class StepCommitted(CheckpointError):
    """A superseded step cannot be brought back: a committed one stands in its place. Remove that first."""


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
    return manifest, open_parts(store, folder, manifest)


def open_parts(store: Store, folder: str, manifest: Manifest) -> Sequence[Part]:
    """The parts that a manifest names, each checked. Raises CheckpointDamaged."""
    parts = []
    for ref in manifest.parts:
        try:
            parts.append(check_part(ref, store.read(join(folder, ref.path))))
        except (RecordInvalid, ObjectNotFound) as error:
            raise _damaged(store, folder, ref.path, manifest.step, str(error)) from error
    return parts


def verify_step(store: Store, folder: str, step: int) -> Iterator[FileEntry]:
    """Reads every byte of the step against its checksums; yields each file that is whole. Raises CheckpointDamaged."""
    _, parts = open_step(store, folder, step)
    for file in (file for part in parts for file in part.files):
        for _ in read_file(store, folder, file, step):
            pass
        yield file


def read_file(store: Store, folder: str, file: FileEntry, step: int) -> Iterator[memoryview]:
    """A file's bytes, chunk by chunk, each checked; a chunk is valid until the next. Raises CheckpointDamaged."""
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
        yield chunk
    try:
        store.read_range(join(folder, file.path), file.size_bytes, memoryview(bytearray(1)))
    except ObjectNotFound:
        return  # it ends where it should
    raise _damaged(store, folder, file.path, step, f"longer than the {file.size_bytes} bytes that were saved")


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
    return [later for later in _steps(store, folder) if later > step and _supersede(store, folder, later, but_of_run)]


def set_aside(store: Store, folder: str, step: int) -> bool:
    """Marks this step alone superseded, whosever it is, as `supersede_after` does; whether it was committed.

    For a step that turned out to be damaged: newer ones and older ones are what they were.
    """
    return _supersede(store, folder, step, but_of_run=None)


def superseded_steps(store: Store, folder: str) -> list[CommittedStep]:
    """What was committed once and rolled back since, by step and run; a record that is damaged is listed as such.

    `run` is the one in the record's name: what `reinstate` and `remove_superseded` take. A step that is still (or
    again) committed by that run is not superseded: whoever marked it was killed before the manifest went.
    """
    found = []
    for step in _steps(store, folder):
        runs = _superseded_runs(store, folder, step)
        committed = _committed_run(store, folder, step) if runs else None
        found += [_superseded_step(store, folder, step, run) for run in runs if run != committed]
    return found


def reinstate(store: Store, folder: str, step: int, run: str) -> Manifest:
    """Makes a superseded step committed again, after every byte of it was found right.

    The manifest is created only where there is none, so a commit at the same moment wins; the mark goes last, so that
    a kill in between leaves a committed step, and the next call finishes the work. Raises CheckpointNotFound when the
    step is not superseded, StepCommitted when another run's step stands in its place, CheckpointDamaged.
    """
    mark = superseded_path(step, run)
    try:
        data = store.read(join(folder, mark))
    except ObjectNotFound as error:
        raise CheckpointNotFound(f"step {step} of run {run} is not superseded in {store.uri}/{folder}") from error
    try:
        manifest = check_manifest(data, step)
        if manifest.run != run:
            raise RecordInvalid(f"it is the manifest of run {manifest.run}")
    except RecordInvalid as error:
        raise _damaged(store, folder, mark, step, str(error)) from error
    for file in (file for part in open_parts(store, folder, manifest) for file in part.files):
        for _ in read_file(store, folder, file, step):
            pass
    path = join(folder, manifest_path(step))
    if not store.create(path, data) and store.read(path) != data:
        raise StepCommitted(f"step {step} is committed in {store.uri}/{folder}, by another run than {run}")
    store.delete(join(folder, mark))
    return manifest


def remove_committed(store: Store, folder: str, step: int) -> None:
    """Removes a committed step, and nothing of what is superseded in the same folder."""
    superseded = set(_superseded_runs(store, folder, step))
    committed = _committed_run(store, folder, step)
    if not superseded - {committed}:
        remove_step(store, folder, step)
        return
    if committed in superseded:  # else the step would come to light again as superseded
        store.delete(join(folder, superseded_path(step, committed)))
    store.delete(join(folder, manifest_path(step)))
    for name, run in _files_of_runs(store, folder, step):
        if run not in superseded or run == committed:
            store.delete(join(folder, f"{step_folder(step)}/{name}"))


def remove_superseded(store: Store, folder: str, step: int, run: str) -> None:
    """Removes what was superseded of a step: first the record, then the files, but for those of a committed step.

    Where the record is damaged nobody knows whose the files are: they are left for `retain` to sweep.
    """
    store.delete(join(folder, superseded_path(step, run)))
    if run == _committed_run(store, folder, step):
        return
    for name, of in _files_of_runs(store, folder, step):
        if of == run:
            store.delete(join(folder, f"{step_folder(step)}/{name}"))


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


def _supersede(store: Store, folder: str, step: int, but_of_run: str | None) -> bool:
    """Whether the step was committed, by another run."""
    try:
        data = store.read(join(folder, manifest_path(step)))
    except ObjectNotFound:
        return False
    try:
        run = check_manifest(data, step).run
    except RecordInvalid:
        run = "damaged"
    if run == but_of_run:
        return False
    store.create(join(folder, superseded_path(step, run)), data)
    store.delete(join(folder, manifest_path(step)))
    return True


def _superseded_step(store: Store, folder: str, step: int, run: str) -> CommittedStep:
    mark = superseded_path(step, run)
    try:
        manifest = check_manifest(store.read(join(folder, mark)), step)
    except (RecordInvalid, ObjectNotFound) as error:
        return CommittedStep(step=step, run=run, damage=f"{mark}: {error}")
    return CommittedStep(
        step=step, run=run, world_size=manifest.world_size, size_bytes=manifest.size_bytes,
        saved_time=manifest.saved_time, committed_time=manifest.committed_time,
    )  # fmt: skip


def _superseded_runs(store: Store, folder: str, step: int) -> list[str]:
    kinds = [classify(entry.name) for entry in store.list(join(folder, step_folder(step)))]
    return [kind.run for kind in kinds if kind.kind == "superseded" and kind.run is not None]


def _committed_run(store: Store, folder: str, step: int) -> str | None:
    """The run of the step's manifest; None without one, or when it is damaged."""
    try:
        manifest = read_manifest(store, folder, step)
    except RecordInvalid:
        return None
    return manifest.run if manifest is not None else None


def _files_of_runs(store: Store, folder: str, step: int) -> list[tuple[str, str]]:
    """The names of the step's parts and data files, with their runs. Parts come first: they name the data."""
    kinds = [(entry.name, classify(entry.name)) for entry in store.list(join(folder, step_folder(step)))]
    files = [(name, kind) for name, kind in kinds if kind.kind in ("part", "data")]
    return [(name, str(kind.run)) for name, kind in sorted(files, key=lambda file: file[1].kind != "part")]


def _steps(store: Store, folder: str) -> list[int]:
    steps = [parse_step_folder(entry.name) for entry in store.list(folder) if entry.is_folder]
    return sorted(step for step in steps if step is not None)


def _damaged(store: Store, folder: str, path: str, step: int, reason: str) -> CheckpointDamaged:
    return CheckpointDamaged(join(folder, path), step, reason, older_step(store, folder, step))
