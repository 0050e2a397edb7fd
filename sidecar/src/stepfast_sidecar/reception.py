"""Accepts connections, at the node's own socket and at the pods', and decides who may say what.

The node's own socket (`stepfast run`) serves this user, who may also supervise. A pod's socket serves ranks of the
pod's job and run alone: whatever else is said there, and whoever comes in greater numbers than it has ranks, is
refused, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from stepfast.errors import ProtocolError, StepfastError
from stepfast.messages import Failure, FlushRun, Hello, Launching, Message, RequestSave, Watch
from stepfast.step import JobKey
from stepfast.storage.rules import StorageRules
from stepfast_sidecar import tenants
from stepfast_sidecar.intake import Peer
from stepfast_sidecar.rank import serve_rank
from stepfast_sidecar.run import Session
from stepfast_sidecar.tenants import Volume

if TYPE_CHECKING:
    from stepfast_sidecar.agent import Agent

log = logging.getLogger(__name__)

Meet: TypeAlias = "Callable[[Peer, Door], Coroutine[Any, Any, None]]"

HELLO_SECONDS = 30.0
_POD_CONNECTIONS = 256  # of one pod at once, and ranks of one launch: descriptors and the status are everybody's


class Door:
    """One listening socket and who came in through it. `volume` is None for the node's own."""

    def __init__(
        self, listener: socket.socket, volume: Volume | None, *, meet: Meet, left: Callable[[Door], None]
    ) -> None:
        self.volume = volume
        self.launch = 0  # of torchrun within the pod: the newest whose ranks said hello
        self.local_world_size: int | None = None
        self.is_foreseeing = False
        self._listener, self._meet, self._left = listener, meet, left
        self._peers: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="door")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors: others may end meanwhile
                log.error("a connection was not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            if self.volume is not None and len(self._peers) >= _POD_CONNECTIONS:
                sock.close()
                continue
            task = asyncio.create_task(self._meet(Peer(sock), self), name="peer")
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    async def close(self) -> None:
        """Ends every connection; the socket's name is somebody else's to remove."""
        self._left(self)
        for task in (self._accepting, *self._peers):
            task.cancel()
        await asyncio.gather(self._accepting, *self._peers, return_exceptions=True)
        self._listener.close()


class Reception:
    """All doors of an agent."""

    def __init__(self, agent: Agent, rules: StorageRules) -> None:
        self._agent, self._rules = agent, rules
        self._doors: set[Door] = set()

    def open(self, listener: socket.socket, volume: Volume | None = None) -> Door:
        """Serves the socket from now on."""
        door = Door(listener, volume, meet=self.meet, left=self._doors.discard)
        self._doors.add(door)
        return door

    async def close(self) -> None:
        """Ends all that is served."""
        for door in list(self._doors):
            await door.close()

    async def meet(self, peer: Peer, door: Door) -> None:
        """Serves one connection, to its end."""
        try:
            if door.volume is None:
                _check_user(peer)
            messages = peer.messages()
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(messages, None)
            if first is None:
                return
            if isinstance(first, Hello):
                hello = first if door.volume is None else self._admit(first, door, door.volume)
                await serve_rank(self._agent, peer, hello, messages, door.volume)
                return
            if isinstance(first, Launching):
                await self._foresee(first, door)
                return
            self._supervise(peer, door, first)
            async for message in messages:
                self._supervise(peer, door, message)
        except TimeoutError:
            log.warning("a connection%s said nothing for %s s", _whose(door), HELLO_SECONDS)
        except StepfastError as error:
            log.warning("a connection%s was closed: %s", _whose(door), error)
            peer.send(Failure(id=0, kind=type(error).__name__, reason=str(error)))
        finally:
            self._agent.unwatch(peer)
            peer.dispose()

    async def _foresee(self, launching: Launching, door: Door) -> None:
        """Lasts as long as the work, so that all that limits and ends a pod's connections does so with that, too."""
        volume = door.volume
        if volume is None:
            await self._agent.foresee(launching, {})
            return
        reason = tenants.refusal(launching, volume, self._rules)
        if reason is not None:
            raise ProtocolError(reason)
        if launching.ranks > _POD_CONNECTIONS:
            raise ProtocolError(f"{volume.owner}: more ranks than the {_POD_CONNECTIONS} that it may have here")
        if door.is_foreseeing:
            return  # a pod has one launcher, which says it once
        door.is_foreseeing = True
        try:
            await self._agent.foresee(launching, volume.credentials)
        finally:
            door.is_foreseeing = False

    def _supervise(self, peer: Peer, door: Door, message: Message) -> None:
        if door.volume is not None:
            raise ProtocolError(f"{type(message).__name__} is not for pods to say")
        match message:
            case Watch():
                self._agent.watch(peer)
            case RequestSave():
                self._agent.request_save(JobKey.parse(message.job), message.run)
            case FlushRun():
                self._agent.flush(JobKey.parse(message.job), message.run)
            case _:
                raise ProtocolError(f"{type(message).__name__} from somebody who is no rank")

    # ------------------------------------------------------------ ranks of pods

    def _admit(self, hello: Hello, door: Door, volume: Volume) -> Hello:
        """The hello as it counts on this node. Raises ProtocolError when this pod may not say it.

        A step is whole on the node when the ranks of all the run's pods here have staged it. All of these pods have
        their volumes before the last of their ranks says hello, and nothing is staged before that.
        """
        reason = tenants.refusal(hello, volume, self._rules)
        if reason is not None:
            raise ProtocolError(reason)
        launch = tenants.launch_of(hello.run, volume.run) or 0
        if launch < door.launch:
            raise ProtocolError(f"{volume.owner}: {hello.run} is over: torchrun has launched its ranks again since")
        mine = list(self._sessions_of(volume))
        if launch > door.launch:
            for session in mine:
                if session.alive and session.hello.run != hello.run:
                    session.peer.close()
            door.launch, door.local_world_size = launch, None
        beside = [session for session in mine if session.hello.run == hello.run and session.hello.rank != hello.rank]
        most = min(hello.local_world_size, _POD_CONNECTIONS)
        if len(beside) >= most or door.local_world_size not in (None, hello.local_world_size):
            raise ProtocolError(f"{volume.owner}: more ranks than the {most} that it may have here")
        door.local_world_size = hello.local_world_size
        sizes = [other.local_world_size or hello.local_world_size for other in self._doors if _is_beside(other, volume)]
        total = min(sum(sizes), hello.world_size)
        for session in self._agent.sessions_of(volume.job, hello.run):
            session.hello = replace(session.hello, local_world_size=total)
        return replace(hello, local_world_size=total)

    def _sessions_of(self, volume: Volume) -> Iterable[Session]:
        room = self._agent.rooms.get(volume.job)
        runs = room.runs.values() if room is not None else ()
        return (s for run in runs for s in run.sessions.values() if s.volume_id == volume.id)


def _is_beside(door: Door, volume: Volume) -> bool:
    return door.volume is not None and (door.volume.job, door.volume.run) == (volume.job, volume.run)


def _check_user(peer: Peer) -> None:
    credentials = peer.credentials()
    if credentials.uid not in (os.getuid(), 0):
        raise ProtocolError(f"user {credentials.uid} is not this agent's")


def _whose(door: Door) -> str:
    return f" of {door.volume.owner}" if door.volume is not None else ""
