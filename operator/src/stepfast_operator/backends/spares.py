"""The pods that hold places into which one job's gang may grow. Must not know when it is to grow."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from stepfast.kube import AlreadyExists, Kube, KubeError
from stepfast_operator import manifests
from stepfast_operator.clusterview import ClusterView
from stepfast_operator.lease import Lease
from stepfast_operator.manifests import Owner
from stepfast_operator.observed import Spare
from stepfast_operator.podview import PodView
from stepfast_operator.spec import TrainingSpec

log = logging.getLogger(__name__)

_REFUSED_SECONDS = 30.0  # a quota that is used up, an admission rule, say: nothing tells when it is not


class Spares:
    """Used by one task at a time."""

    def __init__(self, kube: Kube, view: ClusterView, lease: Lease, priority_class: str) -> None:
        """`priority_class`: that the pods have; empty: what the job's template says."""
        self._kube, self._view, self._lease, self._priority_class = kube, view, lease, priority_class
        self._refused_until = 0.0

    def view(self, owner: Owner) -> tuple[Spare, ...]:
        return tuple(map(_spare_of, self._pods(owner)))

    async def set(self, owner: Owner, spec: TrainingSpec, count: int, avoided_nodes: Sequence[str]) -> None:
        """So many of them, none on these nodes. Who has a place keeps it; who has none, and keeps off others, too, is
        made anew. One that is refused, by whomever, is asked for again later: a gang that trains does not need it, and
        is to be looked after meanwhile.
        """
        pods = sorted(self._pods(owner), key=lambda pod: pod.node is None)
        kept = [pod for pod in pods if _spare_of(pod).may_stay(avoided_nodes)][:count]
        for pod in pods:
            if pod not in kept:
                await self._end(pod)
        taken = {pod.index for pod in kept}
        missing = [number for number in range(count) if number not in taken][: count - len(kept)]
        if not missing or time.monotonic() < self._refused_until:
            return
        try:
            for number in missing:
                await self._make(owner, spec, number, avoided_nodes)
        except KubeError as error:
            self._refused_until = time.monotonic() + _REFUSED_SECONDS
            log.warning("%s has no spare that waits for a place to grow into: %s", owner.job, error)

    def _pods(self, owner: Owner) -> list[PodView]:
        return [pod for pod in self._view.spares_of(owner.job, owner.uid) if pod.deleted_time is None]

    async def _make(self, owner: Owner, spec: TrainingSpec, number: int, avoided_nodes: Sequence[str]) -> None:
        self._lease.check()
        pod = manifests.spare_of(owner, spec, number, avoided_nodes, priority_class=self._priority_class)
        with suppress(AlreadyExists):  # on its way out, or not told of yet
            self._view.take_pod(await self._kube.create(f"/api/v1/namespaces/{owner.job.namespace}/pods", pod))

    async def _end(self, pod: PodView) -> None:
        """At once: it does nothing, and its place is wanted."""
        self._lease.check()
        await self._kube.delete(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", grace_seconds=0, uid=pod.uid)
        self._view.drop_pod(pod)


def _spare_of(pod: PodView) -> Spare:
    return Spare(node=pod.node, placed_time=pod.placed_time, avoided_nodes=pod.avoided_nodes)
