"""A rank, a pod or the whole gang ends, or stands still."""

from __future__ import annotations

from collections.abc import Callable

from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.gangs import overlapping_gangs
from testjobs.job import Job


def test_rank_killed(job: Callable[..., Job], account: Account) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.signal_rank("KILL")
    status = account.check_end(training)
    check_ledger(status, "RankFailed", counted=True)
    failure = status["lastFailure"]
    assert (failure["rank"], failure["exitCode"]) == (1, 137)
    assert failure["pod"] == f"{training.name}-1-1"


def test_pod_deleted(job: Callable[..., Job], account: Account) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.delete_pod()
    check_ledger(account.check_end(training), "PodDeleted", counted=False)


def test_pod_evicted(job: Callable[..., Job], account: Account) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    training.evict_pod()
    check_ledger(account.check_end(training), "PodEvicted", counted=False)


def test_rank_out_of_memory(job: Callable[..., Job], account: Account) -> None:
    limits = {"limits": {"memory": "1500Mi"}, "requests": {"memory": "300Mi"}}
    training = job("--eat-at-step", str(COMMITTED + 5), trainer={"resourcesPerNode": limits})
    check_ledger(account.check_end(training), "OOMKilled", counted=True)


def test_hang(job: Callable[..., Job], account: Account) -> None:
    policy = {"progressDeadlineSeconds": 10}
    training = job("--hang-at-step", str(COMMITTED + 5), progressPolicy=policy, startupDeadlineSeconds=240)
    status = account.check_end(training)
    check_ledger(status, "HangDetected", counted=True)
    assert any(line.startswith("HangDetected") for line in training.story())


def test_suspended_and_resumed(job: Callable[..., Job], account: Account) -> None:
    training = job("--save-every", "1000")
    training.wait("it trains", lambda status: status.get("trainerStatus", {}).get("globalStep", 0) > 20)
    training.patch({"suspend": True})
    status = training.wait("it is suspended", lambda status: status["state"] == "Suspended")
    saved = status["checkpoint"]["latestPersistedStep"]
    assert saved == status["trainerStatus"]["globalStep"] > 20, "the last step was saved before the gang was ended"
    training.wait("no pod lives", lambda _: not training.pods(1))
    training.patch({"suspend": False})
    status = training.wait_for_end()
    assert (status["restarts"], status["stepsLost"], status["attempt"]) == (0, 0, 2)
    assert training.digests() == account.undisturbed
    assert overlapping_gangs(training.cluster.audit(), training.document()["metadata"]["uid"]) == []
    account.record(status)
