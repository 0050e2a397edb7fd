"""One `stepfast run`: takes the job's lock, runs the reconcile loop until the job is over, and leaves
nothing behind.

The loop is woken by what changes (an agent's status, a launcher's end, a signal) and looks again when the
last decision asked for it.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stepfast.errors import StepfastError
from stepfast.step import JobKey
from stepfast.storage.base import Store
from stepfast_operator.backends.localagent import AgentSettings, Client, LocalAgent
from stepfast_operator.backends.memoryfolder import default_memory_limit, memory_folder
from stepfast_operator.backends.process import ProcessBackend, ProcessSettings
from stepfast_operator.backends.statefolder import Invocation, Saved, StateFolder
from stepfast_operator.limits import limits_of
from stepfast_operator.local.preflight import requested_memory
from stepfast_operator.observed import AgentState, Intent
from stepfast_operator.reconcile import Pass, reconcile
from stepfast_operator.record import State, Status
from stepfast_operator.spec import TrainingJob

INTERRUPTED = 130
_LONGEST_WAIT_SECONDS = 5.0
_AGENT_START_SECONDS = 60.0
_AGENT_POLL_SECONDS = 0.2


class StepsUnpersisted(StepfastError):
    """Memory alone holds steps of a job that is over."""


class View(Protocol):
    """Who shows the user what happens."""

    def line(self, text: str) -> None:
        """One line that the gang wrote."""

    def show(self, seen: Pass) -> None:
        """One pass of the loop."""

    def say(self, text: str) -> None:
        """One line of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a session takes from its surroundings; tests put theirs in."""

    state_root: Path
    storage_uri: str
    open_store: Callable[[str], Store]
    connect: Callable[[str], Client]
    agent_command: tuple[str, ...] | None = None  # None: the installed agent
    invocation: Invocation | None = None  # how the user can call this again
    is_measured: bool = False  # where memory and time go: --anatomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the session ended. `exit_code` is what `stepfast run` exits with."""

    uid: str
    status: Status
    exit_code: int
    state_folder: Path
    storage_uri: str
    anatomy: Path | None = None  # where what was measured is, if anything was; None: nobody asked


async def run_session(job: TrainingJob, surroundings: Surroundings, view: View) -> Outcome:
    """Runs the job until it is complete, failed or suspended. Raises JobLocked, StepsUnpersisted, StorageError,
    SpecError.
    """
    state = StateFolder(surroundings.state_root, job.job)
    state.lock()
    try:
        return await _run_locked(job, surroundings, view, state)
    finally:
        state.unlock()


async def _run_locked(job: TrainingJob, surroundings: Surroundings, view: View, state: StateFolder) -> Outcome:
    wake = asyncio.Event()
    requested = requested_memory(job)
    memory_limit = default_memory_limit() if requested is None else requested
    storage_uri = job.spec.checkpoint.storage_uri or surroundings.storage_uri
    agent_settings = AgentSettings(
        connect=surroundings.connect,
        memory_limit=memory_limit,
        log=state.path / "agent.log",
        end_seconds=job.spec.failure_policy.flush_timeout_seconds,
    )
    if surroundings.agent_command is not None:
        agent_settings = replace(agent_settings, command=surroundings.agent_command)
    saved = state.read()
    if saved is not None and saved.status.is_terminal:
        await _persist_left(job.job, saved.uid, agent_settings, view)
    uid, status = _begin(state, saved)
    if surroundings.invocation is not None:
        state.write_invocation(replace(surroundings.invocation, limits=limits_of(job.spec)))
    agent = LocalAgent(job.job, uid, agent_settings, wake.set)
    anatomy = state.path / "anatomy.json" if surroundings.is_measured else None
    if anatomy is not None:
        anatomy.unlink(missing_ok=True)  # of a job before this one
    settings = ProcessSettings(
        storage_uri=storage_uri,
        open_store=surroundings.open_store,
        memory_limit=memory_limit,
        anatomy=anatomy,
        on_line=view.line,
        say=view.say,
        on_change=wake.set,
    )
    backend = ProcessBackend(job, uid, state, agent, settings)
    interrupts = _Interrupts(backend, wake, view)
    try:
        status = await _loop(backend, status, wake, view)
    finally:
        if not await backend.close():
            view.say(
                f"what is not persisted stays in memory ({agent.memory_folder}); the same command persists it first"
            )
        interrupts.restore()
    if not backend.catch_up():
        view.say(
            f"how the job ended could not be noted in {state.status_file}: to the same command it was ended in the "
            "middle, and goes on from its latest step"
        )
    return Outcome(
        uid=uid,
        status=status,
        exit_code=exit_code_of(status),
        state_folder=state.path,
        storage_uri=storage_uri,
        anatomy=anatomy,
    )


