"""`stepfast run`'s command line: options, manifest, script arguments, exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from stepfast_operator.local import command
from stepfast_operator.local.session import Outcome, Surroundings, View, exit_code_of
from stepfast_operator.local.view import panel
from stepfast_operator.names import job_name_of
from stepfast_operator.record import (
    Attempt,
    Cause,
    CheckpointStatus,
    LastFailure,
    Recovery,
    State,
    Status,
    TrainerStatus,
)
from stepfast_operator.spec import API_VERSION, KIND, Interval, ResumePolicy, TrainingJob
from testcrds.manifests import FULL, OWN_STORAGE, manifest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Run:
    """Invokes `stepfast run` with a session that only takes the job down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.job: TrainingJob | None = None
        self.status = Status(state=State.COMPLETE, terminal_state=State.COMPLETE, attempt=1)
        self.folder = folder
        monkeypatch.setattr(command, "run_session", self._session)
        monkeypatch.chdir(folder)
        for script in ("train.py", "t.py", "dir/Train_GPT.py"):
            (folder / script).parent.mkdir(exist_ok=True)
            (folder / script).touch()
        self.app = typer.Typer()
        self.app.callback()(lambda: None)
        command.register(self.app)

    async def _session(self, job: TrainingJob, surroundings: Surroundings, view: View) -> Outcome:
        self.job = job
        view.say("in session")
        return Outcome(
            uid="u",
            status=self.status,
            exit_code=exit_code_of(self.status),
            state_folder=self.folder,
            storage_uri=surroundings.storage_uri,
        )

    def __call__(self, *arguments: str) -> Any:
        return CliRunner().invoke(self.app, ["run", *arguments])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path)


def test_script_arguments_pass_through_untouched(run: Run) -> None:
    assert run("--nproc-per-node", "2", "dir/Train_GPT.py", "--name", "x", "-f", "--", "y").exit_code == 0
    assert run.job is not None
    assert run.job.spec.trainer.command == ("torchrun",)
    assert run.job.spec.trainer.args == ("--", "dir/Train_GPT.py", "--name", "x", "-f", "--", "y")
    assert str(run.job.job) == "local/train-gpt"
    assert run.job.spec.trainer.num_proc_per_node == 2


def test_options_lie_on_top_of_the_manifest(run: Run, tmp_path: Path) -> None:
    manifest = """
apiVersion: stepfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: gpt, namespace: team}
spec:
  trainer: {command: [torchrun, train.py], numProcPerNode: 8, image: x, env: [{name: A, value: "1"}]}
  failurePolicy: {maxRestarts: 7, maxRestartsWithoutProgress: 2}
"""
    (tmp_path / "job.yaml").write_text(manifest)
    options = ["--nproc-per-node", "auto", "--max-restarts", "1", "--env", "B=2=3", "--memory", "1Gi"]
    result = run(
        "-f",
        "job.yaml",
        *options,
        "--interval",
        "50steps",
        "--resume-from-step",
        "4",
        "--storage",
        "memory://",
    )
    assert result.exit_code == 0, result.output
    assert run.job is not None
    spec = run.job.spec
    assert str(run.job.job) == "team/gpt"
    assert spec.trainer.num_proc_per_node is None
    assert [(variable.name, variable.value) for variable in spec.trainer.env] == [("A", "1"), ("B", "2=3")]
    assert (spec.failure_policy.max_restarts, spec.failure_policy.max_restarts_without_progress) == (1, 2)
    assert (spec.checkpoint.memory.size_limit, spec.checkpoint.interval) == (2**30, Interval(steps=50))
    assert (spec.checkpoint.resume_policy, spec.checkpoint.resume_from_step) == (ResumePolicy.STEP, 4)
    assert spec.checkpoint.storage_uri == "memory://"
    assert "spec.trainer.image has no meaning on one machine" in result.output


