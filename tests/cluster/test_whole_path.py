"""The whole path, as the README promises it: helm install, kubectl apply of an example, and a training that ends."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from testjobs.job import SAVE_EVERY, Job, Team
from testjobs.release import Release

from stepfast.storage import open_store
from testcluster.jobnamespace import torch_pod_parts

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_stdlib" / "job.yaml"


@pytest.fixture
def applied(team: Team) -> Iterator[Callable[[dict[str, Any]], Job]]:
    """Applies a TrainingJob, and removes it afterwards."""
    jobs: list[Job] = []

    def apply(manifest: dict[str, Any]) -> Job:
        manifest["metadata"]["namespace"] = team.namespace
        team.cluster.apply(manifest)
        jobs.append(Job(cluster=team.cluster, namespace=team.namespace, name=manifest["metadata"]["name"]))
        return jobs[-1]

    yield apply
    for job in jobs:
        print("\n".join(job.story()))
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=120s")


def example(team: Team) -> dict[str, Any]:
    """The example as it stands, but for the image of this machine, which has torch in a volume."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    parts = torch_pod_parts()
    manifest["spec"]["trainer"] |= {"image": team.image, "env": parts["env"]}
    container = {"name": "node", "imagePullPolicy": "Never", "volumeMounts": parts["volumeMounts"]}
    manifest["spec"]["template"]["spec"] |= {"containers": [container], "volumes": parts["volumes"]}
    return manifest


def test_the_example_trains_on_two_nodes_and_can_be_watched(
    team: Team,
    release: Release,
    applied: Callable[[dict[str, Any]], Job],
    monkeypatch: pytest.MonkeyPatch,
    cluster_azurite: Any,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", cluster_azurite.connection_string())
    cluster = team.cluster
    job = applied(example(team))
    watch = subprocess.Popen(
        [cluster.binaries.path("kubectl"), "--kubeconfig", cluster.kubeconfig, "get", "tj", "-n", team.namespace, "-w"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        status = job.wait_for_end()
    finally:
        watch.terminate()
        rows = [line.split() for line in watch.communicate()[0].splitlines()]
    assert {job.node_of(0), job.node_of(1)} == {"node-1", "node-2"} or len(cluster.nodes) > 2
    assert (status["restarts"], status["trainerStatus"]["globalStep"]) == (0, 300)
    assert status["checkpoint"]["latestPersistedStep"] == 300
    header, *lines = rows
    assert header == ["NAME", "STATE", "READY", "NODES", "STEP", "PERSISTED", "RESTARTS", "AGE"]
    ours = [line for line in lines if line[0] == job.name and len(line) == len(header)]
    steps, persisted = ([int(line[header.index(name)]) for line in ours] for name in ("STEP", "PERSISTED"))
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3, "the steps move"
    assert persisted == sorted(persisted)
    assert len(set(persisted)) >= 3, "the committed steps move"
    assert [line.partition(":")[0] for line in job.story()] == ["PodsCreated", "PodsReady", "Completed"]
    described = cluster.kubectl("describe", "trainingjob", job.name, "-n", team.namespace)
    assert "attempt 1 starts from scratch: 2 pods" in described
    store = open_store(release.storage_uri)
    try:
        names = {entry.name for entry in store.list(f"{team.namespace}/{job.name}")}
    finally:
        store.close()
    assert names >= {"global_step250", "global_step275", "global_step300", "checkpointHistories.csv"}


def test_a_restart_on_the_same_node_restores_from_memory(team: Team) -> None:
    job = team.submit("same-node", nodes=1, processes=2)
    try:
        job.wait_for_commit(4 * SAVE_EVERY)
        node = job.node_of(0)
        job.signal_rank("KILL", index=0)
        status = job.wait_for_end()
        assert job.node_of(0, attempt=2) == node
        (recovery,) = status["recoveries"]
        assert recovery["restoredTier"] == "Memory"
        assert recovery["stepsLost"] <= SAVE_EVERY
    finally:
        job.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=120s")


def test_a_rank_that_dies_is_restarted_inside_its_pod(team: Team) -> None:
    policy = {"restartStrategy": "InPlace", "maxInPlaceRestarts": 2}
    job = team.submit("in-place", failurePolicy=policy)
    try:
        job.wait_for_commit(4 * SAVE_EVERY)
        uids = {pod["metadata"]["uid"] for pod in job.pods(1)}
        job.signal_rank("KILL")
        status = job.wait_for_end()
        assert (status["attempt"], status["restarts"]) == (1, 0)
        assert {pod["metadata"]["uid"] for pod in job.pods(1)} == uids, "the same pods"
        (recovery,) = status["recoveries"]
        assert recovery["inPlaceRestart"] == 1
        assert recovery["resumedFromStep"] >= 4 * SAVE_EVERY
    finally:
        job.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=120s")
