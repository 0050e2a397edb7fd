"""The supervisor's view of a node's agent on this machine: its status, and two requests. Used by `stepfast run`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from stepfast.client import Connection, connect
from stepfast.errors import AgentUnavailable, ProtocolError, StepfastError
from stepfast.messages import FlushRun, Message, RequestSave, Status, Watch
from stepfast.nodestatus import NodeStatus, from_document
from stepfast.step import JobKey

_RECONNECT_SECONDS = 0.2


class NodeClient:
    """Talks to the agent behind a socket path; the agent may come later, go, and come back."""

    def __init__(self, socket_path: str, *, timeout_seconds: float = 10.0) -> None:
        self._path = socket_path
        self._timeout = timeout_seconds
        self._closed = threading.Event()
        self._watching: Connection | None = None
        self._thread: threading.Thread | None = None

    def status(self) -> NodeStatus:
        """The node's status now. Raises AgentUnavailable."""
        connection = self._open()
        try:
            connection.send(Watch())
            return _status(connection.receive()[0])
        finally:
            connection.close()

    def watch(self, on_status: Callable[[NodeStatus], None]) -> None:
        """Calls back with each change, from a thread of its own, across restarts of the agent, until `close`."""
        self._thread = threading.Thread(target=self._follow, args=(on_status,), name="stepfast-watch", daemon=True)
        self._thread.start()

    def request_save(self, job: JobKey, run: str) -> None:
        """Asks the gang to save at its next agreed step and to wait there to be stopped. Raises AgentUnavailable."""
        self._tell(RequestSave(job=str(job), run=run))

    def flush(self, job: JobKey, run: str) -> None:
        """Asks the agent to persist all it holds of the run. Raises AgentUnavailable."""
        self._tell(FlushRun(job=str(job), run=run))

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        if (watching := self._watching) is not None:
            watching.close()
        if self._thread is not None:
            self._thread.join(timeout=self._timeout)

    def _open(self) -> Connection:
        return Connection(connect(self._path, self._timeout))

    def _tell(self, message: Message) -> None:
        # Watch comes behind the request and is answered: once the answer is here the request was taken in.
        connection = self._open()
        try:
            connection.send(message)
            connection.send(Watch())
            _status(connection.receive()[0])
        finally:
            connection.close()

    def _follow(self, on_status: Callable[[NodeStatus], None]) -> None:
        while not self._closed.is_set():
            try:
                connection = self._watching = self._open()
            except AgentUnavailable:
                self._closed.wait(_RECONNECT_SECONDS)
                continue
            try:
                connection.send(Watch())
                on_status(_status(connection.receive()[0]))
                connection.wait_for_ever()  # the agent tells changes, and there need not be any
                while not self._closed.is_set():
                    on_status(_status(connection.receive()[0]))
            except StepfastError:
                self._closed.wait(_RECONNECT_SECONDS)
            finally:
                self._watching = None
                connection.close()


def _status(message: Message) -> NodeStatus:
    if not isinstance(message, Status):
        raise ProtocolError(f"the agent answers Watch with {type(message).__name__}")
    try:
        return from_document(json.loads(message.document))
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the agent's status does not parse: {error}") from error
