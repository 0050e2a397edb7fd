"""torchsnapshot's asynchronous take."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.base import Peer, Tier, copy_into
from benchmarks.peers.processgroup import join_alone
from benchmarks.workload import State


class TorchSnapshotAsync(Peer):
    """Threads of the training process write one file per tensor."""

    title = "torchsnapshot async_take"
    installed = True

    def set_up(self, state: State) -> None:
        join_alone()
        self._pending: dict[int, Any] = {}
        self._application = _application(state)

    def save(self, step: int) -> bool:
        from torchsnapshot import Snapshot  # type: ignore[import-not-found]

        self._pending[step] = Snapshot.async_take(str(self.path(step)), self._application)
        return True

    def is_persisted(self, step: int) -> bool:
        pending = self._pending[step]
        if not pending.done():
            return False
        pending.wait()
        return True

    def close(self) -> None:
        for pending in self._pending.values():
            pending.wait()

    def prepare_restore(self, tier: Tier) -> None:
        join_alone()
        import torchsnapshot  # noqa: F401 - what takes seconds is not part of the restore

    def restore(self, tier: Tier, step: int, state: State) -> None:
        from torchsnapshot import Snapshot

        application = _application(state)
        Snapshot(str(self.path(step))).restore(application)
        copy_into(state, dict(application["state"]))


def _application(state: State) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {"state": StateDict(**state)}
