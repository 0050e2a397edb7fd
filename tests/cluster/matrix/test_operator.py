"""The operator ends when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from testjobs.account import COMMITTED, Account, check_ledger
from testjobs.job import Job
from testjobs.release import Release


def test_operator_away_when_a_rank_is_killed(job: Callable[..., Job], account: Account, release: Release) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    release.kill_container(release.operator_pod())
    training.signal_rank("KILL")
    check_ledger(account.check_end(training), "RankFailed", counted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A moment of a recovery at which the operator is killed: while the job's status is so. `hold`: what keeps the
    recovery there meanwhile, where it would be over in less time than a look at it takes.
    """

    name: str
    is_here: Callable[[dict[str, Any]], object]
    hold: Callable[[Job, Any], AbstractContextManager[None]] = lambda job, azurite: nullcontext()


@contextmanager
def without_storage(job: Job, azurite: Any) -> Iterator[None]:
    with azurite.unanswering():
        job.wait("a step waits for the storage", lambda status: status["checkpoint"].get("pendingBytes"))
        yield


@contextmanager
def without_new_pods(job: Job, azurite: Any) -> Iterator[None]:
    job.cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", job.namespace)
    try:
        yield
    finally:
        job.cluster.kubectl("delete", "quota", "none", "-n", job.namespace)


def newest_recovery(status: dict[str, Any]) -> dict[str, Any]:
    return dict((status.get("recoveries") or [{}])[-1])


PHASES = [
    Phase(
        name="flushing",
        is_here=lambda status: "endedTime" in status["current"] and "flushedTime" not in status["current"],
        hold=without_storage,
    ),
    Phase(
        name="planned",
        is_here=lambda status: status["attempt"] == 2 and "podsReadyTime" not in status["current"],
        hold=without_new_pods,
    ),
    Phase(
        name="pods made",
        is_here=lambda status: "launchedTime" in newest_recovery(status) and "restoredTime" not in status["current"],
    ),
    Phase(name="restored", is_here=lambda status: "restoredTime" in newest_recovery(status)),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name.replace(" ", "-"))
def test_operator_killed(
    job: Callable[..., Job], account: Account, release: Release, cluster_azurite: Any, phase: Phase
) -> None:
    training = job()
    training.wait_for_commit(COMMITTED)
    operator = release.operator_pod()
    with phase.hold(training, cluster_azurite):
        training.signal_rank("KILL")
        training.wait(f"the recovery is at: {phase.name}", phase.is_here)
        release.kill_container(operator)
        assert phase.is_here(training.status()), "still, when nobody moved it any more"
    check_ledger(account.check_end(training), "RankFailed", counted=True)
