"""Giving a finished file its name only if nobody has that name: whole or not at all, and to one of many
writers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from stepfast.storage.localfile import NO_SUCH_THING

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
# What file systems without hard links (FAT, many of FUSE) say to one.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


def place_exclusively(temp: Path, target: Path) -> bool:
    """Makes `target` the file that `temp` is, unless `target` exists. True if it did so. `temp` may be gone
    after.

    Raises OSError.
    """
    linked = _link(temp, target)
    if linked is not None:
        return linked
    renamed = _rename(temp, target)
    if renamed is not None:
        return renamed
    return _rename_locked(temp, target)


def _link(temp: Path, target: Path) -> bool | None:
    """None where the file system has no hard links."""
    try:
        os.link(temp, target, follow_symlinks=False)
    except FileExistsError:
        # Over NFS the answer to a link that was made can get lost; its repetition finds our own file.
        return _is_same_file(temp, target)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return None
        raise
    return True


def _rename(temp: Path, target: Path) -> bool | None:
    """None where kernel or file system cannot rename without replacing."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    if function(_AT_FDCWD, os.fsencode(temp), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code in NO_SUCH_THING:
        return None
    raise OSError(code, os.strerror(code), str(target))


def _rename_locked(temp: Path, target: Path) -> bool:
    """The last resort excludes writers of this machine only (and of others, where locks are shared). It is
    preferred to O_EXCL on the target, which would show a reader half a file and, after a kill, for ever."""
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if os.path.lexists(target):
            return False
        os.rename(temp, target)
        return True
    finally:
        os.close(folder)


def _is_same_file(temp: Path, target: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(temp), os.lstat(target))
    except FileNotFoundError:
        return False
