"""`stepfast status`, `suspend` and `resume` of jobs on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from stepfast.step import JobKey
from stepfast_operator.backends.statefolder import StateFolder, document_of
from stepfast_operator.jobcommands.errors import JobDeleted
from stepfast_operator.jobcommands.localjobs import LocalJobs
from stepfast_operator.jobcommands.sighting import of_cluster, of_machine
from stepfast_operator.jobcommands.watching import Lines, screen_of
from stepfast_operator.local import command
from stepfast_operator.local.session import Outcome, Surroundings, View, exit_code_of
from stepfast_operator.record import (
    Attempt,
    Cause,
    CheckpointStatus,
    Condition,
    ConditionType,
    FailedReason,
    LastFailure,
    Nodes,
    Recovery,
    State,
    Status,
    TrainerStatus,
)
from stepfast_operator.report import RECOVERY_HEADINGS, Report, facts_of
from stepfast_operator.spec import TrainingJob

NOW = 1_800_000_000.0
JOB = JobKey(namespace="local", name="gpt")

Stepfast = Callable[..., Any]


@pytest.fixture
def stepfast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stepfast:
    """The command line in a folder of its own, on a machine that knows no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def saved(job: JobKey, status: Status) -> StateFolder:
    """The folder of a job with that status, below the working folder."""
    state = StateFolder(Path.cwd() / ".stepfast" / "jobs", job)
    state.path.mkdir(parents=True, exist_ok=True)
    state.write("uid", status)
    return state


@contextmanager
def running(state: StateFolder) -> Iterator[None]:
    """As `stepfast run` has its lock: by this process."""
    state.lock()
    try:
        yield
    finally:
        state.unlock()


def attempt(**values: Any) -> Attempt:
    return Attempt(**{"attempt": 2, "run": "u-2", "resume_step": 30, "planned_time": NOW - 100.0, **values})


TRAINING = Status(
    state=State.RUNNING,
    attempt=2,
    restarts=1,
    restarts_count_towards_max=1,
    nodes=Nodes(desired=2, ready=1, active=2),
    trainer_status=TrainerStatus(
        global_step=50, progress_percentage=25, steps_per_second=2.0, estimated_remaining_seconds=90
    ),
    checkpoint=CheckpointStatus(
        latest_persisted_step=40,
        latest_persisted_time=NOW - 35.0,
        latest_persisted_uri="memory://root/local/gpt",
        size_bytes=2**20,
        persist_lag_steps=10,
        persist_lag_seconds=5.0,
        restored_step=30,
        restored_tier="Memory",
        storage_error="the storage hangs",
    ),
    last_failure=LastFailure(attempt=1, failure_time=NOW - 120.0, reason=Cause.NODE_LOST, node="node-2"),
    recoveries=(
        Recovery(
            attempt=1,
            cause=Cause.NODE_LOST,
            node="node-2",
            failure_time=NOW - 120.0,
            detected_time=NOW - 119.5,
            flushed_time=NOW - 119.0,
            pods_ready_time=NOW - 110.0,
            restored_time=NOW - 109.0,
            resumed_time=NOW - 108.5,
            restored_tier="Memory",
            steps_lost=3,
        ),
    ),
    steps_lost=3,
    current=attempt(),
    conditions=(
        Condition(
            type=ConditionType.CHECKPOINT_FRESH, status="False", reason="Stale", message="older than promised",
            last_transition_time=NOW - 12.0,
        ),
        Condition(type=ConditionType.PROGRESSING, status="True", reason="StepAdvanced"),
        Condition(type=ConditionType.PODS_READY, status="True", reason="PodsReady"),
    ),
)  # fmt: skip


