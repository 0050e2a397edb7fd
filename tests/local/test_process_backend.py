"""`stepfast run` on real processes: kills at every level, and nothing of one gang ever lives beside the
next.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventual import wait_until
from stepfast.step import JobKey
from stepfast_operator.actions import LaunchGang
from stepfast_operator.backends import processes
from stepfast_operator.backends.gangprocess import RUN, command_of
from stepfast_operator.backends.localagent import MARKER
from stepfast_operator.backends.memoryfolder import memory_folder, socket_folder
from stepfast_operator.backends.process import ProcessBackend, ProcessSettings
from stepfast_operator.backends.statefolder import JobLocked, Launch, StateFolder, StatusUnreadable
from stepfast_operator.observed import Gang, WorkerPhase
from stepfast_operator.record import Attempt, Cause, State, Status
from stepfast_operator.spec import Trainer, parse_manifest

# A launcher with one rank in a session of its own, as torchrun's are. Each start leaves a file with the
# rank's pid
# and what of this job lived at that moment.
GANG = """
import os, signal, subprocess, sys
from pathlib import Path
folder, attempt = Path(sys.argv[1]), os.environ["STEPFAST_ATTEMPT"]
rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
(folder / f"rank-{attempt}.tmp").write_text(str(rank.pid))
(folder / f"rank-{attempt}.tmp").rename(folder / f"rank-{attempt}")
print("launched", attempt, flush=True)
if attempt in sys.argv[2].split(","):
    rank.kill()
    sys.exit(0)
