"""Sizes as people read them. Pure."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """The size in bytes or the binary unit that fits it, as `7.4 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
