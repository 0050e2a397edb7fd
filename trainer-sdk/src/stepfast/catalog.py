"""What a job's folder holds: its committed steps, their parts and files, and whether the bytes are still those saved.

Reads the storage; changes it only to roll back (`supersede_after`), to leave out what is damaged (`set_aside`) and to
undo either (`reinstate`), to keep no more than is wanted (`retain`), and to remove a step (`remove_step`,
`remove_committed`, `remove_superseded`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stepfast.checksum import checksum
from stepfast.commit import missing_references, read_manifest
from stepfast.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ObjectNotFound, ReferenceMissing
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
from stepfast.references import Reference, from_metadata, referred_file
from stepfast.retention import abandoned, leftovers, steps_to_remove
from stepfast.storage.base import Store
from stepfast.tensorfile import Header, HeaderInvalid, header_bytes, parse_header
from stepfast.withdrawal import remove_withdrawn, withdraw


class StepReferred(CheckpointError):
    """A step cannot be removed: committed ones refer to it. Remove those first, or with it."""


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
    refers: tuple[int, ...] = ()  # older steps whose files hold what its own leave out, which its size does not count
    damage: str | None = None


def committed_steps(store: Store, folder: str) -> list[CommittedStep]:
    """All committed steps of the job, newest last; a step with a damaged manifest is listed, with the damage, and so is
    one that refers to a step that is not committed.
    """
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
                    refers=manifest.refers,
                )
            )
    runs = {step.step: step.run for step in found if step.damage is None}
    return [_with_lost_references(step, runs) for step in found]


def _with_lost_references(step: CommittedStep, runs: Mapping[int, str]) -> CommittedStep:
    lost = [other for other in step.refers if runs.get(other) != step.run]
    if not lost:
        return step
    numbers = ", ".join(map(str, lost))
    return replace(step, damage=f"{manifest_path(step.step)}: it refers to step {numbers}, not committed by its run")


def latest_step(store: Store, folder: str) -> int | None:
    """The highest committed step whose manifest is whole, as are those of the steps that it refers to, or None."""
    for step in reversed(_steps(store, folder)):
        try:
            manifest = read_manifest(store, folder, step)
            if manifest is not None and not missing_references(store, folder, manifest):
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


def verify_step(store: Store, folder: str, step: int, *, but: Collection[str] = ()) -> Iterator[FileEntry]:
    """Reads every byte of the step against its checksums, and all of the older steps' files that it refers to but for
    those that are whole already (`but`, by path); yields each file that is whole. Raises CheckpointDamaged.
    """
    manifest, parts = open_step(store, folder, step)
    yield from _verified(store, folder, manifest, parts, but)


def _verified(
    store: Store, folder: str, manifest: Manifest, parts: Sequence[Part], but: Collection[str]
) -> Iterator[FileEntry]:
    seen = set(but)
    for file in (file for part in parts for file in part.files):
        for _ in read_file(store, folder, file, manifest.step):
            pass
        yield file
        for other in check_references(store, folder, manifest, file):
            if other.path in seen:
                continue
            seen.add(other.path)
            for _ in read_file(store, folder, other, manifest.step):
                pass
            yield other


def check_references(store: Store, folder: str, manifest: Manifest, file: FileEntry) -> list[FileEntry]:
    """The older steps' files that a file of the step leaves tensors to, once they are found to have them.

    Their bytes are not read. Raises CheckpointDamaged.
    """
    if not manifest.refers:
        return []
    step, found = manifest.step, []
    references = read_references(store, folder, file, step)
    for path in sorted({reference.path for reference in references.values()}):
        try:
            entry = referred_file(path, manifest, partial(_read_record, store, folder, step))
        except RecordInvalid as error:
            raise _damaged(store, folder, path, step, f"step {step} refers to it: {error}") from error
        held = read_header(store, folder, entry, step).ranges
        names = [reference.name for reference in references.values() if reference.path == path]
        lost = next((name for name in names if name not in held), None)
        if lost is not None:
            reason = f"tensor {lost!r}, for which step {step} refers to it, is not in the file"
            raise _damaged(store, folder, path, step, reason)
        found.append(entry)
    return found


def _read_record(store: Store, folder: str, step: int, path: str) -> bytes:
    """An older step's, that the step refers to."""
    try:
        return store.read(join(folder, path))
    except ObjectNotFound as error:
        raise _damaged(store, folder, path, step, f"step {step} refers to it: {error}") from error


