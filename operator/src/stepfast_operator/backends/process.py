"""The process backend: a gang is torchrun processes on this machine, a node one of them.

Invariant I9 here: before a gang is launched no process lives that was started with STEPFAST_RUN of any run
of this job's uid; whoever started it, and whether or not its parents still live.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepfast.errors import AgentUnavailable, StepfastError
from stepfast.nodestatus import JobStatus
from stepfast.step import run_id
from stepfast.storage.base import Store
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends import processes
from stepfast_operator.backends.base import LaunchPostponed
from stepfast_operator.backends.blocking import call_in_thread
from stepfast_operator.backends.gangprocess import (
    RUN,
    GangProcess,
    Start,
    command_of,
    environment,
    failure_of,
    failure_of_exit,
    free_port,
    local_gpus,
    local_processes,
    torchrun_environment,
    variables_of,
)
from stepfast_operator.backends.jobstorage import JobStorage
from stepfast_operator.backends.localagent import LocalAgent
from stepfast_operator.backends.machinememory import machine_memory
from stepfast_operator.backends.standby import Standby
from stepfast_operator.backends.statefolder import Launch, StateFolder
from stepfast_operator.backends.statuswriter import StatusWriter
from stepfast_operator.names import is_run_of
from stepfast_operator.observed import (
    AgentState,
    Committed,
    DeadRank,
    Failure,
    Gang,
    Intent,
    Observed,
    Room,
    Worker,
    WorkerPhase,
)
from stepfast_operator.record import Attempt, Cause, Status
from stepfast_operator.spec import TrainingJob, settings_text

_KILL_SECONDS = 10.0
_STANDBY_SECONDS = 3.0  # from when all ranks train to when the next attempt's launchers are started
_REAP_SECONDS = 1.0
_TERMINATION_POLL_SECONDS = 0.1


class GangUnkillable(StepfastError):
    """Processes of the job outlived SIGKILL: they hang in the kernel, on a device or a dead network file
    system.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What one machine adds to a job. `on_line` gets the gang's output, `say` what the user is to know; `on_change`
    says that it is time to look.
    """

    storage_uri: str
    open_store: Callable[[str], Store]
    memory_limit: int
    on_line: Callable[[str], None]
    say: Callable[[str], None]
    on_change: Callable[[], None]
    anatomy: Path | None = None  # where rank 0 writes what it measured; None: nothing is measured
    clock: Callable[[], float] = time.time


class ProcessBackend:
    """One job's gang, agent, storage and state folder. Used from one event loop, in the main thread."""

    def __init__(
        self,
        job: TrainingJob,
        uid: str,
        state: StateFolder,
        agent: LocalAgent | None,
        settings: ProcessSettings,
    ) -> None:
        self._job, self._uid, self._state, self._agent, self._settings = job, uid, state, agent, settings
        self.intent = Intent.RUN  # changed by `ask`
        self._ranks_per_node = local_processes(job.spec.trainer.num_proc_per_node)
        self._gang: dict[int, GangProcess] = {}
        self._standby = Standby(settings.on_line)
        self._trains_since: float | None = None
        self._gang_run: str | None = None
        self._has_launched = False  # before that whoever typed the command is there to mend what is wrong
        self._postponed_for = ""
        self._status_writer = StatusWriter(state, uid, settings.say)
        self._poll: asyncio.TimerHandle | None = None
        self._storage = JobStorage(job.job, settings.storage_uri, settings.open_store)
        self._room = self._find_room()
        saved = state.read()
        self._began = settings.clock()
        self._written = saved.written_time if saved is not None else self._began

    def ask(self, intent: Intent) -> None:
        """Says what the user wants now, and lets go of a storage call that could hold that up."""
        self.intent = intent
        if intent is not Intent.RUN:
            self._storage.let_go()

    async def observe(self, status: Status) -> Observed:
        now = self._settings.clock()
        reports = self._reports()
        gang = self._observe_gang(status.current, now)
        self._prepare_next(status.open_attempt, reports, now)
        dead = [
            DeadRank(
                rank=rank.rank,
                node=f"node-{rank.rank // self._ranks_per_node}",
                ended_time=rank.ended_time or now,
                run=report.run,
            )
            for report in reports
            if status.current is not None and report.run == status.current.run
            for rank in report.ranks
            if not rank.alive and not rank.clean and processes.started_with(rank.pid, RUN) != report.run
        ]
        return Observed(
            now=now,
            job=self._job.job,
            uid=self._uid,
            spec=self._job.spec,
            status=status,
            intent=self.intent,
            gang=gang,
            live_runs=self._live_runs(status),
            agent=self._agent.state() if self._agent is not None else AgentState.ELSEWHERE,
            reports=reports,
            dead_ranks=dead,
            began_time=self._began,
            command=self._job.command,
            storage_uri=self._storage.job_uri,
            anatomy=self._job.anatomy,
            room=self._room,
        )

    async def read_steps(self) -> Sequence[Committed]:
        return await self._storage.read_steps()

    async def supersede_after(self, step: int) -> None:
        await self._storage.supersede_after(step)

    async def launch(self, launch: LaunchGang) -> None:
        if self._gang_run == launch.run:
            return
        if not self.catch_up():
            raise self._postponed(launch, "its number cannot be noted")
        await self._kill(self._is_ours, spared=self._standby.pids)
        self._forget_gang()
        try:
            self._launch(launch)
        except OSError as error:
            await self._kill(self._is_ours, spared=self._standby.pids)
            self._forget_gang()
            with suppress(OSError):
                self._state.forget_launch(launch.attempt)
            if not self._has_launched:
                raise
            raise self._postponed(launch, str(error)) from error
        self._has_launched, self._postponed_for = True, ""
        self._standby.end()
        self._look_for_terminations(launch.attempt)

    def _launch(self, launch: LaunchGang) -> None:
        """Raises OSError; some of it may live then."""
        state, nodes = self._state, self._job.spec.trainer.num_nodes
        # What an earlier job of this name said of its end goes first: with the record beside it, it were this gang's.
        for node in range(nodes):
            state.termination(launch.attempt, node).unlink(missing_ok=True)
        # Before the first process: whoever finds no such file knows that nothing of this run ever lived.
        record = Launch(run=launch.run, launched_time=self._settings.clock(), nodes=nodes)
        state.write_launch(launch.attempt, record)
        port = free_port(nodes)
        self._gang_run = launch.run
        loop = asyncio.get_running_loop()
        for node in range(nodes):
            start = self._start(launch, node, port)
            process = self._gang[node] = self._standby.take(start) or GangProcess(start, self._settings.on_line)
            loop.add_reader(process.output, self._read_output, process)
            loop.add_reader(process.pidfd, self._note_exit, process)

    def _postponed(self, launch: LaunchGang, why: str) -> LaunchPostponed:
        """Says so once."""
        message = f"attempt {launch.attempt} is not launched yet: {why}"
        if message != self._postponed_for:
            self._postponed_for = message
            self._settings.say(message)
        return LaunchPostponed(message)

    def _start(self, launch: LaunchGang, node: int, port: int) -> Start:
        trainer = self._job.spec.trainer
        return Start(
            node=node,
            command=command_of(trainer),
            env=self._environment(launch, node, port),
            folder=trainer.working_dir or os.getcwd(),
        )

    def _prepare_next(self, current: Attempt | None, reports: Sequence[JobStatus], now: float) -> None:
        """Starts the launchers of the attempt after this one, once this one's ranks have trained for a moment: not
        beside their own start, which would wait for them, nor for a job that is over at once.
        """
        ranks = [rank for report in reports if current and report.run == current.run for rank in report.ranks]
        nodes = self._job.spec.trainer.num_nodes
        is_training = len(ranks) >= nodes * self._ranks_per_node and all(rank.step_time for rank in ranks)
        if current is None or self._gang_run != current.run or not is_training:
            self._trains_since = None
            return
        self._trains_since = now if self._trains_since is None else self._trains_since
        if now - self._trains_since < _STANDBY_SECONDS:
            return
        attempt = current.attempt + 1
        run = run_id(self._uid, attempt)
        if self._standby.run != run:
            launch = LaunchGang(attempt=attempt, run=run, resume_step=0, nodes=nodes)
            self._standby.prepare(run, [self._start(launch, node, port=0) for node in range(nodes)])

    async def stop(self, runs: Sequence[str], mode: StopMode) -> None:
        wanted = frozenset(runs)
        if mode is StopMode.KILL:
            await self._kill(lambda run: run in wanted)
            return
        if self._gang_run in wanted:
            for process in self._gang.values():
                with suppress(ProcessLookupError):
                    process.process.send_signal(signal.SIGTERM)

    async def start_agent(self) -> None:
        if self._agent is None:
            return
        try:
            await self._agent.start()
        except OSError as error:
            if not self._has_launched:
                raise
            raise AgentUnavailable(f"the agent cannot be started: {error}") from error

    async def flush(self, run: str) -> None:
        if self._agent is not None:
            await self._agent.flush(run)

    async def request_save(self, run: str) -> None:
        if self._agent is not None:
            await self._agent.request_save(run)

    async def set_spares(self, count: int, avoided_nodes: Sequence[str]) -> None:
        """Nothing: one machine has room for what runs on it."""

    async def leave_queue(self, attempt: int) -> None:
        """Nothing: nobody queues what runs on this machine."""

    async def delete_job(self) -> None:
        """Nothing: on one machine a job that is over is a folder of logs, which is its user's."""

    async def write_status(self, status: Status) -> None:
        """Raises OSError until a gang was launched: nothing is lost then. A gang that trains is not to end for it."""
        if self._has_launched:
            self._status_writer.write_when_possible(status)
        else:
            self._status_writer.write(status)

    def catch_up(self) -> bool:
        """Writes the status if it could not be written before; whether it is written."""
        return self._status_writer.catch_up()

    async def close(self) -> bool:
        """Ends everything of this job, in order: gang, agent (which flushes), threads. Nothing of it runs
        after. False when the agent's memory stays, because it may hold what the storage does not.
        """
        try:
            with suppress(GangUnkillable):
                await self._kill(self._is_ours)
            self._standby.end()
            self._forget_gang()
        finally:
            is_all_persisted = await self._agent.end() if self._agent is not None else True
            await self._storage.close()
        return is_all_persisted

    @property
    def is_gang_alive(self) -> bool:
        """Whether a launcher that was started here lives."""
        return any(process.exit_code() is None for process in self._gang.values())

    def _find_room(self) -> Room:
        """All nodes are this machine, and its GPUs those of each: rank 0 of every node takes the first. A job without a
        prediction has nothing to compare.
        """
        if self._job.anatomy is None:
            return Room()
        ranks = self._job.spec.trainer.num_nodes * self._ranks_per_node
        gpus = min(local_gpus(), self._ranks_per_node)
        machine = machine_memory(self._settings.memory_limit, has_gpus=gpus > 0)
        return Room(world_size=ranks, ranks=ranks, gpus=gpus, nodes=[machine])

    def _is_ours(self, run: str) -> bool:
        return is_run_of(run, self._uid)

    def _reports(self) -> list[JobStatus]:
        status = self._agent.status if self._agent is not None else None
        return [report for report in status.jobs if report.job == self._job.job] if status is not None else []

    def _live_runs(self, status: Status) -> frozenset[str]:
        """While the gang that was launched here runs undisturbed there is nothing to search the machine
        for.
        """
        attempt = status.open_attempt
        if attempt is not None and self._gang_run == attempt.run:
            return frozenset({attempt.run})
        waiting = self._standby.pids
        return frozenset(run for pid, run in processes.marked(RUN, self._is_ours).items() if pid not in waiting)

    def _observe_gang(self, current: Attempt | None, now: float) -> Gang | None:
        launch = self._state.read_launch(current.attempt, current.run) if current is not None else None
        if current is None or launch is None:
            return None
        workers = [self._observe_worker(current, launch, node, now) for node in range(launch.nodes)]
        return Gang(run=current.run, launched_time=launch.launched_time, workers=workers)

    def _observe_worker(self, current: Attempt, launch: Launch, node: int, now: float) -> Worker:
        name = f"node-{node}"
        ours = self._gang.get(node) if self._gang_run == current.run else None
        # The exit status first: what the launcher had to say it had said by then.
        code = ours.exit_code() if ours is not None else None
        said = self._state.read_termination(current.attempt, node)
        failure = failure_of(said, name) if said is not None else None
        phase = WorkerPhase.RUNNING
        if ours is None:
            is_done = said is not None and said.get("exitCode") == 0
            phase = WorkerPhase.SUCCEEDED if is_done else WorkerPhase.FAILED
            if failure is None and not is_done:
                time_known = max(self._written, launch.launched_time)
                failure = Failure(
                    cause=Cause.SUPERVISOR_RESTARTED,
                    time=min(now, time_known),
                    node=name,
                    message="stepfast run itself was ended, its gang with it",
                )
        elif code is not None:
            phase = WorkerPhase.SUCCEEDED if code == 0 else WorkerPhase.FAILED
            failure = None if code == 0 else failure or failure_of_exit(code, name, now)
        since = launch.launched_time if phase is WorkerPhase.RUNNING else None
        return Worker(index=node, node=name, phase=phase, failure=failure, running_since=since)

    def _environment(self, launch: LaunchGang, node: int, port: int) -> Mapping[str, str]:
        spec, state = self._job.spec, self._state
        ours = {
            RUN: launch.run,
            "STEPFAST_JOB": str(self._job.job),
            "STEPFAST_ATTEMPT": str(launch.attempt),
            "STEPFAST_RESUME_STEP": str(launch.resume_step),
            "STEPFAST_STORAGE_URI": self._settings.storage_uri,
            "STEPFAST_MEMORY_BUFFER_SIZE": str(self._settings.memory_limit),
            # One agent serves all of this machine's torchruns: to it they are one node.
            "STEPFAST_SETTINGS": settings_text(
                spec,
                node=0,
                ranks_per_agent=spec.trainer.num_nodes * self._ranks_per_node,
                planned_time=launch.planned_time,
                interruptions=launch.interruptions,
                trained_seconds=launch.trained_seconds,
            ),
            "STEPFAST_TERMINATION_LOG": str(state.termination(launch.attempt, node).absolute()),
        }
        if self._settings.anatomy is not None:
            ours["STEPFAST_ANATOMY"] = str(self._settings.anatomy.absolute())
        if self._agent is not None:
            ours["STEPFAST_SOCKET"] = self._agent.socket_path
        torchrun = torchrun_environment(
            nodes=spec.trainer.num_nodes,
            processes=self._ranks_per_node,
            run=launch.run,
            port=port,
            logs=(state.attempt(launch.attempt) / f"node-{node}").absolute(),
        )
        return environment(os.environ, torchrun, variables_of(spec.trainer), ours)

    async def _kill(self, matches: Callable[[str], bool], spared: Collection[int] = ()) -> None:
        is_dead = await call_in_thread(
            lambda: processes.kill_marked(RUN, matches, _KILL_SECONDS, spared), name="stepfast-kill"
        )  # fmt: skip
        if not is_dead:
            left = processes.marked(RUN, matches).keys() - set(spared)
            raise GangUnkillable(
                f"processes {sorted(left)} of {self._job.job} do not end when killed: no gang is started"
            )

    def _read_output(self, process: GangProcess) -> None:
        if not process.read_output():
            asyncio.get_running_loop().remove_reader(process.output)

    def _note_exit(self, process: GangProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        self._settings.on_change()

    def _look_for_terminations(self, attempt: int) -> None:
        """Wakes the loop when a launcher has something to say: it may say so seconds before it ends."""
        if any(self._state.termination(attempt, node).exists() for node in self._gang):
            self._poll = None
            self._settings.on_change()
            return
        loop = asyncio.get_running_loop()
        self._poll = loop.call_later(_TERMINATION_POLL_SECONDS, self._look_for_terminations, attempt)

    def _forget_gang(self) -> None:
        """Reaps the launchers, which are dead by now, and takes in what they had written."""
        loop = asyncio.get_running_loop()
        if self._poll is not None:
            self._poll.cancel()
        for process in self._gang.values():
            with suppress(subprocess.TimeoutExpired):  # unkillable: it goes when the kernel lets it
                process.process.wait(_REAP_SECONDS)
            with suppress(ValueError):
                loop.remove_reader(process.output)
                loop.remove_reader(process.pidfd)
            process.drain()
            process.close()
        self._gang, self._gang_run = {}, None