def test_facts_tell_why_and_how_old_what_is_committed_is() -> None:
    facts = dict(facts_of(TRAINING, NOW))
    assert facts["state"] == "Running"
    assert facts["CheckpointFresh"] == "False for 12 s: Stale: older than promised"
    assert not {"Progressing", "PodsReady"} & set(facts)
    assert facts["last failure"] == "attempt 1 failed: NodeLost (node-2)"
    assert facts["nodes"] == "1 of 2 ready"
    assert facts["last step"] == "50, 25 %, 2.00 steps/s, 1.5 min left"
    assert facts["latest committed step"] == "40 (1.0 MiB), 35 s ago; 10 steps (5.0 s of training) behind training"
    assert facts["restored"] == "step 30 from Memory"
    assert facts["waiting for storage"] == "the storage hangs"


def test_both_places_are_told_in_the_same_words() -> None:
    document = document_of(JOB, "uid", TRAINING)
    here = of_machine(document, folder="/jobs/local.gpt", process=1)
    there = of_cluster(document, context="kind", server="https://api", now=NOW)
    end = Report(title=str(JOB), facts=facts_of(TRAINING), status=TRAINING)

    def names(report: Report) -> list[str]:
        return [name for name, _ in report.facts]

    assert set(names(here.report(NOW))) - set(names(there.report(NOW))) == {"process"}
    assert [name for name in names(there.report(NOW)) if name in names(end)] == names(end)
    assert here.report(NOW).status == there.report(NOW).status == end.status
    assert {**here.summary(), "where": 0} == {**there.summary(), "where": 0}


def test_status_shows_the_job_of_this_machine(stepfast: Stepfast) -> None:
    saved(JOB, TRAINING)
    result = stepfast("status", "gpt")
    assert result.exit_code == 0, result.output
    assert "local/gpt (this machine)" in result.output
    assert "none: `stepfast run` was ended from outside; `stepfast resume gpt` tells how to go on" in result.output
    assert all(heading in result.output for heading in RECOVERY_HEADINGS)
    (row,) = [line for line in result.output.splitlines() if "NodeLost (node-2)" in line and "0.50 s" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        "1",
        "NodeLost (node-2)",
        "0.50 s",
        "0.50 s",
        "9.00 s",
        "1.00 s",
        "0.50 s",
        "11.50 s",
        "3",
        "Memory",
    ]


def test_status_as_json_is_the_summary_and_where_it_is_from(stepfast: Stepfast, tmp_path: Path) -> None:
    state = saved(JOB, TRAINING)
    with running(state):
        document = json.loads(stepfast("status", "--json", "gpt").stdout)
    where = document.pop("where")
    assert where["kind"] == "Machine"
    assert Path(where["folder"]) == tmp_path / ".stepfast/jobs/local.gpt"
    assert where["process"] is not None
    written = document_of(JOB, "uid", TRAINING)
    assert document == {"metadata": written["metadata"], **written["status"]}