def read_references(store: Store, folder: str, file: FileEntry, step: int) -> dict[str, Reference]:
    """What a data file's header says to be in older steps' files, by name. Raises CheckpointDamaged."""
    try:
        return from_metadata(read_header(store, folder, file, step).metadata)
    except RecordInvalid as error:
        raise _damaged(store, folder, file.path, step, str(error)) from error


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
    the next call finishes the work. The newest goes first: no committed step is left whose reference is gone.
    """
    newer = [later for later in reversed(_steps(store, folder)) if later > step]
    return sorted(later for later in newer if _supersede(store, folder, later, but_of_run))


def set_aside(store: Store, folder: str, step: int) -> bool:
    """Marks this step alone superseded, whosever it is, as `supersede_after` does; whether it was committed.

    For a step that turned out to be damaged: newer ones and older ones are what they were, but that those that refer to
    it are as damaged as it is until it is reinstated.
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
    """Makes a superseded step committed again, after every byte of it, and of what it refers to, was found right.

    The manifest is created only where there is none, so a commit at the same moment wins; the mark goes last, so that
    a kill in between leaves a committed step, and the next call finishes the work. Raises CheckpointNotFound when the
    step is not superseded, ReferenceMissing when it refers to one that is not committed, StepCommitted when another
    run's step stands in its place, CheckpointDamaged.
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
    missing = missing_references(store, folder, manifest)
    if missing:
        raise ReferenceMissing(
            f"step {step} of run {run} refers to step {', '.join(map(str, missing))}, which is not committed by that "
            "run (any more): reinstate that first, if it is superseded",
            missing,
        )
    for _ in _verified(store, folder, manifest, open_parts(store, folder, manifest), ()):
        pass
    path = join(folder, manifest_path(step))
    if not store.create(path, data) and store.read(path) != data:
        raise StepCommitted(f"step {step} is committed in {store.uri}/{folder}, by another run than {run}")
    store.delete(join(folder, mark))
    return manifest


def referring_to(store: Store, folder: str, steps: Collection[int]) -> dict[int, list[int]]:
    """Of these steps those that other committed ones refer to, each with these. Raises StorageError."""
    others = [found for found in committed_steps(store, folder) if found.step not in steps]
    by_step = {step: [other.step for other in others if step in other.refers] for step in sorted(steps)}
    return {step: referring for step, referring in by_step.items() if referring}


def remove_committed(store: Store, folder: str, step: int) -> None:
    """Removes a committed step, and nothing of what is superseded in the same folder.

    Raises StepReferred when another committed step refers to it.
    """
    referring = referring_to(store, folder, [step])
    if referring:
        raise StepReferred(
            f"step {step} is not removed: step {', '.join(map(str, referring[step]))} refers to it, for tensors that "
            "had not changed since. Remove what refers to it first, or with it"
        )
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

    What a kept or protected step refers to is kept with it. Called after a commit of `run`, by its leader alone. Raises
    StorageError.
    """
    found = committed_steps(store, folder)
    # A step that cannot be restored must not push one out that can.
    whole = [step.step for step in found if step.damage is None]
    refers = {step.step: step.refers for step in found}
    stays = [*protected, *(step.step for step in found if step.damage is not None)]
    removed = steps_to_remove(whole, max_to_keep=max_to_keep, protected=stays, refers=refers)
    for step in reversed(removed):  # what refers goes before what it refers to, should this be killed in between
        remove_step(store, folder, step)
    kept = {step.step for step in found} - set(removed)
    newest = max(kept, default=0)
    unfinished, temporary = {}, {}
    for step in _steps(store, folder):
        if step < newest and step not in removed:
            temporary[step] = store.list_temporary(join(folder, step_folder(step)))
            if step not in kept:
                unfinished[step] = [file.name for file in store.list(join(folder, step_folder(step)))]
    # A folder is never removed here, however empty it looks: a step may be on its way into it.
    for step, other in leftovers(unfinished, newest_committed=newest, run=run):
        # Nobody waits here, as who makes room does, until a manifest that is being written must be there: this follows
        # each commit. One that comes after the second look has lost its files. Then an agent of an earlier attempt was
        # about to write it at this very moment, the step is older than one that is committed, and reading it says so.
        remove_withdrawn(store, withdraw(store, folder, step, other))
    for step, name in abandoned(temporary, committed=kept, run=run):
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
        saved_time=manifest.saved_time, committed_time=manifest.committed_time, refers=manifest.refers,
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
