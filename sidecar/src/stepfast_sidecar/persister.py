"""The process that persists one job: commands in on standard input, answers out on standard output, a line each.

One process a job, so that a bad tenant, a slow store or a crash stays in its room. It dies with its supervisor, at
once: a new agent may hand out the very slots that it reads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from stepfast.errors import ReferenceMissing, StepfastError, StorageUnavailable
from stepfast.histories import SaveRow
from stepfast.layout import parse_file_entry
from stepfast.storage import open_store
from stepfast_sidecar.persist import JobPersister
from stepfast_sidecar.slotmaps import SlotRef

NICENESS = 10
_PR_SET_PDEATHSIG = 1


class Server:
    """Runs commands in the pools they belong to, and writes one answer for each."""

    def __init__(self, open_persister: Callable[[], JobPersister], answers: TextIO) -> None:
        """`answers`: where they are written."""
        self._open_persister, self._answers = open_persister, answers
        self._opened: JobPersister | None = None
        self._opening = threading.Lock()
        self._write_lock = threading.Lock()
        self._pools = {
            # One step at a time: the newest wins when the one before it is done.
            "persist": ThreadPoolExecutor(1, thread_name_prefix="stepfast-persist"),
            "window": ThreadPoolExecutor(8, thread_name_prefix="stepfast-window"),
            "commit": ThreadPoolExecutor(4, thread_name_prefix="stepfast-commit"),
            "fetch": ThreadPoolExecutor(4, thread_name_prefix="stepfast-fetch"),
            "foresee": ThreadPoolExecutor(2, thread_name_prefix="stepfast-foresee"),  # what is asked for goes first
            "keep": ThreadPoolExecutor(1, thread_name_prefix="stepfast-retain"),
        }

    @property
    def _persister(self) -> JobPersister:
        """Opened when first needed: a storage that cannot be opened fails the command, saying why, not the process."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open_persister()
            return self._opened

    def submit(self, command: Mapping[str, Any]) -> None:
        """Takes a command; its answer carries the same id."""
        kind = command["command"]
        actions: dict[str, tuple[str, Callable[..., Any]]] = {
            "persist": ("persist", self._persist),
            "window": ("window", self._window),
            "commit": ("commit", self._commit),
            "steps": ("fetch", lambda: {"steps": self._persister.steps()}),
            "fetch": ("fetch", lambda path: self._persister.fetch(path)),  # noqa: PLW0108  # opens the storage there
            "restorable": ("fetch", lambda **values: {"paths": self._persister.files_to_restore(**values)}),
            "foresee": ("foresee", lambda path: self._persister.foresee(path)),  # noqa: PLW0108  # same
            "supersede": ("keep", lambda **values: {"steps": self._persister.supersede_after(**values)}),
            "setAside": ("keep", lambda step: {"steps": [step] if self._persister.set_aside(step) else []}),
            "remove": ("keep", self._remove),
            "retain": ("keep", lambda **values: {"removed": self._persister.retain(**values)}),
            "history": ("keep", self._history),
        }
        pool, action = actions[kind]
        self._pools[pool].submit(self._run, command["id"], action, command["values"])

    def _run(self, request: int, action: Callable[..., Any], values: Mapping[str, Any]) -> None:
        try:
            answer = {"id": request, "ok": True, "values": action(**values)}
        except StepfastError as error:
            answer = {"id": request, "ok": False, "kind": type(error).__name__, "reason": str(error)}
            if isinstance(error, StorageUnavailable):
                answer["retryAfter"] = error.retry_after_seconds
        except Exception as error:  # noqa: BLE001  # a command's outermost frame: the answer must go out
            traceback.print_exc()
            answer = {
                "id": request,
                "ok": False,
                "kind": "AgentError",
                "reason": f"{type(error).__name__}: {error}",
            }
        with self._write_lock:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    def _persist(self, *, slots: list[dict[str, Any]], streamed: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
        part = self._persister.persist(
            slots=[SlotRef(**slot) for slot in slots],
            streamed=[parse_file_entry(file) for file in streamed],
            **values,
        )
        return {"size": part.size_bytes, "time": part.persisted_time}

    def _window(self, *, slot: dict[str, Any], **values: Any) -> dict[str, Any]:
        file = self._persister.persist_window(slot=SlotRef(**slot), **values)
        return {"file": file.to_document() if file is not None else None}

    def _commit(self, **values: Any) -> dict[str, Any]:
        try:
            manifest = self._persister.commit(**values)
        except ReferenceMissing as error:
            return {"committed": False, "missing": error.missing, "reason": str(error)}
        if manifest is None:
            return {"committed": False}
        return {
            "committed": True,
            "time": manifest.committed_time,
            "size": manifest.size_bytes,
            "run": manifest.run,
        }

    def _remove(self, *, step: int) -> dict[str, Any]:
        self._persister.remove(step)
        return {}

    def _history(self, *, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self._persister.note_saves([SaveRow(**row) for row in rows])
        return {}

    def close(self) -> None:
        """Ends what runs."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        if self._opened is not None:
            self._opened.close()


def _die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we asked; the agent itself may be process 1, in a container
        sys.exit(1)


def _give_way() -> None:
    """Training comes first: this process has a small share of what training wants, too, and wakes without interrupting
    it.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _take_standard_output() -> TextIO:
    """Standard output, for answers alone: what storage libraries print there goes to standard error from now on."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description="persists one job; started by the agent")
    parser.add_argument("--storage-uri", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--spool-folder")
    parser.add_argument("--supervisor", type=int, required=True, help="its process id; we die with it")
    parser.add_argument("--storage-deadline", type=float, default=30.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor ends us, after the flush
    _die_with_parent(arguments.supervisor)
    _give_way()

    def open_persister() -> JobPersister:
        store = open_store(arguments.storage_uri, deadline_seconds=arguments.storage_deadline)
        settle = 2 * arguments.storage_deadline
        return JobPersister(store, arguments.folder, spool_folder=arguments.spool_folder, settle_seconds=settle)

    server = Server(open_persister, _take_standard_output())
    try:
        for line in sys.stdin:
            server.submit(json.loads(line))
    finally:
        server.close()


if __name__ == "__main__":
    main()
