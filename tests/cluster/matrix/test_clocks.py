"""The clock of one node is set minutes ahead or back while a job trains there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from testcluster.clocks import CLAIM, NodeClocks, build_library
from testcluster.fixtures import loudly
from testcluster.jobnamespace import claim_folder, release_folder
from testjobs.account import COMMITTED, TIMES, Account, check_ledger
from testjobs.job import STEPS, Job, Team
from testjobs.release import Release

# Of the folders of a node that its agent sees.
FOLDER = "/var/lib/kubelet/plugins/csi.stepfast.dev/clock"
DEADLINE_SECONDS = 60  # less than clocks are off by


@pytest.fixture
def clocks(release: Release, team: Team, tmp_path: Path) -> Iterator[NodeClocks]:
    """Of all nodes, for agents and the gang's pods: launchers, rendezvous, ranks."""
    with loudly():
        clocks = NodeClocks(FOLDER, build_library(tmp_path))
        for node in release.cluster.nodes.values():
            clocks.prepare(node)
    claim_folder(team.cluster, team.namespace, CLAIM, FOLDER)
    try:
        release.upgrade("--set-json", f"sidecar.extraEnv={json.dumps(clocks.environment())}")
        release.wait_until_ready()
        yield clocks
    finally:
        release.upgrade()
        release.wait_until_ready()
        release_folder(team.cluster, team.namespace, CLAIM)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seconds", "index"), [(300, 1), (-300, 0)], ids=["5-min-ahead", "5-min-back"])
def test_clock_of_one_node_set(
    clocks: NodeClocks, job: Callable[..., Job], account: Account, seconds: int, index: int
) -> None:
    """That of its agent, its launcher and its ranks, by a preloaded library; the kubelet's and containerd's, which are
    Go, and the kernel's stay. Then a rank dies there, and its end is dated by that clock.
    """
    begin = time.time()
    policy = {"progressDeadlineSeconds": DEADLINE_SECONDS}
    training = job(
        "--pace", "0.3", parts=[clocks.pod_parts()], progressPolicy=policy, startupDeadlineSeconds=240
    )  # fmt: skip
    committed = training.wait_for_commit(COMMITTED)["checkpoint"]["latestPersistedStep"]
    node = training.node_of(index)
    clocks.skew(training.cluster.nodes[node], seconds)
    told = training.wait_for_commit(committed + 250)
    assert (told["attempt"], told["restarts"]) == (1, 0), "no deadline is over because a clock says so"
    training.signal_rank("KILL", index=index)
    status = account.check_end(training, committed=committed + 250)
    check_ledger(status, "RankFailed", counted=True)
    (recovery,) = status["recoveries"]
    assert recovery["rank"] == index
    times = [*(recovery[name] for name in TIMES), status["checkpoint"]["latestPersistedTime"]]
    assert begin < min(map(seconds_of, times)) <= max(map(seconds_of, times)) < time.time()
    assert 0 <= status["productiveSeconds"] <= status["trainedSeconds"] < time.time() - begin
    assert f"global_step{STEPS}" in {name.partition("/")[0] for name in training.stored()}


def seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
