"""`stepfast status`, `suspend`, `resume` and `checkpoints -n` against a real API server.

No operator runs: what it would write into the status, the tests write.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from stepfast.cli import checkpoints
from stepfast.environment import read_environment
from stepfast.torch import Checkpointer
from stepfast_operator.local import command
from testcluster.waiting import CommandFailed, wait_until
from testoperator.running import run_to_end

ROOT = Path(__file__).resolve().parents[2]
CRD = "trainingjobs.stepfast.dev"
API = "stepfast.dev/v1alpha1"
RESUME_REQUEST = "stepfast.dev/resume-request"
COMMITTED = {
    "state": "Suspended",
    "attempt": 1,
    "nodes": {"desired": 1, "ready": 0, "active": 0, "succeeded": 0, "failed": 0},
    "checkpoint": {"latestPersistedStep": 40, "latestPersistedTime": "2026-01-02T03:04:05.000000Z"},
    "trainerStatus": {"globalStep": 40},
}
OVER = {**COMMITTED, "state": "Failed", "terminalState": "Failed", "current": {
    "attempt": 1, "run": "u-1", "resumeStep": 0, "plannedTime": "2026-01-02T03:04:05.000000Z",
    "failReason": "NoProgress", "failMessage": "3 restarts in a row",
}}  # fmt: skip

Stepfast = Callable[..., Any]


@pytest.fixture(scope="module")
def installed(api_server: Any) -> Iterator[Any]:
    """The API server with our kind; it is removed again where it was not there before."""
    was_there = CRD in api_server.kubectl("get", "crd", "-o", "name")
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds" / f"{CRD}.yaml"))
    api_server.kubectl("wait", "--for=condition=Established", f"crd/{CRD}")
    wait_until(f"{CRD} is served", lambda: api_server.kubectl("get", CRD, "-A") is not None)
    yield api_server
    if not was_there:
        api_server.kubectl("delete", "crd", CRD)


class Space:
    """A namespace of the API server, and a kubeconfig whose current namespace it is."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server, self.name = server, f"cli-{uuid.uuid4().hex[:8]}"
        server.kubectl("create", "namespace", self.name)
        self.config: dict[str, Any] = yaml.safe_load(server.kubeconfig.read_text())
        self._file = folder / "kubeconfig"
        self.context["context"]["namespace"] = self.name
        self.write()

    @property
    def context(self) -> Any:
        current = self.config["current-context"]
        return next(context for context in self.config["contexts"] if context["name"] == current)

    @property
    def cluster(self) -> Any:
        """That of the current context."""
        name = self.context["context"]["cluster"]
        return next(cluster for cluster in self.config["clusters"] if cluster["name"] == name)["cluster"]

    def write(self) -> Path:
        self._file.write_text(yaml.safe_dump(self.config))
        return self._file

    def use(self, user: dict[str, Any]) -> None:
        """Asks the API server as somebody else."""
        self.config["users"].append({"name": "other", "user": user})
        self.context["context"]["user"] = "other"
        self.write()

    def make(self, name: str = "gpt", status: dict[str, Any] | None = None, **spec: Any) -> None:
        """A job; a spec without more than its command where none is given."""
        document = {"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name, "namespace": self.name},
                    "spec": {"trainer": {"command": ["torchrun", "train.py"]}, **spec}}  # fmt: skip
        self.server.apply(document)
        if status is not None:
            self.report(status, name)

    def report(self, status: dict[str, Any], name: str = "gpt") -> None:
        self._patch(name, {"status": status}, "--subresource=status")

    def change(self, patch: dict[str, Any], name: str = "gpt") -> None:
        self._patch(name, patch)

    def job(self, name: str = "gpt") -> Any:
        return self.server.get(CRD, name, "-n", self.name)

    def _patch(self, name: str, patch: dict[str, Any], *options: str) -> None:
        words = ["patch", CRD, name, "-n", self.name, "--type=merge", "-p", json.dumps(patch)]
        self.server.kubectl(*words, *options)


