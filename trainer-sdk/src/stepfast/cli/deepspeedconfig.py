"""`stepfast deepspeed-config fix`: an old or broken DeepSpeed configuration, made valid, with a report of each change.

The configuration goes to standard output or a file, the report to standard error. Exit status 1: with --check, when
something has to change. 2: the file is none that can be read, or a person has to decide something first.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from stepfast.cli.told import told
from stepfast.errors import SpecError
from stepfast.integrations.deepspeedconfig import RELEASE, Absent, Rewrite, Undecided
from stepfast.integrations.deepspeedconfig import fix as fixed_configuration
from stepfast.integrations.deepspeedconfig.draft import Block, Value
from stepfast.integrations.deepspeedconfig.source import Source, is_json, read_json, read_python
from stepfast.storage.target import placed_file

app = typer.Typer(no_args_is_help=True, help="DeepSpeed configurations: make old and broken ones valid.")


@app.callback()
def root() -> None:
    """Makes a command of a single one, too."""


@app.command()
def fix(  # noqa: PLR0917 - typer calls it by keyword
    file: Annotated[
        Path,
        typer.Argument(
            help="a JSON file, or a Python file that holds the configuration as literals: in a call of Hparams, or as "
            "a dictionary. Nothing of it is run"
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="write to this file (default: standard output)")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="write to the file itself")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file of --out")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="only report, and end with status 1 if something has to change")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="which configuration of a Python file: a variable's name")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="take this key out, given by its dotted path; may be repeated")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="the ranks that the batch sizes are for")
    ] = None,
    own_optimizer: Annotated[
        bool, typer.Option("--own-optimizer", help="the script hands DeepSpeed an optimizer of its own: allow that")
    ] = False,
    keep_nebula: Annotated[
        bool,
        typer.Option("--keep-nebula", help="leave the nebula block for stepfast.integrations.deepspeed.initialize"),
    ] = False,
) -> None:
    """Writes a configuration that the current DeepSpeed takes. Every change is reported with its reason."""
    with told():
        _check_options(file, out=out, in_place=in_place, check=check)
        source = _read(file, name, in_place=in_place)
        try:
            fixed = fixed_configuration(
                source.configuration,
                world_size=world_size,
                own_optimizer=own_optimizer,
                keep_nebula=keep_nebula,
                removals=remove or (),
            )
        except Undecided as error:
            _tell_problems(file, error)
            raise typer.Exit(2) from error
        rewrites = (*source.rewrites, *fixed.rewrites)
        _tell(file, rewrites, (*source.notes, *fixed.notes))
        if check:
            raise typer.Exit(1 if rewrites else 0)
        target = file if in_place else out
        if target is None:
            typer.echo(_document(fixed.configuration))
        elif not in_place or rewrites:
            _write(target, fixed.configuration, force=force or in_place)


def _check_options(file: Path, *, out: Path | None, in_place: bool, check: bool) -> None:
    given = [option for option, is_given in (("--out", out), ("--in-place", in_place), ("--check", check)) if is_given]
    if len(given) > 1:
        raise SpecError(given[1], f"does not go with {given[0]}")
    if out is not None and out.resolve() == file.resolve():
        raise SpecError("--out", f"{out} is the file itself: say --in-place")


def _read(file: Path, name: str | None, *, in_place: bool) -> Source:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError("FILE", f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError("FILE", f"{file} is no text: {error.reason} at byte {error.start}") from error
    is_python = file.suffix == ".py" or (file.suffix != ".json" and not is_json(text))
    if not is_python and name is not None:
        raise SpecError("--name", f"{file} is JSON, which is one configuration")
    if is_python and in_place:
        raise SpecError("--in-place", f"{file} is no JSON file: name a file with --out")
    return read_python(text, name) if is_python else read_json(text)


def _write(to: Path, configuration: Block, *, force: bool) -> None:
    with placed_file(to, force=force) as temp:
        temp.write_text(_document(configuration) + "\n", encoding="utf-8")
        if to.exists():
            shutil.copymode(to, temp)


def _document(configuration: Block) -> str:
    return json.dumps(configuration, indent=2, ensure_ascii=False)


def _tell(file: Path, rewrites: tuple[Rewrite, ...], notes: tuple[str, ...]) -> None:
    if not rewrites:
        typer.echo(f"{file}: valid for DeepSpeed {RELEASE}, nothing to change", err=True)
    for rewrite in rewrites:
        typer.echo(f"{_change(rewrite)}\n    {rewrite.why}", err=True)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if rewrites:
        changes = "1 change" if len(rewrites) == 1 else f"{len(rewrites)} changes"
        typer.echo(f"{file}: {changes} for DeepSpeed {RELEASE}", err=True)


def _tell_problems(file: Path, error: Undecided) -> None:
    for problem in error.problems:
        value = "" if isinstance(problem.value, Absent) else f" {_text(problem.value)}"
        typer.echo(f"stepfast: {problem.path}:{value}\n    {problem.why}", err=True)
    typer.echo(
        f"stepfast: {file}: somebody has to decide that: change it in the file, or take it out with --remove PATH",
        err=True,
    )


def _change(rewrite: Rewrite) -> str:
    if isinstance(rewrite.was, Absent):
        return f"{rewrite.path}: {_text(rewrite.now)} added"
    if isinstance(rewrite.now, Absent):
        return f"{rewrite.path}: {_text(rewrite.was)} removed"
    if rewrite.to == rewrite.path and _text(rewrite.was) == _text(rewrite.now):
        return f"{rewrite.path}: {_text(rewrite.now)}"
    moved = "" if rewrite.to == rewrite.path else f"{rewrite.to}: "
    return f"{rewrite.path}: {_text(rewrite.was)} -> {moved}{_text(rewrite.now)}"


def _text(value: Value) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def register(root: typer.Typer) -> None:
    """Adds the commands under `deepspeed-config`."""
    root.add_typer(app, name="deepspeed-config")
