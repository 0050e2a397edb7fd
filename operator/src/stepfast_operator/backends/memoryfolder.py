"""Where a job's memory tier and its agent's socket lie on this machine, and how much memory it may take."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_SHM = Path("/dev/shm")
_LONGEST_SOCKET_FOLDER = 80  # a socket's whole path must stay under 108 bytes


def memory_folder(uid: str, fallback: Path) -> Path:
    """The job's folder in tmpfs; without /dev/shm a folder in `fallback`, which is slower and survives as
    much.
    """
    root = _SHM if os.access(_SHM, os.W_OK) else fallback / "tmp"
    return root / f"stepfast-{os.getuid()}" / uid


def socket_folder() -> Path:
    """A fresh folder of our own with a path short enough for a socket in it."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(parent) <= _LONGEST_SOCKET_FOLDER and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="stepfast-", dir=parent))
    raise OSError("no folder for the agent's socket: TMPDIR is too long a path, or not writable")


def default_memory_limit() -> int:
    """Half of the memory that is available, at most half of the tmpfs that it lies in (bytes)."""
    available = _available_bytes() // 2
    if not _SHM.is_dir():
        return available
    room = os.statvfs(_SHM)
    return min(available, room.f_blocks * room.f_frsize // 2)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
