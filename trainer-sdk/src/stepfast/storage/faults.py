"""What an operating system's error means to a caller of the storage. No I/O."""

from __future__ import annotations

import errno

from stepfast.errors import ObjectNotFound, StorageError, StorageForbidden, StorageFull, StorageUnavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Neither permissions nor names get better by waiting: somebody has to change something.
_FORBIDDEN = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EEXIST,
        errno.EFAULT,  # the caller's own memory is gone: its slot was truncated
        errno.EINVAL,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EFBIG,
        errno.EXDEV,
    }
)
# What kernels say of a medium or a file system that has lost bytes, by the ways that reads take.
_DAMAGED = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ, errno.ENODATA})


def is_damage(error: OSError) -> bool:
    """Whether the bytes are gone where such an error of a read does not pass; of others nobody knows."""
    return error.errno in _DAMAGED


def storage_error(error: OSError, doing: str) -> StorageError:
    """The StorageError that says the same; `doing` names operation and path."""
    reason = error.strerror or str(error) or type(error).__name__
    message = f"{doing}: {reason}"
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(message)
    if error.errno in _FULL:
        return StorageFull(message)
    refused = PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError
    if error.errno in _FORBIDDEN or isinstance(error, refused):
        return StorageForbidden(message)
    return StorageUnavailable(message)