@pytest.fixture
def space(installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Space]:
    space = Space(installed, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(space.write()))
    monkeypatch.chdir(tmp_path)
    yield space
    installed.kubectl("delete", "namespace", space.name, "--wait=false")


@pytest.fixture
def stepfast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stepfast:
    """The command line with this checkout's entry points, whatever is installed."""
    project = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "installed" / "checkout-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: checkout\nVersion: 0\n")
    lines = ["[stepfast.jobs]", *(f"{name} = {of}" for name, of in project["entry-points"]["stepfast.jobs"].items())]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.setattr(asyncio, "run", run_to_end)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    checkpoints.register(app)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def train(root: Path, job: str, *steps: int) -> None:
    """Commits these steps of that job below a folder."""
    values = {"STEPFAST_JOB": job, "STEPFAST_STORAGE_URI": root.as_uri(), "STEPFAST_RUN": "r-1"}
    with Checkpointer(environment=read_environment(values), model={"weights": torch.arange(6.0)}) as checkpointer:
        for step in steps:
            checkpointer.save(step).wait(timeout_seconds=60.0)


def test_status_is_that_of_the_current_namespace(space: Space, stepfast: Stepfast) -> None:
    space.make(checkpoint={"storageUri": "memory://root"}, status=COMMITTED, suspend=True)
    result = stepfast("status", "gpt")
    assert result.exit_code == 0, result.output
    assert f"{space.name}/gpt (context {space.config['current-context']})" in result.output
    for words in ("Suspended", "40, ", " d ago", f"memory://root/{space.name}/gpt"):
        assert words in result.output
    assert stepfast("status", "-n", space.name, "gpt").exit_code == 0
    assert stepfast("status", f"{space.name}/gpt").exit_code == 0


def test_status_as_json_is_what_the_api_server_has(space: Space, stepfast: Stepfast) -> None:
    space.make(status=COMMITTED)
    document = json.loads(stepfast("status", "--json", "gpt").stdout)
    where = document.pop("where")
    job = space.job()
    assert (where["kind"], where["context"]) == ("Cluster", space.config["current-context"])
    assert document.pop("metadata")["uid"] == job["metadata"]["uid"]
    assert document == job["status"]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        pytest.param({}, None, "has not looked at this job yet", id="new"),
        pytest.param({"suspend": True}, {**COMMITTED, "state": "Running"}, "asked for", id="suspend-asked"),
        pytest.param({}, {**COMMITTED, "observedGeneration": 0}, "the latest change of the spec", id="behind"),
        pytest.param({"managedBy": "x.io/y"}, None, "Stepfast's operator leaves it alone", id="managed-elsewhere"),
    ],
)
def test_status_tells_what_the_operator_has_not_done(
    space: Space, stepfast: Stepfast, change: dict[str, Any], status: dict[str, Any] | None, said: str
) -> None:
    space.make(status=status, **change)
    assert said in " ".join(stepfast("status", "gpt").output.replace("│", " ").split())


