"""What an operator sees of pods that have found no place, and of the nodes that they were made to keep off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from stepfast.kube import Kube
from stepfast.step import JobKey
from stepfast_operator import manifests
from stepfast_operator.actions import LaunchGang
from stepfast_operator.backends.sight import Launched, Sight
from stepfast_operator.backends.spares import Spares
from stepfast_operator.clusterjob import ClusterJob, parse_job
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.document import JSON
from stepfast_operator.lease import Lease
from stepfast_operator.manifests import Owner
from stepfast_operator.observed import Spare
from stepfast_operator.record import Attempt, Status

OWNER = Owner(job=JobKey(namespace="ml", name="gpt"), uid="u")


def job_of(**fields: JSON) -> ClusterJob:
    trainer = {"image": "gpt:1", "command": ["torchrun", "train.py"], "numNodes": 2}
    return parse_job(
        {
            "apiVersion": manifests.API_VERSION,
            "kind": "TrainingJob",
            "metadata": {"namespace": "ml", "name": "gpt", "uid": "u", "generation": 1},
            "spec": {"trainer": trainer, **fields},
        }
    )


JOB, ELASTIC = job_of(), job_of(elasticPolicy={"maxNodes": 3})
LAUNCHED = Launched(run="u-2", launched_time=1000.0, nodes=2, is_whole=True)
STATUS = Status(attempt=2, current=Attempt(attempt=2, run="u-2", resume_step=10, planned_time=990.0))
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}


class Pods(Kube):
    """An API server that takes all pods, and knows nothing else."""

    def __init__(self) -> None:
        self.made: dict[str, JSON] = {}
        self._count = 100

    async def create(self, path: str, body: JSON) -> JSON:
        self._count += 1
        name = body["metadata"]["name"]
        assert name not in self.made
        metadata = {**body["metadata"], "uid": f"{name}-{self._count}", "resourceVersion": str(self._count)}
        self.made[name] = {**body, "metadata": metadata}
        return self.made[name]

    async def delete(self, path: str, *, grace_seconds: int | None = None, uid: str | None = None) -> None:
        assert self.made.pop(path.rpartition("/")[2])["metadata"]["uid"] == uid


class Held(Lease):
    """It is ours."""

    def check(self) -> None:
        pass


class Cluster:
    """A view of nodes and of the gang's pods, as far as they were told of; `woken`: the jobs, by uid."""

    def __init__(self) -> None:
        self.kube = Pods()
        self.woken: list[str] = []
        self.view = ClusterView(
            self.kube, namespaces=["ml"], agent_namespace="stepfast", wake_uid=self.woken.append,
            wake_job=lambda job: None, wake_later=lambda job: None,
        )  # fmt: skip
        self._version = 0

    def tell_node(self, name: str) -> str:
        """That there is such a node, which is well. Returns its uid."""
        metadata, ready = self._metadata(name), {"type": "Ready", "status": "True"}
        self.view.nodes.take({"metadata": metadata, "status": {"conditions": [ready]}})
        return str(metadata["uid"])

    def tell_pod(self, index: int, *, avoided: Sequence[str], node: str | None = None) -> None:
        """That the pod was made, and found a place or none."""
        launch = LaunchGang(attempt=2, run="u-2", resume_step=10, nodes=2, avoided_nodes=tuple(avoided))
        pod = manifests.pod_of(OWNER, JOB.spec, launch, index, storage_uri="file:///s", preferred_node=None)
        pod["metadata"] |= self._metadata(pod["metadata"]["name"])
        if node is not None:
            pod["spec"]["nodeName"] = node
        self.view.take_pod({**pod, "status": {"conditions": [] if node is not None else [UNSCHEDULABLE]}})

    def _metadata(self, name: str) -> JSON:
        self._version += 1
        return {"name": name, "uid": f"{name}-{self._version}", "resourceVersion": str(self._version)}

    def candidates(self, job: ClusterJob = JOB) -> Any:
        sight = Sight(self.view, job)
        return sight.candidates(STATUS, sight.gang(STATUS.current, LAUNCHED, sight.pods(), 1000.0))


