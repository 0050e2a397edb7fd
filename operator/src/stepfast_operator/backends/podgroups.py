"""What is said to those who admit or schedule gangs, and asked of them: Kueue, Volcano, coscheduling. One job's. Must
not know why a gang is made or ended.

Of Kueue's own objects nothing is written: that a group is over, and that nothing runs of a pod, its pods say.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from stepfast.kube import AlreadyExists, Conflict, Forbidden, Kube, KubeError, NotFound
from stepfast_operator import podgroups
from stepfast_operator.backends.base import QueueRefused
from stepfast_operator.document import JSON
from stepfast_operator.lease import Lease
from stepfast_operator.manifests import Owner
from stepfast_operator.observed import QueueView
from stepfast_operator.podview import PodView
from stepfast_operator.spec import PodGroupPolicy

_KUEUE = "/apis/kueue.x-k8s.io"
_UNTOLD_SECONDS = 2.0  # between two questions while there is no word yet
_TOLD_SECONDS = 30.0  # and while there is: thousands of jobs may wait


class PodGroups:
    """The groups of one job's pods. Used by one task at a time."""

    def __init__(self, kube: Kube, lease: Lease) -> None:
        self._kube, self._lease = kube, lease
        self._kueue_version = ""
        self._left = 0  # the attempt whose PodGroup is known to be gone
        self._word, self._is_waiting, self._asked_time, self._asked_group = "", False, 0.0, ""

    async def enter(
        self, owner: Owner, policy: PodGroupPolicy, attempt: int, pods: Sequence[JSON], known: Sequence[PodView]
    ) -> list[JSON]:
        """The attempt's pods as members of a group, which is there with all that it needs. `known`: the job's pods that
        are there. Raises QueueRefused.
        """
        try:
            if policy.kueue is None:
                group = podgroups.group_name(owner, attempt)
                await self._make(owner, policy, group, pods)
            else:
                group = podgroups.kueue_group(owner, attempt, len(pods), known)
                await self._workload(owner, group)
                others = {name: held for name, held in podgroups.held_groups(known).items() if name != group}
                for members in others.values():
                    await self.close(members)
        except NotFound as error:
            raise QueueRefused(f"the API server has no such kind; is {_who(policy)} installed? {error}") from error
        except Forbidden as error:
            value = f"podGroups.{_value(policy)}=true"
            raise QueueRefused(f"the operator may not; install its chart with {value}: {error}") from error
        return [podgroups.joined(pod, policy, group=group, nodes=len(pods)) for pod in pods]

    async def view(
        self, owner: Owner, policy: PodGroupPolicy | None, attempt: int, pods: Sequence[PodView], now: float
    ) -> QueueView:
        """`pods`: all of the job's."""
        is_held = any(not podgroups.is_group_left(members) for members in podgroups.held_groups(pods).values())
        if policy is not None and policy.kueue is None:
            is_held = is_held or 0 < attempt != self._left
        ours = [pod for pod in pods if pod.attempt == attempt and pod.is_alive]
        waiting = [pod for pod in ours if pod.is_gated]
        is_asked = bool(waiting)
        if policy is not None and policy.volcano is not None:
            is_asked = any(pod.node is None for pod in ours)
        if not is_asked:
            return QueueView(is_held=is_held)
        await self._ask(owner, policy, attempt, waiting, now)
        message = f"waits in {_queue(policy)}{f': {self._word}' if self._word else ''}"
        return QueueView(is_waiting=self._is_waiting, message=message, is_held=is_held)

    async def leave(self, owner: Owner, policy: PodGroupPolicy | None, attempt: int, pods: Sequence[PodView]) -> None:
        """Nothing more of the attempt, or of those before it, is to come."""
        for members in podgroups.held_groups(pods).values():
            await self.close(members)
        if policy is not None:
            # Without the right to remove it nobody has made one, or it goes with the job, whose it is.
            with suppress(Forbidden):
                await self.clear(owner, policy, attempt)
        self._left = attempt

    async def close(self, members: Sequence[PodView]) -> None:
        """Ends a group of Kueue's, of which nothing runs any more. `members`: those of its pods that it holds."""
        for pod in podgroups.unburied(members):
            await self.bury(pod)
        if not any(pod.member is not None and pod.member.is_last for pod in members):
            await self._say(members[0], "", {"metadata": podgroups.LAST_OF_GROUP})

    async def bury(self, pod: PodView) -> None:
        """Says in the pod's status that nothing of it runs."""
        await self._say(pod, "/status", {"status": podgroups.BURIED})

    async def _say(self, pod: PodView, part: str, patch: JSON) -> None:
        self._lease.check()
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}{part}"
        with suppress(NotFound, Conflict):  # Kueue has let it go
            await self._kube.patch(path, {**patch, "metadata": {**patch.get("metadata", {}), "uid": pod.uid}})

    async def clear(self, owner: Owner, policy: PodGroupPolicy, attempt: int) -> None:
        """Removes the PodGroup of that attempt, which is over."""
        path = podgroups.pod_groups_path(policy, owner.job.namespace)
        if path is not None and attempt:
            self._lease.check()
            await self._kube.delete(f"{path}/{podgroups.group_name(owner, attempt)}")

    async def _make(self, owner: Owner, policy: PodGroupPolicy, group: str, pods: Sequence[JSON]) -> None:
        path = podgroups.pod_groups_path(policy, owner.job.namespace)
        document = podgroups.pod_group_of(owner, policy, group=group, nodes=len(pods), pod=pods[0])
        self._lease.check()
        try:
            await self._kube.create(str(path), document)
        except AlreadyExists:
            return  # its name holds a piece of the job's uid

    async def _ask(
        self, owner: Owner, policy: PodGroupPolicy | None, attempt: int, waiting: Sequence[PodView], now: float
    ) -> None:
        """Has the word of whoever lets the gang wait, not older than is good for the API server."""
        members = [pod.member for pod in waiting if pod.member is not None]
        group = members[0].group if members else podgroups.group_name(owner, attempt)
        patience = _UNTOLD_SECONDS if self._word in ("", podgroups.UNSEEN) else _TOLD_SECONDS
        if group == self._asked_group and now - self._asked_time < patience:
            return
        self._asked_group, self._asked_time = group, now
        strange = next((pod.name for pod in waiting if pod.member is not None and not pod.member.is_taken), None)
        if strange is not None:
            self._is_waiting, self._word = (
                True,
                (
                    f"Kueue has not taken pod {strange}: is it installed, with the integration pod, and does it manage "
                    "this namespace?"
                ),
            )
            return
        try:
            self._is_waiting, self._word = await self._word_of(owner, policy, group, is_gated=bool(waiting))
        except KubeError as error:
            self._is_waiting, self._word = bool(waiting), f"why, nobody says: {error}"

    async def _word_of(
        self, owner: Owner, policy: PodGroupPolicy | None, group: str, *, is_gated: bool
    ) -> tuple[bool, str]:
        if policy is not None and policy.volcano is not None:
            path = podgroups.pod_groups_path(policy, owner.job.namespace)
            word = podgroups.volcano_wait(await self._kube.get(f"{path}/{group}"))
            return is_gated or bool(word), word
        if policy is None or policy.kueue is None:
            return is_gated, "its pods have scheduling gates"
        workload = await self._workload(owner, group)
        if workload is None:
            return is_gated, podgroups.UNSEEN
        return is_gated, podgroups.workload_wait(workload)

    async def _workload(self, owner: Owner, group: str) -> JSON | None:
        """Kueue's of that group; None when it has made none yet. Raises NotFound where there is no Kueue."""
        if not self._kueue_version:
            served = await self._kube.get(_KUEUE)
            self._kueue_version = str(served["preferredVersion"]["groupVersion"])
        path = f"/apis/{self._kueue_version}/namespaces/{owner.job.namespace}/workloads/{group}"
        try:
            return await self._kube.get(path)
        except NotFound:
            return None


def _who(policy: PodGroupPolicy) -> str:
    if policy.kueue is not None:
        return "Kueue"
    return "Volcano" if policy.volcano is not None else "the scheduler plugin coscheduling"


def _value(policy: PodGroupPolicy) -> str:
    if policy.kueue is not None:
        return "kueue"
    return "volcano" if policy.volcano is not None else "coscheduling"


def _queue(policy: PodGroupPolicy | None) -> str:
    if policy is not None and policy.kueue is not None:
        return f"queue {policy.kueue.queue_name}"
    if policy is not None and policy.volcano is not None:
        return f"queue {policy.volcano.queue}"
    return "line"
