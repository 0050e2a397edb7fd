"""The `stepfast` command: an empty typer app that the installed distributions add their commands to.

A distribution offers a command as an entry point of the group `stepfast.commands`: a `register(app)`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

GROUP = "stepfast.commands"


def main() -> None:
    """Entry point of the `stepfast` script."""
    if find_spec("typer") is None or find_spec("rich") is None:
        sys.stderr.write("The command line needs typer and rich: pip install stepfast[run]\n")
        sys.exit(2)
    import typer

    app = typer.Typer(
        name="stepfast",
        help="Training that loses no work: checkpoints without stalls, restarts from the latest.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root() -> None:
        """Makes commands of a single registered function, too."""

    for commands in ("stepfast.cli.checkpoints", "stepfast.cli.deepspeedconfig", "stepfast.cli.anatomy"):
        if find_spec(commands) is not None:
            import_module(commands).register(app)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        entry.load()(app)
    app()
