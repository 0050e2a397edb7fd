"""The Lease on a real API server: at most one acts, and none after another one may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from stepfast.kube import Kube
from stepfast_operator import lease as module
from stepfast_operator.lease import Lease, NotLeading
from testcluster.controlplane import KubernetesClient
from testoperator.connection import connect
from testoperator.polling import until
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import make_namespace


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion as in earnest."""
    monkeypatch.setattr(module, "DURATION_SECONDS", 3.0)
    monkeypatch.setattr(module, "FENCE_SECONDS", 2.0)
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.2)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.6)


class Stage:
    def __init__(self, kube: Kube, far: Kube, wire: Wire, namespace: str) -> None:
        self.kube, self.far, self.wire, self.namespace = kube, far, wire, namespace

    @property
    def path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/stepfast-operator"

    async def holder(self) -> str:
        return str((await self.kube.get(self.path))["spec"].get("holderIdentity"))

    async def renewed(self) -> str:
        return str((await self.kube.get(self.path))["spec"]["renewTime"])


def play(api: KubernetesClient, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        kube = await connect(api.kubeconfig)
        url = urlsplit(str(kube._api.configuration.host))
        assert url.hostname is not None
        async with Wire(url.hostname, url.port or 443).laid() as wire:
            far = await connect(api.kubeconfig, server=wire.url)
            try:
                await asyncio.wait_for(scenario(Stage(kube, far, wire, await make_namespace(kube))), 60)
            finally:
                await far.close()
                await kube.close()

    run_to_end(run())


@asynccontextmanager
async def contending(lease: Lease) -> AsyncIterator[Lease]:
    task = asyncio.create_task(lease.run())
    try:
        yield lease
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def acts(lease: Lease) -> bool:
    try:
        lease.check()
    except NotLeading:
        return False
    return True


def test_one_of_two_holds_it_and_the_other_one_waits(api_server: KubernetesClient) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.kube, stage.namespace, "a")) as one:
            async with contending(Lease(stage.kube, stage.namespace, "b")) as two:
                await until("one holds it", lambda: acts(one) or acts(two))
                loop = asyncio.get_running_loop()
                begin = loop.time()
                while loop.time() - begin < 4:
                    assert acts(one) != acts(two)
                    await asyncio.sleep(0.02)

    play(api_server, scenario)


def test_killed_holder_is_followed_once_the_lease_has_run_out(api_server: KubernetesClient) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.kube, stage.namespace, "a")) as killed:
            await asyncio.wait_for(killed.held.wait(), 20)
        begin = asyncio.get_running_loop().time()
        async with contending(Lease(stage.kube, stage.namespace, "b")) as next_one:
            await asyncio.wait_for(next_one.held.wait(), 20)
        assert asyncio.get_running_loop().time() - begin >= module.DURATION_SECONDS
        assert (await stage.kube.get(stage.path))["spec"]["leaseTransitions"] == 1

    play(api_server, scenario)


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that outlast every test: who gets one has not waited for its end."""
    monkeypatch.setattr(module, "DURATION_SECONDS", 3600.0)


@pytest.mark.usefixtures("lasting")
def test_same_pod_goes_on_at_once(api_server: KubernetesClient) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.kube, stage.namespace, "a")) as killed:
            await asyncio.wait_for(killed.held.wait(), 20)
        async with contending(Lease(stage.kube, stage.namespace, "a")) as restarted:
            await asyncio.wait_for(restarted.held.wait(), 20)
        assert (await stage.kube.get(stage.path))["spec"]["leaseTransitions"] == 0

    play(api_server, scenario)


def test_holder_whose_connection_has_died_without_a_word_stays_the_holder(api_server: KubernetesClient) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.far, stage.namespace, "far")) as far:
            await asyncio.wait_for(far.held.wait(), 20)
            stage.wire.stall()
            loop = asyncio.get_running_loop()
            begin, renewed = loop.time(), await stage.renewed()
            while loop.time() - begin < module.DURATION_SECONDS:
                assert acts(far)
                await asyncio.sleep(0.02)
            assert await stage.renewed() > renewed

    play(api_server, scenario)


@pytest.mark.parametrize("way", ["silence", "cut"])
def test_holder_that_cannot_renew_stops_before_another_one_acts(api_server: KubernetesClient, way: str) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.far, stage.namespace, "far")) as far:
            await asyncio.wait_for(far.held.wait(), 20)
            async with contending(Lease(stage.kube, stage.namespace, "near")) as near:
                getattr(stage.wire, way)()
                while not acts(near):
                    was_acting = acts(far)
                    await asyncio.sleep(0.01)
                assert not was_acting, "there was a moment in which nobody acted"
                assert far.is_lost
                assert await stage.holder() == "near"

    play(api_server, scenario)


@pytest.mark.parametrize("renewed", ["1999-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"])
def test_clocks_may_differ_by_years(api_server: KubernetesClient, renewed: str) -> None:
    """Neither is a living holder robbed, nor a dead one waited for without end."""

    async def scenario(stage: Stage) -> None:
        spec = {"holderIdentity": "other", "leaseDurationSeconds": 3, "renewTime": renewed, "acquireTime": renewed}
        body = {"metadata": {"name": "stepfast-operator"}, "spec": spec}
        await stage.kube.create(stage.path.rpartition("/")[0], body)
        begin = asyncio.get_running_loop().time()
        async with contending(Lease(stage.kube, stage.namespace, "a")) as lease:
            await asyncio.wait_for(lease.held.wait(), 20)
        assert asyncio.get_running_loop().time() - begin >= module.DURATION_SECONDS

    play(api_server, scenario)


@pytest.mark.usefixtures("lasting")
def test_given_up_it_is_taken_at_once_and_not_taken_back(
    api_server: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a renewal that is under way while it is given up."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.0)

    async def scenario(stage: Stage) -> None:
        for turn in range(10):
            async with contending(Lease(stage.kube, stage.namespace, f"a{turn}")) as lease:
                await asyncio.wait_for(lease.held.wait(), 20)
                await lease.release()
                assert not acts(lease)
                assert await stage.holder() == ""

    play(api_server, scenario)


def test_lease_of_another_one_is_not_given_up(api_server: KubernetesClient) -> None:
    async def scenario(stage: Stage) -> None:
        async with contending(Lease(stage.kube, stage.namespace, "a")) as lease:
            await asyncio.wait_for(lease.held.wait(), 20)
            other = Lease(stage.kube, stage.namespace, "b")
            await other.release()
            assert await stage.holder() == "a"

    play(api_server, scenario)
