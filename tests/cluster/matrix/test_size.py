"""Places for an elastic gang's pods go and come."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from testcluster.waiting import wait_until
from testjobs.account import COMMITTED, Account, check_times
from testjobs.gangs import overlapping_gangs
from testjobs.job import SAVE_EVERY, Job
from testjobs.release import Release

SCRIPT = Path(__file__).parents[1] / "elastic_trainer.py"
STEPS = 1200
TOLERANCE = 1e-6
_ENDED = re.compile(r"rank (\d+) ends after step (\d+) with (\S+)")


def test_gang_shrinks_without_a_lost_node_and_grows_when_there_is_another(
    job: Callable[..., Job], account: Account, release: Release, tmp_path: Path
) -> None:
    """Two nodes, one, two. Of two nodes one is lost and stays away; later a node takes its place."""
    expected = left_alone(tmp_path)
    training = job(
        "--steps", str(STEPS),
        script=SCRIPT.name,
        elasticPolicy={"minNodes": 1, "scaleDownTimeoutSeconds": 5},
        failurePolicy={"podDeletionGraceSeconds": 5, "maxRestarts": 0},
    )  # fmt: skip
    training.wait_for_commit(COMMITTED)
    others = [name for name in release.cluster.nodes if name not in map(training.node_of, (0, 1))]
    name = next(node for node in map(training.node_of, (1, 0)) if node != release.operator_node())
    node = release.cluster.nodes[name]
    for other in others:
        release.cluster.kubectl("cordon", other)
    try:
        node.kill()
        smaller = training.wait("one node trains", lambda status: is_training(status, nodes=1))
        attempt = smaller["attempt"]
        training.wait_for_commit(smaller["current"]["firstStep"] + SAVE_EVERY, attempt=attempt)
        before = training.commits()
        node.start()
        wait_until(f"{name} is back", node.is_ready, seconds=120)
        larger = training.wait("two nodes train", lambda status: is_training(status, nodes=2))
        assert larger["attempt"] == attempt + 1
        status = training.wait_for_end()
    finally:
        if not node.is_running:
            node.start()
        for other in others:
            release.cluster.kubectl("uncordon", other)
        wait_until(f"{name} is back", node.is_ready, seconds=120)
        release.wait_until_ready()
    causes = [recovery["cause"] for recovery in status["recoveries"]]
    assert causes == ["NodeLost", "Resized", "Resized"]
    for recovery in status["recoveries"][1:]:  # the attempt after the first never had a place for all its pods
        check_times(recovery)
    assert status["restartsCountTowardsMax"] == 0
    assert status["recoveries"][-1]["stepsLost"] == 0, "it saves before it grows"
    assert status["recoveries"][0]["resumedFromStep"] >= max(before[1]), "a committed step is never lost"
    assert overlapping_gangs(list(release.cluster.audit()), training.document()["metadata"]["uid"]) == []
    check_ends(training, expected)
    assert not any("-spare-" in pod["metadata"]["name"] for pod in pods_of(training))
    account.record(status, agreement=f"within {TOLERANCE:g}")


def is_training(status: dict[str, Any], *, nodes: int) -> bool:
    current = status.get("current", {})
    return current.get("nodes") == nodes and current.get("attempt", 1) > 1 and "firstStepTime" in current


def pods_of(job: Job) -> list[dict[str, Any]]:
    chosen = f"stepfast.dev/job={job.name}"
    items: list[dict[str, Any]] = job.cluster.get("pods", "-n", job.namespace, "-l", chosen)["items"]
    return items


def left_alone(folder: Path) -> dict[str, Any]:
    """What the same training ends with in one process that nothing happens to."""
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "STEPFAST_STORAGE_URI": str(folder / "checkpoints"),
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--save-every", str(STEPS), "--pace", "0"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return ends_in(done.stdout)[0]


def ends_in(log: str) -> dict[int, Any]:
    """What ranks have printed of their end."""
    return {
        int(rank): torch.load(io.BytesIO(base64.b64decode(text)))
        for rank, step, text in _ENDED.findall(log)
        if int(step) == STEPS
    }


def check_ends(job: Job, expected: dict[str, Any]) -> None:
    """Each rank has trained on each sample as often, and ends with the same values but for what the order of sums
    makes.
    """
    found: dict[int, Any] = {}
    for pod in job.pods(job.status()["attempt"]):
        found |= ends_in(job.cluster.kubectl("logs", "-n", job.namespace, pod["metadata"]["name"], "-c", "node"))
    assert sorted(found) == [0, 1]
    for end in found.values():
        assert torch.equal(end["times"], expected["times"])
        for value, wanted in zip(end["values"], expected["values"], strict=True):
            assert float((value - wanted).abs().max() / wanted.abs().max()) < TOLERANCE