def test_watch_follows_the_job_to_its_end(space: Space) -> None:
    space.make(status={**COMMITTED, "state": "Running"})
    with subprocess.Popen(
        [sys.executable, "-m", "stepfast.cli", "status", "-w", "--json", "-n", space.name, "gpt"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["state"] == "Running"
            space.report({"trainerStatus": {"globalStep": 41}})
            assert json.loads(process.stdout.readline())["trainerStatus"]["globalStep"] == 41
            space.report(OVER)
            assert json.loads(process.stdout.readline())["state"] == "Failed"
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()


def test_watch_ends_when_the_job_is_deleted(space: Space) -> None:
    space.make(status={**COMMITTED, "state": "Running"})
    with subprocess.Popen(
        [sys.executable, "-m", "stepfast.cli", "status", "-w", "-n", space.name, "gpt"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert "Running  attempt 1  step 40  persisted 40" in process.stdout.readline()
            space.server.kubectl("delete", CRD, "gpt", "-n", space.name)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert said == f"stepfast status: {space.name}/gpt was deleted\n"


def test_suspend_and_resume_say_what_they_ask_for(space: Space, stepfast: Stepfast) -> None:
    space.make(status={**COMMITTED, "state": "Running"})
    asked = stepfast("suspend", "gpt")
    assert asked.exit_code == 0, asked.output
    assert "is asked to save a last checkpoint and to stop (Running): `stepfast status -w gpt` shows" in asked.output
    assert space.job()["spec"]["suspend"] is True
    assert "is suspended already (Running)" in stepfast("suspend", "gpt").output
    space.report(COMMITTED)
    resumed = stepfast("resume", "-n", space.name, "gpt")
    assert f"is resumed: it goes on from step 40. `stepfast status -w -n {space.name} gpt` follows it" in resumed.output
    job = space.job()
    assert job["spec"]["suspend"] is False
    assert job["spec"]["checkpoint"]["resumePolicy"] == "Latest"
    assert RESUME_REQUEST not in job["metadata"].get("annotations", {})
    again = stepfast("resume", "gpt")
    assert again.exit_code == 0
    assert "is not suspended: it is Suspended" in again.output
    assert space.job()["metadata"]["generation"] == job["metadata"]["generation"]


def test_each_resume_from_a_step_is_a_request_of_its_own(space: Space, stepfast: Stepfast, tmp_path: Path) -> None:
    train(tmp_path / "storage", f"{space.name}/gpt", 20, 40)
    space.make(status=COMMITTED, suspend=True, checkpoint={"storageUri": (tmp_path / "storage").as_uri()})
    commands = []
    for _ in range(2):
        space.change({"spec": {"suspend": True}})
        resumed = stepfast("resume", "gpt", "--step", "20")
        assert resumed.exit_code == 0, resumed.output
        assert "it goes back to step 20; later steps are superseded" in resumed.output
        job = space.job()
        assert job["spec"]["suspend"] is False
        assert (job["spec"]["checkpoint"]["resumePolicy"], job["spec"]["checkpoint"]["resumeFromStep"]) == ("Step", 20)
        commands.append(job["metadata"]["annotations"][RESUME_REQUEST])
    assert len(set(commands)) == 2
    before = space.job()["metadata"]
    space.change({"spec": {"suspend": True}})
    assert "or goes back to resumeFromStep if it has not yet" in stepfast("resume", "gpt").output
    assert space.job()["metadata"]["annotations"] == before["annotations"]


@pytest.mark.parametrize(
    ("spec", "status", "arguments", "said"),
    [
        pytest.param({}, OVER, ["resume"], "is over (Failed: NoProgress: 3 restarts in a row) and is never run again",
            id="over"),
        pytest.param({}, OVER, ["resume"], "delete -n {space} trainingjob gpt`, then apply its manifest again",
            id="over-says-how"),
        pytest.param({}, OVER, ["suspend"], "is never run again", id="suspend-over"),
        pytest.param({"managedBy": "x.io/y"}, None, ["resume"], "is managed by x.io/y", id="managed-elsewhere"),
        pytest.param({}, {**COMMITTED, "state": "Running"}, ["resume", "--step", "20"],
            "is not suspended (Running), and goes back to a step only from there", id="step-running"),
        pytest.param({"suspend": True}, {**COMMITTED, "state": "Suspending"}, ["resume", "--step", "20"],
            "is not suspended yet (Suspending)", id="step-suspending"),
        pytest.param({"suspend": True, "checkpoint": {"storageUri": "memory://r"}}, COMMITTED,
            ["resume", "--step", "30"], "step 30 is not committed in memory://r/{space}/gpt; these are: none",
            id="step-not-committed"),
        pytest.param({"suspend": True, "checkpoint": {"storageUri": "nosuch://r"}}, COMMITTED,
            ["resume", "--step", "30"], "whether step 30 is committed cannot be read from here", id="step-unreadable"),
        pytest.param({"suspend": True}, None, ["resume", "--step", "30"], "there is no step 30", id="no-commit"),
        pytest.param({"suspend": True, "checkpoint": {"storageUri": "memory://r", "secretRef": {"name": "s"}}},
            COMMITTED, ["resume", "--step", "30"],
            "keeps its checkpoints in a storage of its own (checkpoint.secretRef), which the operator cannot read",
            id="step-of-own-storage"),
        pytest.param({"checkpoint": {"storageUri": "memory://r", "secretRef": {"name": "s"}}},
            {**COMMITTED, "state": "Running"}, ["resume", "--step", "30", "--no-check"], "goes on from the newest step",
            id="step-of-own-storage-running"),
    ],
)  # fmt: skip
def test_what_a_job_is_in_no_state_for_is_refused(  # noqa: PLR0917 - pytest calls it by keyword
    space: Space, stepfast: Stepfast, spec: dict[str, Any], status: dict[str, Any] | None, arguments: list[str],
    said: str,
) -> None:  # fmt: skip
    space.make(status=status, **spec)
    before = space.job()["metadata"]["resourceVersion"]
    result = stepfast(*arguments, "gpt")
    assert result.exit_code == 2, result.output
    assert said.format(space=space.name) in result.stderr
    assert space.job()["metadata"]["resourceVersion"] == before


def test_a_step_is_asked_for_without_a_look_where_the_user_says_so(space: Space, stepfast: Stepfast) -> None:
    space.make(suspend=True, status=COMMITTED, checkpoint={"storageUri": "nosuch://r"})
    assert stepfast("resume", "gpt", "--step", "30", "--no-check").exit_code == 0
    assert space.job()["spec"]["checkpoint"]["resumeFromStep"] == 30


def test_a_job_that_is_being_deleted_is_not_resumed(space: Space, stepfast: Stepfast) -> None:
    space.make(suspend=True, status=COMMITTED)
    space.change({"metadata": {"finalizers": ["stepfast.dev/finalizer"]}})
    space.server.kubectl("delete", CRD, "gpt", "-n", space.name, "--wait=false")
    result = stepfast("resume", "gpt")
    assert result.exit_code == 2
    assert "is being deleted and cannot be resumed" in result.stderr
    assert "deletion" in stepfast("status", "gpt").output
    space.change({"metadata": {"finalizers": None}})


def test_a_job_of_this_machine_comes_first_unless_a_cluster_is_named(space: Space, stepfast: Stepfast) -> None:
    folder = Path(".stepfast/jobs/local.gpt")
    folder.mkdir(parents=True)
    metadata = {"namespace": "local", "name": "gpt", "uid": "u"}
    (folder / "status.json").write_text(json.dumps({"metadata": metadata, "status": {"state": "Complete"}}))
    space.make(status=COMMITTED)
    assert "local/gpt (this machine)" in stepfast("status", "gpt").output
    for options in (["-n", space.name], ["--context", space.config["current-context"]]):
        assert f"{space.name}/gpt (context" in stepfast("status", *options, "gpt").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["gtp"], "of context", id="where"),
        pytest.param(["gtp"], ": did you mean gpt?", id="near-name"),
        pytest.param(["-n", "{other}", "{name}"], "did you mean -n {space}?", id="other-namespace"),
        pytest.param(["-n", "nowhere", "gpt"], "there is no namespace nowhere in context", id="no-namespace"),
    ],
)
def test_a_job_that_is_not_there_is_told_with_what_is_near(
    space: Space, stepfast: Stepfast, arguments: list[str], said: str
) -> None:
    space.make()
    names = {"space": space.name, "other": "default", "name": f"in-{space.name}"}
    space.make(names["name"])
    result = stepfast("status", *(word.format(**names) for word in arguments))
    assert result.exit_code == 2, result.output
    assert said.format(**names) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def become_nobody(space: Space) -> None:
    """Asks the API server as somebody who may nothing, from here on."""
    space.server.kubectl("create", "serviceaccount", "reader", "-n", space.name)
    space.use({"token": space.server.kubectl("create", "token", "reader", "-n", space.name).strip()})


def let_read(space: Space, stepfast: Stepfast) -> None:
    """Lets that somebody read jobs, and nothing else."""
    words = ("-n", space.name, "--verb=get,list,watch", f"--resource={CRD}")
    space.server.kubectl("create", "role", "reader", *words)
    who = f"--serviceaccount={space.name}:reader"
    space.server.kubectl("create", "rolebinding", "reader", "-n", space.name, "--role=reader", who)
    wait_until("the role counts", lambda: stepfast("status", "-n", space.name, "gpt").exit_code == 0)


def test_a_user_without_the_role_is_told_which_one(space: Space, stepfast: Stepfast) -> None:
    space.make(suspend=True)
    become_nobody(space)
    result = stepfast("status", "-n", space.name, "gpt")
    assert result.exit_code == 1
    assert f"you may not get {CRD} in namespace {space.name} of context" in result.stderr
    assert "the role view there" in result.stderr
    let_read(space, stepfast)
    refused = stepfast("resume", "-n", space.name, "gpt")
    assert refused.exit_code == 1
    assert f"you may not patch {CRD}" in refused.stderr
    assert "the role edit there" in refused.stderr
    missing = stepfast("status", "-n", space.name, "gtp")
    assert ": did you mean gpt?" in missing.stderr


def spoil(space: Space, how: str) -> None:
    match how:
        case "not-installed":
            space.cluster["server"] += "/elsewhere"  # where the API server knows no kind at all
        case "stranger":
            space.use({"token": "nobody's"})
        case "no-login":
            program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "interactiveMode": "Never",
                       "args": ["-c", "echo the browser is closed >&2; exit 7"]}  # fmt: skip
            space.use({"exec": program})
        case "no-server":
            space.cluster["server"] = "https://127.0.0.1:1"
        case "untrusted":
            space.cluster.pop("certificate-authority", None)
            space.cluster.pop("certificate-authority-data", None)
        case "no-current-context":
            space.config.pop("current-context")
        case "no-cluster":
            space.context["context"]["cluster"] = "gone"
    space.write()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("not-installed", "Stepfast is not installed in context {context} ({server}/elsewhere), which knows no"),
        ("stranger", "context {context} ({server}) does not take your credentials: log in again"),
        ("no-login", "logging in to context {context} failed: exec: process returned 7"),
        ("no-server", "context {context} (https://127.0.0.1:1) does not answer ("),
        ("untrusted", "certificate verify failed"),
        ("no-current-context", "has no current context: name one with --context; it has: {context}"),
        ("no-cluster", "Expected object with name gone"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_asked_is_one_line_that_says_what_to_do(
    space: Space, stepfast: Stepfast, how: str, said: str
) -> None:
    names = {"context": space.config["current-context"], "server": space.cluster["server"]}
    spoil(space, how)
    for arguments in (["status", "-n", space.name, "gpt"], ["checkpoints", "list", "-n", space.name, "gpt"]):
        result = stepfast(*arguments)
        assert result.exit_code == 1, result.output
        assert said.format(**names) in result.stderr
        assert len(result.stderr.splitlines()) == 1
    both = stepfast("status", "gpt")
    assert both.exit_code == 1
    assert both.stderr.startswith("stepfast status: there is no job gpt on this machine (")
    assert said.format(**names) in both.stderr


@pytest.mark.parametrize(
    ("text", "said"), [("", "is no kubeconfig"), ("{", "is no kubeconfig"), ("[1]", "is no kubeconfig")]
)
def test_a_file_that_is_no_kubeconfig_is_named(
    stepfast: Stepfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "broken"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    result = stepfast("status", "-n", "x", "gpt")
    assert result.exit_code == 1
    assert f"{file} {said}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_context_is_told_with_the_known_ones(space: Space, stepfast: Stepfast) -> None:
    result = stepfast("status", "--context", "prod", "gpt")
    assert result.exit_code == 1
    assert f"has no context prod; it has: {space.config['current-context']}" in result.stderr


def test_checkpoints_of_a_job_are_found_by_its_name(space: Space, stepfast: Stepfast, tmp_path: Path) -> None:
    root = tmp_path / "storage"
    train(root, f"{space.name}/gpt", 20, 40)
    uri = f"{root.as_uri()}/{space.name}/gpt"
    space.make(checkpoint={"storageUri": root.as_uri()})
    by_spec = stepfast("checkpoints", "list", "-n", space.name, "gpt", "--json")
    assert [row["step"] for row in json.loads(by_spec.stdout)] == [20, 40]
    space.change({"spec": {"suspend": True}})
    space.change({"spec": {"checkpoint": {"storageUri": "memory://new"}}})
    space.report({**COMMITTED, "checkpoint": {**COMMITTED["checkpoint"], "latestPersistedUri": uri}})
    context = ["--context", space.config["current-context"]]
    for arguments, words in (
        (["list", "gpt", *context], "40"),
        (["show", "gpt", "-n", space.name], "step 40"),
        (["verify", "gpt", "-n", space.name], "step 20: whole"),
        (["export", "gpt", "out", "-n", space.name], "step 40 is in out"),
        (["rm", "gpt", "40", "--yes", "-n", space.name], "removed step 40"),
    ):
        result = stepfast("checkpoints", *arguments)
        assert result.exit_code == 0, result.output
        assert words in result.output
    reinstated = stepfast("checkpoints", "reinstate", "gpt", "40", "-n", space.name)
    assert (reinstated.exit_code, f"step 40 is not superseded in {uri}" in reinstated.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["gpt"], "has committed nothing yet and names no storageUri: give the URI instead", id="unknown"),
        pytest.param(["gtp"], "did you mean gpt?", id="near-name"),
        pytest.param(["memory://root/a/b"], "is no job's name: leave out --namespace", id="uri"),
    ],
)
def test_checkpoints_that_cannot_be_found_are_asked_for_by_uri(
    space: Space, stepfast: Stepfast, arguments: list[str], said: str
) -> None:
    space.make()
    result = stepfast("checkpoints", "list", "-n", space.name, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_somebody_elses_change_in_between_is_not_overwritten(space: Space, stepfast: Stepfast) -> None:
    """The API server refuses a patch that was made from an older state; it is made anew from the new one."""
    space.make(suspend=True, status=COMMITTED, checkpoint={"storageUri": "memory://r"})
    stale = space.job()["metadata"]["resourceVersion"]
    space.report(OVER)
    with pytest.raises(CommandFailed, match="the object has been modified"):
        space.change({"metadata": {"resourceVersion": stale}, "spec": {"suspend": False}})
    assert "is never run again" in stepfast("resume", "gpt").stderr


def told_of(space: Space, reason: str, message: str) -> None:
    """An Event of the job, as the operator posts it."""
    metadata = space.job()["metadata"]
    space.server.apply({
        "apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": message, "count": 1,
        "metadata": {"name": f"gpt.{uuid.uuid4().hex[:8]}", "namespace": space.name},
        "involvedObject": {"apiVersion": API, "kind": "TrainingJob", "name": "gpt", "namespace": space.name,
                           "uid": metadata["uid"]},
        "eventTime": "2026-01-02T03:04:06.000000Z", "action": reason, "reportingComponent": "stepfast-operator",
        "reportingInstance": "here",
    })  # fmt: skip


def test_report_shows_what_the_cluster_and_the_storage_know_of_the_job(
    space: Space, stepfast: Stepfast, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    space.make(checkpoint={"storageUri": root.as_uri()}, status=COMMITTED)
    told_of(space, "Restarting", "attempt 1 failed: <NodeLost>")
    train(root, f"{space.name}/gpt", 3)
    result = stepfast("report", "gpt")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "gpt.html").read_text()
    assert "attempt 1 failed: &lt;NodeLost&gt;" in page
    assert f"In context {space.config['current-context']}" in page
    assert "cannot be read" not in page


def test_report_says_that_events_may_not_be_read(space: Space, stepfast: Stepfast, tmp_path: Path) -> None:
    space.make(status=COMMITTED)
    become_nobody(space)
    let_read(space, stepfast)
    assert stepfast("report", "-n", space.name, "gpt").exit_code == 0
    page = (tmp_path / "gpt.html").read_text()
    assert f"Events are not shown: you may not list events in namespace {space.name} of" in page
    assert "saves are not shown: where they are is known with the first commit" in page


def pod_of(space: Space, why: str) -> None:
    """A pod of the job's gang that the scheduler could not place."""
    job = space.job()
    marks = {"job": "gpt", "job-uid": job["metadata"]["uid"], "attempt": "2", "node-index": "0"}
    owner = {"apiVersion": API, "kind": "TrainingJob", "name": "gpt", "uid": job["metadata"]["uid"], "controller": True}
    space.server.apply({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "gpt-2-0", "namespace": space.name, "ownerReferences": [owner],
            "labels": {f"stepfast.dev/{name}": value for name, value in marks.items()},
            "annotations": {"stepfast.dev/run": f"{job['metadata']['uid']}-2"},
        },
        "spec": {
            "containers": [{"name": "node", "image": "none"}], "automountServiceAccountToken": False,
            "schedulerName": "nobody", "serviceAccountName": "default",
        },
    })  # fmt: skip
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    patch = json.dumps({"status": {"conditions": [condition]}})
    space.server.kubectl(
        "patch", "pod", "gpt-2-0", "-n", space.name, "--subresource=status", "--type=merge", "-p", patch
    )