async def _persist_left(job: JobKey, uid: str, settings: AgentSettings, view: View) -> None:
    """What a job of this name left in memory alone when it ended is persisted before another one begins, which then
    goes on from there. Raises StepsUnpersisted.
    """
    folder = memory_folder(uid, settings.log.parent)
    if not folder.exists():
        return
    view.say(f"persisting what the job before this one left in memory ({folder})")
    changed = asyncio.Event()
    agent = LocalAgent(job, uid, settings, changed.set)
    try:
        await agent.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGENT_START_SECONDS):
                # Told to end before it serves it would go without a flush.
                while agent.state() is AgentState.STARTING:
                    changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_AGENT_POLL_SECONDS):
                            await changed.wait()
    finally:
        is_all_persisted = await agent.end()
    if not is_all_persisted:
        raise StepsUnpersisted(
            f"the job before this one left steps of {job} in memory alone ({folder}), and they cannot be persisted "
            f"now; {settings.log} says why. Run the same command again when the storage answers, or remove that "
            "folder to give these steps up."
        )


def _begin(state: StateFolder, saved: Saved | None) -> tuple[str, Status]:
    """The job that was interrupted here, under its old uid; else a new one, which resumes from the storage
    alone.
    """
    if saved is not None and not saved.status.is_terminal:
        return saved.uid, saved.status
    status = Status(start_time=time.time())
    uid = str(uuid.uuid4())
    state.write(uid, status)
    return uid, status


async def _loop(backend: ProcessBackend, status: Status, wake: asyncio.Event, view: View) -> Status:
    while True:
        # Cleared before looking: what changes while we look wakes us again.
        wake.clear()
        backend.catch_up()
        seen = await reconcile(backend, status)
        status = seen.after
        view.show(seen)
        if status.is_terminal or (status.state is State.SUSPENDED and backend.intent is not Intent.RUN):
            return status
        requeue = seen.decision.requeue_seconds
        wait = _LONGEST_WAIT_SECONDS if requeue is None else min(requeue, _LONGEST_WAIT_SECONDS)
        if wait > 0:
            try:
                async with asyncio.timeout(wait):
                    await wake.wait()
            except TimeoutError:
                continue
        else:
            await asyncio.sleep(0)


def exit_code_of(status: Status) -> int:
    """0 when complete, 130 when suspended, else the script's own exit status (128 + signal), or 1."""
    if status.terminal_state == State.COMPLETE:
        return 0
    if status.state is State.SUSPENDED:
        return INTERRUPTED
    if status.current is not None and status.current.succeeded_time is not None:
        return 1  # the script's own was 0, but what it made is not safe
    code = status.last_failure.exit_code if status.last_failure is not None else None
    return code if code is not None and 0 < code < 256 else 1


class _Interrupts:
    """The first Ctrl-C (or SIGTERM) asks for a last checkpoint, the second stops at once; what is staged is
    flushed. A terminal that closes (SIGHUP) asks for a last checkpoint, however often: the shell, the kernel and
    whoever ends the login session may all tell of it, the last with a SIGTERM beside it.
    """

    def __init__(self, backend: ProcessBackend, wake: asyncio.Event, view: View) -> None:
        self._backend, self._wake, self._view = backend, wake, view
        self._is_asked = False
        self._handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._interrupt}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            self._handlers[signal.SIGHUP] = self._suspend
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.add_signal_handler(number, handler)

    def restore(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._handlers:
            loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._suspend()
            return
        self._backend.ask(Intent.STOP_NOW)
        self._view.say("stopping now; what is staged is still persisted")
        self._wake.set()

    def _suspend(self) -> None:
        if self._backend.intent is Intent.STOP_NOW:
            return
        self._backend.ask(Intent.SUSPEND)
        is_training = self._backend.is_gang_alive
        first = "saving a last checkpoint, then stopping" if is_training else "stopping; no gang is running"
        self._view.say(f"{first}; once more stops now")
        self._wake.set()
