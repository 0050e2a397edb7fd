"""What a trainer's code can reach from inside its pod (I10): its own socket, and nothing of anybody else."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from testcluster.cluster import Cluster
from testcluster.waiting import CommandFailed
from testjobs.job import SAVE_EVERY, Job, Team
from testjobs.release import NAMESPACE, Release


@pytest.fixture(scope="module")
def jobs(team: Team) -> Iterator[tuple[Job, Job]]:
    """Two jobs that train side by side."""
    both = team.submit("tenant-one", "--steps", "100000"), team.submit("tenant-two", "--steps", "100000")
    for job in both:
        job.wait_for_commit(SAVE_EVERY)
    yield both
    for job in both:
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=150s")


def run_in(job: Job, code: str) -> str:
    """What Python code prints in the trainer's container of the job's first pod."""
    pod = f"{job.name}-1-0"
    program = textwrap.dedent(code)
    return job.cluster.kubectl("exec", "-n", job.namespace, pod, "-c", "node", "--", "python3", "-c", program)


def answer_to(asked: Job, message: str, /, **values: Any) -> dict[str, Any]:
    """What the agent answers through the pod's own socket to that message of the protocol."""
    answer = run_in(
        asked,
        f"""
        import json, os
        from stepfast import messages
        from stepfast.client import Connection, connect
        values = json.loads({json.dumps(json.dumps(values))})
        if {message!r} == "Hello":
            values = {{"storage_uri": os.environ["STEPFAST_STORAGE_URI"], **values}}
            values |= {{"version": messages.VERSION, "pid": os.getpid()}}
        connection = Connection(connect(os.environ["STEPFAST_SOCKET"], 10.0))
        connection.send(messages.{message}(**values))
        message, _ = connection.receive()
        print(json.dumps({{"type": type(message).__name__, "reason": getattr(message, "reason", "")}}))
    """,
    )
    return dict(json.loads(answer))


def hello(asking: Job, /, **claims: Any) -> dict[str, Any]:
    """What the agent answers to a rank that claims so."""
    values = {
        "job": f"{asking.namespace}/{asking.name}", "run": f"{asking.document()['metadata']['uid']}-1",
        "rank": 7, "local_rank": 0, "world_size": 8, "local_world_size": 1, "node": 7,
        "memory_bytes": 0, "max_to_keep": 5, "resume_step": 0,
        **claims,
    }  # fmt: skip
    return answer_to(asking, "Hello", **values)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        pytest.param({"job": "team/tenant-two"}, "works for the job team/tenant-one", id="another job"),
        pytest.param({"job": "other/tenant-one"}, "works for the job team/tenant-one", id="another namespace"),
        pytest.param({"run": "00000000-1"}, "not of 00000000-1", id="another run"),
        pytest.param({"storage_uri": "file:///"}, "neither the root of this cluster", id="the agent's files"),
        pytest.param({"storage_uri": "az://other/x"}, "neither the root of this cluster", id="another storage"),
    ],
)
def test_a_claim_that_does_not_fit_the_pod_is_refused(
    jobs: tuple[Job, Job], claims: dict[str, str], words: str
) -> None:
    answer = hello(jobs[0], **claims)
    assert answer["type"] == "Failure"
    assert words in answer["reason"]


def test_a_pod_sees_its_own_socket_and_no_memory_of_the_agent(jobs: tuple[Job, Job]) -> None:
    seen = run_in(
        jobs[0],
        """
        import glob, os
        print(sorted(os.listdir("/run/stepfast")), glob.glob("/dev/shm/*"), os.path.exists("/var/lib/kubelet"))
    """,
    )
    assert seen.strip() == "['agent.sock'] [] False"


def test_a_pod_cannot_change_what_is_in_its_volume(jobs: tuple[Job, Job]) -> None:
    said = run_in(
        jobs[0],
        """
        for act in ("remove", "create"):
            try:
                import os
                os.unlink("/run/stepfast/agent.sock") if act == "remove" else open("/run/stepfast/other", "w")
                print("done")
            except OSError as error:
                print(error.strerror)
    """,
    )
    assert said.split("\n")[:2] == ["Read-only file system"] * 2


def test_a_pod_has_no_token(jobs: tuple[Job, Job]) -> None:
    assert run_in(jobs[0], "import os; print(os.path.exists('/var/run/secrets'))").strip() == "False"


@pytest.mark.parametrize("message", ["Watch", "RequestSave", "FlushRun"])
def test_supervision_is_not_spoken_through_a_pods_socket(jobs: tuple[Job, Job], message: str) -> None:
    job = jobs[0]
    run = {"job": f"{job.namespace}/{job.name}", "run": f"{job.document()['metadata']['uid']}-1"}
    answer = answer_to(job, message, **({} if message == "Watch" else run))
    assert answer == {"type": "Failure", "reason": f"{message} is not for pods to say"}


@pytest.mark.parametrize("account", ["stepfast-operator", "stepfast-sidecar"])
@pytest.mark.parametrize("verb", ["get", "list", "watch", "create", "update", "patch", "delete"])
def test_no_account_of_ours_may_touch_a_secret(release: Release, account: str, verb: str) -> None:
    assert not may(release.cluster, account, verb, "secrets", "--all-namespaces")


def may(cluster: Cluster, account: str, *question: str) -> bool:
    user = f"system:serviceaccount:{NAMESPACE}:{account}"
    try:
        return cluster.kubectl("auth", "can-i", *question, "--as", user).strip() == "yes"
    except CommandFailed:  # its status, when the answer is no
        return False


def test_containers_run_with_a_read_only_root_and_without_capabilities(release: Release, jobs: tuple[Job, Job]) -> None:
    pods = [release.operator_pod(), *(release.agent_pod(node) for node in release.cluster.nodes)]
    for pod in pods:
        node = release.cluster.nodes[pod["spec"]["nodeName"]]
        pid = node.container_process(pod["status"]["containerStatuses"][0]["containerID"])
        facts = dict(line.split(":", 1) for line in node.run("cat", f"/proc/{pid}/status").splitlines())
        assert {facts[name].strip() for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}, pod["metadata"]["name"]
        assert facts["NoNewPrivs"].strip() == "1"
        assert facts["Seccomp"].strip() == "2"
        mounts = node.run("cat", f"/proc/{pid}/mounts").splitlines()
        root = next(line.split() for line in mounts if line.split()[1] == "/")
        assert "ro" in root[3].split(","), root