STARTING = {
    **COMMITTED, "state": "Starting", "attempt": 2, "restarts": 1,
    "lastFailure": {"attempt": 1, "time": "2026-01-02T03:04:05.000000Z", "reason": "NodeLost", "node": "node-2"},
    "current": {"attempt": 2, "run": "u-2", "resumeStep": 40, "plannedTime": "2026-01-02T03:04:06.000000Z"},
    "conditions": [{"type": "PodsReady", "status": "False", "reason": "PodsPending", "message": "seen by the operator",
                    "lastTransitionTime": "2026-01-02T03:04:06Z"}],
}  # fmt: skip


def test_explain_names_the_pods_that_are_waited_for_and_what_bounds_the_job(space: Space, stepfast: Stepfast) -> None:
    space.make(status=STARTING, failurePolicy={"maxRestarts": 5})
    space.server.apply({"apiVersion": "v1", "kind": "ServiceAccount",
                        "metadata": {"name": "default", "namespace": space.name}})  # fmt: skip
    pod_of(space, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    result = stepfast("explain", "gpt")
    assert result.exit_code == 0, result.output
    assert "for pod gpt-2-0: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in result.output
    assert "attempt 1 failed: NodeLost (node-2), " in result.output
    assert "5 more restarts of 5 may follow failures (maxRestarts)" in result.output
    assert "(startupDeadlineSeconds)" in result.output


def test_explain_says_what_the_operator_saw_where_pods_may_not_be_read(space: Space, stepfast: Stepfast) -> None:
    space.make(status=STARTING)
    become_nobody(space)
    let_read(space, stepfast)
    result = stepfast("explain", "-n", space.name, "gpt")
    assert result.exit_code == 0, result.output
    assert "  - seen by the operator" in result.output
