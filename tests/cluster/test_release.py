"""The release changes and goes while a job trains: the job and its data go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from testcluster.waiting import wait_until
from testjobs.account import Account
from testjobs.job import SAVE_EVERY, STEPS, Job, Team
from testjobs.release import Release

pytestmark = pytest.mark.usefixtures("storage_access")


@pytest.fixture
def submit(team: Team) -> Iterator[Callable[..., Job]]:
    """Submits a job and removes it afterwards."""
    submitted: list[Job] = []

    def run(name: str, *arguments: str) -> Job:
        submitted.append(team.submit(name, *arguments))
        return submitted[-1]

    yield run
    for job in submitted:
        print("\n".join(job.story()))
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=120s")


def test_a_job_goes_on_through_an_upgrade(
    submit: Callable[..., Job], release: Release, undisturbed: Mapping[int, str]
) -> None:
    job = submit("upgraded", "--pace", "0.2", "--hold-at-step", str(STEPS - SAVE_EVERY))
    job.wait_for_commit(2 * SAVE_EVERY)
    before = {_uid(release.operator_pod()), *(_uid(release.agent_pod(node)) for node in release.cluster.nodes)}
    annotations = [f"{component}.podAnnotations.release=next" for component in ("operator", "sidecar")]
    release.upgrade(*(part for annotation in annotations for part in ("--set", annotation)))
    release.wait_until_ready()
    after = {_uid(release.operator_pod()), *(_uid(release.agent_pod(node)) for node in release.cluster.nodes)}
    assert not before & after, "all of the release was replaced"
    assert "terminalState" not in job.status()
    job.signal_rank("USR1")
    Account(undisturbed=undisturbed).check_end(job, restarts=0)


def test_a_job_outlives_the_release_and_the_next_one_takes_it_up(
    submit: Callable[..., Job], release: Release, undisturbed: Mapping[int, str]
) -> None:
    job = submit("uninstalled", "--pace", "0.4", "--hold-at-step", str(STEPS - SAVE_EVERY))
    committed = job.wait_for_commit(2 * SAVE_EVERY)["checkpoint"]["latestPersistedStep"]
    release.uninstall()
    try:
        wait_until("nothing of the release is left", lambda: not release.pods(), seconds=150)
        assert _phases(job) == {"Running"}
        assert job.document()["spec"]
        assert job.status()["checkpoint"]["latestPersistedStep"] >= committed
    finally:
        release.install()
    job.wait("the next release sees it train", lambda status: status["checkpoint"]["latestPersistedStep"] > committed)
    assert _phases(job) == {"Running"}
    job.signal_rank("USR1")
    Account(undisturbed=undisturbed).check_end(job, restarts=0)


def _phases(job: Job) -> set[str]:
    pods = job.cluster.get("pods", "-n", job.namespace, "-l", f"stepfast.dev/job={job.name}")["items"]
    return {pod["status"]["phase"] for pod in pods}


def _uid(pod: dict[str, Any]) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid
