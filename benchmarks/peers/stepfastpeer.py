"""Stepfast, with a real agent in a process of its own."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.base import Peer, Site, StepMissing, Tier
from benchmarks.processes.agentprocess import agent_command, is_answering, memory_limit, wait_for_slots
from benchmarks.workload import State

from stepfast.errors import AgentUnavailable
from stepfast.nodeclient import NodeClient
from stepfast.nodestatus import NodeStatus
from stepfast.torch import Checkpointer, Saved, every

JOB = "bench/peers"
_TOLD_SECONDS = 10.0


class Stepfast(Peer):
    """Copies into a slot of the agent's; the agent writes it to disk and commits it."""

    title = "Stepfast"
    tiers = ("memory", "disk")

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._waits: set[float] = set()
        self._counts: dict[str, int] = {}

    def environment(self) -> dict[str, str]:
        return {
            "STEPFAST_SOCKET": str(self._socket),
            "STEPFAST_JOB": JOB,
            # Every save is to be persisted, as the other peers' are, however soon it comes after the one before.
            "STEPFAST_SETTINGS": '{"maxToKeep": 2, "persistIntervalSeconds": 0}',
        }

    def helper_command(self) -> Sequence[str]:
        site = self.site
        limit = memory_limit(site.size_bytes, slots=site.slots, ranks=site.ranks)
        return agent_command(self._socket, self._memory, limit)

    def is_helper_ready(self) -> bool:
        return is_answering(self._socket)

    def counts(self) -> dict[str, int]:
        try:
            jobs = NodeClient(str(self._socket)).status().jobs
        except AgentUnavailable:
            return self._counts
        for job in jobs:
            self._waits |= {rank.waited_time for rank in job.ranks if rank.waited_time is not None}
            self._counts = {"skipped": job.saves.skipped, "dropped": job.saves.dropped, "waited": len(self._waits)}
        return self._counts

    def clear_memory(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self.site.storage / JOB / f"global_step{step}"

    @property
    def _memory(self) -> Path:
        return Path("/dev/shm") / f"stepfast-{self.site.key}"

    @property
    def _socket(self) -> Path:
        return self.site.folder / "agent.sock"

    def set_up(self, state: State) -> None:
        self._checkpointer = self._open(state)
        self._saved: Saved | None = None
        self._persisted = 0  # the newest step that is
        self._is_watching = False
        self._followed: set[int] = set()
        self._checkpointer.restore()
        self._checkpointer.step(0)  # tells the agent the size: slots are made while training begins
        site = self.site
        wait_for_slots(NodeClient(str(self._socket)), site.ranks * site.slots * site.size_bytes)

    def save(self, step: int) -> bool:
        self._saved = self._checkpointer.save(step)
        return self._saved.saved

    def follow(self, step: int) -> None:
        assert self._saved is not None
        self._followed.add(step)
        threading.Thread(target=self._wait, args=(self._saved,), name=f"persisted-{step}", daemon=True).start()

    def _wait(self, saved: Saved) -> None:
        saved.wait()
        self._persisted = max(self._persisted, saved.step)

    def is_persisted(self, step: int) -> bool:
        if not self._is_watching and step not in self._followed:
            self._is_watching = True
            NodeClient(str(self._socket)).watch(self._take)
        return step <= self._persisted

    def _take(self, status: NodeStatus) -> None:
        """What the agent says of steps that nobody waits for."""
        persisted = [job.latest_persisted_step or 0 for job in status.jobs if job.run == self._run]
        self._persisted = max([self._persisted, *persisted])

    def remove(self, step: int) -> None:
        """The agent keeps the newest two."""

    def close(self) -> None:
        self._checkpointer.close()

    def prepare_restore(self, tier: Tier) -> None:
        import torch.distributed.checkpoint  # noqa: F401 - nothing of it is used: as warm as the other peers' processes

    def restore(self, tier: Tier, step: int, state: State) -> None:
        checkpointer = self._open(state)
        # As a training does that is started again: the newest. If that is another, asking for this one tells why.
        restored = checkpointer.restore()
        if restored != step and checkpointer.restore(step) != step:
            raise StepMissing(f"step {restored} was restored")

    def check_restored(self, tier: Tier) -> None:
        wanted, deadline = "Memory" if tier == "memory" else "Persistent", time.monotonic() + _TOLD_SECONDS
        while (told := self._told_tier()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if told != wanted:
            raise StepMissing(f"the step was restored from {told}, and not from {wanted}")

    def _told_tier(self) -> str | None:
        """Where this process's restore came from, as it has told the agent."""
        jobs = NodeClient(str(self._socket)).status().jobs
        return next((rank.restored_tier for job in jobs if job.run == self._run for rank in job.ranks), None)

    def _open(self, state: State) -> Checkpointer:
        os.environ["STEPFAST_RUN"] = self._run
        return Checkpointer(state=state, interval=every(steps=10**9), storage_uri=self._storage_uri)

    @property
    def _run(self) -> str:
        return f"{self.site.key}-{os.getpid()}"

    @property
    def _storage_uri(self) -> str:
        return self.site.storage.as_uri()
