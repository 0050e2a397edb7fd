"""`stepfast-operator` as a real process against a real API server, with the rights that the chart gives it alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from stepfast_operator import labels
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import State
from testchart import chart
from testcluster.controlplane import ApiServer, KubernetesClient
from testoperator.behindwire import kubeconfig_through, play_behind_a_wire
from testoperator.polling import until
from testoperator.process import OperatorProcess, kubeconfig_of, operator_process
from testoperator.rights import ACCOUNT, grant
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import World, manifest

SERVER_SECONDS = 300
Events = list[dict[str, Any]]


def play(api: KubernetesClient, scenario: Callable[[World], Awaitable[None]], *, seconds: float = 240) -> None:
    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            await asyncio.wait_for(scenario(world), seconds)

    run_to_end(run())


async def reaches(world: World, job: ClusterJob, state: State) -> None:
    async def is_so() -> bool:
        return (await world.status(job)).state is state

    await until(f"{job.job} is {state}", is_so, seconds=200)


async def has_lease(world: World, namespace: str, holder: str) -> bool:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    leases = (await world.kube.get(path))["items"]
    return any(lease["spec"].get("holderIdentity", "") == holder for lease in leases)


async def is_healthy(operator: OperatorProcess) -> None:
    await until("it is healthy", lambda: operator.health() == (200, "ok\n"))


# ---- killed at every effect


def test_operator_that_is_killed_after_each_of_its_requests_loses_and_doubles_nothing(
    audited_api: ApiServer, tmp_path: Path
) -> None:
    async def scenario(world: World) -> None:
        where = world.namespace
        with operator_process(
            tmp_path, audited_api.kubeconfig, namespace=where, watch=[where], mode="crashing"
        ) as operator:
            job = await world.make_job(trainer={"numNodes": 2})
            await world.kubelets.started("job-1-1")
            await world.kubelets.end("job-1-0", 7)
            await world.kubelets.started("job-2-1")
            for index in range(2):
                await world.kubelets.end(f"job-2-{index}", 0)
            await reaches(world, job, State.COMPLETE)
            lives = operator.log.read_text().count("a life is over")
        status = await world.status(job)
        assert (status.attempt, status.restarts, status.restarts_count_towards_max) == (2, 1, 1)
        assert [(recovery.attempt, recovery.counted) for recovery in status.recoveries] == [(1, True)]
        assert lives >= 12, f"killed {lives} times: finalizer, statuses, annotations, Service, pods, deletions"

        made = Counter({name: len(uids) for name, uids in world.kubelets.ever_made.items()})
        assert made == Counter({f"job-{attempt}-{index}": 1 for attempt in (1, 2) for index in (0, 1)})
        events = [event for event in audited_api.audit() if event.get("objectRef", {}).get("namespace") == where]
        order = list(ended_and_made(events))
        first_of_second = min(order.index(("create", f"job-2-{index}")) for index in (0, 1))
        assert order.index(("ended", "job-1-1")) < first_of_second, "at most one gang lives; job-1-0 had failed"

    play(audited_api, scenario)


def ended_and_made(events: Events) -> Iterator[tuple[str, str]]:
    """Pods that were made, and pods of which the kubelet said that they are over: first by their status."""
    said = set()
    for event in events:
        reference, code = event["objectRef"], event["responseStatus"].get("code")
        if reference["resource"] != "pods":
            continue
        # Whose client dies meanwhile is answered by some error of the server's, and may be done all the same.
        is_refused = code is not None and 400 <= code < 500
        if event["verb"] == "create" and "subresource" not in reference and not is_refused:
            yield "create", reference.get("name") or event["requestObject"]["metadata"]["name"]
        options = event.get("requestObject") or {}
        is_kubelets = event["verb"] == "delete" and options.get("gracePeriodSeconds") == 0
        if is_kubelets and reference["name"] not in said:
            said.add(reference["name"])
            yield "ended", reference["name"]


# ---- without its API server


def test_operator_whose_api_server_is_away_waits_and_begins_anew_in_its_own_process(
    operator_api: KubernetesClient, tmp_path: Path
) -> None:
    """A kubelet lets minutes pass before it restarts a container that has ended a few times."""

    async def scenario(world: World, wire: Wire) -> None:
        where = world.namespace
        kubeconfig = kubeconfig_through(wire, operator_api, tmp_path)
        wire.cut()
        with operator_process(tmp_path, kubeconfig, namespace=where, watch=[where]) as operator:
            said = operator.log.read_text
            await until("it waits", lambda: said().count("TrainingJobs cannot be listed yet") > 1, seconds=60)
            assert (operator.health(), operator.health("/readyz")[0]) == ((200, "ok\n"), 503)
            wire.mend()
            await until("it is ready", lambda: operator.health("/readyz") == (200, "ok\n"))
            job = await world.make_job(trainer={"numNodes": 2})
            await world.kubelets.started("job-1-1")
            wire.cut()
            await until("it knows nothing any more", lambda: "the Lease was lost" in said(), seconds=60)
            await world.kubelets.end("job-1-0", 7)
            wire.mend()
            await world.kubelets.started("job-2-1")
            for index in range(2):
                await world.kubelets.end(f"job-2-{index}", 0)
            await reaches(world, job, State.COMPLETE)
            assert operator.process.poll() is None
            assert await asyncio.to_thread(operator.terminate) == 0

    play_behind_a_wire(operator_api, scenario, seconds=200)


# ---- with the chart's rights


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["all namespaces", "one namespace"])
def test_rights_of_the_chart_are_enough_and_sigterm_ends_it_in_order(
    audited_api: ApiServer, tmp_path: Path, is_namespaced: bool
) -> None:
    async def scenario(world: World) -> None:
        values: dict[str, Any] = {"watchNamespaces": [world.namespace]} if is_namespaced else {}
        grant(audited_api, tmp_path, values)
        await until("the API server knows of the rights", lambda: may_create_pods(world))
        kubeconfig = kubeconfig_of(audited_api, chart.NAMESPACE, chart.OPERATOR, tmp_path)
        identity = f"operator-{world.namespace}"
        begun = len(list(audited_api.audit()))
        with operator_process(
            tmp_path, kubeconfig, namespace=chart.NAMESPACE, identity=identity, watch=values.get("watchNamespaces", [])
        ) as operator:
            await whole_life(world)
            await hands_off(world)
            await is_healthy(operator)
            assert 'stepfast_jobs{state="Complete"}' in operator.scrape()
            assert 'stepfast_watch_age_seconds{resource="trainingjobs"} 0.0' in operator.scrape()
            await until("its Lease", lambda: has_lease(world, chart.NAMESPACE, identity))
            begin = time.monotonic()
            status = await asyncio.to_thread(operator.terminate)
            assert time.monotonic() - begin < 10
            assert status == 0, operator.log.read_text()[-3000:]
        assert not await has_lease(world, chart.NAMESPACE, identity), "given up: the next one need not wait"
        assert await has_lease(world, chart.NAMESPACE, "")
        ours = [event for event in list(audited_api.audit())[begun:] if event["user"]["username"] == ACCOUNT]
        assert ours
        refused = [event for event in ours if is_refused(event)]
        assert [(event["verb"], event["requestURI"]) for event in refused] == []
        described = audited_api.kubectl("describe", "trainingjob", "whole", "-n", world.namespace)
        assert "PodsCreated" in described

    play(audited_api, scenario)


def is_refused(event: dict[str, Any]) -> bool:
    """For want of rights: a namespace that is being removed answers 403 too, to who may create in it."""
    decision = event.get("annotations", {}).get("authorization.k8s.io/decision")
    return decision == "forbid" or event["responseStatus"].get("code") == 401


async def may_create_pods(world: World) -> bool:
    asked = {"namespace": world.namespace, "verb": "create", "resource": "pods"}
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": ACCOUNT, "resourceAttributes": asked},
    }  # fmt: skip
    answer = await world.kube.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


async def whole_life(world: World) -> None:
    """A job that fails, restarts, completes; and one that is deleted while it runs."""
    job = await world.make_job("whole", trainer={"numNodes": 2})
    await world.kubelets.end("whole-1-0", 7)
    for index in range(2):
        await world.kubelets.end(f"whole-2-{index}", 0)
    await reaches(world, job, State.COMPLETE)
    gone = await world.make_job("gone")
    await world.kubelets.started("gone-1-0")
    assert (await world.job(gone)).finalizers == (labels.FINALIZER,)
    await world.kube.delete(gone.path)

    async def is_gone() -> bool:
        listed = await world.kube.get(f"/apis/stepfast.dev/v1alpha1/namespaces/{world.namespace}/trainingjobs")
        return all(item["metadata"]["uid"] != gone.uid for item in listed["items"])

    await until("the deleted job is gone", is_gone)


async def hands_off(world: World) -> None:
    """A job of another manager is left alone, by an operator that has seen a later one."""
    path = f"/apis/stepfast.dev/v1alpha1/namespaces/{world.namespace}/trainingjobs"
    other = await world.kube.create(path, manifest(world.namespace, "other", managedBy="kueue.x-k8s.io/multikueue"))
    job = await world.make_job("later")
    await world.kubelets.end("later-1-0", 0)
    await reaches(world, job, State.COMPLETE)
    now = await world.kube.get(f"{path}/other")
    assert now["metadata"]["resourceVersion"] == other["metadata"]["resourceVersion"], "untouched"


def test_dead_watch_of_jobs_is_seen_by_the_health_probe(operator_api: KubernetesClient, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        where = world.namespace
        with operator_process(
            tmp_path, operator_api.kubeconfig, namespace=where, watch=[where], mode="deaf"
        ) as operator:
            await is_healthy(operator)
            await world.make_job()
            await until("it is not", lambda: operator.health()[0] == 503)
            assert operator.health()[1].startswith("trainingjobs: nothing heard for")

    play(operator_api, scenario)


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["all namespaces", "one namespace"])
def test_api_server_is_told_when_to_end_each_watch(audited_api: ApiServer, tmp_path: Path, is_namespaced: bool) -> None:
    """One that dies without a word would else be believed in for as long as the process lives (kopf issue 1145)."""

    async def scenario(world: World) -> None:
        watch = [world.namespace] if is_namespaced else []
        grant(audited_api, tmp_path, {"watchNamespaces": watch})
        kubeconfig = kubeconfig_of(audited_api, chart.NAMESPACE, chart.OPERATOR, tmp_path)
        begun = len(list(audited_api.audit()))
        with operator_process(
            tmp_path, kubeconfig, namespace=chart.NAMESPACE, identity=f"operator-{world.namespace}", watch=watch
        ) as operator:
            await is_healthy(operator)
            job = await world.make_job()
            await world.kubelets.end("job-1-0", 0)
            await reaches(world, job, State.COMPLETE)
            await asyncio.to_thread(operator.terminate)  # so that the next one need not wait for the Lease
        ours = [event for event in list(audited_api.audit())[begun:] if event["user"]["username"] == ACCOUNT]
        watches = [event for event in ours if event["verb"] == "watch"]
        resources = {event["objectRef"]["resource"] for event in watches}
        assert resources == {"trainingjobs", "pods", "nodes", "checkpointnodes"}
        limits = [parse_qs(urlsplit(event["requestURI"]).query).get("timeoutSeconds") for event in watches]
        assert limits == [[str(SERVER_SECONDS)]] * len(watches), [event["requestURI"] for event in watches]

    play(audited_api, scenario)


# ---- beside operators of others


def peering_crd(kind: str, scope: str) -> dict[str, Any]:
    """As in kopf's own manifest, but for what peerings say."""
    singular, anything = kind.lower(), {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    versions = [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}]
    names = {"kind": kind, "singular": singular, "plural": f"{singular}s"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.kopf.dev"},
        "spec": {"group": "kopf.dev", "scope": scope, "names": names, "versions": versions},
    }


@pytest.fixture
def peered_api(operator_api: KubernetesClient) -> Iterator[KubernetesClient]:
    """With kopf's peerings served, as where others run operators of kopf."""
    crds = peering_crd("ClusterKopfPeering", "Cluster"), peering_crd("KopfPeering", "Namespaced")
    names = [f"crd/{crd['metadata']['name']}" for crd in crds]
    try:
        operator_api.apply(*crds)
        operator_api.kubectl("wait", "--for=condition=Established", *names)
        yield operator_api
    finally:
        operator_api.kubectl("delete", "--ignore-not-found", *names)


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["all namespaces", "one namespace"])
def test_peering_of_another_operator_that_is_alive_and_comes_first_freezes_nothing(
    peered_api: KubernetesClient, tmp_path: Path, is_namespaced: bool
) -> None:
    """Kopf takes an object `default` for its own, whoever made it (kopf issue 734)."""

    async def scenario(world: World) -> None:
        where = world.namespace
        kind, place = ("KopfPeering", {"namespace": where}) if is_namespaced else ("ClusterKopfPeering", {})
        other = {"priority": 1000, "lifetime": 3600, "lastseen": datetime.now(UTC).isoformat()}
        metadata = {"name": "default", **place}
        peering = {"apiVersion": "kopf.dev/v1", "kind": kind, "metadata": metadata, "status": {"another": other}}
        await asyncio.to_thread(peered_api.apply, peering)
        watch = [where] if is_namespaced else []
        with operator_process(tmp_path, peered_api.kubeconfig, namespace=where, watch=watch) as operator:
            await is_healthy(operator)
            # The second one is made when whatever is read at the start was read.
            for name in ("first", "second"):
                job = await world.make_job(name)
                await world.kubelets.end(f"{name}-1-0", 0)
                await reaches(world, job, State.COMPLETE)
        path = f"namespaces/{where}/kopfpeerings" if is_namespaced else "clusterkopfpeerings"
        now = await world.kube.get(f"/apis/kopf.dev/v1/{path}/default")
        assert now["status"] == peering["status"], "nor does it take part"

    play(peered_api, scenario)
