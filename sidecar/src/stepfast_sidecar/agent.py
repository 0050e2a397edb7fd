"""The supervisor: keeps a room for each job, serves ranks through `reception`, tells its status. Maps no slot, ever."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import assert_never

from stepfast.anatomymetrics import heard
from stepfast.errors import ProtocolError
from stepfast.messages import Hello, Launching, SaveRequested, Status
from stepfast.nodestatus import EvictionNotice, NodeStatus, to_document
from stepfast.slotplan import rank_share
from stepfast.step import JobKey
from stepfast.storage.rules import StorageRules
from stepfast_sidecar.checkpointnode import Action, CheckpointNodeWriter, NodeRequest
from stepfast_sidecar.cluster import checkpoint_node_writer, serve_kubelet
from stepfast_sidecar.config import Config
from stepfast_sidecar.fetched import FetchedFile
from stepfast_sidecar.gangs import Gang
from stepfast_sidecar.growth import watch_growth
from stepfast_sidecar.health import Health, serve_http
from stepfast_sidecar.intake import Peer, listen
from stepfast_sidecar.jobmirrors import MirrorRoom
from stepfast_sidecar.lending import Lending
from stepfast_sidecar.memory import VOLUMES, MemoryTier
from stepfast_sidecar.metrics import FlushCause, Metrics
from stepfast_sidecar.mirrors import Mirrors
from stepfast_sidecar.noticewatch import NoticeWatch
from stepfast_sidecar.reception import Reception
from stepfast_sidecar.room import Room
from stepfast_sidecar.run import Run, Session, newest_run
from stepfast_sidecar.starter import Starter
from stepfast_sidecar.tasks import Tasks
from stepfast_sidecar.tenants import launch_of
from stepfast_sidecar.volumes import Volumes

log = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.2
_LET_GO_POLL_SECONDS = 10.0
_OTHERS_SECONDS = 10.0  # how long, at the end, other nodes' parts of a step are waited for
_STARTING, _SERVING = "its earlier steps and sockets", "its end"


class Agent:
    """One node's agent. `run` serves until it is told to end, and ends in order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.health = Health([_STARTING])
        self.memory = MemoryTier(config.memory_dir, config.memory_limit_bytes)
        self.rooms: dict[JobKey, Room] = {}
        self.mirror_room = MirrorRoom(limit_bytes=config.mirrors.limit_bytes if config.mirrors is not None else 0)
        self.mirrors: Mirrors | None = None
        self.lending = Lending(self.rooms, self.memory, config.memory_limit_bytes, share_of=self.share_bytes)
        rules = StorageRules(root=config.storage_root, allowed=config.allowed_storage)
        self.reception = Reception(self, rules)
        self.volumes = Volumes(config.memory_dir / VOLUMES, self.reception.open)
        self._watchers: set[Peer] = set()
        self._publishing: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._node_writer: CheckpointNodeWriter | None = None
        self._requests: tuple[NodeRequest, ...] = ()  # of the operator, as they stand
        self._notice: EvictionNotice | None = None
        self._ending = asyncio.Event()
        self._starter = Starter()

    # ------------------------------------------------------------ life

    async def run(self) -> bool:
        """Adopts what an earlier agent left, serves, and at the end flushes all it holds; False when it could not."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        async with AsyncExitStack() as ends:
            self._serve_http(ends)
            self._adopt()
            self._join_mirrors(ends)
            if self.config.kubelet_dir is not None:
                await self._serve_kubelet(ends, self.config.kubelet_dir)
            if self.config.socket is not None:
                self.reception.open(listen(str(self.config.socket)))
                ends.callback(self.config.socket.unlink, missing_ok=True)
            self._tasks.start(self._flush_orphans(), "flush orphans")
            self._tasks.start(self._let_jobs_go(), "let jobs go")
            self._tasks.start(watch_growth(self.rooms), "watch growth")
            self._tasks.start(self.health.beat(), "beat")
            if self.config.metadata_endpoint is not None:
                self._tasks.start(NoticeWatch(self.config.metadata_endpoint, self._noticed).run(), "eviction notices")
            if self.config.checkpoint_node:
                self._node_writer = checkpoint_node_writer(self.config.node, self)
                self._tasks.start(self._node_writer.run(), "CheckpointNode")
            self.health.done(_STARTING)
            try:
                await self._ending.wait()
                self.health.wait_for(_SERVING)
                await self._flush_all(FlushCause.SIGTERM)
                if self.config.remove_memory and await self._starter.takes_ranks_along(self.rooms):
                    await self._flush_all(FlushCause.SIGTERM)
            finally:
                is_idle = await self._close()
        return is_idle

    def _serve_http(self, ends: AsyncExitStack) -> None:
        if self.config.metrics_port is None:
            return
        self.metrics.observe(
            limit_bytes=self.config.memory_limit_bytes,
            used_bytes=lambda: self.memory.budget.taken_bytes,
            mirror_bytes=lambda: self.mirror_room.used_bytes,
            lag_seconds=lambda: max((room.lag_seconds for room in list(self.rooms.values())), default=0.0),
            anatomies=lambda: {room.job: heard(room.metrics) for room in list(self.rooms.values())},
        )
        stop = serve_http(self.config.metrics_address, self.config.metrics_port, self.metrics.registry, self.health)
        ends.push_async_callback(asyncio.to_thread, stop)

    def _join_mirrors(self, ends: AsyncExitStack) -> None:
        if self.config.mirrors is None:
            for room in self.rooms.values():
                room.mirrors.release_all()  # of an agent that had them
            return
        self.mirrors = Mirrors(
            self.rooms, self.memory, self.config.mirrors, self.config.node,
            is_expected=self.volumes.has_mirrors, metrics=self.metrics, changed=self.changed,
        )  # fmt: skip
        ends.push_async_callback(self.mirrors.close)
        self._tasks.start(self.mirrors.look(), "look after mirrors")

    async def _serve_kubelet(self, ends: AsyncExitStack, kubelet_dir: Path) -> None:
        os.chmod(self.config.memory_dir, 0o700)  # the kubelet may have made it, for everybody
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every rank of every pod has a connection
        await self.volumes.republish()
        ends.push_async_callback(self.volumes.close)
        takes_mirrors = self.mirrors is not None
        servers = await serve_kubelet(kubelet_dir, self.config.node, self.volumes, self.health, takes_mirrors)
        ends.push_async_callback(servers.stop)

    async def _close(self) -> bool:
        """Ends all that runs; whether everything is persisted."""
        is_in_use = any(room.is_living for room in self.rooms.values())
        await self._tasks.cancel()
        if self._node_writer is not None:
            await self._node_writer.say_goodbye()
        await self.reception.close()
        is_idle = all(room.waits_for_others for room in self.rooms.values())
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
            sizes, credentials = settings.get("localWorldSizes"), settings.get("credentials")
            room = self._room(job, uri, credentials if isinstance(credentials, dict) else {})
            room.adopt(slots, sizes if isinstance(sizes, dict) else {})

    async def _flush_orphans(self) -> None:
        """Runs of an earlier agent whose ranks do not come back are flushed."""
        adopted = {(job, run) for job, room in self.rooms.items() for run in room.runs}
        if not adopted:
            return
        await asyncio.sleep(self.config.adopt_seconds)
        for job, name in adopted:
            run = self.rooms[job].runs.get(name) if job in self.rooms else None
            if run is not None and not any(session.alive for session in run.sessions.values()):
                self.rooms[job].flush(run, FlushCause.AGENT_RESTARTED)

    async def _let_jobs_go(self) -> None:
        """A job that nobody has run here for a while, and of which all is persisted, leaves memory and, sooner, its
        process.
        """
        quiet: dict[JobKey, float] = {}  # since when
        while True:
            await asyncio.sleep(min(_LET_GO_POLL_SECONDS, self.config.idle_seconds / 10))
            for room in self.rooms.values():
                room.rest()
            now = time.monotonic()
            quiet = {
                job: quiet.get(job, now)
                for job, room in self.rooms.items()
                if room.waits_for_others and not room.is_living
            }
            for job in [job for job, since in quiet.items() if now - since >= self.config.idle_seconds]:
                log.info("%s has left this node", job)
                # Not waited for: before it is closed, another of them may have come back to life.
                self._tasks.start(self._dismiss(job).close(), f"close {job}")

    def _dismiss(self, job: JobKey) -> Room:
        """Frees what is held of the job; the room that is left is to be closed."""
        room = self.rooms.pop(job)
        room.leave()
        self.memory.forget(job)
        self.changed(False)
        return room

    async def _flush_all(self, cause: FlushCause) -> None:
        begin = time.monotonic()
        for room in self.rooms.values():
            for run in room.runs.values():
                room.flush(run)  # what all of them take is measured here
        await asyncio.sleep(0.02)  # ranks that died a moment ago are still to be noticed
        done_time: float | None = None
        while not all(room.is_idle for room in self.rooms.values()):
            now = time.monotonic()
            if not all(room.waits_for_others for room in self.rooms.values()):
                done_time = None
            elif done_time is None:
                done_time = now
            if done_time is not None and now - done_time > _OTHERS_SECONDS:
                log.info("steps that lack other nodes' parts are left to those to commit")
                break
            if now - begin > self.config.flush_timeout_seconds:
                log.error("not all was persisted within %s s", self.config.flush_timeout_seconds)
                break
            await asyncio.sleep(0.02)
        self.metrics.flushed(cause, time.monotonic() - begin)

    def _noticed(self, notice: EvictionNotice | None) -> None:
        """The node is to be taken away, or is not any more. What is held is persisted at once: nobody may get a signal,
        and nothing of this memory survives.
        """
        is_new = notice is not None and (self._notice is None or notice.event != self._notice.event)
        self._notice = notice
        self._end_flushes()
        self.changed(True)
        if notice is None:
            log.warning("the node is not to be taken away any more")
        elif is_new:
            log.warning("the node is about to be taken away (%s, event %s)", notice.kind, notice.event)
            self._tasks.start(self._flush_all(FlushCause.EVICTION_NOTICE), "flush before the eviction")

    # ------------------------------------------------------------ requests

    def watch(self, peer: Peer) -> None:
        """Tells the peer the status now and after each change."""
        self._watchers.add(peer)
        peer.send(self._status())

    def unwatch(self, peer: Peer) -> None:
        self._watchers.discard(peer)

    def request_save(self, job: JobKey, run: str) -> None:
        """Asks the run's ranks on this node to save, and to wait to be stopped."""
        for found in self._launches(job, run):
            for session in found.sessions.values():
                if session.alive:
                    session.peer.send(SaveRequested())

    def flush(self, job: JobKey, run: str) -> None:
        """Persists all that is held of the run."""
        for found in self._launches(job, run):
            self.rooms[job].flush(found, FlushCause.REQUESTED)
        if self.mirrors is not None and job in self.rooms:
            self.rooms[job].mirrors.flush(lambda name: launch_of(name, run) is not None)
            self.mirrors.act(self.rooms[job])

    def carry_out(self, requests: tuple[NodeRequest, ...]) -> None:
        """What the operator asks for, from now on: whoever joins later hears of it, too."""
        self._requests = requests
        self._end_flushes()
        for request in requests:
            match request.action:
                case Action.FLUSH:
                    self.flush(request.job, request.run)
                case Action.SAVE:
                    self.request_save(request.job, request.run)
                case _:
                    assert_never(request.action)

    def take_gangs(self, gangs: tuple[Gang, ...]) -> None:
        """Which gangs mirror their steps, and between which nodes."""
        if self.mirrors is not None:
            self.mirrors.take(gangs)

    async def fetch_mirrored(self, room: Room, path: str, run: str) -> FetchedFile | None:
        """A rank's file from another node's memory, if it is to be had there."""
        return await self.mirrors.fetch(room, path, run) if self.mirrors is not None else None

    def is_save_requested(self, job: JobKey, run: str) -> bool:
        """Whether the operator waits for the run's last save."""
        return self._is_asked(Action.SAVE, job, run)

    def _is_asked(self, action: Action, job: JobKey, run: str) -> bool:
        asked = [request for request in self._requests if request.action is action and request.job == job]
        return any(launch_of(run, request.run) is not None for request in asked)

    def end_flush(self, job: JobKey, run: Run) -> None:
        """Ends the run's flush if it trains on: its ranks were thought gone, or the node to be taken away. While the
        operator or the cloud's notice asks for the flush, it stands.
        """
        is_asked = self._notice is not None or self._ending.is_set() or self._is_asked(Action.FLUSH, job, run.flow.run)
        if run.is_training and not is_asked:
            run.flow.end_flush()

    def _end_flushes(self) -> None:
        for job, room in self.rooms.items():
            for run in room.runs.values():
                self.end_flush(job, run)

    def _launches(self, job: JobKey, run: str) -> list[Run]:
        """The run, with what torchrun has launched again of it within its pods."""
        room = self.rooms.get(job)
        return [found for name, found in room.runs.items() if launch_of(name, run) is not None] if room else []

    # ------------------------------------------------------------ rooms and status

    def sessions_of(self, job: JobKey, run: str) -> Iterable[Session]:
        """What is known of the run's ranks on this node."""
        room = self.rooms.get(job)
        return room.runs[run].sessions.values() if room is not None and run in room.runs else ()

    async def foresee(self, launching: Launching, credentials: Mapping[str, str]) -> None:
        """Has at hand what a launcher's ranks will restore. Their hellos may name another storage than its environment
        does: what the job has here stays as it is, and is theirs alone to change.
        """
        if launching.resume_step == 0:
            return
        room = self._room(JobKey.parse(launching.job), launching.storage_uri, credentials)
        if (room.storage_uri, room.credentials) == (launching.storage_uri, credentials):
            await room.foresee(launching, lambda path: self.fetch_mirrored(room, path, launching.run))

    def room_for(self, hello: Hello, credentials: Mapping[str, str]) -> Room:
        """The room of a rank's job, with the credentials that its newest pods bring along.

        Raises ProtocolError when the job is known with another storage.
        """
        job = JobKey.parse(hello.job)
        room = self.rooms.get(job)
        if room is not None and room.storage_uri != hello.storage_uri and self._is_over(room, hello.run):
            self._tasks.start(self._dismiss(job).close(), f"close {job}")
        room = self._room(job, hello.storage_uri, credentials)
        if room.storage_uri != hello.storage_uri:
            raise ProtocolError(f"job {job} is on this node with the storage {room.storage_uri}")
        if hello.run not in room.runs or hello.run == newest_run(room.runs):
            room.use_credentials(credentials)
        return room

    def _is_over(self, room: Room, run: str) -> bool:
        """Whether the room may give way to a job of its name with another storage: nothing of it is left to do, or it
        is of a job that was deleted since.
        """
        if room.is_living:
            return False
        uids = {name.rpartition("-")[0] for name in room.runs}
        if not room.waits_for_others and run.rpartition("-")[0] in uids:
            return False
        if not room.waits_for_others:
            log.error("%s: steps of an earlier job of that name are given up, unpersisted", room.job)
        return True

    def share_bytes(self, hello: Hello) -> int:
        """The rank's share of the memory tier now: living jobs divide it equally, and their ranks each job's part."""
        job = JobKey.parse(hello.job)
        living = sum(room.is_living for other, room in self.rooms.items() if other != job) + 1
        return rank_share(
            self.config.memory_limit_bytes,
            jobs=living,
            job_limit_bytes=hello.memory_bytes or None,
            ranks=hello.local_world_size,
        )

    def reclaim(self, wanted_bytes: int, room: Room) -> None:
        """Takes back what is lent, then frees slots that nobody needs: first of ranks that are gone, then beyond the
        shares of other living jobs.
        """
        wanted_bytes -= self.lending.make_room(wanted_bytes, room)
        for other in self.rooms.values():
            wanted_bytes -= other.fetched.release(wanted_bytes)
            wanted_bytes -= other.mirrors.release(wanted_bytes)
        others = [other for other in self.rooms.values() if other is not room]
        for candidate in (*others, room):
            wanted_bytes -= candidate.slots.release_idle(wanted_bytes)
        for other in others:
            wanted_bytes -= other.slots.release_excess(wanted_bytes, self.share_bytes)
        for other in others:
            # The storage of a job that is gone may never answer again (its credentials went with it): the living are
            # not to wait for ever.
            if wanted_bytes > 0 and not other.is_living and time.time() - other.left_time >= self.config.idle_seconds:
                wanted_bytes -= other.slots.size_bytes
                if not other.waits_for_others:
                    log.error("%s: given up unpersisted: its ranks left long ago, and memory is needed", other.job)
                self._tasks.start(self._dismiss(other.job).close(), f"close {other.job}")

    def _room(self, job: JobKey, storage_uri: str, credentials: Mapping[str, str]) -> Room:
        room = self.rooms.get(job)
        if room is None:
            room = self.rooms[job] = Room(
                job,
                storage_uri,
                credentials,
                config=self.config,
                memory=self.memory,
                mirror_room=self.mirror_room,
                metrics=self.metrics,
                changed=self.changed,
            )
        return room

    def status(self) -> NodeStatus:
        """Everything the agent has to say."""
        return NodeStatus(
            node=self.config.node,
            memory_limit_bytes=self.config.memory_limit_bytes,
            memory_used_bytes=sum(room.memory_bytes for room in self.rooms.values()),
            jobs=tuple(status for _, room in sorted(self.rooms.items()) for status in room.status()),
            notice=self._notice,
            mirror_address=self.mirrors.address if self.mirrors is not None else None,
        )

    def _status(self) -> Status:
        return Status(document=json.dumps(to_document(self.status())))

    def changed(self, at_once: bool) -> None:
        """Something worth telling happened; told at once, or together with what else happens in a moment."""
        if self.mirrors is not None:
            self.mirrors.wake()
        if self._node_writer is not None:
            self._node_writer.changed(at_once)
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
