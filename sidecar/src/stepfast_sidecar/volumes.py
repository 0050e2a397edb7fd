"""The published volumes: a socket in each pod's volume folder, and a note of each in the memory tier's folder.

A note is written before the socket is made and removed before the socket is: what has no note is not served after a
restart, and the kubelet asks again for whatever it got no answer to. Everything inside the target folder may be a
tenant's doing (a pod that runs as root writes there): nothing in it is followed, opened or trusted. The folder above
it is the kubelet's, no pod sees it, so sockets are made there and moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import stat
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from stepfast.errors import SpecError
from stepfast.step import JobKey
from stepfast_sidecar.intake import listen
from stepfast_sidecar.tenants import Volume, VolumeRefused, check_alone

log = logging.getLogger(__name__)

SOCKET_NAME = "agent.sock"
_BUILDING_NAME = ".stepfast-agent.sock"
_RETRY_SECONDS = 5.0


class Door(Protocol):
    """A socket that is served. Implemented by `reception.Door`."""

    volume: Volume | None

    async def close(self) -> None: ...


class Volumes:
    """Publishes and takes back. Requests for one volume wait for each other."""

    def __init__(self, folder: Path, serve: Callable[[socket.socket, Volume], Door]) -> None:
        """`folder` is for the notes; `serve` takes a listening socket over."""
        self._folder, self._serve = folder, serve
        self._doors: dict[str, Door] = {}
        self._noted: dict[str, Volume] = {}  # served, or meant to be: what takes its pod's one place
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._retries: set[asyncio.Task[None]] = set()

    def known(self, volume_id: str) -> Volume | None:
        """The volume as it was published, or is going to be."""
        return self._noted.get(volume_id)

    def has_mirrors(self, job: JobKey) -> bool:
        """Whether a pod of the job says that its steps are mirrored."""
        return any(volume.mirrors for volume in self._noted.values() if volume.job == job)

    async def republish(self) -> None:
        """Gives every volume of an earlier agent its socket back. One that fails is tried again in the background."""
        for volume in await asyncio.to_thread(_read_notes, self._folder):
            if not await asyncio.to_thread(os.path.isdir, os.path.dirname(volume.target_path)):
                await asyncio.to_thread(_forget, self._folder, volume.id)  # the pod went meanwhile
                continue
            try:
                await self.publish(volume)
            except VolumeRefused as error:  # an agent before this one gave it
                log.error("%s", error)
                await asyncio.to_thread(_forget, self._folder, volume.id)
            except OSError as error:
                log.error("%s: its socket is not back yet: %s", volume.owner, error)
                retry = asyncio.create_task(self._insist(volume), name=f"republish {volume.owner}")
                self._retries.add(retry)
                retry.add_done_callback(self._retries.discard)

    async def _insist(self, volume: Volume) -> None:
        while volume.id not in self._doors:
            await asyncio.sleep(_RETRY_SECONDS)
            if volume.id not in self._noted:
                return  # the pod went meanwhile
            with contextlib.suppress(OSError):
                await self.publish(volume)

    async def publish(self, volume: Volume) -> None:
        """Puts a socket into the volume's folder; harmless when it is there.

        Raises VolumeRefused when the pod has another volume, OSError.
        """
        async with self._lock(volume.id):
            check_alone(volume, self._noted.values())
            # Before anything is awaited, or two volumes of a pod that are asked for at once both find the place free.
            # It stays taken when what follows fails, as the note does: the kubelet asks again, or has it removed.
            self._noted[volume.id] = volume
            await asyncio.to_thread(_write_note, self._folder, volume)
            door = self._doors.get(volume.id)
            if door is not None and await asyncio.to_thread(_has_socket, volume.target_path):
                door.volume = volume  # with the secret as it is now
                return
            if door is not None:  # somebody removed it
                del self._doors[volume.id]
                await door.close()
            listener = await asyncio.to_thread(_open_socket, volume.target_path)
            self._doors[volume.id] = self._serve(listener, volume)
        log.info("%s has its socket, for %s, run %s", volume.owner, volume.job, volume.run)

    async def unpublish(self, volume_id: str, target_path: str) -> None:
        """Ends the pod's connections and removes all of the volume; harmless when half of it, or all, is gone.

        Raises OSError.
        """
        async with self._lock(volume_id):
            await asyncio.to_thread(_forget, self._folder, volume_id)
            door = self._doors.pop(volume_id, None)
            if door is not None:
                await door.close()
            self._noted.pop(volume_id, None)
            await asyncio.to_thread(_remove, target_path)
        if door is not None and door.volume is not None:
            log.info("%s has left", door.volume.owner)

    async def close(self) -> None:
        """Serves no more. The sockets' names stay: the next agent puts its own there."""
        for retry in list(self._retries):
            retry.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        for door in self._doors.values():
            await door.close()

    def _lock(self, volume_id: str) -> asyncio.Lock:
        lock = self._locks.get(volume_id)
        if lock is None:
            lock = self._locks[volume_id] = asyncio.Lock()
        return lock


# ---------------------------------------------------------------- in a thread: the file system


def _note_path(folder: Path, volume_id: str) -> Path:
    return folder / f"{volume_id}.json"


def _write_note(folder: Path, volume: Volume) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    building = folder / f".{volume.id}.new"
    descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({**asdict(volume), "job": str(volume.job)}, file)
    os.rename(building, _note_path(folder, volume.id))


def _read_notes(folder: Path) -> list[Volume]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            volume = Volume(**{**values, "job": JobKey.parse(values["job"])})
        except (OSError, ValueError, KeyError, TypeError, SpecError):
            log.error("the note %s does not parse: its pod has to be started again", path)
            path.unlink(missing_ok=True)
            continue
        found.append(volume)
    return found


def _forget(folder: Path, volume_id: str) -> None:
    _note_path(folder, volume_id).unlink(missing_ok=True)


def _has_socket(target_path: str) -> bool:
    return os.path.lexists(os.path.join(target_path, SOCKET_NAME))


def _open_socket(target_path: str) -> socket.socket:
    with contextlib.suppress(FileExistsError):
        os.mkdir(target_path, 0o755)
    folder = os.open(target_path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(folder, 0o755)  # whoever the pod runs as goes in; nobody but root writes
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(SOCKET_NAME, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(SOCKET_NAME, dir_fd=folder)  # a rename replaces anything else
    finally:
        os.close(folder)
    building = os.path.join(os.path.dirname(target_path), _BUILDING_NAME)
    return listen(os.path.join(target_path, SOCKET_NAME), mode=0o666, building=building)


def _remove(target_path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(os.path.dirname(target_path), _BUILDING_NAME))
    if os.path.islink(target_path):
        os.unlink(target_path)
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target_path)  # follows no link (shutil.rmtree.avoids_symlink_attacks)
