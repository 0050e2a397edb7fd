"""The steps by which a local file comes into being: a temporary file beside it, every byte on disk, then its
name."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_MAX_NAME_BYTES = 200  # of the object's name in the temporary one, so that the latter stays below 255
NO_SUCH_THING = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What kernels and file systems (some of FUSE and CIFS) say to a call that they do not have."""


def temp_path(target: Path) -> Path:
    """A new name in the target's folder, which `is_temp_name`."""
    stem = os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])
    return target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(6)}.tmp")


def is_temp_name(name: str) -> bool:
    """Left behind by a writer that was killed, or being written."""
    return name.startswith(".") and name.endswith(".tmp")


def target_name(name: str) -> str:
    """The name that a temporary file was to become."""
    return name.removeprefix(".").removesuffix(".tmp").rpartition(".")[0]


def write_temp(target: Path, data: bytes) -> Path:
    """A temporary file beside the target that holds the data, on disk."""
    temp = temp_path(target)
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_at(descriptor, 0, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        remove_quietly(temp)
        raise
    return temp


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """All of the data: a write may take less than it is given."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset += written
        data = data[written:]


def read_at(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fills the buffer; returns the number of bytes, less than its length at the file's end."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def sync_folder(folder: Path) -> None:
    """A name is on disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SUCH_THING:
            raise
    finally:
        os.close(descriptor)


def remove_quietly(path: Path) -> None:
    """For what nobody sees anyway."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_tree(folder: Path) -> None:
    """Removes a folder with all in it, temporary files too; others may do the same at the same time.

    Symbolic links are removed, never followed.
    """
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
        os.rmdir(folder)
