"""A small file system on this machine whose device writes only so many bytes a second. Needs root and a loop device.

The limit is the kernel's own, of cgroups: version 2's `io.max` limits what the processes of a group write, version 1's
throttle limits a device for everybody, the kernel's write-back included. As the device is a loop device of our own,
nobody else's writes are slowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V2_CONTROLLERS = Path("/sys/fs/cgroup/cgroup.controllers")
_V1_LIMIT = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_UNMOUNT_SECONDS = 30.0


def unlimited_reason() -> str:
    """Why no device of this machine can be slowed; an empty text when one can be."""
    if os.geteuid() != 0:
        return "not root"
    missing = [program for program in ("losetup", "mkfs.ext4", "mount") if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}"
    if not _V1_LIMIT.exists():
        controllers = _V2_CONTROLLERS.read_text().split() if _V2_CONTROLLERS.exists() else []
        # A group's limit says nothing of what an agent outside of it writes, and of write-back only where the file
        # system takes part: the cells would not all meet the same disk.
        has_io = "there is io.max alone, which slows groups" if "io" in controllers else "no io.max either"
        return f"no blkio.throttle of cgroup v1, which slows a device for all; {has_io}"
    done = subprocess.run(["losetup", "--find"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no loop device: {done.stderr.strip()}"


@contextmanager
def slow_disk(parent: Path, size_bytes: int, bytes_per_second: int) -> Iterator[Path]:
    """A folder on such a disk; the disk is gone when it is left. Raises CalledProcessError, OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="slow-", dir=parent)).absolute()
    image, folder = place / "disk", place / "mounted"
    folder.mkdir()
    device = ""
    try:
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        device = _run("losetup", "--find", "--show", str(image))
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        _run("mount", device, str(folder))
        number = os.stat(device).st_rdev
        name = f"{os.major(number)}:{os.minor(number)}"
        _V1_LIMIT.write_text(f"{name} {bytes_per_second}")
        try:
            yield folder
        finally:
            _V1_LIMIT.write_text(f"{name} 0")  # none; what is left to write goes at once
            _unmount(folder)
    finally:
        if device:
            _run("losetup", "--detach", device)
        shutil.rmtree(place)


def _unmount(folder: Path) -> None:
    """Whoever was killed while the disk was slow holds it until what he had begun to write is written."""
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while True:
        try:
            _run("umount", str(folder))
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