# What of the fullest manifest one machine leaves alone.
CLUSTER_ONLY = (
    "spec.managedBy", "spec.ttlSecondsAfterFinished", "spec.template", "spec.spot", "spec.trainer.image",
    "spec.trainer.resourcesPerNode", "spec.failurePolicy.restartStrategy", "spec.failurePolicy.maxInPlaceRestarts",
    "spec.failurePolicy.podDeletionGraceSeconds", "spec.failurePolicy.rules[1].onPodConditions",
    "spec.failurePolicy.rules[2].onReasons", "spec.failurePolicy.rules[3].onNodeConditions",
    "spec.failurePolicy.rules[3].excludeNode", "spec.nodeExclusionPolicy", "spec.podGroupPolicy",
    "spec.checkpoint.secretRef",
)  # fmt: skip


def test_manifest_with_every_field_of_the_cluster_runs_here_and_says_what_is_ignored(run: Run) -> None:
    trainer = {**FULL["trainer"], "workingDir": "dir", "args": ["Train_GPT.py"], "numNodes": 2}
    spec = {**FULL, "trainer": trainer, "checkpoint": OWN_STORAGE["checkpoint"]}
    Path("full.yaml").write_text(yaml.safe_dump(manifest(spec)))
    looked_up = [variable["name"] for variable in trainer["env"] if "valueFrom" in variable]
    refused = run("-f", "full.yaml")
    assert (refused.exit_code, run.job) == (2, None)
    assert (
        f"only a cluster can look that up: on one machine give the value with --env {looked_up[0]}=" in refused.output
    )
    result = run("-f", "full.yaml", *(word for name in looked_up for word in ("--env", f"{name}=1")))
    assert result.exit_code == 0, result.output
    notices = [line for line in result.output.splitlines() if "has no meaning on one machine" in line]
    assert sorted(notices) == sorted(
        f"stepfast: {path} has no meaning on one machine and is ignored" for path in CLUSTER_ONLY
    )


@pytest.mark.parametrize(
    ("options", "policy"),
    [(["--resume-from-step", "4"], ResumePolicy.STEP), (["--resume-policy", "Never"], ResumePolicy.NEVER)],
)
def test_secret_of_the_cluster_does_not_keep_this_machine_from_going_back(
    run: Run, options: list[str], policy: ResumePolicy
) -> None:
    trainer = {"args": ["Train_GPT.py"], "workingDir": "dir"}
    Path("own.yaml").write_text(yaml.safe_dump(manifest({**OWN_STORAGE, "trainer": trainer})))
    result = run("-f", "own.yaml", *options)
    assert result.exit_code == 0, result.output
    assert run.job is not None
    assert run.job.spec.checkpoint.resume_policy is policy
    assert result.output.count("spec.checkpoint.secretRef has no meaning on one machine and is ignored") == 1


