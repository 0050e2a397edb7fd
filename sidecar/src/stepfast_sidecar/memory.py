"""The memory tier's files: slots, and what is lent beside them, in the agent's own folder of a tmpfs.

The agent creates and pre-faults them (so the pages are charged to it, and the first save is as fast as the tenth) and
hands descriptors to ranks. It reads and writes control pages with pread and pwrite: only a job's own persister maps a
slot, so that a tenant who truncates one kills nobody else.

    <memory folder>/<namespace>/<job>/job.json
    <memory folder>/.volumes/<volume>.json
    <memory folder>/<namespace>/<job>/<rank>/slot-<index>-<generation>-<data bytes>
    <memory folder>/<namespace>/<job>/lent/<data bytes>-<name>
    <memory folder>/.gone/<any name>                 let go, and not free yet

What stands beside them in a job's folder for other nodes is `mirrorfiles`'.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfast.errors import AgentError, SpecError
from stepfast.lentfile import MARK, lent_file_bytes
from stepfast.slot import CONTROL_BYTES, ControlPage, SlotState, agent_record, read_control
from stepfast.step import JobKey
from stepfast.storage.blocks import free_blocks
from stepfast.tensorfile import PAGE
from stepfast_sidecar.budget import Budget

log = logging.getLogger(__name__)

VOLUMES = ".volumes"  # no namespace has a name like that: the notes of published volumes
_GONE = ".gone"  # likewise
_LENT = "lent"  # of a job's folder: no rank has a number like that
_LOCK = "agent.lock"
_LOCK_SECONDS = 5.0  # how long the agent before has to go
_SLOT = re.compile(r"slot-([0-9]+)-([0-9]+)-([0-9]+)")
_SLACK_BYTES = 1 << 20  # of a file's blocks: some file systems count what they note of it, too


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFile:
    """One slot's file. `generation` tells two files of one index apart; it only grows."""

    path: Path
    index: int
    generation: int
    capacity_bytes: int

    @property
    def size_bytes(self) -> int:
        return CONTROL_BYTES + self.capacity_bytes

    def has_grown(self) -> bool:
        """Whether its rank made the file larger than it was handed out: memory that nobody granted.

        Also beyond the end of the file, where its size tells nothing of it (FALLOC_FL_KEEP_SIZE).
        """
        return _has_grown(self.path, self.size_bytes)

    def is_whole(self) -> bool:
        """Whether all its bytes are there: a rank may have cut it short."""
        try:
            return self.path.stat().st_size >= self.size_bytes
        except FileNotFoundError:
            return False

    def cut_back(self) -> None:
        """Frees what it has beyond its size; one that was cut short stays so. Raises OSError."""
        _cut_back(self.path, self.size_bytes)

    def read_control(self) -> ControlPage:
        """What the slot says of itself; an unreadable or cut slot is an empty one."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                page = file.read(CONTROL_BYTES)
                if os.fstat(file.fileno()).st_size < self.size_bytes:
                    return ControlPage(record=None, verdict=None)
        except OSError:
            return ControlPage(record=None, verdict=None)
        return read_control(page)

    def write_verdict(self, seq: int, verdict: SlotState) -> None:
        """Notes what became of the slot's bytes of that sequence number."""
        offset, data = agent_record(seq, verdict)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)

    def open(self, *, writable: bool) -> int:
        """A descriptor of the file; the caller closes it."""
        return os.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True, kw_only=True)
class LentFile:
    """Memory that ranks share beside their slots, as `stepfast.lentfile` says: sparse, so it takes what is written.

    Pages are charged to whoever writes them first: in a cluster to a rank's own pod, not to the agent.
    """

    path: Path
    data_bytes: int

    @property
    def size_bytes(self) -> int:
        return lent_file_bytes(self.data_bytes)

    def has_grown(self) -> bool:
        """Whether a rank made it larger than it was lent."""
        return _has_grown(self.path, self.size_bytes)

    def open(self) -> int:
        """A descriptor to read and write by; the caller closes it. Raises OSError."""
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)


def lay_out(descriptor: int, size_bytes: int) -> None:
    """Gives a file its size at once, whatever that is; it gets its pages as they are written.

    For what comes from elsewhere: who sends it would not wait until all pages of hundreds of GiB are made. Raises
    OSError when the file system has not as much left now.
    """
    found = os.fstatvfs(descriptor)
    if found.f_blocks and found.f_bavail * found.f_frsize < size_bytes:  # without blocks it has no limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, size_bytes)


