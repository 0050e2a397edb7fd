"""The supervisor: serves the node's socket, keeps a room for each job, tells its status. Maps no slot, ever."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import time

from stepfast.errors import ProtocolError, StepfastError
from stepfast.nodestatus import NodeStatus, to_document
from stepfast.protocol import Failure, FlushRun, Hello, Message, RequestSave, SaveRequested, Status, Watch
from stepfast.step import JobKey
from stepfast_sidecar.config import Config
from stepfast_sidecar.intake import Peer, listen
from stepfast_sidecar.memory import MemoryTier
from stepfast_sidecar.metrics import Metrics
from stepfast_sidecar.rank import serve_rank
from stepfast_sidecar.room import Room

log = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.2
_HELLO_SECONDS = 30.0
_LET_GO_POLL_SECONDS = 10.0


class Agent:
    """One node's agent. `run` serves until it is told to end, and ends in order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.memory = MemoryTier(config.memory_dir, config.memory_limit_bytes)
        self.rooms: dict[JobKey, Room] = {}
        self._watchers: set[Peer] = set()
        self._peers: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.TimerHandle | None = None
        self._ending = asyncio.Event()

    # ------------------------------------------------------------ life

    async def run(self) -> bool:
        """Adopts what an earlier agent left, serves, and at the end flushes all it holds; False when it could not."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        self._adopt()
        listener = listen(str(self.config.socket))
        stop_metrics = None
        if self.config.metrics_port is not None:
            stop_metrics = self.metrics.serve(
                self.config.metrics_port,
                limit_bytes=self.config.memory_limit_bytes,
                used_bytes=self.memory.used_bytes,
                lag_seconds=lambda: max((room.lag_seconds for room in self.rooms.values()), default=0.0),
            )
        serving = asyncio.create_task(self._serve(listener), name="serve")
        adopting = asyncio.create_task(self._flush_orphans(), name="flush orphans")
        clearing = asyncio.create_task(self._let_jobs_go(), name="let jobs go")
        try:
            await self._ending.wait()
            await self._flush_all("SIGTERM")
        finally:
            is_idle = await self._close(listener, serving, adopting, clearing)
            if stop_metrics is not None:
                await asyncio.to_thread(stop_metrics)
        return is_idle

    async def _close(self, listener: socket.socket, *tasks: asyncio.Task[None]) -> bool:
        """Ends all that runs; whether everything is persisted."""
        is_in_use = any(room.is_living for room in self.rooms.values())
        for task in (*tasks, *self._peers):
            task.cancel()
        await asyncio.gather(*tasks, *self._peers, return_exceptions=True)
        listener.close()
        self.config.socket.unlink(missing_ok=True)
        is_idle = all(room.is_idle for room in self.rooms.values())
        for room in self.rooms.values():
            await room.close()
        if self._publishing is not None:
            self._publishing.cancel()
        if self.config.remove_memory and is_idle and not is_in_use:
            shutil.rmtree(self.config.memory_dir, ignore_errors=True)
        return is_idle

    def _adopt(self) -> None:
        for job, settings, slots in self.memory.jobs():
            uri = settings.get("storageUri")
            if not isinstance(uri, str):
                self.memory.forget(job)
                continue
            sizes = settings.get("localWorldSizes")
            self._room(job, uri).adopt(slots, sizes if isinstance(sizes, dict) else {})

    async def _flush_orphans(self) -> None:
        """Runs of an earlier agent whose ranks do not come back are flushed."""
        adopted = {(job, run) for job, room in self.rooms.items() for run in room.runs}
        if not adopted:
            return
        await asyncio.sleep(self.config.adopt_seconds)
        for job, name in adopted:
            run = self.rooms[job].runs.get(name) if job in self.rooms else None
            if run is not None and not any(session.alive for session in run.sessions.values()):
                self.rooms[job].flush(run)

    async def _let_jobs_go(self) -> None:
        """A job that nobody has run here for a while, and of which all is persisted, leaves memory and processes."""
        quiet: dict[JobKey, float] = {}  # since when
        while True:
            await asyncio.sleep(min(_LET_GO_POLL_SECONDS, self.config.idle_seconds / 2))
            now = time.monotonic()
            quiet = {
                job: quiet.get(job, now) for job, room in self.rooms.items() if room.is_idle and not room.is_living
            }
            for job in [job for job, since in quiet.items() if now - since >= self.config.idle_seconds]:
                log.info("%s has left this node", job)
                room = self.rooms.pop(job)
                room.slots.release_all()
                self.memory.forget(job)
                await room.close()

    async def _flush_all(self, cause: str) -> None:
        begin = time.monotonic()
        for room in self.rooms.values():
            for run in room.runs.values():
                room.flush(run)
        await asyncio.sleep(0.02)  # ranks that died a moment ago are still to be noticed
        while not all(room.is_idle for room in self.rooms.values()):
            if time.monotonic() - begin > self.config.flush_timeout_seconds:
                log.error("not all was persisted within %s s", self.config.flush_timeout_seconds)
                break
            await asyncio.sleep(0.02)
        self.metrics.flushed(cause, time.monotonic() - begin)

    # ------------------------------------------------------------ connections

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: others may end meanwhile
                log.error("a connection was not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._meet(Peer(sock)), name="peer")
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    async def _meet(self, peer: Peer) -> None:
        try:
            credentials = peer.credentials()
            if credentials.uid not in (os.getuid(), 0):
                raise ProtocolError(f"user {credentials.uid} is not this agent's")
            messages = peer.messages()
            async with asyncio.timeout(_HELLO_SECONDS):
                first = await anext(messages, None)
            if first is None:
                return
            if isinstance(first, Hello):
                await serve_rank(self, peer, first, messages)
                return
            self._supervise(peer, first)
            async for message in messages:
                self._supervise(peer, message)
        except TimeoutError:
            log.warning("a connection said nothing for %s s", _HELLO_SECONDS)
        except StepfastError as error:
            log.warning("a connection was closed: %s", error)
            peer.send(Failure(id=0, kind=type(error).__name__, reason=str(error)))
        finally:
            self._watchers.discard(peer)
            peer.dispose()

    def _supervise(self, peer: Peer, message: Message) -> None:
        match message:
            case Watch():
                self._watchers.add(peer)
                peer.send(self._status())
            case RequestSave():
                for session in self._run_sessions(message.job, message.run):
                    session.send(SaveRequested())
            case FlushRun():
                room = self.rooms.get(JobKey.parse(message.job))
                if room is not None and message.run in room.runs:
                    room.flush(room.runs[message.run])
            case _:
                raise ProtocolError(f"{type(message).__name__} from somebody who is no rank")

    def _run_sessions(self, job: str, run: str) -> list[Peer]:
        room = self.rooms.get(JobKey.parse(job))
        if room is None or run not in room.runs:
            return []
        return [session.peer for session in room.runs[run].sessions.values() if session.alive]

    # ------------------------------------------------------------ rooms and status

    def room_for(self, hello: Hello) -> Room:
        """The room of the rank's job. Raises ProtocolError when the job is known with another storage."""
        job = JobKey.parse(hello.job)
        room = self._room(job, hello.storage_uri)
        if room.storage_uri != hello.storage_uri:
            raise ProtocolError(f"job {job} is on this node with the storage {room.storage_uri}")
        return room

    def share_bytes(self, hello: Hello) -> int:
        """The rank's share of the memory tier now: living jobs divide it equally, and their ranks each job's part."""
        job = JobKey.parse(hello.job)
        living = sum(room.is_living for other, room in self.rooms.items() if other != job) + 1
        limit = self.config.memory_limit_bytes // living
        if hello.memory_bytes:
            limit = min(limit, hello.memory_bytes)
        return limit // hello.local_world_size

    def reclaim(self, wanted_bytes: int, room: Room) -> None:
        """Frees slots that nobody needs: first of ranks that are gone, then beyond the shares of other living jobs."""
        others = [other for other in self.rooms.values() if other is not room]
        for candidate in (*others, room):
            wanted_bytes -= candidate.slots.release_idle(wanted_bytes)
        for other in others:
            wanted_bytes -= other.slots.release_excess(wanted_bytes, self.share_bytes)

    def _room(self, job: JobKey, storage_uri: str) -> Room:
        room = self.rooms.get(job)
        if room is None:
            room = self.rooms[job] = Room(
                job,
                storage_uri,
                config=self.config,
                memory=self.memory,
                metrics=self.metrics,
                changed=self.changed,
            )
        return room

    def status(self) -> NodeStatus:
        """Everything the agent has to say."""
        return NodeStatus(
            node=self.config.node,
            memory_limit_bytes=self.config.memory_limit_bytes,
            memory_used_bytes=sum(room.slots.size_bytes for room in self.rooms.values()),
            jobs=tuple(status for _, room in sorted(self.rooms.items()) for status in room.status()),
        )

    def _status(self) -> Status:
        return Status(document=json.dumps(to_document(self.status())))

    def changed(self, at_once: bool) -> None:
        """Something worth telling happened; told at once, or together with what else happens in a moment."""
        if not self._watchers:
            return
        if at_once:
            if self._publishing is not None:
                self._publishing.cancel()
            self._publish()
        elif self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_later(_COALESCE_SECONDS, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        status = self._status()
        for peer in list(self._watchers):
            peer.send(status)
