"""The Kubernetes backend's effects on a real API server: cut off after every request and repeated, pods that do not
end, and names that are taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.kube import Invalid, Kube, KubeUnavailable
from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast_operator import labels
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.backends import kubernetes
from stepfast_operator.backends.kubernetes import KubernetesBackend, NameTaken
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.document import JSON
from stepfast_operator.lease import NotLeading
from stepfast_operator.observed import Committed, WorkerPhase
from stepfast_operator.record import Cause, CheckpointStatus
from testcluster.controlplane import KubernetesClient
from testoperator.backends import CHANGES, held, launch_of, play
from testoperator.connection import connect
from testoperator.kubelet import READY, SILENT
from testoperator.polling import until
from testoperator.world import API, Operation, World, make_namespace, planned


class Killed(BaseException):
    """As SIGKILL: nobody handles it."""


class Interrupted(Kube):
    """Dies at the request of that number that changes something, before it is sent or after it was answered."""

    left = 1_000_000
    is_sent = False

    async def _request(self, method: str, path: str, query: Any, body: JSON = None, **options: Any) -> JSON:
        self.left -= method in CHANGES
        is_last = self.left < 0
        if is_last and not self.is_sent:
            raise Killed
        answer = await super()._request(method, path, query, body, **options)
        if is_last:
            raise Killed
        return answer


@pytest.mark.parametrize("is_sent", [False, True], ids=["before the request", "after it"])
def test_launch_that_is_cut_off_anywhere_is_finished_by_the_next_operator(
    operator_api: KubernetesClient, is_sent: bool
) -> None:
    """One attempt before it still lives: its pod is ended first. Nothing is made twice."""

    async def scenario(world: World, operation: Operation) -> None:
        kube = await connect(operator_api.kubeconfig, Interrupted)
        assert isinstance(kube, Interrupted)
        kube.is_sent = is_sent
        try:
            for number in range(30):
                job = await world.make_job(f"j{number}", trainer={"numNodes": 2})
                await operation.backend(job).launch(replace(launch_of(job), attempt=1))
                kube.left = number
                died = await cut_off(operation, kube, await world.job(job), launch_of(job, 2))
                kube.left = 1_000_000
                again = operation.backend(await world.job(job))
                await launch_at_last(again, launch_of(job, 2))
                pods = [pod for pod in operation.view.pods_of(job.job, job.uid) if pod.is_alive]
                assert {pod.run for pod in pods} == {f"{job.uid}-2"}
                assert sorted(pod.index for pod in pods) == [0, 1]
                noted = json.loads((await world.job(job)).launched or "")
                assert (noted["run"], noted["isWhole"]) == (f"{job.uid}-2", True)
                if not died:
                    break
            assert number >= 6, "annotation, two deletions, Service, two pods, annotation"
        finally:
            await kube.close()
        assert {len(uids) for uids in world.kubelets.ever_made.values()} == {1}

    play(operator_api, scenario)


async def launch_at_last(backend: KubernetesBackend, launch: LaunchGang) -> None:
    """As passes do: while pods of the attempt before have not ended, nothing is made, and the next pass asks again."""
    while True:
        try:
            return await backend.launch(launch)
        except KubeUnavailable:
            continue


async def cut_off(operation: Operation, kube: Interrupted, job: ClusterJob, launch: LaunchGang) -> bool:
    """Whether the launch died."""
    backend = KubernetesBackend(replace(operation.cluster, kube=kube), job)
    died = False
    try:
        await backend.launch(launch)
    except* Killed:
        died = True
    return died


def test_pod_that_goes_after_the_gang_was_whole_is_never_made_again(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2})
        await operation.backend(job).launch(launch_of(job))
        await world.kubelets.started("job-1-1")
        await until("both are seen", lambda: len(operation.view.pods_of(job.job, job.uid)) == 2)
        await world.kube.delete(f"/api/v1/namespaces/{world.namespace}/pods/job-1-1")
        await until("it is gone", lambda: len(operation.view.pods_of(job.job, job.uid)) == 1)
        backend = operation.backend(await world.job(job))
        await backend.launch(launch_of(job))
        assert await world.pods() == ["job-1-0"]
        gang = (await backend.observe(planned(job))).gang
        assert gang is not None
        failure = gang.workers[1].failure
        assert failure is not None
        assert failure.cause is Cause.POD_DELETED

    play(operator_api, scenario)


async def no_sign(world: World, operation: Operation, job: ClusterJob) -> None:
    """Its pods may all have been made, and may not."""


async def pod_failed_alone(world: World, operation: Operation, job: ClusterJob) -> None:
    await end_first_pod(world, operation, job, 1, "no such file: train.py")


async def rank_failed(world: World, operation: Operation, job: ClusterJob) -> None:
    await end_first_pod(world, operation, job, 1, json.dumps({"rank": 0, "exitCode": 1, "message": "NCCL"}))


async def pod_succeeded(world: World, operation: Operation, job: ClusterJob) -> None:
    await end_first_pod(world, operation, job, 0, "")


async def end_first_pod(world: World, operation: Operation, job: ClusterJob, exit_code: int, message: str) -> None:
    await world.kubelets.end("job-1-0", exit_code, message=message)
    await until("it has ended", lambda: any(not pod.is_alive for pod in operation.view.pods_of(job.job, job.uid)))


async def rank_joined(world: World, operation: Operation, job: ClusterJob) -> None:
    await world.report(0, held(job, f"{job.uid}-1"))
    await until("the report is read", lambda: operation.view.reports_of(job.job))


async def rank_joined_again(world: World, operation: Operation, job: ClusterJob) -> None:
    await world.report(0, held(job, f"{job.uid}-1.1"))
    await until("the report is read", lambda: operation.view.reports_of(job.job))


@pytest.mark.parametrize(
    ("sign", "has_begun"),
    [
        (no_sign, False), (pod_failed_alone, False),
        (rank_joined, True), (rank_joined_again, True), (rank_failed, True), (pod_succeeded, True),
    ],
)  # fmt: skip
def test_run_that_is_known_to_have_begun_is_not_begun_again_by_the_operator_that_finishes_its_launch(
    operator_api: KubernetesClient, sign: Callable[[World, Operation, ClusterJob], Awaitable[None]], has_begun: bool
) -> None:
    """The operator before it was lost when all pods were made, and it had not noted so; then a pod was taken away."""

    async def scenario(world: World, operation: Operation) -> None:
        kube = await connect(operator_api.kubeconfig, Interrupted)
        assert isinstance(kube, Interrupted)
        job = await world.make_job(trainer={"numNodes": 2})
        kube.left = 4
        try:
            assert await cut_off(operation, kube, job, launch_of(job)), "annotation, Service, two pods"
        finally:
            await kube.close()
        for index in range(2):
            await world.kubelets.started(f"job-1-{index}")
        await until("both are seen", lambda: len(operation.view.pods_of(job.job, job.uid)) == 2)
        await sign(world, operation, job)
        await world.kube.delete(f"/api/v1/namespaces/{world.namespace}/pods/job-1-1")
        await until("it is gone", lambda: len(operation.view.pods_of(job.job, job.uid)) == 1)
        backend = operation.backend(await world.job(job))
        await backend.launch(launch_of(job))
        assert await world.pods() == (["job-1-0"] if has_begun else ["job-1-0", "job-1-1"])
        gang = (await backend.observe(planned(job))).gang
        assert gang is not None
        failure = gang.workers[1].failure
        assert (failure is not None and failure.cause is Cause.POD_DELETED) == has_begun

    play(operator_api, scenario)


@pytest.mark.parametrize(("attempt", "error"), [(1, SpecError), (2, Invalid)], ids=["first", "a later one"])
def test_pods_that_are_refused_are_the_manifests_fault_in_the_first_attempt_alone(
    operator_api: KubernetesClient, attempt: int, error: type[Exception]
) -> None:
    """Pods that follow from the same manifest were accepted once: what refuses them now may change again."""

    async def scenario(world: World, operation: Operation) -> None:
        bad = {"containers": [{"name": "node", "imagePullPolicy": "Sometimes"}]}
        job = await world.make_job(template={"spec": bad})
        with pytest.raises(error, match="imagePullPolicy"):
            await operation.backend(job).launch(launch_of(job, attempt))

    play(operator_api, scenario)


@pytest.mark.parametrize("kind", ["Service", "Pod"])
def test_name_of_another_ones_object_is_said_and_left_alone(operator_api: KubernetesClient, kind: str) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        others = {
            "Service": {"metadata": {"name": "job"}, "spec": {"ports": [{"port": 80}]}},
            "Pod": {"metadata": {"name": "job-1-0"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        }
        await world.kube.create(f"/api/v1/namespaces/{world.namespace}/{kind.lower()}s", others[kind])
        job = await world.make_job()
        with pytest.raises(NameTaken, match=f"{kind} .* does not belong to this TrainingJob"):
            await operation.backend(job).launch(launch_of(job))

    play(operator_api, scenario)


def test_force_is_used_when_the_node_is_not_ready_and_only_after_the_grace(
    operator_api: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_GONE_SECONDS", 0.3)

    async def scenario(world: World, operation: Operation) -> None:
        ahead = [0.0]
        cluster = replace(operation.cluster, clock=lambda: time.time() + ahead[0])
        job = await world.make_job(failurePolicy={"podDeletionGraceSeconds": 60})
        backend = KubernetesBackend(cluster, job)
        run = f"{job.uid}-1"
        await backend.launch(launch_of(job))
        await world.kubelets.started("job-1-0")
        world.kubelets.stuck.add(world.kubelets.node(0))
        ahead[0] = 3600.0
        await backend.stop([run], StopMode.KILL)
        await until("it is asked to end", lambda: "deletionTimestamp" in world.kubelets.pods["job-1-0"]["metadata"])
        await backend.stop([run], StopMode.KILL)
        assert await world.pods() == ["job-1-0"], "its node is Ready: the kubelet alone knows when it has ended"
        ahead[0] = 0.0
        await world.kubelets.say(0, SILENT)
        node = world.kubelets.node(0)
        await until("the node is silent", lambda: not operation.view.is_ready(node))
        await backend.stop([run], StopMode.KILL)
        assert await world.pods() == ["job-1-0"], "the grace is not over"
        assert (await backend.observe(planned(job))).live_runs == {run}
        ahead[0] = 61.0
        await backend.stop([run], StopMode.KILL)
        assert await world.pods() == []
        assert (await backend.observe(planned(job))).live_runs == frozenset()
        await world.kubelets.say(0, READY)

    play(operator_api, scenario)


def test_node_that_is_lost_is_seen_in_the_gang(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend = operation.backend(job)
        await backend.launch(launch_of(job))
        await world.kubelets.started("job-1-0")
        await world.kubelets.say(0, SILENT)
        await until("the node is silent", lambda: not operation.view.is_ready(world.kubelets.node(0)))
        gang = (await backend.observe(planned(job))).gang
        assert gang is not None
        assert gang.workers[0].phase is WorkerPhase.RUNNING
        assert gang.workers[0].failure is not None
        assert gang.workers[0].failure.cause is Cause.NODE_LOST

    play(operator_api, scenario)


def test_pod_of_another_namespace_that_claims_to_be_of_the_gang_is_none_of_it(operator_api: KubernetesClient) -> None:
    """Labels and owners are whatever a pod's maker writes: another tenant's may neither feign a worker nor a stray."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        backend = operation.backend(job)
        await backend.launch(launch_of(job))
        await world.kubelets.started("job-1-0")
        elsewhere = await make_namespace(world.kube)
        made = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/pods/job-1-0")
        for run in (1, 7):
            kept = {name: made["metadata"][name] for name in ("labels", "ownerReferences")}
            metadata = {"name": f"p{run}", **kept, "annotations": {labels.RUN: f"{job.uid}-{run}"}}
            metadata["labels"] = {**kept["labels"], labels.NODE_INDEX: str(run)}
            pod = {"metadata": metadata, "spec": {"containers": [{"name": "node", "image": "i"}]}}
            await world.kube.create(f"/api/v1/namespaces/{elsewhere}/pods", pod)
        # A pod that came after them is told of after them.
        other = await world.make_job("other")
        await operation.backend(other).launch(launch_of(other))
        await world.kubelets.started("other-1-0")
        await until(
            "the watch is beyond them", lambda: any(pod.node for pod in operation.view.pods_of(other.job, other.uid))
        )
        observed = await backend.observe(planned(job))
        assert observed.live_runs == {f"{job.uid}-1"}
        assert observed.gang is not None
        assert [worker.pod for worker in observed.gang.workers] == ["job-1-0"]

    play(operator_api, scenario)