def _has_grown(path: Path, size_bytes: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False  # freed meanwhile
    unit = max(found.st_blksize, _SLACK_BYTES)  # a tmpfs of huge pages gives whole ones
    most = (size_bytes // unit + 2) * unit
    return found.st_size > size_bytes or found.st_blocks * 512 > most


def _cut_back(path: Path, size_bytes: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, min(path.stat().st_size, size_bytes))


def _lock(root: Path) -> int:
    """Makes the folder this agent's: two would give the same slots away. The lock ends with the process."""
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise AgentError(f"{root} is another agent's, which is still running") from error
            time.sleep(0.05)  # an agent that was killed a moment ago is still being taken apart


def _empty(path: Path) -> None:
    """Gives all pages of the file back: they would live on with a mapping. Whoever reads them finds zeros."""
    with open(path, "r+b", buffering=0) as file:
        pages = -(-os.fstat(file.fileno()).st_size // PAGE)  # of part of a page nothing is freed
        free_blocks(file.fileno(), pages * PAGE)


def _remove(path: Path) -> None:
    """Frees the file's memory, whoever still maps it. Raises OSError when a rank's mapping keeps some of it."""
    try:
        _empty(path)
    except FileNotFoundError:
        pass  # the whole folder was removed meanwhile
    finally:
        path.unlink(missing_ok=True)


def _unmark(lent: LentFile) -> None:
    """Removes the mark, before the data goes. What ranks did to the file harms nobody but themselves."""
    try:
        with open(lent.path, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size >= lent.data_bytes + len(MARK):
                os.pwrite(file.fileno(), bytes(len(MARK)), lent.data_bytes)
    except OSError as error:
        log.warning("%s: memory that was lent stays with those who have it: %s", lent.path, error)


class MemoryTier:
    """The folder, and which jobs it holds. `budget`: how much of it is taken."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Raises AgentError when another agent has the folder."""
        self._root = root
        self.budget = Budget(limit_bytes)
        self._gone = root / _GONE
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(root)
        self._gone.mkdir(mode=0o700, exist_ok=True)

    def create(self, job: JobKey, rank: int, index: int, generation: int, capacity_bytes: int) -> SlotFile:
        """Makes a slot and all its pages; blocks about 0.3 s a GiB. Raises OSError when memory is exhausted."""
        folder = self.folder(job) / f"{rank:05d}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        slot = SlotFile(
            path=folder / f"slot-{index}-{generation}-{capacity_bytes}",
            index=index,
            generation=generation,
            capacity_bytes=capacity_bytes,
        )
        building = folder / f".{slot.path.name}"
        descriptor = os.open(building, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, slot.size_bytes)
            os.rename(building, slot.path)
        except OSError:
            os.unlink(building)
            raise
        finally:
            os.close(descriptor)
        return slot

    def remove(self, slot: SlotFile) -> None:
        """Frees the slot's memory, whoever still maps it: its name at once, its pages in a moment."""
        self.discard(slot.path, slot.size_bytes)

    def discard(self, path: Path, size_bytes: int) -> None:
        """Frees a file that may be there, as `remove` does; it was counted as so many bytes."""
        gone = self._gone / uuid.uuid4().hex
        try:
            os.rename(path, gone)
        except FileNotFoundError:  # of the file or, should somebody have removed it, of the folder for such
            path.unlink(missing_ok=True)
            self.budget.give_back(size_bytes)
        else:
            self.budget.free(size_bytes, lambda: _remove(gone))

    def lend(self, job: JobKey, name: str, data_bytes: int) -> LentFile:
        """Makes a file for ranks to share, whose room was taken before. Raises OSError."""
        folder = self.folder(job) / _LENT
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lent = LentFile(path=folder / f"{data_bytes}-{name}", data_bytes=data_bytes)
        descriptor = os.open(lent.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, lent.size_bytes)
            os.pwrite(descriptor, MARK, data_bytes)
        except OSError:
            os.unlink(lent.path)
            raise
        finally:
            os.close(descriptor)
        return lent

    def take_back(self, lent: LentFile) -> None:
        """Frees the memory, whoever still maps it: who looks for its mark afterwards sees that it is gone."""
        _unmark(lent)
        self.discard(lent.path, lent.size_bytes)

    @property
    def system_free_bytes(self) -> int:
        """What the folder's file system has left, whatever the limit says."""
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def remember(self, job: JobKey, settings: dict[str, object]) -> None:
        """Notes what a restarted agent must know of the job, credentials among it: for this user's eyes alone."""
        folder = self.folder(job)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        building = folder / ".job.json"
        descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        os.rename(building, folder / "job.json")

    def forget(self, job: JobKey) -> None:
        """Frees all that is held of the job."""
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def jobs(self) -> Iterator[tuple[JobKey, dict[str, object], dict[int, list[SlotFile]]]]:
        """What an earlier agent left: each job, its settings, and its slots by rank. Removes what is none of these.

        What that one lent is gone with it: a rank that lives on may borrow anew.
        """
        for path in self._gone.iterdir():
            self._discard_uncounted(path)
        for path in self._root.glob(f"*/*/{_LENT}/*"):
            size = path.name.partition("-")[0]
            _unmark(LentFile(path=path, data_bytes=int(size) if size.isdigit() else 0))
            self._discard_uncounted(path)
        for note in sorted(self._root.glob("*/*/job.json")):
            try:
                job = JobKey(namespace=note.parent.parent.name, name=note.parent.name)
                settings = json.loads(note.read_text())
            except (SpecError, ValueError, OSError):
                shutil.rmtree(note.parent, ignore_errors=True)
                continue
            yield job, settings, self._slots(note.parent)

    def _discard_uncounted(self, path: Path) -> None:
        size_bytes = path.stat().st_blocks * 512
        self.budget.count(size_bytes)
        self.discard(path, size_bytes)

    def _slots(self, folder: Path) -> dict[int, list[SlotFile]]:
        slots: dict[int, list[SlotFile]] = {}
        for path in sorted(folder.glob("[0-9]*/*")) + sorted(folder.glob("[0-9]*/.*")):
            match = _SLOT.fullmatch(path.name)
            size = path.stat().st_size
            if match is None or size <= CONTROL_BYTES:
                path.unlink(missing_ok=True)
                continue
            slot = SlotFile(
                path=path,
                index=int(match.group(1)),
                generation=int(match.group(2)),
                # Its rank may have cut it meanwhile, or made it larger: what it was made with is in its name.
                capacity_bytes=min(size - CONTROL_BYTES, int(match.group(3))),
            )
            if slot.has_grown():
                slot.cut_back()
            self.budget.count(slot.size_bytes)
            slots.setdefault(int(path.parent.name), []).append(slot)
        return slots

    def folder(self, job: JobKey) -> Path:
        """Of one job: all that is held of it."""
        return self._root / job.namespace / job.name
