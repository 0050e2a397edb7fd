"""Memory that the ranks of a run on one node share: lent by the node's agent, or without one a file of their own.

Both look as `stepfast.lentfile` says. The agent may take its memory back at any time, since slots come first; then
everybody finds zeros. So whoever uses `buffer` or `descriptor` directly has to ask `is_lost` after each read, and to
throw away what it read if it is. `read_into` and `write` do that, and no full file system ends a process in them (a
page of a mapping that cannot be had is a SIGBUS).
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from stepfast.environment import Environment
from stepfast.errors import GangError, StepfastError
from stepfast.lentfile import MARK, MAX_LENT_BYTES, lent_bytes, lent_file_bytes, whole_pages
from stepfast.step import is_file_name
from stepfast.torch.link import AgentLink

log = logging.getLogger("stepfast")

_SHM = Path("/dev/shm")
_TOPIC = "shared"


class SharedMemory:
    """A file of memory, zero where nobody has written. What ranks do in it at the same time they settle themselves."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Of a file as `stepfast.lentfile` describes it; the descriptor is this object's from now on."""
        self._descriptor = descriptor
        self._size = size_bytes
        self._map: mmap.mmap | None = None

    @property
    def descriptor(self) -> int:
        """The file; its data stands at its beginning."""
        return self._descriptor

    @property
    def size_bytes(self) -> int:
        """How much data it holds: whole pages, the same for all ranks, perhaps less than was asked for."""
        return self._size

    @property
    def buffer(self) -> mmap.mmap:
        """The data, mapped when it is first asked for. A copy out of it is good if `is_lost` is False afterwards."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self._size)
        return self._map

    @property
    def is_lost(self) -> bool:
        """Whether the memory was taken back: for ever, and for all ranks. A system call, some microseconds."""
        return os.pread(self._descriptor, len(MARK), self._size) != MARK

    def read_into(self, begin: int, target: bytearray | memoryview) -> bool:
        """Fills `target` with the bytes from `begin` on. False: it is lost, and `target` holds nothing of use."""
        view = memoryview(target).cast("B")
        self._check(begin, len(view))
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], begin + done)
            if count == 0:
                return False  # somebody cut the file short
            done += count
        return not self.is_lost

    def write(self, begin: int, data: bytes | bytearray | memoryview) -> bool:
        """Writes the bytes from `begin` on. False: it is lost, or there is no memory left; part may be written."""
        view = memoryview(data).cast("B")
        self._check(begin, len(view))
        done = 0
        while done < len(view):
            if self.is_lost:
                return False
            try:
                done += os.pwrite(self._descriptor, view[done:], begin + done)
            except OSError as error:
                log.warning("stepfast: shared memory was not written: %s", error)
                return False
        return not self.is_lost

    def close(self) -> None:
        """Lets go of it; the other ranks keep it. What still uses `buffer` (a tensor over it) keeps the mapping."""
        self._map = None  # not closed: torch.frombuffer keeps the object, and nothing that would keep it from closing
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1

    def _check(self, begin: int, size_bytes: int) -> None:
        if not 0 <= begin <= begin + size_bytes <= self._size:
            raise ValueError(f"{size_bytes} bytes from {begin} are not within {self._size}")


class Meeting(Protocol):
    """How ranks meet: what `open_shared` needs of a gang."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    def count(self, topic: str) -> int:
        """How often all of them together have asked so, this time included."""

    def exchange(self, topic: str, text: str) -> list[str]:
        """What each of them says, by rank. Raises GangError."""


def open_shared(
    name: str, size_bytes: int, *, environment: Environment, link: AgentLink | None, gang: Meeting
) -> SharedMemory | None:
    """At most `size_bytes` that this node's ranks share under that name, or None: on all ranks of the node alike.

    All ranks of the gang call it, with the same name.

    With an agent it is of the memory tier, and lent by what the slots leave: nothing before all ranks of the node have
    announced how large their files are, which `Checkpointer.step` does when it is first called. What is lent then,
    be it nothing, is so for this name as long as the run.

    Without one it is a file in /dev/shm or, where that is too small, in the temporary folder, of at most half of what
    is free there. It has no name by the time that anybody else hears of it: no crash leaves it behind. The ranks have
    to see each other's /proc.

    Raises GangError; ValueError for a name that could not be a file's, or a size that no memory has.
    """
    if not is_file_name(name):
        raise ValueError(f"{name!r} cannot be the name of a file")
    if not 0 < size_bytes <= MAX_LENT_BYTES:
        raise ValueError(f"size_bytes is {size_bytes}")
    # A topic serves one exchange: the name may be opened again once all ranks have opened it.
    opening = (gang.count(f"{_TOPIC}/{name}") - 1) // gang.world_size
    topic = f"{_TOPIC}/{name}/{opening}"
    if link is not None:
        gang.exchange(f"{topic}/here", "")  # what a rank said to the agent before, the agent is to know when it lends
        opened = _borrow(name, size_bytes, link)
    else:
        opened = _meet(f"{topic}/file", size_bytes, environment, gang)
    said = json.dumps({"node": environment.node, "size": opened.size_bytes if opened is not None else 0})
    with _kept(opened):
        sizes = {told["size"] for told in _exchange(f"{topic}/size", said, environment.node, gang)}
    if opened is not None and len(sizes) > 1:
        log.warning("stepfast: not all ranks of this node have the shared memory %s: none uses it", name)
        opened.close()
        return None
    return opened


