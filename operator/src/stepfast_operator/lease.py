"""The fence: a Lease that only one operator holds. Whoever cannot renew it in time stops acting before another may.

A pod has one name for all its containers one after another, so an operator that was killed and is restarted in its pod
goes on at once; another pod waits until the Lease is given up or has run out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from stepfast.errors import StepfastError
from stepfast.kube import AlreadyExists, Conflict, Kube, KubeError, NotFound, Patience
from stepfast_operator.document import JSON, time_text

log = logging.getLogger(__name__)

DURATION_SECONDS = 20.0
# Renewed within it, or no longer acted upon: what is under way then is over before the Lease runs out (`PATIENCE`
# gives a change of an object less than the rest of it).
FENCE_SECONDS = 10.0
_RENEW_SECONDS = 2.0
# A connection may have died without a word, which a renewal, the most frequent request, is the first to meet: what is
# not answered by then is asked once more, on another connection, while the Lease is still ours. An API server that is
# slow has longer: to be asked twice makes it no faster.
_LOOK_SECONDS = 3.0
# A change that the API server takes later than that could meet another operator's. The renewals of the Lease alone
# would keep a connection open for each second that an unused one is kept.
PATIENCE = Patience(connect_seconds=10.0, read_seconds=30.0, change_seconds=9.0, idle_seconds=2 * _RENEW_SECONDS)


class NotLeading(StepfastError):
    """Another operator may have taken over: nothing is done any more."""


class Lease:
    """One Lease object. `run` acquires and renews; `check` is asked before every effect."""

    def __init__(self, kube: Kube, namespace: str, identity: str, name: str = "stepfast-operator") -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._renewed: float | None = None  # by our own clock, before the request was sent
        self._seen: tuple[str, float] | None = None  # another holder's renewal, and when we first saw it
        self._busy = asyncio.Lock()  # one request at a time, so that none renews what another gives up
        self._is_over = False
        self.held = asyncio.Event()

    def check(self) -> None:
        """Raises NotLeading unless the Lease is surely ours."""
        if self._renewed is None or time.monotonic() - self._renewed > FENCE_SECONDS:
            raise NotLeading(f"the Lease {self._namespace}/{self._name} is not held by {self._identity}")

    @property
    def is_lost(self) -> bool:
        """Whether it was held, and is not any more."""
        return self._renewed is not None and time.monotonic() - self._renewed > FENCE_SECONDS

    async def run(self) -> None:
        """Acquires and renews the Lease; returns when it was lost or given up."""
        while not (self.is_lost or self._is_over):
            pause = _RENEW_SECONDS
            try:
                async with self._busy:
                    await self._renew()
            except KubeError as error:
                log.warning("the Lease was not renewed: %s", error)
                pause /= 4
            await asyncio.sleep(pause)
        if not self._is_over:
            log.error("the Lease was lost")

    async def release(self) -> None:
        """Gives it up, so that a successor need not wait."""
        is_ours, self._is_over = self.held.is_set() and not self.is_lost, True
        self._renewed = None
        if not is_ours:
            return
        try:
            async with self._busy:
                lease = await self._kube.get(self._path)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._kube.replace(self._path, lease)
        except KubeError as error:
            log.warning("the Lease was not given up: %s", error)

    async def _renew(self) -> None:
        begin = time.monotonic()
        if not self._is_over and await self._try() and not self._is_over:
            self._renewed = begin
            self.held.set()

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"

    async def _try(self) -> bool:
        """Takes or renews it; False when another one has it, or was faster."""
        try:
            lease = await self._kube.get(self._path, max(_LOOK_SECONDS, 2 * self._kube.change_seconds))
        except NotFound:
            return await self._create()
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity and not self._has_run_out(spec):
            return False
        if holder != self._identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = _now()
        lease["spec"] = {**spec, **self._ours()}
        try:
            await self._kube.replace(self._path, lease)
        except Conflict:
            return False
        return True

    async def _create(self) -> bool:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {"acquireTime": _now(), "leaseTransitions": 0, **self._ours()},
        }
        try:
            await self._kube.create(self._path.rpartition("/")[0], lease)
        except AlreadyExists:
            return False
        return True

    def _ours(self) -> JSON:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION_SECONDS),
            "renewTime": _now(),
        }

    def _has_run_out(self, spec: JSON) -> bool:
        """Whether its holder has not renewed it for its whole duration, by our own clock: clocks differ."""
        renewal = f"{spec.get('holderIdentity')} {spec.get('renewTime')}"
        now = time.monotonic()
        if self._seen is None or self._seen[0] != renewal:
            self._seen = (renewal, now)
        return now - self._seen[1] > float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)


def _now() -> str:
    return time_text(datetime.now(UTC).timestamp())
