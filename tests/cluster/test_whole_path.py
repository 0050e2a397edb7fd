"""The whole path, as the README promises it: helm install, kubectl apply of an example, and a training that ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from testcluster.jobnamespace import torch_pod_parts
from testjobs.job import SAVE_EVERY, STEPS, Job, Team

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def ended(team: Team) -> Iterator[Callable[[Job], Job]]:
    """Takes a job, to tell its story and remove it afterwards."""
    jobs: list[Job] = []

    def take(job: Job) -> Job:
        jobs.append(job)
        return job

    yield take
    for job in jobs:
        print("\n".join(job.story()))
        team.cluster.kubectl("delete", "trainingjob", job.name, "-n", team.namespace, "--timeout=120s")


def example(team: Team, name: str) -> dict[str, Any]:
    """The example as it stands, but for the image of this machine, which has torch in a volume."""
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLES / name / "job.yaml").read_text())
    parts = torch_pod_parts()
    manifest["spec"]["trainer"] |= {"image": team.image, "env": parts["env"]}
    container = {"name": "node", "imagePullPolicy": "Never", "volumeMounts": parts["volumeMounts"]}
    manifest["spec"]["template"]["spec"] |= {"containers": [container], "volumes": parts["volumes"]}
    manifest["metadata"]["namespace"] = team.namespace
    return manifest


@pytest.mark.usefixtures("storage_access")
def test_the_example_trains_on_two_nodes_and_can_be_watched(team: Team, ended: Callable[[Job], Job]) -> None:
    cluster = team.cluster
    manifest = example(team, "gpt_stdlib")
    arguments = manifest["spec"]["trainer"]["args"]
    arguments[arguments.index("300")] = "150"  # on a busy machine it makes one a second
    cluster.apply(manifest)
    job = ended(team.job(manifest["metadata"]["name"]))
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
    assert (status["restarts"], status["trainerStatus"]["globalStep"]) == (0, 150)
    assert status["checkpoint"]["latestPersistedStep"] == 150
    header, *lines = rows
    assert header == ["NAME", "STATE", "READY", "NODES", "STEP", "PERSISTED", "RESTARTS", "AGE"]
    ours = [line for line in lines if line[0] == job.name and len(line) == len(header)]
    steps, persisted = ([int(line[header.index(name)]) for line in ours] for name in ("STEP", "PERSISTED"))
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3, "the steps move"
    assert persisted == sorted(persisted)
    assert len(set(persisted)) >= 3, "the committed steps move"
    # On a machine that is busy the ranks may need so long to import torch that the operator tells of it.
    told = [line for line in job.story() if "no rank uses the SDK yet" not in line]
    assert [line.partition(":")[0] for line in told] == ["PodsCreated", "PodsReady", "Completed"]
    described = cluster.kubectl("describe", "trainingjob", job.name, "-n", team.namespace)
    assert "attempt 1 starts from scratch: 2 pods" in described
    assert job.stored() >= {
        "global_step100",
        "global_step125",
        "global_step150",
        "checkpointHistories.csv",
    }


def test_an_elastic_pipeline_that_is_killed_goes_on_at_the_shape_that_it_had(
    team: Team, ended: Callable[[Job], Job]
) -> None:
    manifest = example(team, "elastic_pipeline")
    trainer = manifest["spec"]["trainer"] | {"numProcPerNode": 2}
    trainer["resourcesPerNode"]["requests"]["cpu"] = "1"
    # A rule of which it is known that it freezes, and the kill comes when it has.
    trainer["args"] += ["--epochs", "4", "--width", "16", "--rule", "gradients", "--alpha", "0.5", "--no-cache"]
    trainer["args"] += ["--save-every", "10", "--crash-at-step", "102", "--crash-rank", "1"]
    manifest["spec"]["trainer"] = trainer
    team.cluster.apply(manifest)
    job = ended(team.job(manifest["metadata"]["name"]))
    status = job.wait_for_end()
    (recovery,) = status["recoveries"]
    # What is frozen was saved once, in an older step, which only the storage has.
    assert (recovery["restoredTier"], recovery["resumedFromStep"]) == ("Persistent", 100)
    assert status["trainerStatus"]["globalStep"] == status["checkpoint"]["latestPersistedStep"] == 120
    log = team.cluster.kubectl("logs", "-n", team.namespace, f"{job.name}-2-0", "-c", "node")
    ((epoch, frozen),) = re.findall(r"epoch +(\d+) +(\d+) frozen +2 x 1 devices", log)
    assert (int(epoch), int(frozen) > 0) == (3, True), "only the epoch of the kill, as two replicas of one device"


def test_a_restart_on_the_same_nodes_restores_from_memory(team: Team, ended: Callable[[Job], Job]) -> None:
    """A gang of which each node holds all that its ranks restore."""
    job = ended(team.submit("same-nodes", "--unreplicated", processes=2))
    job.wait_for_commit(4 * SAVE_EVERY)
    nodes = [job.node_of(index) for index in (0, 1)]
    job.signal_rank("KILL")
    status = job.wait_for_end()
    assert [job.node_of(index, attempt=2) for index in (0, 1)] == nodes
    (recovery,) = status["recoveries"]
    assert recovery["restoredTier"] == "Memory"
    assert recovery["stepsLost"] <= SAVE_EVERY


def test_a_rank_that_dies_is_restarted_inside_its_pod(
    team: Team, undisturbed: Mapping[int, str], ended: Callable[[Job], Job]
) -> None:
    job = ended(team.submit("in-place", failurePolicy={"restartStrategy": "InPlace", "maxInPlaceRestarts": 2}))
    job.wait_for_commit(4 * SAVE_EVERY)
    uids = {pod["metadata"]["uid"] for pod in job.pods(1)}
    job.signal_rank("KILL")
    status = job.wait_for_end()
    assert (status["attempt"], status["restarts"]) == (1, 0)
    assert {pod["metadata"]["uid"] for pod in job.pods(1)} == uids, "the same pods"
    (recovery,) = status["recoveries"]
    assert recovery["inPlaceRestart"] == 1
    assert recovery["resumedFromStep"] >= 4 * SAVE_EVERY
    assert job.digests() == undisturbed


@pytest.mark.usefixtures("storage_access")
def test_a_job_with_a_storage_of_its_own_names_a_secret(
    team: Team, undisturbed: Mapping[int, str], ended: Callable[[Job], Job], cluster_azurite: Any
) -> None:
    container = cluster_azurite.new_container()
    team.cluster.kubectl(
        "create", "secret", "generic", "own-storage", "-n", team.namespace,
        f"--from-literal=AZURE_STORAGE_CONNECTION_STRING={cluster_azurite.connection_string()}",
    )  # fmt: skip
    own = {"storageUri": f"az://{container}/mine", "secretRef": {"name": "own-storage"}}
    job = ended(team.submit("own-storage", checkpoint=own))
    job.wait_for_commit(4 * SAVE_EVERY)
    job.delete_pod()
    status = job.wait_for_end()
    (recovery,) = status["recoveries"]
    assert recovery["resumedFromStep"] >= 4 * SAVE_EVERY
    assert status["checkpoint"]["latestPersistedStep"] == STEPS
    assert job.digests() == undisturbed
    assert f"global_step{STEPS}" in replace(job, storage_uri=own["storageUri"]).stored()
    assert job.stored() == set()


@pytest.mark.usefixtures("storage_access")
def test_a_job_is_steered_from_the_command_line(
    team: Team, undisturbed: Mapping[int, str], ended: Callable[[Job], Job], cluster_azurite: Any
) -> None:
    job = ended(team.submit("steered"))
    settings = {
        "KUBECONFIG": str(team.cluster.kubeconfig),
        "AZURE_STORAGE_CONNECTION_STRING": cluster_azurite.connection_string(),
    }

    def stepfast(*words: str) -> str:
        line = [sys.executable, "-m", "stepfast.cli", *words, "-n", team.namespace, job.name]
        done = subprocess.run(line, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    job.wait_for_commit(4 * SAVE_EVERY)
    stepfast("suspend")
    suspended = job.wait("it is suspended", lambda status: status["state"] == "Suspended")
    assert "Suspended" in stepfast("status")
    saved = suspended["checkpoint"]["latestPersistedStep"]
    back = sorted(job.commits()[1])[-3]  # one of those that are kept
    stepfast("resume", "--step", str(back))
    status = job.wait_for_end()
    assert (status["attempt"], status["checkpoint"]["latestPersistedStep"]) == (2, STEPS)
    assert status["stepsLost"] == saved - back
    assert job.digests() == undisturbed
    assert "Complete" in stepfast("status")
    assert str(STEPS) in stepfast("checkpoints", "list")
