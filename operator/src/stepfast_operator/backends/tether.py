"""Ties a command to its parent: `python -I -S tether.py PARENT_PID command args...` becomes that command,
and gets SIGTERM when the parent dies. Standard library only, and no import of ours: it is run as a file,
before anything else.

A program of its own rather than code between fork and exec, which is not safe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        # It died before we were tied to it, so that no signal will come.
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
