"""Jobs of `stepfast run` on this machine, read from their state folders."""

from __future__ import annotations

import asyncio
import difflib
import json
import shlex
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from stepfast.errors import SpecError
from stepfast.step import JobKey, run_id
from stepfast_operator.backends.statefolder import Invocation, StateFolder, StatusUnreadable, jobs_in
from stepfast_operator.document import JSON
from stepfast_operator.jobcommands.errors import JobDeleted

_POLL_SECONDS = 0.5
_SUGGESTIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """A job as its folder tells of it. `process` runs it now; `again` is the command that goes on with it."""

    job: JobKey
    document: JSON
    folder: Path
    process: int | None
    again: Invocation | None

    def command(self, step: int | None = None) -> str | None:
        """What to type to go on, for a shell in any folder; None when that was not written down."""
        if self.again is None:
            return None
        rolled_back = ["--resume-from-step", str(step)] if step is not None else []
        words = ["stepfast", "run", *self.again.options, *rolled_back, *self.again.script]
        return f"cd {shlex.quote(self.again.folder)} && {shlex.join(words)}"

    def launches(self, root: Path, attempts: int) -> dict[int, float]:
        """When its attempts were launched, of those whose logs are still there."""
        state, uid = StateFolder(root, self.job), str(self.document["metadata"]["uid"])
        found = {number: state.read_launch(number, run_id(uid, number)) for number in range(1, attempts + 1)}
        return {number: launch.launched_time for number, launch in found.items() if launch is not None}


class LocalJobs:
    """The jobs below one state folder, `.stepfast/jobs`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, name: str, namespace: str | None) -> JobKey | None:
        """The job of that name; of any namespace where none is given. Raises SpecError when there are several."""
        found = [job for job in jobs_in(self.root) if job.name == name and namespace in (None, job.namespace)]
        if len(found) > 1:
            raise SpecError("JOB", f"{' and '.join(map(str, found))} are on this machine: name it with its namespace")
        return found[0] if found else None

    def missing(self, name: str) -> str:
        """That there is no such job, and which are near."""
        names = [job.name for job in jobs_in(self.root)]
        near = difflib.get_close_matches(name, names, n=_SUGGESTIONS)
        hint = f"; near: {', '.join(near)}" if near else ""
        return f"there is no job {name} on this machine ({self.root}{hint})"

    def get(self, job: JobKey) -> LocalJob:
        """Raises JobDeleted, StatusUnreadable."""
        state = StateFolder(self.root, job)
        path = state.path / "status.json"
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise JobDeleted(f"{job} is gone: {path} was removed") from None
        except (OSError, ValueError) as error:
            raise StatusUnreadable(f"{path} cannot be read: {error}") from error
        return LocalJob(
            job=job, document=document, folder=state.path, process=state.holder(), again=state.read_invocation()
        )

    async def follow(self, job: JobKey) -> AsyncGenerator[LocalJob, None]:
        """The job now, and each time that it changes. Raises JobDeleted, StatusUnreadable."""
        seen = None
        while True:
            found = self.get(job)
            if found != seen:
                seen = found
                yield found
            await asyncio.sleep(_POLL_SECONDS)