def test_gang_is_as_large_here_as_its_manifest_says(run: Run) -> None:
    trainer = {"args": ["Train_GPT.py"], "workingDir": "dir", "numNodes": 3}
    elastic = {"trainer": trainer, "elasticPolicy": {"maxNodes": 2}}
    Path("elastic.yaml").write_text(yaml.safe_dump(manifest(elastic)))
    result = run("-f", "elastic.yaml")
    assert result.exit_code == 0, result.output
    assert run.job is not None
    assert (run.job.spec.trainer.num_nodes, run.job.spec.elastic_policy) == (3, None)
    assert "spec.elasticPolicy has no meaning on one machine and is ignored" in result.output


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/job.yaml")), ids=lambda path: path.parent.name)
def test_examples_for_the_cluster_run_here(run: Run, monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    monkeypatch.chdir(EXAMPLES)
    result = run("-f", str(example))
    assert result.exit_code == 0, result.output
    assert run.job is not None
    assert "spec.trainer.image has no meaning on one machine" in result.output


def test_what_stands_beside_the_job_in_its_file_is_named(run: Run) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}
    job = manifest({"trainer": {"command": ["torchrun", "train.py"]}}, "gpt")
    Path("job.yaml").write_text(yaml.safe_dump_all([namespace, job, None]))
    result = run("-f", "job.yaml")
    assert result.exit_code == 0, result.output
    assert "Namespace team in job.yaml has no meaning on one machine and is ignored" in result.output
    Path("job.yaml").write_text(yaml.safe_dump_all([job, job]))
    result = run("-f", "job.yaml")
    assert result.exit_code == 2
    assert "job.yaml: holds 2 of kind TrainingJob: one at a time runs on one machine" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["-f", "missing.yaml"], "missing.yaml: cannot be read", id="no-file"),
        pytest.param(["-f", "job.yaml", "train.py"], "either a script", id="both"),
        pytest.param(["--nproc-per-node", "all", "t.py"], "spec.trainer.numProcPerNode", id="processes"),
        pytest.param(["--env", "A", "t.py"], "'A' is not K=V", id="env"),
        pytest.param(["--memory", "1GB", "t.py"], "spec.checkpoint.memory.sizeLimit", id="memory"),
        pytest.param(["--name", "No Good", "t.py"], "metadata.name", id="name"),
        pytest.param(["nothere.py"], "nothere.py: there is no such script", id="script"),
        pytest.param(
            ["python3", "t.py"],
            "python3 is started for you: name the script alone, as in stepfast run t.py",
            id="python",
        ),
        pytest.param(["-f", "nodir.yaml"], "spec.trainer.workingDir: 'nodir' is no folder", id="working-dir"),
        pytest.param(["-f", "moved.yaml"], "gone.py: there is no such script in dir", id="script-in-working-dir"),
        pytest.param(["--summary", "t.py/s.json", "t.py"], "--summary: t.py/s.json cannot be written", id="summary"),
        pytest.param(["--summary", "dir", "t.py"], "--summary: dir cannot be written", id="summary-folder"),
        pytest.param(["--memory", "1000", "t.py"], "at least 8392704 (9Mi)", id="memory-of-a-rank"),
        pytest.param(
            ["--memory", "9Mi", "--nnodes", "2", "t.py"],
            "2 ranks need at least 16785408 (17Mi)",
            id="memory-of-all-ranks",
        ),
        pytest.param(["--resume-policy", "Step", "t.py"], "--resume-from-step", id="step"),
    ],
)
def test_usage_errors_name_what_is_wrong_and_exit_with_2(run: Run, arguments: list[str], said: str) -> None:
    for name, trainer in (
        ("nodir", {"command": ["torchrun", "t.py"], "workingDir": "nodir"}),
        ("moved", {"command": ["torchrun"], "args": ["--tee", "3", "gone.py"], "workingDir": "dir"}),
    ):
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "x"}, "spec": {"trainer": trainer}}
        Path(f"{name}.yaml").write_text(json.dumps(document))
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert run.job is None


def failed(exit_code: int | None) -> Status:
    failure = LastFailure(attempt=1, failure_time=1.0, reason=Cause.RANK_FAILED, exit_code=exit_code)
    return Status(state=State.FAILED, terminal_state=State.FAILED, last_failure=failure)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        pytest.param(Status(terminal_state=State.COMPLETE), 0, id="complete"),
        pytest.param(failed(3), 3, id="script"),
        pytest.param(failed(137), 137, id="signal"),
        pytest.param(failed(None), 1, id="unknown"),
        pytest.param(Status(state=State.SUSPENDED), 130, id="suspended"),
    ],
)
def test_exit_status_follows_the_job(run: Run, status: Status, code: int) -> None:
    run.status = status
    assert run("train.py").exit_code == code


