"""A file's blocks, given and taken back without a byte of it being written or mapped: Linux's fallocate.

Not os.posix_fallocate, which takes none back, and writes every block where the file system cannot give it. A call
through ctypes keeps no other thread of Python waiting.
"""

from __future__ import annotations

import ctypes
import errno
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def reserve_blocks(descriptor: int, size_bytes: int) -> None:
    """All of the file's first `size_bytes`. Raises OSError, also where system or file system cannot."""
    _fallocate(descriptor, 0, size_bytes)


def free_blocks(descriptor: int, size_bytes: int) -> None:
    """Likewise: whoever reads or has mapped them finds zeros. The file's size stays. Raises OSError, as above."""
    _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, size_bytes)


def _fallocate(descriptor: int, mode: int, size_bytes: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(descriptor, mode, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