def test_lock_that_is_looked_at_is_not_taken(stepfast: Stepfast) -> None:
    state = saved(JOB, TRAINING)
    assert state.holder() is None
    with running(state):
        holder = state.holder()
        assert holder is not None
        with (state.path / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert state.holder() is None


COMPLETE = Status(state=State.COMPLETE, terminal_state=State.COMPLETE, attempt=1)
FAILED = Status(
    state=State.FAILED,
    terminal_state=State.FAILED,
    attempt=2,
    current=attempt(fail_reason=FailedReason.NO_PROGRESS, fail_message="3 restarts in a row"),
)


@pytest.mark.parametrize(
    ("status", "code"), [pytest.param(COMPLETE, 0, id="complete"), pytest.param(FAILED, 1, id="failed")]
)
def test_watching_ends_with_the_job(stepfast: Stepfast, status: Status, code: int) -> None:
    saved(JOB, status)
    result = stepfast("status", "-w", "gpt")
    assert result.exit_code == code
    assert f"{status.state}  attempt {status.attempt}" in result.output
    assert stepfast("status", "gpt").exit_code == 0


def test_watching_elsewhere_than_on_a_terminal_tells_only_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = screen_of(as_json=False, watch=True, clock=lambda: NOW)
    assert isinstance(screen, Lines)
    document = document_of(JOB, "uid", TRAINING)
    with screen:
        for _ in range(2):
            screen.show(of_machine(document, folder="/f", process=1))
        document["status"]["trainerStatus"]["globalStep"] = 51
        screen.show(of_machine(document, folder="/f", process=1))
    lines = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "attempt 1 failed: NodeLost (node-2)",
        "Running  attempt 2  step 50  persisted 40 (10 behind)",
        "Running  attempt 2  step 51  persisted 40 (10 behind)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["status", "gtp"], "there is no job gtp on this machine", id="unknown"),
        pytest.param(["status", "gtp"], "near: gpt)", id="near-names"),
        pytest.param(["status", "gtp"], "no cluster is configured: there is no", id="no-cluster"),
        pytest.param(["status", "other/gpt"], "there is no job gpt on this machine", id="other-namespace"),
        pytest.param(["status", "two"], "a/two and b/two are on this machine", id="two-of-one-name"),
        pytest.param(["status", "No_Good"], "is not a lower-case DNS name", id="name"),
        pytest.param(["status", "-n", "a", "b/gpt"], "--namespace: a is not the namespace of b/gpt", id="namespaces"),
        pytest.param(["suspend", "gpt"], "nothing runs local/gpt on this machine (Running)", id="suspend-idle"),
        pytest.param(["resume", "over"], "local/over is over (Failed: NoProgress: 3 restarts in a row)", id="over"),
        pytest.param(["resume", "over"], "goes on from its checkpoints", id="over-says-how"),
        pytest.param(["resume", "gpt", "--step", "7"], "step 7 is not committed in memory://root/local/gpt", id="step"),
        pytest.param(["resume", "gpt", "--step", "7"], "--no-check asks for it all the same", id="step-unchecked"),
        pytest.param(["resume", "fresh", "--step", "7"], "there is no step 7", id="nothing-committed"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_with_status_2(
    stepfast: Stepfast, arguments: list[str], said: str
) -> None:
    saved(JOB, TRAINING)
    saved(JobKey(namespace="local", name="over"), FAILED)
    saved(JobKey(namespace="local", name="fresh"), Status(state=State.SUSPENDED))
    for namespace in ("a", "b"):
        saved(JobKey(namespace=namespace, name="two"), TRAINING)
    result = stepfast(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_no_cluster_at_all_is_an_error_of_its_own(stepfast: Stepfast) -> None:
    saved(JOB, TRAINING)
    result = stepfast("status", "-n", "local", "gpt")
    assert result.exit_code == 1
    assert "no cluster is configured" in result.stderr
    assert "Point KUBECONFIG to a kubeconfig" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_missing_extra_is_named(stepfast: Stepfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = stepfast("status", "-n", "x", "gpt")
    assert result.exit_code == 1
    assert 'pip install "stepfast-operator[cluster]"' in result.stderr


def test_status_of_another_version_is_no_crash(stepfast: Stepfast) -> None:
    state = saved(JOB, TRAINING)
    document = document_of(JOB, "uid", TRAINING)
    document["status"]["state"] = "Dreaming"
    (state.path / "status.json").write_text(json.dumps(document))
    result = stepfast("status", "gpt")
    assert result.exit_code == 1
    assert "the status of local/gpt is not one that this version of Stepfast knows" in result.stderr


def test_suspend_says_how_to_end_the_process_that_runs_it(stepfast: Stepfast) -> None:
    with running(saved(JOB, TRAINING)) as _:
        result = stepfast("suspend", "gpt")
    assert result.exit_code == 0
    assert "kill -TERM " in result.output


def run_once(stepfast: Stepfast, monkeypatch: pytest.MonkeyPatch, status: Status, *arguments: str) -> TrainingJob:
    """`stepfast run` with a session that only writes down what it was given and leaves that status."""
    jobs: list[TrainingJob] = []

    async def session(job: TrainingJob, surroundings: Surroundings, view: View) -> Outcome:
        jobs.append(job)
        state = saved(job.job, status)
        assert surroundings.invocation is not None
        state.write_invocation(surroundings.invocation)
        return Outcome(
            uid="uid", status=status, exit_code=exit_code_of(status), state_folder=state.path, storage_uri="memory://r"
        )

    monkeypatch.setattr(command, "run_session", session)
    result = stepfast("run", *arguments)
    assert jobs, result.output
    return jobs[0]


@pytest.mark.parametrize(
    ("arguments", "step", "again"),
    [
        pytest.param(["train.py", "--steps", "3"], [], ["train.py", "--steps", "3"], id="script"),
        pytest.param(
            ["--env", "A=b c", "--env", "B=1", "--nproc-per-node", "2", "--resume-from-step", "30", "train.py", "-f"],
            [], ["--nproc-per-node", "2", "--env", "A=b c", "--env", "B=1", "train.py", "-f"], id="asked-for-once",
        ),
        pytest.param(["train.py"], ["--step", "0"], ["--resume-from-step", "0", "train.py"], id="step"),
        pytest.param(
            ["--name", "train", "-f", "job.yaml"], [], ["--file", "job.yaml", "--name", "train"], id="manifest"
        ),
    ],
)  # fmt: skip
def test_resume_prints_the_command_that_goes_on(
    stepfast: Stepfast, monkeypatch: pytest.MonkeyPatch, arguments: list[str], step: list[str], again: list[str]
) -> None:
    tmp_path = Path.cwd()
    (tmp_path / "train.py").touch()
    manifest = {"apiVersion": "stepfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"},
                "spec": {"trainer": {"command": ["torchrun", "train.py"]}}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(manifest))
    first = run_once(stepfast, monkeypatch, Status(state=State.SUSPENDED, attempt=1), *arguments)
    result = stepfast("resume", "train", *step)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output.splitlines()[1])
    assert words == ["cd", str(tmp_path), "&&", "stepfast", "run", *again]
    second = run_once(stepfast, monkeypatch, Status(state=State.SUSPENDED, attempt=1), *words[5:])
    assert second.spec.trainer == first.spec.trainer
    assert second.job == first.job


def test_command_line_is_kept_for_the_users_own_eyes(stepfast: Stepfast, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").touch()
    run_once(stepfast, monkeypatch, Status(state=State.SUSPENDED), "--env", "TOKEN=secret", "train.py")
    (file,) = Path.cwd().glob(".stepfast/jobs/*/invocation.json")
    assert file.stat().st_mode & 0o077 == 0


def test_watch_sees_a_job_that_changes_and_one_that_goes(stepfast: Stepfast, tmp_path: Path) -> None:
    state = saved(JOB, TRAINING)
    seen: list[str] = []

    async def follow() -> None:
        async for found in LocalJobs(tmp_path / ".stepfast" / "jobs").follow(JOB):
            seen.append(found.document["status"]["state"])
            if len(seen) == 1:
                state.write("uid", COMPLETE)
            else:
                (state.path / "status.json").unlink()

    with pytest.raises(JobDeleted, match="local/gpt is gone"):
        asyncio.run(asyncio.wait_for(follow(), timeout=60))
    assert seen == ["Running", "Complete"]


@pytest.mark.parametrize(
    ("nodes", "rank", "told"),
    [
        pytest.param(1, 1, "NodeLost (rank 1)", id="one-node"),
        pytest.param(2, 1, "NodeLost (rank 1, node-2)", id="several-nodes"),
        pytest.param(1, None, "NodeLost (node-2)", id="no-rank"),
    ],
)
def test_recovery_names_the_node_where_that_tells_something(nodes: int, rank: int | None, told: str) -> None:
    recovery = replace(TRAINING.recoveries[0], rank=rank)
    status = replace(TRAINING, nodes=Nodes(desired=nodes), recoveries=(recovery, replace(recovery, in_place_restart=1)))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(Report(title="x", facts=[], status=status).render())
    text = console.export_text()
    assert f"│ {told} " in text
    assert "│             1 │" in text
    assert "│   1, in place │" in text
