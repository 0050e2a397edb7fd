"""Makes a persister's storage stand still while a file is there. On PYTHONPATH of the agents that want it.

STEPFAST_HELD_WHILE names the file: every write waits until it is gone, as on a file server that hangs; with
STEPFAST_HELD_NAME only those of files that are called so.
"""

import os
import sys
import time

_GATE = os.environ.get("STEPFAST_HELD_WHILE")
_NAME = os.environ.get("STEPFAST_HELD_NAME")
_DEADLINE_SECONDS = 120.0


def _install(gate: str) -> None:
    import stepfast.storage

    original = stepfast.storage.open_store

    def probe(operation: str, path: str) -> None:
        end = time.monotonic() + _DEADLINE_SECONDS
        if _NAME not in (None, os.path.basename(path)):
            return
        while os.path.exists(gate) and time.monotonic() < end:
            time.sleep(0.01)

    def open_store(uri, **options):  # type: ignore[no-untyped-def]  # the wrapped function's own signature
        return original(uri, probe=probe, **options)

    stepfast.storage.open_store = open_store


if _GATE and "stepfast_sidecar.persister" in sys.orig_argv:
    _install(_GATE)
