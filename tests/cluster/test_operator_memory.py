"""Jobs that carry a prediction, reconciled against a real API server: what their nodes' labels come to."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from stepfast.footprint import ANNOTATION, Footprint
from stepfast_operator.clusterjob import ClusterJob, parse_job
from stepfast_operator.record import Condition, ConditionType, State
from testcluster.controlplane import KubernetesClient
from testoperator.playing import play
from testoperator.polling import until
from testoperator.world import API, Operation, World, manifest

GIB = 1 << 30
PREDICTED = Footprint(
    title="BERT-large", device="v100-16gb", device_memory_bytes=16160 << 20, occupied_bytes=15 * GIB,
    reserved_bytes=14 * GIB, context_bytes=GIB, peak_bytes=13 * GIB, components={"activations": 13 * GIB},
    checkpoint_bytes=GIB,
)  # fmt: skip
ONE_GPU = {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}}


async def make_gpu_node(world: World, index: int, mib: int) -> None:
    """A node of the test's own, with GPUs that have so much memory."""
    await world.kubelets.make_node(index)
    marks = {"test": world.namespace, "nvidia.com/gpu.memory": str(mib)}
    await world.kube.patch(f"/api/v1/nodes/{world.kubelets.node(index)}", {"metadata": {"labels": marks}})


async def make_job(world: World, operation: Operation, **policy: Any) -> ClusterJob:
    """A job that may run on the test's nodes alone, once the operator has seen their labels."""

    def is_seen() -> bool:
        return any(node.labels.get("test") == world.namespace for node in operation.view.nodes.values())

    await until("the nodes are seen", is_seen)
    template = {"spec": {"nodeSelector": {"test": world.namespace}}}
    document = manifest(world.namespace, trainer=ONE_GPU, template=template, memoryPolicy=policy)
    document["metadata"]["annotations"] = {ANNOTATION: PREDICTED.to_json()}
    return parse_job(await world.kube.create(f"{API}/namespaces/{world.namespace}/trainingjobs", document))


async def verdict(world: World, job: ClusterJob) -> Condition:
    """The condition, once it is written."""

    async def is_written() -> bool:
        return (await world.status(job)).condition(ConditionType.FITS_MEMORY) is not None

    await until("FitsMemory is written", is_written)
    condition = (await world.status(job)).condition(ConditionType.FITS_MEMORY)
    assert condition is not None
    return condition


def test_job_that_fits_the_gpus_of_its_nodes_runs(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await make_gpu_node(world, 0, 16160)
        job = await make_job(world, operation, action="Refuse", deviceMemory="1Gi")
        await world.kubelets.end("job-1-0", 0)
        condition = await verdict(world, job)
        assert (condition.status, condition.reason) == ("True", "Fits")
        assert condition.message.endswith(f"a GPU of {world.kubelets.node(0)} has 15.8 GiB")

    play(operator_api, scenario)


def test_job_that_does_not_fit_is_warned_of_before_its_pods_are_made(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await make_gpu_node(world, 0, 11264)
        job = await make_job(world, operation)
        await world.kubelets.started("job-1-0")
        condition = await verdict(world, job)
        assert (condition.status, condition.reason) == ("False", "DeviceTooSmall")
        pod = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/pods/job-1-0")
        # The API server's times are of whole seconds.
        created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
        assert condition.last_transition_time < created + 1
        await asyncio.wait_for(operation.events.drain(10), 15)
        described = operator_api.kubectl("describe", "trainingjob", "job", "-n", world.namespace)
        assert described.count("DoesNotFitMemory") == 1
        assert "one rank takes 15.0 GiB (14.0 GiB reserved + 1.0 GiB CUDA context" in described

    play(operator_api, scenario)


def test_refused_job_has_no_pods_and_no_further_writes_until_it_may_run(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await make_gpu_node(world, 0, 11264)
        job = await make_job(world, operation, action="Refuse")
        condition = await verdict(world, job)
        assert condition.message.endswith("no pods are made until it fits (memoryPolicy.action: Refuse)")
        assert (await world.status(job)).state is State.PENDING
        version = await looked_at_again(world, operation, job)
        assert (await world.kube.get(job.path))["metadata"]["resourceVersion"] == version, "written without a change"
        assert await world.pods() == []
        await world.kube.patch(job.path, {"spec": {"memoryPolicy": {"action": "Warn"}}})
        await world.kubelets.started("job-1-0")
        assert (await verdict(world, job)).status == "False"

    play(operator_api, scenario)


def test_refused_job_runs_once_it_fits_a_node(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        await make_gpu_node(world, 0, 11264)
        job = await make_job(world, operation, action="Refuse")
        assert (await verdict(world, job)).status == "False"
        name = world.kubelets.node(0)
        marks = {"nvidia.com/gpu.memory": "81920"}
        await world.kube.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": marks}})

        def is_seen() -> bool:
            node = operation.view.node(name)
            return node is not None and marks.items() <= node.labels.items()

        await until("the node's new label is seen", is_seen)
        operation.jobs.wake(job.uid)
        await world.kubelets.started("job-1-0")
        assert (await verdict(world, job)).status == "True"

    play(operator_api, scenario)


async def looked_at_again(world: World, operation: Operation, job: ClusterJob) -> str:
    """Returns when a change that means nothing was looked at: the version that this change made."""
    before = looks(operation)
    changed = await world.kube.patch(job.path, {"metadata": {"annotations": {"note": "changed"}}})
    # A look that began before the change may end after it.
    await until(
        "the job is looked at twice more", lambda: looks(operation) > before + 1 or operation.jobs.wake(job.uid)
    )
    return str(changed["metadata"]["resourceVersion"])


def looks(operation: Operation) -> float:
    """How often jobs were looked at."""
    lines = operation.metrics.text().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("stepfast_reconcile_duration_seconds_count")
    )
