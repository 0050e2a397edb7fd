"""Tables for people and for pipes: no cell is ever cut or wrapped."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepfast.terminal import printable

_GAP = "  "


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """With lines around on a terminal that is wide enough; elsewhere aligned columns, one row a line, no tabs."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        typer.echo(title)
    console = Console()
    if sys.stdout.isatty() and sum(widths) + 3 * len(widths) + 1 <= console.width:
        # As Text: rich would take brackets in a name for its own markup.
        table = Table(*columns)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for line in [list(columns), *cells]:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        typer.echo(_GAP.join(padded).rstrip())
