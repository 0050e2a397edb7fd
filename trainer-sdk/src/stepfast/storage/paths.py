"""Which paths a store accepts: relative, with `/`, and never out of its root. No I/O."""

from __future__ import annotations

from stepfast.errors import StorageForbidden


def object_path(path: str) -> str:
    """The path of an object, checked. Raises StorageForbidden."""
    if not path:
        raise StorageForbidden("an empty path names no object")
    return _checked(path)


def folder_path(folder: str) -> str:
    """The path of a folder, checked and without a `/` at its end; empty for the root. Raises
    StorageForbidden."""
    stripped = folder.removesuffix("/")
    return _checked(stripped) if folder else ""


def _checked(path: str) -> str:
    components = path.split("/")
    if "\0" in path or any(component in {"", ".", ".."} for component in components):
        raise StorageForbidden(f"{path!r} is refused: paths are relative, without empty, `.` or `..` components")
    return path
