"""docs/chaos.md: two parts, each between marks of its own and written by its own command alone."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

HEAD = """\
# Chaos

What is killed, lost, cut off or slowed down while a training runs, and what came of it. Each part is written by its
command; nothing in it is written by hand.
"""
_NOT_RUN = "It was not run yet."


class Part(StrEnum):
    """A part of the page, named for the command that writes it."""

    MACHINE = "make chaos"
    CLUSTER = "make chaos-cluster"

    @property
    def begin(self) -> str:
        return f"<!-- {self}: begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self}: end -->"


def write_part(page: Path, part: Part, text: str) -> None:
    """Puts the text in the place of that part, and leaves all else of the page; makes the page where there is none.

    Raises:
        ValueError: the page has no such part.
    """
    page.write_text(with_part(page.read_text() if page.exists() else new_page(), part, text))


def new_page() -> str:
    return "\n".join([HEAD, *(f"{part.begin}\n{_NOT_RUN}\n{part.end}\n" for part in Part)])


def with_part(page: str, part: Part, text: str) -> str:
    """The page with that text as the part's. Raises as `write_part`."""
    before, begin, rest = page.partition(f"{part.begin}\n")
    _, end, after = rest.partition(part.end)
    if not (begin and end):
        raise ValueError(f"the page lacks the marks of its part by `{part}`: {part.begin} and {part.end}")
    return f"{before}{begin}{text.rstrip()}\n{end}{after}"
