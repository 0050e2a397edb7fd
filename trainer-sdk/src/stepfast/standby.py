"""A launcher that is ready before it is needed: `python -m stepfast.standby`.

It imports what torchrun is made of, seconds of every restart, and waits. One line of JSON on standard input makes it
the launcher of a gang, with that line's arguments, environment and folder; without one it ends.
"""

from __future__ import annotations

import json
import os
import sys

from stepfast import launcher


def order(arguments: list[str], environment: dict[str, str], folder: str) -> bytes:
    """The line for a launcher with these arguments (torchrun's options, then the script), and nothing of this process's
    environment.
    """
    return json.dumps({"arguments": arguments, "environment": environment, "folder": folder}).encode() + b"\n"


def main() -> int:
    """Waits for an order and carries it out; returns the exit status."""
    launcher.load()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0
    told = json.loads(line)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return launcher.main(told["arguments"])


if __name__ == "__main__":
    sys.exit(main())
