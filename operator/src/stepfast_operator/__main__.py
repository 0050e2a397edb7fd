"""Starts the operator, and ends it in order: SIGTERM, or a part that failed. Without its Lease it begins anew."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import kopf

from stepfast.errors import StepfastError
from stepfast.kube import Kube
from stepfast.storage.open import open_store
from stepfast.storage.rules import StorageRules
from stepfast_operator import handlers, serving
from stepfast_operator.backends.kubernetes import Cluster
from stepfast_operator.backends.requests import Requests
from stepfast_operator.backends.rings import Rings
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.eventlog import EventLog
from stepfast_operator.jobs import Jobs
from stepfast_operator.jobwatch import JobWatch, wait_until_listed
from stepfast_operator.lease import PATIENCE, Lease
from stepfast_operator.metrics import Metrics
from stepfast_operator.settings import Settings, parse_settings

log = logging.getLogger("stepfast_operator")

_DRAIN_SECONDS = 5.0
_RELEASE_SECONDS = 3.0
_KOPF_STOP_SECONDS = 3.0
_LOST_LEASE_STATUS = 4


class Operator:
    """All parts of the operator, and how they belong together."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self._kube, self._settings = kube, settings
        self.metrics = Metrics()
        self.jobs = Jobs(self.metrics)
        self._watch = JobWatch()
        self._view = ClusterView(
            kube,
            namespaces=settings.namespaces,
            agent_namespace=settings.namespace,
            wake_uid=self.jobs.wake,
            wake_job=self.jobs.wake_job,
            wake_later=self.jobs.wake_job_later,
        )
        self._lease = Lease(kube, settings.namespace, settings.identity)
        self._events = EventLog(kube, settings.identity)
        self._stopping = asyncio.Event()
        self._kopf_stop, self._kopf_ready = asyncio.Event(), asyncio.Event()
        self.metrics.watch(statuses=self.jobs.statuses, agents=self._view.agents.values, ages=self._ages, now=time.time)

    async def run(self) -> int:
        """Serves until told to end; the exit status."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            metrics = serving.metrics_answer(self.metrics)
            await stack.enter_async_context(serving.serve(settings.metrics_port, metrics=metrics))
            health = serving.health_answer(self._view.ages, self._watch.age_seconds)
            ready = serving.ready_answer(self._kopf_ready.is_set)
            await stack.enter_async_context(serving.serve(settings.health_port, healthz=health, readyz=ready))
            return await self._serve()

    async def _serve(self) -> int:
        self._hear_signals()
        parts = {
            self._start("watches", self._view.run()),
            self._start("lease", self._lease.run()),
            self._start("events", self._events.run()),
            self._start("job watch", self._watch.run(self._kube, self._settings.namespaces)),
        }
        kopf_task = self._start("kopf", self._kopf())
        starting = self._start("start", self._begin())
        starting.add_done_callback(self._note_start)
        stopping = self._start("stop", self._stopping.wait())
        try:
            done, _ = await asyncio.wait({*parts, kopf_task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is not None:
                done.add(starting)
        finally:
            starting.cancel()
            await self.jobs.close()
            # Nothing is done any more: a successor need not wait for what follows.
            await self._give_up_lease()
            self._kopf_stop.set()
            await asyncio.wait({kopf_task}, timeout=_KOPF_STOP_SECONDS)
            await self._events.drain(_DRAIN_SECONDS)
            await _cancel({*parts, kopf_task, starting, stopping})
        return _status_of(done - {stopping})

    def _note_start(self, starting: asyncio.Task[None]) -> None:
        """An operator that could not begin ends, rather than idles."""
        if not starting.cancelled() and starting.exception() is not None:
            self._stopping.set()

    async def _give_up_lease(self) -> None:
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._lease.release()
        except TimeoutError:
            log.warning("the Lease was not given up: it runs out by itself")

    async def _begin(self) -> None:
        """Jobs are looked at once all that they depend on was read, and nobody else does it."""
        await self._kopf_ready.wait()
        self._hear_signals()  # in place of kopf, which would end itself alone
        await self._view.synced()
        await self._lease.held.wait()
        settings, kube = self._settings, self._kube
        requests = Requests(kube, self._view.reports.get, self.jobs.is_under_way)
        self.jobs.start(
            Cluster(
                kube=kube,
                view=self._view,
                requests=requests,
                rings=Rings(kube, self._view.reports.get, self.jobs.is_under_way),
                lease=self._lease,
                storage=StorageRules(root=settings.storage_root or None, allowed=settings.allowed_storage),
                open_store=open_store,
                spare_priority_class=settings.spare_priority_class,
                began_time=time.time(),
            ),
            self._events,
        )
        log.info("TrainingJobs are looked after")

    def _hear_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)

    async def _kopf(self) -> None:
        namespaces = self._settings.namespaces
        await wait_until_listed(self._kube, namespaces)
        await kopf.operator(
            registry=handlers.registry_of(self.jobs, self._watch),
            settings=handlers.settings_of(),
            identity=self._settings.identity,  # type: ignore[arg-type] # a NewType that kopf keeps to itself
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=self._kopf_stop,
            ready_flag=self._kopf_ready,
        )

    def _ages(self) -> dict[str, float]:
        return {**self._view.ages(), "trainingjobs": self._watch.age_seconds()}

    def _start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.create_task(work, name=name)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _status_of(ended: set[asyncio.Task[Any]]) -> int:
    """0 when it was told to end (kopf, too, hears of signals at first); parts that failed say why."""
    status = 0
    for task in ended:
        error = task.exception()
        if error is None and task.get_name() == "kopf":
            continue
        log.error("%s ended: %s", task.get_name(), error if error is not None else "for good", exc_info=error)
        status = _LOST_LEASE_STATUS if task.get_name() == "lease" and error is None else 1
    return status


async def serve(settings: Settings) -> int:
    """The operator from its connection to its end."""
    kube = await Kube.connect(PATIENCE)
    try:
        return await Operator(kube, settings).run()
    finally:
        await kube.close()


def main() -> None:
    """Reads the command line and serves until SIGTERM.

    An operator that has lost its Lease knows nothing any more, and begins anew in its own process: where the API server
    was away a few times, a kubelet would wait for minutes before it restarts the container.
    """
    settings = parse_settings(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s stepfast-operator %(levelname)s %(message)s")
    for noisy in ("kopf.objects", "azure"):  # a line for each event of each job, and for each request to the storage
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        status = asyncio.run(serve(settings))
    except (StepfastError, OSError) as error:
        sys.exit(f"stepfast-operator: {error}")
    if status == _LOST_LEASE_STATUS:
        logging.shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(status)


if __name__ == "__main__":
    main()
