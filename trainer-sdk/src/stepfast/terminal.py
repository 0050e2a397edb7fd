"""Text that came from elsewhere, as a terminal may be given it. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with its control characters written out: none of them moves a cursor, colours or ends a line."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
