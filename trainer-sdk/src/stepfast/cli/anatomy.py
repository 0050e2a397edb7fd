"""`stepfast anatomy`: where memory and time of a training step go. What is said, and how, is stepfast.torch.anatomy's.

Exit status 2: the file is no report, or the page would replace a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfast.cli.anatomymeasure import measure
from stepfast.cli.anatomypredict import predict
from stepfast.cli.told import told
from stepfast.errors import AnatomyError, SpecError
from stepfast.storage.target import placed_file

if TYPE_CHECKING:
    from stepfast.torch.anatomy import Report

app = typer.Typer(no_args_is_help=True, help="Where the memory and the time of a training step go.")


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="a report, as Report.to_json wrote it")],
    html: Annotated[Path | None, typer.Option("--html", help="write it as a page that needs nothing else")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON, in place of tables")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file of --html")] = False,
) -> None:
    """Shows a report: as tables (default), as JSON, as a page for a browser."""
    with told():
        check_targets(out=None, html=html, force=force)
        show(read_report(file), html=html, as_json=as_json, force=force)


app.command()(predict)
app.command()(measure)


def read_report(file: Path) -> Report:
    """Raises SpecError when it cannot be read or is no report; AnatomyError when torch is missing."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError("FILE", f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError("FILE", f"{file} is no text: {error.reason} at byte {error.start}") from error
    try:
        from stepfast.torch.anatomy import from_json
    except ImportError as error:
        raise AnatomyError(f"reports are read with torch ({error}): pip install stepfast[torch,run]") from error
    try:
        return from_json(text)
    except ValueError as error:
        raise SpecError("FILE", f"{file}: {error}") from error


def check_targets(*, out: Path | None, html: Path | None, force: bool) -> None:
    """Before anything takes time. Raises SpecError where `show` could not write a file."""
    if out is not None and html is not None and out.resolve() == html.resolve():
        raise SpecError("--html", f"{html} is the file of --out, too: name another one")
    for option, target in (("--out", out), ("--html", html)):
        if target is None:
            continue
        if target.is_dir():
            raise SpecError(option, f"{target} is a folder: name a file in it")
        if target.exists() and not force:
            raise SpecError(option, f"{target} exists already: name another file, or replace it with --force")
        if not target.absolute().parent.is_dir():
            raise SpecError(option, f"{target}: there is no folder {target.absolute().parent}")


def show(report: Report, *, html: Path | None, as_json: bool, force: bool, out: Path | None = None) -> None:
    """Writes the files that are asked for, and prints the report unless the page alone is. Raises SpecError."""
    if out is not None:
        with placed_file(out, force=force, option="--out") as temp:
            temp.write_text(report.to_json(), encoding="utf-8")
    if html is not None:
        from stepfast.torch.anatomy import html_report

        with placed_file(html, force=force, option="--html") as temp:
            temp.write_text(html_report(report), encoding="utf-8")
        typer.echo(f"{html}: written; open it in a browser", err=True)
    if as_json:
        typer.echo(report.to_json())
    elif html is None:
        from rich.console import Console

        from stepfast.torch.anatomy.table import print_report

        print_report(report, Console())


def register(root: typer.Typer) -> None:
    """Adds the commands under `anatomy`."""
    root.add_typer(app, name="anatomy")