def test_summary_file_is_the_status_as_the_api_shows_it(run: Run, tmp_path: Path) -> None:
    recovery = Recovery(
        attempt=1,
        cause=Cause.RANK_FAILED,
        rank=1,
        failure_time=10.0,
        detected_time=10.5,
        resumed_time=12.0,
        steps_lost=3,
    )
    run.status = Status(
        state=State.COMPLETE,
        terminal_state=State.COMPLETE,
        attempt=2,
        restarts=1,
        recoveries=(recovery,),
        goodput_ratio=0.9,
    )
    result = run("--summary", "out/summary.json", "train.py")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["state"], summary["attempt"], summary["restarts"]) == ("Complete", 2, 1)
    assert summary["recoveries"][0]["stepsLost"] == 3
    assert summary["recoveries"][0]["failureTime"] == "1970-01-01T00:00:10.000000Z"
    assert (summary["checkpoint"]["saves"]["count"], summary["goodputRatio"]) == (0, 0.9)
    assert "RankFailed (rank 1)" in result.output
    assert "0.50 s" in result.output


def test_summary_that_cannot_be_written_in_the_end_is_said_and_leaves_the_exit_status(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run._session

    async def spoil(*arguments: Any) -> Outcome:
        (tmp_path / "s.json").mkdir()
        return await session(*arguments)

    monkeypatch.setattr(command, "run_session", spoil)
    result = run("--summary", "s.json", "t.py")
    assert result.exit_code == 0
    assert "s.json cannot be written" in result.output


def status_at(state: State, *, newest: int | None, persisted: int | None, is_flushed: bool = True) -> Status:
    attempt = Attempt(
        attempt=1, run="u-1", resume_step=0, planned_time=1.0, newest_step=newest, flush_timed_out=not is_flushed
    )
    return Status(
        state=state,
        terminal_state=State.COMPLETE if state is State.COMPLETE else None,
        attempt=1,
        current=attempt,
        trainer_status=TrainerStatus(global_step=newest),
        checkpoint=CheckpointStatus(latest_persisted_step=persisted),
    )


@pytest.mark.parametrize(
    ("status", "arguments", "said"),
    [
        pytest.param(
            status_at(State.SUSPENDED, newest=50, persisted=40),
            [],
            "goes on from step 40; 10 steps after it were not persisted.",
            id="behind",
        ),
        pytest.param(
            status_at(State.SUSPENDED, newest=50, persisted=50), [], "goes on from step 50.", id="all-persisted"
        ),
        pytest.param(
            status_at(State.SUSPENDED, newest=50, persisted=None),
            [],
            "Nothing was committed: the same command starts from scratch.",
            id="nothing",
        ),
        pytest.param(
            status_at(State.SUSPENDED, newest=50, persisted=40, is_flushed=False),
            [],
            "persists first what memory still holds",
            id="memory",
        ),
        pytest.param(
            status_at(State.SUSPENDED, newest=50, persisted=50),
            ["--resume-policy", "Never"],
            "The same command starts from scratch",
            id="never",
        ),
        pytest.param(
            status_at(State.COMPLETE, newest=50, persisted=None),
            [],
            "Nothing was committed: the steps of this job are lost.",
            id="complete-without-a-commit",
        ),
    ],
)
def test_summary_ends_with_what_is_safe(run: Run, status: Status, arguments: list[str], said: str) -> None:
    run.status = status
    assert said in run(*arguments, "t.py").output


def test_live_panel_shows_the_job_at_a_glance() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - for the console's life
    with console.file:
        console.print(panel("local/gpt", Status(state=State.RUNNING, attempt=2, restarts=1)))
    assert "local/gpt  Running  attempt 2  restarts 1" in console.export_text()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("/a/b/My_Script.v2.py", "my-script-v2"),
        ("___.py", "job"),
        ("x" * 99, "x" * 63),
    ],
)
def test_job_name_is_safe_in_paths(script: str, name: str) -> None:
    assert job_name_of(script) == name


def test_step_asked_for_on_the_command_line_is_a_new_request_each_time(run: Run) -> None:
    commands = []
    for arguments in (["--resume-from-step", "5"], ["--resume-from-step", "5"], []):
        assert run(*arguments, "train.py").exit_code == 0
        assert run.job is not None
        commands.append(run.job.command)
    first, second, plain = commands
    assert first is not None
    assert second is not None
    assert first != second
    assert plain is None
