"""Whether kopf still hears of TrainingJobs. Its watcher may die while the process lives (kopf issues 1145, 1276), and
silence alone proves nothing: jobs need not change. So what a list shows now and then has to arrive by the watch, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from stepfast.kube import Kube, KubeError

log = logging.getLogger(__name__)

_LIST_SECONDS = 20.0
_WAIT_SECONDS = 2.0


class JobWatch:
    """What the watch told last, and what it owes."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}  # resource versions, by uid
        self._owed: dict[str, tuple[int | None, float]] = {}  # version (None: its end), and since when

    def note(self, uid: str, version: int) -> None:
        """The watch told of the job."""
        self._told[uid] = version
        owed = self._owed.get(uid)
        if owed is not None and owed[0] is not None and version >= owed[0]:
            del self._owed[uid]

    def forget(self, uid: str) -> None:
        """The watch told of the job's end."""
        self._told.pop(uid, None)
        self._owed.pop(uid, None)

    def age_seconds(self) -> float:
        """For how long the watch has owed something; 0 while it owes nothing."""
        return max((time.monotonic() - since for _, since in self._owed.values()), default=0.0)

    def compare(self, listed: Mapping[str, int], asked: float) -> None:
        """What a list showed that was asked for at that time (of the monotonic clock)."""
        for uid, version in listed.items():
            owed = self._owed.get(uid)
            if owed is not None and owed[0] is None:
                del self._owed[uid]  # a list that was older than the job had shown it as gone
            if self._told.get(uid, 0) < version:
                self._owed.setdefault(uid, (version, asked))
        for uid in [uid for uid in self._told if uid not in listed]:
            self._owed.setdefault(uid, (None, asked))
        for uid in [uid for uid in self._owed if uid not in listed and uid not in self._told]:
            del self._owed[uid]  # made and gone again between two lists

    async def run(self, kube: Kube, namespaces: Sequence[str]) -> None:
        """Compares now and then, until cancelled."""
        paths = _paths(namespaces)
        while True:
            await asyncio.sleep(_LIST_SECONDS)
            asked = time.monotonic()
            try:
                listed = {uid: version for path in paths for uid, version in (await kube.versions(path)).items()}
            except KubeError as error:
                log.warning("TrainingJobs were not listed: %s", error)
                continue
            self.compare(listed, asked)


async def wait_until_listed(kube: Kube, namespaces: Sequence[str]) -> None:
    """Until the API server lists TrainingJobs for us: where it is away, or just back and knows of nobody's rights yet,
    kopf would end.
    """
    for path in _paths(namespaces):
        while True:
            try:
                await kube.get(path, limit="1")
                break
            except KubeError as error:
                log.warning("TrainingJobs cannot be listed yet: %s", error)
            await asyncio.sleep(_WAIT_SECONDS)


def _paths(namespaces: Sequence[str]) -> list[str]:
    root = "/apis/stepfast.dev/v1alpha1"
    return [f"{root}/namespaces/{name}/trainingjobs" for name in namespaces] or [f"{root}/trainingjobs"]
