"""Stepfast, with a real agent in a process of its own."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.base import Peer, StepMissing, Tier
from benchmarks.processes.agentprocess import agent_command, is_answering
from benchmarks.workload import MIB, State

from stepfast.nodeclient import NodeClient
from stepfast.nodestatus import NodeStatus
from stepfast.torch import Checkpointer, Saved, every

JOB = "bench/peers"
_SLOTS_WAIT_SECONDS = 60.0


class Stepfast(Peer):
    """Copies into a slot of the agent's; the agent writes it to disk and commits it."""

    title = "Stepfast"
    tiers = ("memory", "disk")

    def environment(self) -> dict[str, str]:
        return {
            "STEPFAST_SOCKET": str(self.site.folder / "agent.sock"),
            "STEPFAST_JOB": JOB,
            "STEPFAST_SETTINGS": '{"maxToKeep": 2}',
        }

    def helper_command(self) -> Sequence[str]:
        return agent_command(self.site.folder / "agent.sock", self._memory, self._memory_limit)

    def is_helper_ready(self) -> bool:
        return is_answering(self.site.folder / "agent.sock")

    def clear_memory(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self.site.storage / JOB / f"global_step{step}"

    @property
    def _memory(self) -> Path:
        return Path("/dev/shm") / f"stepfast-{self.site.key}"

    @property
    def _memory_limit(self) -> int:
        """The agent's own records and each tensor's place in the file take a little beside the tensors."""
        return self.site.ranks * self.site.slots * (self.site.size_bytes + self.site.size_bytes // 50 + 8 * MIB)

    def set_up(self, state: State) -> None:
        self._checkpointer = self._open(state)
        self._saved: Saved | None = None
        self._persisted = 0  # the newest step that is
        self._is_watching = False
        self._followed: set[int] = set()
        self._checkpointer.restore()
        self._checkpointer.step(0)  # tells the agent the size: slots are made while training begins
        self._await_slots()

    def _await_slots(self) -> None:
        client, deadline = NodeClient(os.environ["STEPFAST_SOCKET"]), time.monotonic() + _SLOTS_WAIT_SECONDS
        expected = self.site.ranks * self.site.slots * self.site.size_bytes
        while time.monotonic() < deadline:
            if client.status().memory_used_bytes >= expected:
                return
            time.sleep(0.05)
        raise TimeoutError(f"the agent made no {self.site.slots} slots in {_SLOTS_WAIT_SECONDS:.0f} s")

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
            NodeClient(os.environ["STEPFAST_SOCKET"]).watch(self._take)
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

    def _open(self, state: State) -> Checkpointer:
        os.environ["STEPFAST_RUN"] = self._run
        return Checkpointer(state=state, interval=every(steps=10**9), storage_uri=self._storage_uri)

    @property
    def _run(self) -> str:
        return f"{self.site.key}-{os.getpid()}"

    @property
    def _storage_uri(self) -> str:
        return self.site.storage.as_uri()
