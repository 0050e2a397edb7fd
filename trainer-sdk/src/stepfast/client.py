"""A connection to the node's agent: frames out, frames and descriptors in. Knows sockets, nothing of tensors.

`Connection` is the plain blocking transport that both `RankClient` (the SDK's) and `nodeclient` stand on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from stepfast import errors
from stepfast.errors import AgentError, AgentUnavailable, ProtocolError, StepfastError
from stepfast.messages import (
    Borrow,
    Bye,
    CommittedSteps,
    Failure,
    Fetch,
    Fetched,
    Hello,
    Lent,
    Message,
    Remove,
    Reserve,
    Reserved,
    SetAside,
    Steps,
    Supersede,
    Welcome,
)
from stepfast.protocol import ANSWER_LIMIT, Decoder, encode

M = TypeVar("M", bound=Message)
_MAX_DESCRIPTORS = 16


def connect(path: str, timeout_seconds: float) -> socket.socket:
    """A stream socket to the path, which may be longer than a unix address allows. Raises AgentUnavailable."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_seconds)
    try:
        if len(os.fsencode(path)) < 100:
            sock.connect(path)
        else:
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)
    except OSError as error:
        sock.close()
        raise AgentUnavailable(f"no agent answers at {path}: {error}") from error
    return sock


class Connection:
    """Frames over a connected socket. `send` from any thread; `receive` from one.

    The socket's own time-out, the one it was connected with, holds for each `send` and `receive` until `wait_for_ever`:
    an agent that stands still (stopped, or stuck in the kernel) accepts connections and never answers.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder(ANSWER_LIMIT)
        self._ready: deque[Message] = deque()
        self._descriptors: deque[int] = deque()
        self._send_lock = threading.Lock()

    def wait_for_ever(self) -> None:
        """From here on messages come when there is something to tell, however late."""
        self._sock.settimeout(None)

    def send(self, message: Message) -> None:
        """Raises AgentUnavailable when the agent is gone."""
        frame = encode(message)
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except TimeoutError as error:
                raise AgentUnavailable(f"the agent does not answer within {self._sock.gettimeout():g} s") from error
            except OSError as error:
                raise AgentUnavailable(f"the agent went away: {error}") from error

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which the caller closes. Raises AgentUnavailable, ProtocolError."""
        while not self._ready:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 18, _MAX_DESCRIPTORS)
            except TimeoutError as error:
                raise AgentUnavailable(f"the agent does not answer within {self._sock.gettimeout():g} s") from error
            except OSError as error:
                raise AgentUnavailable(f"the agent went away: {error}") from error
            self._descriptors.extend(descriptors)
            if not data:
                raise AgentUnavailable("the agent closed the connection")
            self._ready.extend(self._decoder.feed(data))
        message = self._ready.popleft()
        if len(self._descriptors) < message.descriptors:
            raise ProtocolError(f"{type(message).__name__} came without its descriptor")
        return message, [self._descriptors.popleft() for _ in range(message.descriptors)]

    def abandon(self) -> None:
        """Closes this process's descriptor only."""
        self._sock.close()

    def close(self) -> None:
        """Ends the connection; a `receive` that waits in another thread returns with AgentUnavailable."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


class RankClient:
    """A rank's connection: requests with answers from any thread; what the agent pushes goes to `on_push`,
    with its descriptors, which are then `on_push`'s to close.

    `on_lost` is called once, from the reader's thread, when the connection ends unasked.
    """

    def __init__(
        self,
        path: str,
        hello: Hello,
        *,
        on_push: Callable[[Message, list[int]], None],
        on_lost: Callable[[], None],
        timeout_seconds: float = 30.0,  # to connect and to be greeted
    ) -> None:
        self._connection = Connection(connect(path, timeout_seconds))
        self._ids = itertools.count(1)
        self._answers: dict[int, tuple[Message, list[int]]] = {}
        self._arrived = threading.Condition()
        self._lost: StepfastError | None = None
        self._closing = False
        self._on_push, self._on_lost = on_push, on_lost
        try:
            self._connection.send(hello)
            first, _ = self._connection.receive()
        except StepfastError:
            self._connection.close()
            raise
        if isinstance(first, Failure):
            self._connection.close()
            raise _error_of(first)
        if not isinstance(first, Welcome):
            self._connection.close()
            raise ProtocolError(f"the agent greets with {type(first).__name__}")
        self.welcome = first
        self._connection.wait_for_ever()
        self._reader = threading.Thread(target=self._read, name="stepfast-client", daemon=True)
        self._reader.start()

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self._lost is not None

    def send(self, message: Message) -> None:
        """Sends what has no answer. Raises AgentUnavailable."""
        self._connection.send(message)

    def reserve(
        self, *, step: int, name: str, size_bytes: int, window_begin: int, drop: tuple[int, ...],
        copying: tuple[int, ...] = (),
    ) -> tuple[Reserved, int]:  # fmt: skip
        """A slot and its file's descriptor, which the caller closes. Waits while memory is exhausted."""
        request = next(self._ids)
        message, descriptors = self._ask(
            request,
            Reserve(
                id=request,
                step=step,
                name=name,
                size_bytes=size_bytes,
                window_begin=window_begin,
                drop=drop,
                copying=copying,
            ),
            None,
        )
        return _expect(message, Reserved), descriptors[0]

    def steps(self, timeout_seconds: float = 120.0) -> tuple[int, ...]:
        """The job's committed steps, ascending. Raises StorageError."""
        request = next(self._ids)
        message, _ = self._ask(request, Steps(id=request), timeout_seconds)
        return _expect(message, CommittedSteps).steps

    def supersede_after(self, step: int) -> Callable[[float | None], tuple[int, ...]]:
        """Asks for committed steps of other runs above this one to be marked superseded.

        From now on the agent commits nothing of this run before that is done. What is returned waits for it, so many
        seconds, and returns those steps; it raises StorageError.
        """
        request = next(self._ids)
        self._connection.send(Supersede(id=request, step=step))

        def wait(timeout_seconds: float | None) -> tuple[int, ...]:
            message, _ = self._answer(request, "Supersede", timeout_seconds)
            return _expect(message, CommittedSteps).steps

        return wait

    def set_aside(self, step: int, timeout_seconds: float) -> None:
        """Marks a damaged step, it alone, superseded. Raises StorageError."""
        request = next(self._ids)
        message, _ = self._ask(request, SetAside(id=request, step=step), timeout_seconds)
        _expect(message, CommittedSteps)

    def remove(self, step: int, timeout_seconds: float) -> None:
        """Removes a committed step. Raises StorageError."""
        request = next(self._ids)
        message, _ = self._ask(request, Remove(id=request, step=step), timeout_seconds)
        _expect(message, CommittedSteps)

    def fetch(self, path: str, *, refresh: bool = False) -> tuple[Fetched, int]:
        """An object of the job's folder as a descriptor, which the caller closes. Raises StorageError."""
        request = next(self._ids)
        message, descriptors = self._ask(request, Fetch(id=request, path=path, refresh=refresh), None)
        return _expect(message, Fetched), descriptors[0]

    def borrow(self, name: str, size_bytes: int, timeout_seconds: float = 60.0) -> tuple[int, int | None]:
        """Memory that the run's ranks on this node share under this name: how many bytes of data are lent, and their
        file's descriptor, which the caller closes; 0 and None when nothing is.

        Raises AgentUnavailable: also of an agent that is too old to know of this, which closes the connection.
        """
        request = next(self._ids)
        message, descriptors = self._ask(request, Borrow(id=request, name=name, size_bytes=size_bytes), timeout_seconds)
        return _expect(message, Lent).granted_bytes, descriptors[0] if descriptors else None

    def close(self) -> None:
        """Says goodbye and ends."""
        self._closing = True
        with contextlib.suppress(AgentUnavailable):
            self._connection.send(Bye())
        self._connection.close()
        self._reader.join(timeout=5)

    def abandon(self) -> None:
        """Gives the descriptor back without touching the connection, as a forked child must: it is its parent's."""
        self._closing = True
        self._connection.abandon()

    def _ask(self, request: int, message: Message, timeout_seconds: float | None) -> tuple[Message, list[int]]:
        self._connection.send(message)
        return self._answer(request, type(message).__name__, timeout_seconds)

    def _answer(self, request: int, asked: str, timeout_seconds: float | None) -> tuple[Message, list[int]]:
        with self._arrived:
            arrived = self._arrived.wait_for(lambda: request in self._answers or self._lost, timeout_seconds)
            if request in self._answers:
                answer, descriptors = self._answers.pop(request)
            elif not arrived:
                raise AgentUnavailable(f"the agent did not answer {asked} in {timeout_seconds} s")
            else:
                raise AgentUnavailable(str(self._lost)) from self._lost
        if isinstance(answer, Failure):
            raise _error_of(answer)
        return answer, descriptors

    def _read(self) -> None:
        while True:
            try:
                message, descriptors = self._connection.receive()
            except StepfastError as error:
                with self._arrived:
                    self._lost = error
                    self._arrived.notify_all()
                if not self._closing:
                    self._connection.close()
                    self._on_lost()
                return
            request = getattr(message, "id", None)
            if request is None:
                self._on_push(message, descriptors)
                continue
            with self._arrived:
                self._answers[request] = (message, descriptors)
                self._arrived.notify_all()


def _expect(message: Message, want: type[M]) -> M:
    if not isinstance(message, want):
        raise ProtocolError(f"the agent answers {type(message).__name__} where {want.__name__} belongs")
    return message


_BY_KIND = {
    cls.__name__: cls
    for cls in (
        errors.ObjectNotFound, errors.StorageForbidden, errors.StorageFull, errors.StorageUnavailable,
        errors.MemoryBudgetTooSmall, errors.ProtocolMismatch, errors.ProtocolError, errors.CheckpointNotFound,
    )
}  # fmt: skip


def _error_of(failure: Failure) -> StepfastError:
    return _BY_KIND.get(failure.kind, AgentError)(failure.reason)