def test_lease_that_is_lost_while_pods_are_made_is_said_as_such(
    operator_api: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a group of errors, which nobody expects."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2})
        make = world.kube.create

        def is_lost() -> None:
            raise NotLeading("lost")

        async def create(path: str, body: JSON) -> JSON:
            """The last request before the pods is the Service."""
            made = await make(path, body)
            monkeypatch.setattr(operation.lease, "check", is_lost)
            return made

        monkeypatch.setattr(world.kube, "create", create)
        with pytest.raises(NotLeading):
            await operation.backend(job).launch(launch_of(job))
        assert await world.pods() == []

    play(operator_api, scenario)


def test_step_that_the_status_alone_knows_is_gone_on_from_where_only_the_job_may_read_its_storage(
    operator_api: KubernetesClient,
) -> None:
    """Agents are replaced, and tell no more of what was committed before."""

    async def scenario(world: World, operation: Operation) -> None:
        own = {"storageUri": "memory://own", "secretRef": {"name": "own"}}
        job = await world.make_job(checkpoint=own)
        backend, status = operation.backend(job), planned(job)
        await backend.observe(status)
        assert await backend.read_steps() == ()
        known = CheckpointStatus(latest_persisted_step=100, latest_persisted_time=5.0, size_bytes=7)
        await backend.observe(replace(status, checkpoint=known))
        assert await backend.read_steps() == (Committed(step=100, size_bytes=7, committed_time=5.0),)

    play(operator_api, scenario)


def test_pods_of_a_later_attempt_prefer_the_nodes_whose_memory_holds_their_ranks_steps(
    operator_api: KubernetesClient,
) -> None:
    """The pods before them are gone, and the operator that knew them, too."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2})
        await operation.backend(job).launch(launch_of(job))
        for index in range(2):
            rank = RankStatus(rank=1 - index, pid=1, alive=False, clean=False, joined_time=1.0)
            status = JobStatus(job=job.job, run=f"{job.uid}-1", world_size=2, ranks=(rank,), saves=SaveStatus())
            await world.report(index, status)
        nodes = [world.kubelets.node(index) for index in range(2)]
        await until("both report", lambda: all(operation.view.reports.get(node) for node in nodes))
        await operation.backend(job).stop([f"{job.uid}-1"], StopMode.KILL)
        await until("no pod is left", lambda: not operation.view.pods_of(job.job, job.uid))
        await operation.backend(await world.job(job)).launch(launch_of(job, 2))
        preferred = {}
        for index in range(2):
            pod = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/pods/job-2-{index}")
            [term] = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            [preferred[index]] = term["preference"]["matchFields"][0]["values"]
        assert preferred == {0: nodes[1], 1: nodes[0]}

    play(operator_api, scenario)


async def gangs_of(world: World, index: int) -> list[tuple[str, str, int, list[str]]]:
    document = await world.kube.get(f"{API}/checkpointnodes/{world.kubelets.node(index)}")
    gangs = document.get("spec", {}).get("gangs") or ()
    return sorted((one["name"], one["run"], one["node"], one["neighbours"]) for one in gangs)


def test_agents_of_a_gang_that_mirrors_its_steps_are_told_of_each_other(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(trainer={"numNodes": 2}, checkpoint={"memory": {"mirrors": 1}})
        backend = operation.backend(job)
        for index in range(3):
            await world.report(index, mirror_address=f"10.0.0.{index}:9601")
        await backend.launch(launch_of(job))
        await backend.tell_rings(is_over=False)
        assert await gangs_of(world, 0) == [], "not before all pods have nodes"
        for index in range(2):
            await world.kubelets.started(f"job-1-{index}")
        nodes = [world.kubelets.node(index) for index in range(2)]
        await until("all is known", lambda: [pod.node for pod in operation.view.pods_of(job.job, job.uid)] == nodes)
        await backend.tell_rings(is_over=False)
        run = f"{job.uid}-1"
        assert await gangs_of(world, 0) == [("job", run, 0, ["10.0.0.1:9601"])]
        assert await gangs_of(world, 1) == [("job", run, 1, ["10.0.0.0:9601"])]
        assert await gangs_of(world, 2) == []
        before = (await world.kube.get(f"{API}/checkpointnodes/{nodes[0]}"))["metadata"]["resourceVersion"]
        await backend.tell_rings(is_over=False)
        after = (await world.kube.get(f"{API}/checkpointnodes/{nodes[0]}"))["metadata"]["resourceVersion"]
        assert after == before, "nothing is written when nothing changed"
        for index in range(2):
            await world.report(index, held(job, run), mirror_address=f"10.0.0.{index}:9601")
        await until("they tell of it", lambda: len(operation.view.reports_of(job.job)) == 2)
        await backend.tell_rings(is_over=True)
        assert [await gangs_of(world, index) for index in range(2)] == [[], []]

    play(operator_api, scenario)