def test_what_a_pod_keeps_off_is_read_of_the_pod() -> None:
    cluster = Cluster()
    cluster.tell_pod(0, avoided=(), node="a")
    cluster.tell_pod(1, avoided=("b", "c"))
    sight = Sight(cluster.view, JOB)
    gang = sight.gang(STATUS.current, LAUNCHED, sight.pods(), 1000.0)
    assert gang is not None
    assert [worker.avoided_nodes for worker in gang.workers] == [(), ("b", "c")]


@pytest.mark.parametrize(
    ("avoided", "node", "known"),
    [(("b",), None, ["a", "b"]), ((), None, None), (("b",), "c", None)],
    ids=["no place", "nothing kept off", "a place"],
)
def test_nodes_are_looked_at_while_a_pod_without_a_place_keeps_off_some(
    avoided: Sequence[str], node: str | None, known: list[str] | None
) -> None:
    """Of thousands, at each look: not without need."""
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.tell_node(name)
    cluster.tell_pod(0, avoided=avoided, node="a")
    cluster.tell_pod(1, avoided=avoided, node=node)
    candidates = cluster.candidates()
    assert (None if candidates is None else [one.name for one in candidates]) == known


def test_job_is_woken_by_a_node_that_its_pod_keeps_off_as_long_as_that_has_no_place() -> None:
    cluster = Cluster()
    cluster.tell_pod(1, avoided=("b",))
    cluster.woken.clear()
    cluster.tell_node("z")
    assert cluster.woken == []
    uid = cluster.tell_node("b")
    assert cluster.woken == ["u"]
    [pod] = Sight(cluster.view, JOB).pods()
    cluster.view.drop_pod(pod)
    cluster.woken.clear()
    cluster.view.nodes.drop("b", uid)
    assert (cluster.view.nodes.get("b"), cluster.woken) == (None, [])


def test_spare_without_a_place_is_made_anew_once_it_keeps_off_too_much() -> None:
    cluster = Cluster()
    spares = Spares(cluster.kube, cluster.view, Held(cluster.kube, "stepfast", "one"), "")

    async def set_spares(count: int, *avoided: str) -> dict[str, str]:
        """Those that there are then: their uids, by name."""
        await spares.set(OWNER, JOB.spec, count, avoided)
        return {name: pod["metadata"]["uid"] for name, pod in cluster.kube.made.items()}

    async def scenario() -> None:
        first = await set_spares(2, "b", "c")
        assert spares.view(OWNER) == (Spare(avoided_nodes=("b", "c")), Spare(avoided_nodes=("b", "c")))
        assert await set_spares(2, "b", "c", "d") == first, "it may still go where others may"
        placed = cluster.kube.made["gpt-spare-0"]
        [pod] = [pod for pod in cluster.view.spares_of(OWNER.job, OWNER.uid) if pod.name == "gpt-spare-0"]
        cluster.view.drop_pod(pod)
        placed["spec"]["nodeName"], placed["metadata"]["resourceVersion"] = "a", "200"
        cluster.view.take_pod(placed)
        second = await set_spares(2, "c")
        assert second["gpt-spare-0"] == first["gpt-spare-0"], "who has a place keeps it"
        assert second["gpt-spare-1"] != first["gpt-spare-1"]
        assert [spare.avoided_nodes for spare in spares.view(OWNER)] == [("b", "c"), ("c",)]
        assert await set_spares(2, "c") == second

    asyncio.run(scenario())


def test_nodes_are_looked_at_while_a_spare_without_a_place_keeps_off_some() -> None:
    """Nothing else may depend on them any more."""
    cluster = Cluster()
    cluster.tell_node("a")
    for index in range(2):
        cluster.tell_pod(index, avoided=(), node="a")
    assert cluster.candidates(ELASTIC) is None
    cluster.view.take_pod(asyncio.run(cluster.kube.create("", manifests.spare_of(OWNER, ELASTIC.spec, 0, ["b"]))))
    assert [one.name for one in cluster.candidates(ELASTIC)] == ["a"]
