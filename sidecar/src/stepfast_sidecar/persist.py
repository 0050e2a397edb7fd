"""Persisting, committing and fetching for one job: what the job's own process does with storage and slots.

Owns I2 for a node with an agent: the agent of rank 0 writes the manifest as soon as the parts cover all ranks; any
other agent that wrote a part does after a grace, so that a commit needs nobody in particular.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

from stepfast import catalog
from stepfast.commit import FileUpload, StepParts, read_manifest, try_commit, write_part
from stepfast.errors import ObjectNotFound, StorageError, StorageFull, StorageUnavailable, UploadLost
from stepfast.histories import SaveRow, append_rows
from stepfast.layout import (
    CHUNK_BYTES,
    FileEntry,
    Manifest,
    Part,
    data_path,
    join,
    named_ranks,
    parse_part,
    part_path,
    step_folder,
)
from stepfast.makingroom import make_room, remove_halves
from stepfast.ranks import EVERY_RANK
from stepfast.storage.base import Store
from stepfast_sidecar.copies import Copies
from stepfast_sidecar.slotmaps import SlotDamaged, SlotMaps, SlotRef

T = TypeVar("T")

UPLOAD_THREADS = 4
FORESEE_THREADS = UPLOAD_THREADS  # of their own: what is asked for waits for none of them
FILES_AT_ONCE = 2  # each has its chunks uploaded by the same threads; some stores take a file whole, from memory
READ_THREADS = 16  # for part records, of which a large gang has thousands: each takes the storage's latency
_STEPS_AWAITED = 8  # commits whose parts are remembered, and steps of which some files are uploaded


SlotUse: TypeAlias = tuple[int, str, int]  # rank, the file's name, sequence number


def _use_of(slot: SlotRef) -> SlotUse:
    return slot.rank, slot.name, slot.seq


def chunk_of(size_bytes: int) -> int:
    """The length of the chunks of a file that is there as a whole: larger ones, and half the requests, as soon as each
    thread has one.
    """
    large = 2 * CHUNK_BYTES
    return large if size_bytes >= UPLOAD_THREADS * large else CHUNK_BYTES


class JobPersister:
    """Serves one job's storage. Methods block and may be called from several threads at once."""

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        clock: Callable[[], float] = time.time,
        spool_folder: str | None = None,
        settle_seconds: float = 60.0,
    ) -> None:
        """`settle_seconds`: longer than any agent tries to write a manifest (`makingroom`)."""
        self._store, self._folder, self._clock, self._settle_seconds = store, folder, clock, settle_seconds
        self._uploaders = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="stepfast-upload")
        self._files = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="stepfast-file")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="stepfast-read")
        self._foreseers = ThreadPoolExecutor(FORESEE_THREADS, thread_name_prefix="stepfast-ahead")
        self._copies = Copies(
            store, folder, self._uploaders, foresee_threads=self._foreseers, spool_folder=spool_folder
        )
        self._slots = SlotMaps()
        self._streams: dict[tuple[int, str, int, str], FileUpload] = {}
        self._parts: dict[tuple[int, str], StepParts] = {}  # the latest asked for last
        self._uploaded: dict[tuple[int, str], dict[SlotUse, FileEntry]] = {}  # until their part is written
        self._lock = threading.Lock()

    # ------------------------------------------------------------ writing

    def persist(
        self, *, step: int, run: str, node: int, world_size: int, replicated: str, saved_time: float,
        ranks: Sequence[int], slots: Sequence[SlotRef], streamed: Sequence[FileEntry], sharers: str = EVERY_RANK,
        tag: str = "", refers: Sequence[int] = (), spared: Sequence[str] = (),
    ) -> Part:  # fmt: skip
        """Uploads the slots' files and writes this node's part, with the files that were streamed before.

        A part that is already there is done. Of a step that some ranks alone share in, the part with the first of them
        names those that have nothing in it, too: a manifest names every rank of the gang. `spared`: earlier runs of
        which something is still on its way, should there be no room.

        Raises StorageError, SlotDamaged.
        """
        try:
            return parse_part(self._store.read(join(self._folder, part_path(step, run, node))))
        except ObjectNotFound:
            pass
        files = [*self._within(run, spared, lambda: self._upload_all(step, run, world_size, slots)), *streamed]
        if without := sorted(set(ranks) - {file.rank for file in files}):
            raise SlotDamaged(f"no file is left of ranks {without}")  # rather no step than one that cannot be restored
        part = Part(
            step=step,
            run=run,
            node=node,
            world_size=world_size,
            ranks=named_ranks(ranks, sharers, world_size),
            files=tuple(sorted(files, key=lambda file: (file.rank, file.name))),
            saved_time=saved_time,
            persisted_time=self._clock(),
            replicated=replicated,
            tag=tag,
            refers=tuple(refers),
        )
        self._look_for_files(part, streamed)
        seen = write_part(self._store, self._folder, part)
        with self._lock:
            self._uploaded.pop((step, run), None)
            if seen is not None:
                parts = self._parts.setdefault((step, run), StepParts(self._store, self._folder, step, run))
                parts.note(seen)
                self._forget_old_parts()
        return part

    def _within(self, run: str, spared: Sequence[str], upload: Callable[[], T]) -> T:
        """Uploads; once more when the storage was full, and there was something to make room with."""
        try:
            return upload()
        except StorageFull:
            if not make_room(self._store, self._folder, run=run, spared=spared, settle_seconds=self._settle_seconds):
                raise
            return upload()

    def _upload_all(self, step: int, run: str, world_size: int, slots: Sequence[SlotRef]) -> list[FileEntry]:
        """Several files at once: of small ones most of the time goes into waiting for the storage's answers. What went
        well in an earlier try is not uploaded again.
        """
        known = self._known_uploads(step, run)
        left = [slot for slot in slots if _use_of(slot) not in known]
        uploads = [self._files.submit(self._upload, step, run, world_size, slot) for slot in left]
        wait(uploads)  # all of them: what failed is tried again, and two uploads of one file must not meet
        return [*(known[use] for use in map(_use_of, slots) if use in known), *(upload.result() for upload in uploads)]

    def _known_uploads(self, step: int, run: str) -> dict[SlotUse, FileEntry]:
        """What was uploaded of the step, and is still there: a later attempt may have swept it away."""
        with self._lock:
            uploaded = dict(self._uploaded.get((step, run), {}))
        if not uploaded:
            return {}
        there = self._there(step)
        return {use: file for use, file in uploaded.items() if file.path in there}

    def _there(self, step: int) -> set[str]:
        """The paths of the step's files."""
        listed = self._store.list(join(self._folder, step_folder(step)))
        return {f"{step_folder(step)}/{entry.name}" for entry in listed}

    def _look_for_files(self, part: Part, streamed: Sequence[FileEntry]) -> None:
        """No part names a file that is gone (I1): while the others of them were uploaded a later attempt may have
        committed a newer step and swept this one away. Right before the part is written, so that little can go since.

        Raises StorageUnavailable where the files can be uploaded anew, else SlotDamaged.
        """
        there = self._there(part.step)
        if lost := [file for file in streamed if file.path not in there]:  # nothing but the storage had it
            raise SlotDamaged(f"there is no more of rank {lost[0].rank}: a later attempt swept away {lost[0].path}")
        if gone := [file.path for file in part.files if file.path not in there]:
            raise StorageUnavailable(f"a later attempt swept away {', '.join(gone)}: to be uploaded anew")

    def _note_upload(self, step: int, run: str, use: SlotUse, file: FileEntry) -> None:
        with self._lock:
            files = self._uploaded.pop((step, run), {})
            self._uploaded[(step, run)] = {**files, use: file}
            while len(self._uploaded) > _STEPS_AWAITED:
                del self._uploaded[next(iter(self._uploaded))]

    def _upload(self, step: int, run: str, world_size: int, slot: SlotRef) -> FileEntry:
        path = data_path(step, run, slot.name, slot.rank, world_size)
        upload = self._begin(path, slot, chunk_of(slot.file_bytes))
        try:
            mapped = self._slots.map(slot)
            upload.put(0, mapped.data, self._uploaders)
            mapped.check()
            file = upload.finish()
        except BaseException:
            upload.abort()
            raise
        self._note_upload(step, run, _use_of(slot), file)
        return file

    def _begin(self, path: str, slot: SlotRef, chunk_bytes: int) -> FileUpload:
        """An upload of the slot's file, also where what is left of an earlier one holds the room for it."""

        def begin() -> FileUpload:
            return FileUpload(
                self._store, self._folder, path,
                name=slot.name, rank=slot.rank, size_bytes=slot.file_bytes, chunk_bytes=chunk_bytes,
            )  # fmt: skip

        try:
            return begin()
        except StorageFull:
            if not remove_halves(self._store, self._folder, path):
                raise
            return begin()

    def persist_window(
        self, *, step: int, run: str, world_size: int, slot: SlotRef, spared: Sequence[str] = ()
    ) -> FileEntry | None:
        """Uploads one window of a large file; the file's entry when it is whole with it. `spared`: as of `persist`.

        Raises StorageError (the same window may be tried again) and, when the file has to be begun again, SlotDamaged
        or UploadLost.
        """
        return self._within(run, spared, lambda: self._upload_window(step, run, world_size, slot))

    def _upload_window(self, step: int, run: str, world_size: int, slot: SlotRef) -> FileEntry | None:
        key = (step, run, slot.rank, slot.name)
        upload = self._stream(key, world_size, slot)
        try:
            mapped = self._slots.map(slot)
            upload.put(slot.window_begin, mapped.data)
            mapped.check()
        except (SlotDamaged, UploadLost):
            with self._lock:
                self._streams.pop(key, None)
            upload.abort()
            raise
        with self._lock:  # windows are stored side by side: any of them may be the one that completes the file
            if not upload.is_complete or self._streams.get(key) is not upload:
                return None
            del self._streams[key]
        try:
            return upload.finish()
        except UploadLost:
            raise
        except StorageError:
            with self._lock:
                self._streams.setdefault(key, upload)  # this window comes again
            raise

    def _stream(self, key: tuple[int, str, int, str], world_size: int, slot: SlotRef) -> FileUpload:
        """The upload that a window belongs to: a first window begins it, and ends what the rank streamed before."""
        step, run, rank, name = key
        with self._lock:
            if slot.window_begin > 0:
                if key not in self._streams:
                    raise UploadLost(f"what was stored of {name!r} of rank {rank} is lost: begin again")
                return self._streams[key]
            for stale in [k for k in self._streams if k[2:] == key[2:]]:
                self._streams.pop(stale).abort()
            upload = self._begin(data_path(step, run, name, rank, world_size), slot, CHUNK_BYTES)
            self._streams[key] = upload
            return upload

    def commit(self, *, step: int, run: str, may_write: bool, is_eager: bool = True) -> Manifest | None:
        """The step's manifest, written now if it may be and all parts are there; None while it is not there.

        `is_eager`: parts are read as they come, so that little is left to read after the last one; otherwise only once
        all files are there. Raises StorageError, ReferenceMissing, RecordInvalid.
        """
        if not may_write:
            return read_manifest(self._store, self._folder, step)
        with self._lock:  # taken out: one request at a time looks on with it
            parts = self._parts.pop((step, run), None) or StepParts(self._store, self._folder, step, run)
        manifest = try_commit(
            self._store, self._folder, step, run, parts, is_eager=is_eager, executor=self._readers
        )  # fmt: skip
        if manifest is None:
            with self._lock:
                self._parts[(step, run)] = parts
                self._forget_old_parts()
        return manifest

    def _forget_old_parts(self) -> None:
        while len(self._parts) > _STEPS_AWAITED:
            del self._parts[next(iter(self._parts))]

    def supersede_after(self, *, step: int, run: str) -> list[int]:
        """Rolls back to the step from which `run` goes on; returns the superseded ones. Raises StorageError."""
        return catalog.supersede_after(self._store, self._folder, step, but_of_run=run)

    def set_aside(self, step: int) -> bool:
        """Marks a damaged step, it alone, superseded; whether it was committed. Raises StorageError."""
        return catalog.set_aside(self._store, self._folder, step)

    def retain(self, *, run: str, max_to_keep: int, protected: Sequence[int]) -> list[int]:
        """Removes what is not to be kept; returns the removed steps. Raises StorageError."""
        return catalog.retain(self._store, self._folder, run=run, max_to_keep=max_to_keep, protected=protected)

    def remove(self, step: int) -> None:
        """Removes a committed step. Raises StorageError, StepReferred."""
        catalog.remove_committed(self._store, self._folder, step)

    def note_saves(self, rows: Sequence[SaveRow]) -> None:
        """Adds rows to checkpointHistories.csv."""
        append_rows(self._store, self._folder, rows)

    # ------------------------------------------------------------ reading

    def steps(self) -> list[int]:
        """Committed steps, ascending; also those whose manifest is damaged, so that a restore names it (I5)."""
        return [found.step for found in catalog.committed_steps(self._store, self._folder)]

    def fetch(self, path: str) -> dict[str, Any]:
        """Makes an object readable by a path on this machine. Raises ObjectNotFound, StorageError."""
        found, size = self._copies.open_path(path)
        return {"path": found, "size": size}

    def files_to_restore(self, *, step: int | None, first_rank: int, ranks: int) -> list[str]:
        """The paths of what these ranks would restore the step from (None: the newest). Raises StorageError,
        CheckpointError.
        """
        step = catalog.latest_step(self._store, self._folder) if step is None else step
        if step is None:
            return []
        manifest, parts = catalog.open_step(self._store, self._folder, step)
        sources = {rank if rank < manifest.world_size else 0 for rank in range(first_rank, first_rank + ranks)}
        # Of replicated state each rank saved a share, and all ranks read all of it.
        files = [file for part in parts for file in part.files if part.replicated or file.rank in sources]
        referred = {
            reference.path
            for file in (files if manifest.refers else ())
            for reference in catalog.read_references(self._store, self._folder, file, step).values()
        }
        return [*(file.path for file in files), *sorted(referred)]

    def foresee(self, path: str) -> None:
        """Has a file at hand that will be fetched. Raises ObjectNotFound, StorageError."""
        self._copies.foresee(path)

    def close(self) -> None:
        """Ends threads and connections; unfinished uploads are aborted."""
        with self._lock:
            for upload in self._streams.values():
                upload.abort()
            self._streams.clear()
        self._files.shutdown(wait=True, cancel_futures=True)
        self._uploaders.shutdown(wait=True, cancel_futures=True)
        self._foreseers.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._copies.close()
        self._store.close()
