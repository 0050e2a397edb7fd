"""Kills an agent before the nth of its effects on published volumes. On PYTHONPATH of the agents that want it.

Effects are the calls that change a file system, as Python's audit hooks see them, under the folders that
STEPFAST_KILL_FOLDERS names. They are counted from the moment that the file STEPFAST_KILL_TRIGGER appears; it says at
which one to die.
"""

import os
import signal
import sys

_TRIGGER = os.environ.get("STEPFAST_KILL_TRIGGER")
_FOLDERS = [folder for folder in os.environ.get("STEPFAST_KILL_FOLDERS", "").split(os.pathsep) if folder]
_EFFECTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "socket.bind", "shutil.rmtree"}


def _install(trigger: str) -> None:
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in _EFFECTS or not _is_ours(event, arguments) or not os.path.exists(trigger):
            return
        count += 1
        with open(trigger) as file:
            text = file.read()
        if text and count >= int(text):
            os.unlink(trigger)  # the agent that comes after it lives
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_ours(event: str, arguments: tuple) -> bool:
    if event == "socket.bind":
        return isinstance(arguments[1], str | bytes) and "stepfast-agent" in os.fsdecode(arguments[1])
    paths = [argument for argument in arguments if isinstance(argument, str | bytes | os.PathLike)]
    if any(folder in os.fspath(path) for path in paths for folder in _FOLDERS):
        return True
    # Through the descriptor of a folder, or within one.
    return any(os.path.basename(path) in ("agent.sock", ".stepfast-agent.sock") for path in paths)


if _TRIGGER and "stepfast_sidecar" in sys.orig_argv:
    _install(_TRIGGER)
