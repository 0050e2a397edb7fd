"""Errors of Stepfast as the command line tells them: one line, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stepfast.errors import AnatomyOptionError, CheckpointNotFound, SpecError, StepfastError


@contextmanager
def told() -> Iterator[None]:
    """Exit status 2: the command line asks for what is not there, or is wrong. 1: everything else."""
    try:
        yield
    except StepfastError as error:
        typer.echo(f"stepfast: {error}", err=True)
        is_asked_wrong = isinstance(error, SpecError | AnatomyOptionError | CheckpointNotFound)
        raise typer.Exit(2 if is_asked_wrong else 1) from error
