"""Kills a persister at one effect of its storage, once. On PYTHONPATH of the trials that want it; see `trial.py`.

STEPFAST_CHAOS_KILL is `<operation>|<part of a path>|<after which step>|<victims>|<token file>`; the process that
removes the token file is the one that kills, so that each trial's effect kills once. Victims: `persister`, or `agent`
for the persister and the agent that started it.
"""

import os
import re
import signal
import sys

_WANTED = os.environ.get("STEPFAST_CHAOS_KILL")


def _install(operation: str, part: str, step: int, victims: str, token: str) -> None:
    import stepfast.storage

    original = stepfast.storage.open_store

    def probe(at: str, path: str) -> None:
        found = re.search(r"global_step(\d+)", path)
        if at != operation or part not in path or found is None or int(found.group(1)) < step:
            return
        try:
            os.unlink(token)
        except FileNotFoundError:
            return
        if victims == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def open_store(uri, **options):  # type: ignore[no-untyped-def]  # the wrapped function's own signature
        return original(uri, probe=probe, **options)

    stepfast.storage.open_store = open_store


if _WANTED and "stepfast_sidecar.persister" in sys.orig_argv:
    _operation, _part, _step, _victims, _token = _WANTED.split("|")
    _install(_operation, _part, int(_step), _victims, _token)
