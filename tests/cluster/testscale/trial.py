"""One trial: a cluster of simulated nodes, the real operator with the chart's rights, and what it is put through."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepfast.kube import Kube
from stepfast.step import JobKey
from testchart import chart
from testcluster.simulation import SimulatedCluster, node_document
from testoperator.connection import connect
from testoperator.crds import install_crds
from testoperator.polling import until
from testoperator.process import OperatorProcess, kubeconfig_of, operator_process
from testoperator.rights import ACCOUNT, grant
from testscale.fleet import Fleet
from testscale.jobs import Jobs
from testscale.measures import (
    PASSES,
    WAITS,
    Requests,
    changes,
    counted,
    histogram,
    number_of,
    probed,
    quantile,
    refused,
    time_of,
    usage_of,
)

_NAMESPACES = 10
_PARALLEL = 32
_LONGEST_SECONDS = 900.0
_NODE_CONTROLLER = "system:serviceaccount:kube-system:node-controller"
_IDENTITY = "stepfast-operator-0"  # the pod's name: a container that is started anew keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much there is. `seconds`: how long what goes on is watched; `failures`: how many jobs fail meanwhile."""

    jobs: int = 1000
    pods: int = 10  # of each job
    nodes: int = 1100  # a gang has one pod a node: the large one needs all of them but a few
    large: int = 1000  # pods of the one large job
    seconds: float = 60.0
    failures: int = 20
    most_requests_per_job: int = 40
    most_requests_per_restarted_pod: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What the operator did between two moments."""

    name: str
    seconds: float
    passes: int
    p50_seconds: float
    p99_seconds: float
    p99_wait_seconds: float  # for its turn
    resident_bytes: int
    peak_bytes: int
    processors: float  # computing time over time
    slowest_answer_seconds: float
    p99_answer_seconds: float
    requests: Mapping[str, int]
    refused: Mapping[str, int]
    changes: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Findings:
    """What a trial found, as far as it came."""

    size: Size
    stretches: dict[str, Stretch] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # how long what took
    idle_bytes: int = 0  # of an operator without jobs


class Trial:
    """The parts of a trial, and its steps in their order."""

    def __init__(self, cluster: SimulatedCluster, folder: Path, size: Size, say: Callable[[str], None]) -> None:
        self._cluster, self._folder, self._size, self._say = cluster, folder, size, say
        self._storage_uri = f"file://{folder}/storage"
        self._requests = Requests(cluster.audit_log, ACCOUNT)
        self.findings = Findings(size=size)
        self._gang_size: dict[str, int] = {}
        self._operators = ExitStack()

    async def run(self) -> Findings:
        kube = await connect(self._cluster.kubeconfig)
        try:
            await self._prepare(kube)
            nodes = [f"node-{index:04}" for index in range(self._size.nodes)]
            await self._make_nodes(kube, nodes)
            self._fleet = Fleet(kube, nodes, chart.NAMESPACE, gang_size=self._gang_size)
            await self._fleet.make()
            await self._until_ready(kube)
            self._say(f"{len(nodes)} nodes")
            async with self._fleet.running(), Jobs(kube, self._storage_uri).watched() as self._jobs:
                with self._operators:
                    await self._steps()
        finally:
            await kube.close()
        return self.findings

    # ---- steps

    async def _steps(self) -> None:
        await self._start_operator()
        self.findings.idle_bytes = usage_of(self._operator.process.pid).resident_bytes
        await self._gang_of_many()
        keys = self._keys()
        await self._create(keys)
        await self._be_quiet()
        await self._train(keys)
        await self._fail(keys)
        await self._kill(keys[-1])

    async def _gang_of_many(self) -> None:
        """One large job, before there is any other: made, restarted, and removed."""
        key = JobKey(namespace="team-0", name="large")
        self._gang_size[key.name] = self._size.large
        async with self._stretch("large"):
            begin = time.time()
            await self._jobs.make([key], self._size.large)
            await self._until_running([key])
            self.findings.seconds["large runs"] = time.time() - begin
        self.findings.seconds["large made"] = self._last_pod_made("large") - begin
        async with self._stretch("large restart"):
            begin = time.time()
            await self._jobs.fail_pod(key)
            await self._until_running([key], attempt=2)
            self.findings.seconds["large runs again"] = time.time() - begin
        self.findings.seconds["large made again"] = self._last_pod_made("large restart") - begin
        await self._jobs.remove(key)
        await _settle(self._requests)

    async def _create(self, keys: Sequence[JobKey]) -> None:
        """All jobs at once, until each says of itself that it runs."""
        self._gang_size.update({key.name: self._size.pods for key in keys})
        async with self._stretch("create"):
            begin = time.monotonic()
            making = asyncio.create_task(self._jobs.make(keys, self._size.pods))
            await self._until_running(keys)
            await making
            self.findings.seconds["create"] = time.monotonic() - begin

    async def _be_quiet(self) -> None:
        """Nothing changes: agents have nothing to tell, pods run."""
        await _settle(self._requests)
        async with self._stretch("quiet"):
            await asyncio.sleep(self._size.seconds)

    async def _train(self, keys: Sequence[JobKey]) -> None:
        """Every rank of every job makes steps, and the agents say so."""
        self._fleet.is_training = True
        await asyncio.sleep(self._size.seconds / 5)  # by then every agent has told of it
        async with self._stretch("train"):
            await asyncio.sleep(self._size.seconds)

    async def _fail(self, keys: Sequence[JobKey]) -> None:
        """While all others train, a pod of one job after another fails, until all of these run again."""
        failing = keys[: self._size.failures]
        async with self._stretch("fail"):
            for key in failing:
                await self._jobs.fail_pod(key)
                await asyncio.sleep(self._size.seconds / 2 / len(failing))
            await self._until_running(failing, attempt=2)

    async def _kill(self, key: JobKey) -> None:
        """The operator is killed, a pod fails while it is away, and another operator starts: until the gang ends."""
        os.killpg(self._operator.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._operator.process.wait)
        await self._jobs.fail_pod(key)
        self._requests.skip()
        begin = time.time()
        async with self._stretch("restart", starts=True):
            await self._until_running([key], attempt=2)
        decided = next(event for event in self.findings.stretches["restart"].changes if _is_of(event, key))
        self.findings.seconds["decide again"] = time_of(decided) - begin

    def _last_pod_made(self, stretch: str) -> float:
        events = self.findings.stretches[stretch].changes
        return max(time_of(event) for event in events if event["verb"] == "create" and _kind(event) == "pods")

    # ---- parts

    def _keys(self) -> list[JobKey]:
        return [
            JobKey(namespace=f"team-{index % _NAMESPACES}", name=f"job-{index:04}") for index in range(self._size.jobs)
        ]

    async def _prepare(self, kube: Kube) -> None:
        await asyncio.to_thread(install_crds, self._cluster)
        await asyncio.to_thread(grant, self._cluster, self._folder, {})
        for index in range(_NAMESPACES):
            metadata = {"name": f"team-{index}"}
            await kube.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        names = [*(f"team-{index}" for index in range(_NAMESPACES)), chart.NAMESPACE]

        async def have_accounts() -> bool:
            accounts = (await kube.get("/api/v1/serviceaccounts"))["items"]
            found = {one["metadata"]["namespace"] for one in accounts if one["metadata"]["name"] == "default"}
            return found >= set(names)

        await until("namespaces have their service accounts", have_accounts)
        path = (self._cluster, chart.NAMESPACE, chart.OPERATOR, self._folder)
        self._kubeconfig = await asyncio.to_thread(kubeconfig_of, *path)

    async def _make_nodes(self, kube: Kube, names: Sequence[str]) -> None:
        gate = asyncio.Semaphore(_PARALLEL)

        async def make(name: str) -> None:
            async with gate:
                await kube.create("/api/v1/nodes", node_document(name))

        await asyncio.gather(*map(make, names))

    async def _until_ready(self, kube: Kube) -> None:
        """Else nodes that join would be most of the API server's work while the first job is made, and its pods would
        wait for them.
        """
        agents = f"/api/v1/namespaces/{chart.NAMESPACE}/pods"

        async def are_ready() -> bool:
            await asyncio.sleep(1.0)
            if (await kube.get(agents, fieldSelector="status.phase!=Running"))["items"]:
                return False
            return not any(node["spec"].get("taints") for node in (await kube.get("/api/v1/nodes"))["items"])

        await until("nodes take pods, and their agents run", are_ready, seconds=_LONGEST_SECONDS)
        await _settle(Requests(self._cluster.audit_log, _NODE_CONTROLLER))  # it tells of each node in an Event

    async def _start_operator(self) -> None:
        """Returns when it looks after jobs."""
        starting = operator_process(
            self._folder, self._kubeconfig, namespace=chart.NAMESPACE, identity=_IDENTITY, storages=[self._storage_uri]
        )
        self._operator: OperatorProcess = self._operators.enter_context(starting)
        await until("the operator begins", self._has_begun, seconds=_LONGEST_SECONDS)

    async def _until_running(self, keys: Sequence[JobKey], *, attempt: int = 1) -> None:
        await self._jobs.until_running(keys, attempt=attempt, seconds=_LONGEST_SECONDS, check=self._check)

    def _check(self) -> None:
        if self._operator.process.poll() is not None:
            raise RuntimeError(f"the operator ended: {self._operator.log.read_text()[-3000:]}")

    def _has_begun(self) -> bool:
        self._check()
        return "TrainingJobs are looked after" in self._operator.log.read_text()

    @asynccontextmanager
    async def _stretch(self, name: str, *, starts: bool = False) -> AsyncIterator[None]:
        """Measures the operator while the context lasts; one that is started with it from its first moment."""
        before = ""
        self._requests.skip()
        begin, computed = time.monotonic(), 0.0
        if starts:
            await self._start_operator()
            self.findings.seconds["begin again"] = time.monotonic() - begin
        else:
            before = self._operator.scrape()
            computed = usage_of(self._operator.process.pid).processor_seconds
        async with probed(self._operator) as answers:
            yield
        seconds = time.monotonic() - begin
        after, usage = self._operator.scrape(), usage_of(self._operator.process.pid)
        passes, waits = ([histogram(name, text) for text in (before, after)] for name in (PASSES, WAITS))
        requests = self._requests.take()
        answers.sort()
        self.findings.stretches[name] = Stretch(
            name=name,
            seconds=seconds,
            passes=number_of(*passes),
            p50_seconds=quantile(0.5, *passes),
            p99_seconds=quantile(0.99, *passes),
            p99_wait_seconds=quantile(0.99, *waits),
            resident_bytes=usage.resident_bytes,
            peak_bytes=usage.peak_bytes,
            processors=(usage.processor_seconds - computed) / seconds,
            slowest_answer_seconds=answers[-1],
            p99_answer_seconds=answers[math.ceil(0.99 * len(answers)) - 1],
            requests=counted(requests),
            refused=refused(requests),
            changes=changes(requests),
        )
        self._say(describe_stretch(self.findings.stretches[name]))


async def _settle(requests: Requests) -> None:
    """Until whoever's requests these are has written nothing for a while."""

    async def is_settled() -> bool:
        await asyncio.sleep(3.0)
        return not changes(requests.take())

    await until("nothing is written any more", is_settled, seconds=_LONGEST_SECONDS)


