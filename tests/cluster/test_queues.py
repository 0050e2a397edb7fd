"""Gangs in a queue of Kueue's, against its real controller: admitted as a whole, preempted, admitted again; what keeps
their quota, and what frees it. Scheduler and kubelets are played.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import Cause, State, Status
from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ApiServer
from testcluster.fixtures import loudly
from testoperator.crds import install_crds
from testoperator.kubelet import READY, SILENT
from testoperator.playing import play
from testoperator.polling import until
from testoperator.world import Operation, World
from testqueues.kueue import Kueue

QUEUED = {"podGroupPolicy": {"kueue": {"queueName": "q"}}}
LOW = {"template": {"metadata": {"labels": {"kueue.x-k8s.io/priority-class": "low"}}}}
HIGH = {"template": {"metadata": {"labels": {"kueue.x-k8s.io/priority-class": "high"}}}}
CPU = {"resourcesPerNode": {"requests": {"cpu": "1"}}}

pytestmark = pytest.mark.timeout(1800)  # Kueue may have to be built first


@pytest.fixture(scope="module")
def kueue() -> Iterator[Kueue]:
    """An API server with our CRDs, and Kueue beside it."""
    with loudly():
        binaries = Binaries.find_for_api_server()
        server = ApiServer(Claim.take(), binaries)
        try:
            server.start()
            install_crds(server)
            found = Kueue(server)
            found.start()
            yield found
        finally:
            server.claim.release()


Scene = Callable[[World, Operation], Awaitable[None]]


def queued(kueue: Kueue, scene: Scene, *, cpu: str = "2") -> None:
    """With a queue `q` that has so much to give away, and an operator that looks after what waits in it."""

    async def scenario(world: World, operation: Operation) -> None:
        kueue.make_queue(world.namespace, "q", cpu=cpu)
        await scene(world, operation)

    play(kueue.api, scenario)


async def make(world: World, name: str, *, nodes: int = 2, **fields: Any) -> ClusterJob:
    return await world.make_job(name, trainer={"numNodes": nodes, **CPU}, **QUEUED, **fields)


async def status_when(world: World, job: ClusterJob, what: str, is_so: Callable[[Status], bool]) -> Status:
    async def holds() -> bool:
        return is_so(await world.status(job))

    await until(f"{job.job.name}: {what}", holds)
    return await world.status(job)


def why_not_ready(status: Status) -> tuple[str, str]:
    ready = next((one for one in status.conditions if one.type == "PodsReady"), None)
    return (ready.reason, ready.message) if ready is not None else ("", "")


async def runs(world: World, name: str, attempt: int, nodes: int = 2) -> None:
    for index in range(nodes):
        await world.kubelets.started(f"{name}-{attempt}-{index}")


async def is_used(world: World, kueue: Kueue, cpu: str) -> None:
    await until(f"{cpu} processors are given away", lambda: kueue.used(world.namespace, "q") == cpu)


def groups(world: World, name: str) -> dict[str, str]:
    """By pod, the group that it is in."""
    pods = {pod: document["metadata"] for pod, document in world.kubelets.pods.items() if pod.startswith(f"{name}-")}
    return {pod: metadata["labels"].get("kueue.x-k8s.io/pod-group-name", "") for pod, metadata in pods.items()}


def test_a_gang_waits_as_a_whole_and_runs_once_its_queue_has_room(kueue: Kueue) -> None:
    async def scene(world: World, operation: Operation) -> None:
        first = await make(world, "first")
        await runs(world, "first", 1)
        second = await make(world, "second", startupDeadlineSeconds=1)
        waiting = await status_when(world, second, "waits", lambda status: "insufficient" in why_not_ready(status)[1])
        reason, message = why_not_ready(waiting)
        assert (waiting.state, reason) == (State.STARTING, "Queued")
        assert message.startswith("waits in queue q: couldn't assign flavors to pod set node:"), message
        assert waiting.current is not None
        assert waiting.current.queued_time is not None
        for index in range(2):
            await world.kubelets.end(f"first-1-{index}", 0)
        done = await status_when(world, first, "is complete", lambda status: status.state is State.COMPLETE)
        assert done.restarts == 0
        await runs(world, "second", 1)
        admitted = await status_when(
            world, second, "is admitted", lambda status: bool(status.current and status.current.dequeued_time)
        )
        assert admitted.queued_seconds > 0
        assert not admitted.is_terminal, "a second in a queue is no late start"

    queued(kueue, scene)


def test_a_gang_that_starts_again_keeps_its_quota_though_another_waits_for_it(kueue: Kueue) -> None:
    async def scene(world: World, operation: Operation) -> None:
        first = await make(world, "first")
        await runs(world, "first", 1)
        await make(world, "second")
        await until("second waits", lambda: len(groups(world, "second")) == 2)
        for attempt in (1, 2):
            await world.kubelets.end(f"first-{attempt}-1", 1)
            await runs(world, "first", attempt + 1)
        assert len(set(groups(world, "first").values())) == 1
        assert (await world.status(first)).restarts == 2
        assert all(not pod["spec"].get("nodeName") for name, pod in world.kubelets.pods.items() if "second" in name)

    queued(kueue, scene)


def test_a_gang_that_is_preempted_waits_uncounted_and_goes_on_after_it(kueue: Kueue) -> None:
    async def scene(world: World, operation: Operation) -> None:
        low = await make(world, "low", **LOW)
        await runs(world, "low", 1)
        await make(world, "high", **HIGH)
        await runs(world, "high", 1)
        waiting = await status_when(
            world, low, "waits again",
            lambda status: status.attempt == 2 and why_not_ready(status)[0] == "Queued",
        )  # fmt: skip
        assert waiting.last_failure is not None
        assert waiting.last_failure.reason is Cause.POD_EVICTED
        assert "Preempted to accommodate a workload" in waiting.last_failure.message
        assert (waiting.restarts, waiting.restarts_count_towards_max) == (1, 0)
        for index in range(2):
            await world.kubelets.end(f"high-1-{index}", 0)
        await runs(world, "low", 2)
        for index in range(2):
            await world.kubelets.end(f"low-2-{index}", 0)
        await status_when(world, low, "is complete", lambda status: status.state is State.COMPLETE)
        await is_used(world, kueue, "0")

    queued(kueue, scene)


@pytest.mark.parametrize("is_admitted", [True, False], ids=["that runs", "that waits"])
def test_a_job_that_is_suspended_frees_its_quota_and_queues_anew(kueue: Kueue, is_admitted: bool) -> None:
    async def scene(world: World, operation: Operation) -> None:
        job = await make(world, "job", nodes=2 if is_admitted else 3)
        if is_admitted:
            await runs(world, "job", 1)
            await is_used(world, kueue, "2")
        else:
            await status_when(world, job, "waits", lambda status: "insufficient" in why_not_ready(status)[1])
        await world.kube.patch(job.path, {"spec": {"suspend": True}})
        await status_when(world, job, "is suspended", lambda status: status.state is State.SUSPENDED)
        await is_used(world, kueue, "0")
        await until("no pod of it is held", lambda: not any(
            "kueue.x-k8s.io/managed" in pod["metadata"].get("finalizers", ()) for pod in world.kubelets.pods.values()
        ))  # fmt: skip
        await world.kube.patch(job.path, {"spec": {"suspend": False, "trainer": {"numNodes": 1}}})
        await runs(world, "job", 2, nodes=1)
        await is_used(world, kueue, "1")

    queued(kueue, scene)


def test_a_job_that_failed_or_was_deleted_frees_its_quota(kueue: Kueue) -> None:
    async def scene(world: World, operation: Operation) -> None:
        failing = await make(world, "failing", failurePolicy={"maxRestarts": 0, "flushTimeoutSeconds": 0})
        await runs(world, "failing", 1)
        await world.kubelets.end("failing-1-0", 1)
        await status_when(world, failing, "has failed", lambda status: status.state is State.FAILED)
        deleted = await make(world, "deleted")
        await runs(world, "deleted", 1)
        await world.kube.delete(deleted.path)
        await make(world, "third")
        await runs(world, "third", 1)
        assert "failing-1-0" in await world.pods(), "its logs stay to be read"

    queued(kueue, scene)


def test_a_gang_whose_node_is_lost_starts_again_with_its_quota(kueue: Kueue) -> None:
    """Kueue would take the lost pod for a running one, and a pod in its place for one too many."""

    async def scene(world: World, operation: Operation) -> None:
        patience = {"podDeletionGraceSeconds": 0, "backoff": {"baseSeconds": 0}, "flushTimeoutSeconds": 0}
        job = await make(world, "job", failurePolicy=patience)
        await runs(world, "job", 1)
        world.kubelets.stuck.add(world.kubelets.node(1))
        await world.kubelets.say(1, SILENT)
        lost = world.kubelets.pods
        await until("the lost pod counts as ended", lambda: "NothingRuns" in str(lost["job-1-1"]["status"]))
        await world.kubelets.say(1, READY)
        # An attempt that was made while the node was silent may be lost, too.
        again = await status_when(
            world, job, "runs again", lambda status: status.attempt > 1 and status.state is State.RUNNING
        )
        await runs(world, "job", again.attempt)
        assert len(set(groups(world, "job").values())) == 1
        await is_used(world, kueue, "2")
        assert all(len(uids) == 1 for uids in world.kubelets.ever_made.values()), "Kueue found none too many"

    queued(kueue, scene)
