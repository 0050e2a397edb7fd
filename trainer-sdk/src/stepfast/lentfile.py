"""A file of memory that the ranks of one run and node share beside their slots: its data, then a page with a mark.

The mark says that the data is what the ranks wrote. Whoever takes the memory back removes the mark first and the data
after it, so bytes that were read are good exactly if the mark is there *afterwards*.
"""

from __future__ import annotations

from stepfast.tensorfile import PAGE

MAX_LENT_BYTES = 2**44
MARK = b"stepfast"
MARK_PAGE_BYTES = PAGE


def lent_bytes(size_bytes: int) -> int:
    """Of so many bytes of memory those that hold data: whole pages, beside the mark's; 0 when none is left."""
    return max(0, size_bytes // PAGE * PAGE - MARK_PAGE_BYTES)


def lent_file_bytes(data_bytes: int) -> int:
    """How large the file with so much data is. The mark stands behind the data."""
    return data_bytes + MARK_PAGE_BYTES


def whole_pages(size_bytes: int) -> int:
    """What holds so many bytes of data."""
    return -(-size_bytes // PAGE) * PAGE
