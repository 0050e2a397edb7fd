"""This project as a peer of another benchmark's harness: `bench_peers.py --peer benchmarks/referee.py:Stepfast`.

That harness puts its own module into place as `bench_peers` before it loads this file; nothing else here knows it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import bench_peers  # type: ignore[import-not-found]

_SLOTS = 3
_JOB = "bench/referee"
_REMOVING_MEMORY = """(while kill -0 $$ 2>/dev/null; do sleep 0.2; done; rm -rf "$0") & exec "$@\""""
"""The harness ends the agent with SIGKILL: what it leaves in memory is removed once its process is gone."""


class Stepfast(bench_peers.Peer):  # type: ignore[misc]
    """An agent in a process of its own; restored from its memory, and without it from the storage."""

    desc = "Stepfast: staged in shared memory, persisted and committed by the agent"
    tiers = ("memory", "disk")

    @classmethod
    def agent_cmd(cls, ctx: Any) -> list[str]:
        limit = _SLOTS * (int(ctx.size * 1.05) + 64 * 2**20)
        memory = f"/dev/shm/stepfast-referee-{os.getpid()}"
        return [
            "sh", "-c", _REMOVING_MEMORY, memory,
            sys.executable, "-m", "stepfast_sidecar", "--socket", f"{ctx.dir}/agent.sock",
            "--memory-dir", memory, "--memory-limit", str(limit), "--node", "referee",
        ]  # fmt: skip

    @classmethod
    def env(cls, ctx: Any) -> dict[str, str]:
        return {
            "STEPFAST_SOCKET": f"{ctx.dir}/agent.sock",
            "STEPFAST_JOB": _JOB,
            "STEPFAST_SETTINGS": '{"maxToKeep": 2}',
        }

    def path(self, step: int) -> str:
        return f"{self.ctx.dir}/storage/{_JOB}/global_step{step}"

    def delete(self, step: int) -> None:
        """The agent keeps the newest two."""

    def setup(self, sd: dict[str, Any]) -> None:
        self._checkpointer = self._open(sd)
        self._persisted: set[int] = set()
        self._checkpointer.restore()
        self._checkpointer.step(0)

    def save(self, step: int, sd: dict[str, Any]) -> None:
        saved = self._checkpointer.save(step)

        def follow() -> None:
            saved.wait()
            self._persisted.add(step)

        threading.Thread(target=follow, daemon=True).start()

    def done(self, step: int) -> bool:
        return step in self._persisted

    def teardown(self) -> None:
        self._checkpointer.close()

    def restore(self, tier: str, step: int, dst: dict[str, Any]) -> None:
        if tier == "disk":
            del os.environ["STEPFAST_SOCKET"]  # without an agent the storage is all that there is
        restored = self._open(dst).restore(step)
        if restored != step:
            raise RuntimeError(f"step {restored} was restored, not {step}")

    def _open(self, state: dict[str, Any]) -> Any:
        from stepfast.torch import Checkpointer, every

        os.environ["STEPFAST_RUN"] = f"referee-{os.getpid()}"
        storage = Path(self.ctx.dir, "storage").absolute().as_uri()
        return Checkpointer(state=state, interval=every(steps=10**9), storage_uri=storage)