code = rank.wait()
sys.exit(128 - code if code < 0 else code)
"""

Supervise = Callable[[str], Any]


def gang_manifest(folder: Path, *, succeed: str = "", **spec: Any) -> str:
    (folder / "gang.py").write_text(GANG)
    policy = {"backoff": {"baseSeconds": 0}, "flushTimeoutSeconds": 5, **spec.pop("failurePolicy", {})}
    command = [sys.executable, str(folder / "gang.py"), str(folder), succeed]
    document = {
        "apiVersion": "stepfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gang"},
        "spec": {"trainer": {"command": command, "numProcPerNode": 1}, "failurePolicy": policy, **spec},
    }
    return json.dumps(document)


def rank_pid(folder: Path, attempt: int) -> int | None:
    path = folder / f"rank-{attempt}"
    return int(path.read_text()) if path.exists() else None


def is_living(pid: int | None) -> bool:
    return pid is not None and processes.started_with(pid, RUN) is not None


def status_of(folder: Path) -> Status:
    saved = StateFolder(folder / "jobs", JobKey(namespace="local", name="gang")).read()
    assert saved is not None
    return saved.status


def uid_of(folder: Path) -> str:
    saved = StateFolder(folder / "jobs", JobKey(namespace="local", name="gang")).read()
    assert saved is not None
    return saved.uid


def has_marked(name: str, prefix: str) -> bool:
    return bool(processes.marked(name, lambda value: value.startswith(prefix)))


def agent_pid(uid: str) -> int | None:
    return next(iter(processes.marked(MARKER, lambda value: value == uid)), None)


def test_gang_that_succeeds_leaves_nothing_behind(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise(gang_manifest(tmp_path, succeed="1"))
    assert supervisor.wait() == 0, supervisor.said()
    uid = uid_of(tmp_path)
    assert status_of(tmp_path).state is State.COMPLETE
    assert not has_marked(RUN, uid)
    assert not has_marked(MARKER, uid)
    assert not memory_folder(uid, tmp_path).exists()


def test_ranks_of_a_killed_launcher_are_gone_before_the_next_launch(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise(gang_manifest(tmp_path, succeed="2"))
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the first rank lives")
    orphan = rank_pid(tmp_path, 1)
    uid = uid_of(tmp_path)
    launchers = [pid for pid in processes.marked(RUN, lambda run: run == f"{uid}-1") if pid != orphan]
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)
    wait_until((tmp_path / "rank-2").exists, "the second attempt")
    assert not is_living(orphan)
    assert supervisor.wait() == 0, supervisor.said()
    status = status_of(tmp_path)
    assert (status.attempt, status.restarts_count_towards_max) == (2, 1)
    assert status.last_failure is not None
    assert status.last_failure.reason is Cause.WORKER_FAILED


def test_exit_status_is_the_ranks_own(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise(gang_manifest(tmp_path, failurePolicy={"maxRestarts": 0}))
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the rank lives")
    os.kill(rank_pid(tmp_path, 1) or 0, signal.SIGKILL)
    assert supervisor.wait() == 128 + signal.SIGKILL
    assert "MaxRestartsReached" in supervisor.said()


def test_killed_supervisor_is_followed_by_one_that_ends_its_gang_first(supervise: Supervise, tmp_path: Path) -> None:
    manifest = gang_manifest(tmp_path, succeed="2", failurePolicy={"maxRestarts": 0})
    first = supervise(manifest)
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the first rank lives")
    uid, orphan = uid_of(tmp_path), rank_pid(tmp_path, 1)
    first.process.kill()
    first.wait()
    second = supervise(manifest)
    wait_until((tmp_path / "rank-2").exists, "the second attempt")
    assert not is_living(orphan)
    assert second.wait() == 0, second.said()
    assert uid_of(tmp_path) == uid
    status = status_of(tmp_path)
    assert (status.attempt, status.restarts, status.restarts_count_towards_max) == (2, 1, 0)
    assert status.recoveries[0].cause is Cause.SUPERVISOR_RESTARTED
    assert not has_marked(MARKER, uid)


def test_job_that_is_over_is_a_new_job_next_time(supervise: Supervise, tmp_path: Path) -> None:
    manifest = gang_manifest(tmp_path, succeed="1")
    assert supervise(manifest).wait() == 0
    before = uid_of(tmp_path)
    assert supervise(manifest).wait() == 0
    assert uid_of(tmp_path) != before
    assert status_of(tmp_path).attempt == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_suspends_and_the_same_command_goes_on(
    supervise: Supervise, tmp_path: Path, number: signal.Signals
) -> None:
    manifest = gang_manifest(tmp_path, succeed="2")
    first = supervise(manifest)
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the first rank lives")
    uid = uid_of(tmp_path)
    first.process.send_signal(number)
    assert first.wait() == 130, first.said()
    assert status_of(tmp_path).state is State.SUSPENDED
    assert not has_marked(RUN, uid)
    assert supervise(manifest).wait() == 0
    assert (uid_of(tmp_path), status_of(tmp_path).restarts) == (uid, 0)


def test_interrupt_between_gangs_promises_no_checkpoint(supervise: Supervise, tmp_path: Path) -> None:
    supervisor = supervise(gang_manifest(tmp_path, failurePolicy={"backoff": {"baseSeconds": 100}}))
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the first rank lives")
    os.kill(rank_pid(tmp_path, 1) or 0, signal.SIGKILL)
    wait_until(lambda: status_of(tmp_path).state is State.RESTARTING, "the gang has failed")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.wait() == 130, supervisor.said()
    assert "stopping; no gang is running" in supervisor.said()
    assert "saving a last checkpoint" not in supervisor.said()


def test_second_supervisor_of_a_job_is_refused_and_names_the_first(supervise: Supervise, tmp_path: Path) -> None:
    manifest = gang_manifest(tmp_path)
    first = supervise(manifest)
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the first rank lives")
    with pytest.raises(JobLocked, match=f"process {first.process.pid} already"):
        StateFolder(tmp_path / "jobs", JobKey(namespace="local", name="gang")).lock()
    assert is_living(rank_pid(tmp_path, 1))


def test_killed_agent_is_started_again_beside_the_living_gang(supervise: Supervise, tmp_path: Path) -> None:
    supervise(gang_manifest(tmp_path))
    wait_until(lambda: is_living(rank_pid(tmp_path, 1)), "the rank lives")
    uid = uid_of(tmp_path)
    agent = agent_pid(uid)
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: agent_pid(uid) not in (None, agent), "another agent")
    assert is_living(rank_pid(tmp_path, 1))
    assert status_of(tmp_path).attempt == 1


def test_start_of_an_earlier_job_of_this_name_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, JobKey(namespace="local", name="gang"))
    state.write_launch(1, Launch(run="old-1", launched_time=1.0, nodes=1))
    assert state.read_launch(1, "new-1") is None
    launch = state.read_launch(1, "old-1")
    assert launch is not None
    assert launch.launched_time == 1.0


def test_kill_in_the_midst_of_a_launch_makes_no_success_of_what_an_earlier_job_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse_manifest(json.loads(gang_manifest(tmp_path)), default_namespace="local")
    attempt = Attempt(attempt=1, run="new-1", resume_step=0, planned_time=1.0)
    state = StateFolder(tmp_path / "jobs", job.job)
    state.write_launch(1, Launch(run="old-1", launched_time=1.0, nodes=1))
    state.termination(1, 0).write_text('{"exitCode": 0}')
    write_launch = StateFolder.write_launch

    def write_and_die(self: StateFolder, number: int, launch: Launch) -> None:
        write_launch(self, number, launch)
        raise KeyboardInterrupt

    async def play() -> Gang | None:
        settings = ProcessSettings(
            storage_uri="memory://x",
            open_store=lambda uri: pytest.fail("nothing is read"),
            memory_limit=1,
            on_line=lambda line: None,
            say=lambda text: None,
            on_change=lambda: None,
        )
        monkeypatch.setattr(StateFolder, "write_launch", write_and_die)
        before = ProcessBackend(job, "new", state, None, settings)
        with pytest.raises(KeyboardInterrupt):
            await before.launch(LaunchGang(attempt=1, run="new-1", resume_step=0, nodes=1))
        after = ProcessBackend(job, "new", state, None, settings)
        return (await after.observe(Status(attempt=1, current=attempt))).gang

    gang = asyncio.run(play())
    assert gang is not None
    assert [worker.phase for worker in gang.workers] == [WorkerPhase.FAILED]


def test_damaged_status_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, JobKey(namespace="local", name="gang"))
    state.path.mkdir(parents=True)
    (state.path / "status.json").write_text('{"metadata": {}')
    with pytest.raises(StatusUnreadable, match=r"status\.json"):
        state.read()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(("torchrun", "--", "a.py"), ["-m", "stepfast.launcher", "--", "a.py"], id="torchrun"),
        pytest.param(
            ("python", "-m", "torch.distributed.run", "a.py"),
            ["-m", "stepfast.launcher", "a.py"],
            id="module",
        ),
        pytest.param(("python3", "a.py"), ["a.py"], id="python"),
    ],
)
def test_torchrun_becomes_the_launcher_that_tells_why(command: tuple[str, ...], expected: list[str]) -> None:
    assert command_of(Trainer(command=command)) == [sys.executable, *expected]


def test_socket_folder_is_short_even_under_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 200)))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = socket_folder()
    folder.rmdir()
    assert len(str(folder / "agent.sock")) < 100
