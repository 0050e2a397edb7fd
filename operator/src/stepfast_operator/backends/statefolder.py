"""A job's folder on this machine: the lock, `status.json`, and a folder of logs for each attempt.

.stepfast/jobs/<namespace>.<name>/
  lock                       held by the one `stepfast run` of this job; names its pid
  status.json                metadata and status, replaced atomically
  invocation.json            the command that ran it last, without what is asked for only once
  attempt-0001/              launch.json, termination-<node>.json, torchrun's logs by rank
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepfast.errors import SpecError, StepfastError
from stepfast.step import JobKey
from stepfast_operator.document import JSON, decode, encode
from stepfast_operator.limits import Limits
from stepfast_operator.record import Status


class JobLocked(StepfastError):
    """Another `stepfast run` has this job."""


class StatusUnreadable(StepfastError):
    """`status.json` is not what Stepfast wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What `status.json` holds."""

    uid: str
    status: Status
    written_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`launch.json`: written before the first process of an attempt is started, so that its absence proves
    that none was.
    """

    run: str
    launched_time: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """`invocation.json`: how `stepfast run` was called, in which folder, and what bounds the job's life by that."""

    folder: str
    options: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    limits: Limits | None = None


class StateFolder:
    """One job's folder. Not thread-safe; of all processes only the one that holds the lock may write."""

    def __init__(self, root: Path, job: JobKey) -> None:
        self.job = job
        self.path = root / f"{job.namespace}.{job.name}"
        self._lock: int | None = None
        self._durable: tuple[object, ...] = ()

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    def lock(self) -> None:
        """Raises JobLocked naming the pid that has it. The kernel lets go when this process ends, however it
        ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise JobLocked(
                f"{self.job} is run by process {holder} already ({self.path}). "
                "Stop that one first, or give this job another --name."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """The process that has the lock, as far as its own user can see it; None when nobody has. Takes nothing, so
        that no `stepfast run` meets a lock that is only looked at.
        """
        lock = self.path / "lock"
        try:
            pid = int(lock.read_text(encoding="utf-8"))
            opened = list(Path(f"/proc/{pid}/fd").iterdir())
        except PermissionError:
            return pid
        except (OSError, ValueError):
            return None
        for descriptor in opened:
            with suppress(OSError):
                if descriptor.samefile(lock):
                    return pid
        return None

    def read(self) -> Saved | None:
        """What was written last, or None. Raises StatusUnreadable."""
        path = self.status_file
        try:
            document = json.loads(path.read_bytes())
            status = decode(Status, document["status"], "status", ignore_unknown=True)
            return Saved(uid=str(document["metadata"]["uid"]), status=status, written_time=path.stat().st_mtime)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, SpecError) as error:
            raise StatusUnreadable(f"{path} cannot be read ({error}): move it away to start anew") from error

    def write(self, uid: str, status: Status) -> None:
        """Replaces `status.json` atomically; durably, too, when what a restart depends on has changed."""
        document = document_of(self.job, uid, status)
        temporary = self.path / ".status.json.tmp"
        decisive = (status.attempt, status.state, status.restarts)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            if decisive != self._durable:
                os.fsync(file.fileno())
        temporary.replace(self.status_file)
        self._durable = decisive

    def write_invocation(self, invocation: Invocation) -> None:
        """For this user's eyes: variables on the command line may be secrets."""
        temporary = self.path / ".invocation.json.tmp"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(encode(invocation), file)
        temporary.replace(self.path / "invocation.json")

    def read_invocation(self) -> Invocation | None:
        """None when there is none that can be read."""
        with suppress(OSError, ValueError, SpecError):
            return decode(Invocation, json.loads((self.path / "invocation.json").read_bytes()), "invocation")
        return None

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number:04d}"

    def write_launch(self, number: int, launch: Launch) -> None:
        folder = self.attempt(number)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / ".launch.json.tmp"
        temporary.write_text(json.dumps(encode(launch)), encoding="utf-8")
        temporary.replace(folder / "launch.json")

    def forget_launch(self, number: int) -> None:
        """Nothing of it lives, and it is to be launched again."""
        (self.attempt(number) / "launch.json").unlink(missing_ok=True)

    def read_launch(self, number: int, run: str) -> Launch | None:
        """How that run was launched; None when it never was (a folder of an earlier job of this name counts
        not).
        """
        with suppress(OSError, ValueError, SpecError):
            document = json.loads((self.attempt(number) / "launch.json").read_bytes())
            launch = decode(Launch, document, "launch")
            return launch if launch.run == run else None
        return None

    def termination(self, number: int, node: int) -> Path:
        return self.attempt(number) / f"termination-{node}.json"

    def read_termination(self, number: int, node: int) -> Mapping[str, JSON] | None:
        """What a node's launcher wrote of its end; None while there is nothing whole."""
        with suppress(OSError, ValueError):
            document = json.loads(self.termination(number, node).read_bytes())
            return document if isinstance(document, dict) else None
        return None


def jobs_in(root: Path) -> list[JobKey]:
    """The jobs that have a folder with a status there."""
    found = []
    for path in sorted(root.glob("*/status.json")):
        # As it says itself: both names may hold dots.
        with suppress(OSError, ValueError, KeyError, TypeError, SpecError):
            metadata = json.loads(path.read_bytes())["metadata"]
            job = JobKey(namespace=metadata["namespace"], name=metadata["name"])
            if f"{job.namespace}.{job.name}" == path.parent.name:
                found.append(job)
    return found


def document_of(job: JobKey, uid: str, status: Status) -> dict[str, JSON]:
    """The job as the API shows it: `status.json` and the summary file."""
    metadata = {"namespace": job.namespace, "name": job.name, "uid": uid}
    return {"metadata": metadata, "status": encode(status)}