@contextlib.contextmanager
def _kept(opened: SharedMemory | None) -> Iterator[None]:
    """Closes it when the ranks do not meet."""
    try:
        yield
    except GangError:
        if opened is not None:
            opened.close()
        raise


def _exchange(topic: str, text: str, node: int, gang: Meeting) -> list[dict[str, int]]:
    """What the ranks of this node say."""
    return [told for told in map(json.loads, gang.exchange(topic, text)) if told["node"] == node]


def _borrow(name: str, size_bytes: int, link: AgentLink) -> SharedMemory | None:
    try:
        granted, descriptor = link.borrow(name, size_bytes)
    except (StepfastError, OSError) as error:
        log.warning("stepfast: the agent lends no memory for %s: %s", name, error)
        return None
    if descriptor is None:
        log.info("stepfast: the agent has no memory to spare for %s", name)
        return None
    return SharedMemory(descriptor, granted)


# ---------------------------------------------------------------- without an agent


def _meet(topic: str, size_bytes: int, environment: Environment, gang: Meeting) -> SharedMemory | None:
    """The file that the node's first rank makes; who cannot open it has none. That rank keeps it open meanwhile."""
    made = _make(size_bytes) if environment.local_rank == 0 else None
    told = {"node": environment.node, "size": 0}
    if made is not None:
        found = os.fstat(made.descriptor)
        told |= {
            "size": made.size_bytes, "pid": os.getpid(), "descriptor": made.descriptor, "device": found.st_dev,
            "inode": found.st_ino,
        }  # fmt: skip
    with _kept(made):
        offers = [offer for offer in _exchange(topic, json.dumps(told), environment.node, gang) if offer["size"]]
    if made is not None or not offers:
        return made
    return _take(offers[0])


def _make(size_bytes: int) -> SharedMemory | None:
    """A file that is there for nobody who does not have it open."""
    folder, room_bytes = _roomiest(size_bytes)
    data_bytes = min(whole_pages(size_bytes), lent_bytes(room_bytes))
    if folder is None or data_bytes == 0:
        log.warning("stepfast: there is no room for shared memory in %s or %s", _SHM, tempfile.gettempdir())
        return None
    path = folder / f"stepfast-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        path.unlink()
    except OSError as error:
        log.warning("stepfast: no shared memory in %s: %s", folder, error)
        return None
    try:
        os.ftruncate(descriptor, lent_file_bytes(data_bytes))
        os.pwrite(descriptor, MARK, data_bytes)
    except OSError as error:
        os.close(descriptor)
        log.warning("stepfast: no shared memory in %s: %s", folder, error)
        return None
    return SharedMemory(descriptor, data_bytes)


def _roomiest(size_bytes: int) -> tuple[Path | None, int]:
    """The first folder that has room for all of it, else the one with most; and half of what is free there."""
    rooms: list[tuple[int, Path]] = []
    for folder in (_SHM, Path(tempfile.gettempdir())):
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            continue
        found = os.statvfs(folder)
        room_bytes = found.f_bavail * found.f_frsize // 2
        if lent_bytes(room_bytes) >= size_bytes:
            return folder, room_bytes
        rooms.append((room_bytes, folder))
    room_bytes, best = max(rooms, key=lambda room: room[0], default=(0, None))
    return best, room_bytes


def _take(offer: dict[str, int]) -> SharedMemory | None:
    """The file of another process, by its descriptor there."""
    try:
        descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        log.warning("stepfast: the shared memory of process %s cannot be opened: %s", offer["pid"], error)
        return None
    found = os.fstat(descriptor)
    asked = (offer["device"], offer["inode"], lent_file_bytes(offer["size"]))
    if (found.st_dev, found.st_ino, found.st_size) != asked:  # of another process: that one has ended, or is elsewhere
        os.close(descriptor)
        log.warning("stepfast: process %s has no shared memory any more", offer["pid"])
        return None
    return SharedMemory(descriptor, offer["size"])


__all__ = ["Meeting", "SharedMemory", "open_shared"]