def describe_stretch(stretch: Stretch) -> str:
    """One stretch in one line, for whoever waits."""
    asked = ", ".join(f"{number} {what}" for what, number in sorted(stretch.requests.items()))
    told = (
        f"{stretch.name}: {stretch.seconds:.1f} s",
        f"{stretch.passes} passes, p50 {stretch.p50_seconds:.4f} s, p99 {stretch.p99_seconds:.3f} s",
        f"turn p99 {stretch.p99_wait_seconds:.3f} s",
        f"{stretch.resident_bytes >> 20} MiB (peak {stretch.peak_bytes >> 20})",
        f"{stretch.processors:.2f} processors",
        f"answers p99 {stretch.p99_answer_seconds:.2f} s, longest {stretch.slowest_answer_seconds:.2f} s",
        asked,
        f"refused {dict(stretch.refused)}",
    )
    return "; ".join(told)


def _kind(event: Mapping[str, Any]) -> str:
    reference = event.get("objectRef") or {}
    return str(reference.get("resource")) if not reference.get("subresource") else ""


def _is_of(event: Mapping[str, Any], key: JobKey) -> bool:
    """Whether it changes that job's status, which is how a decision is written down."""
    reference = event.get("objectRef") or {}
    found = (reference.get("resource"), reference.get("namespace"), reference.get("name"))
    return found == ("trainingjobs", key.namespace, key.name)
