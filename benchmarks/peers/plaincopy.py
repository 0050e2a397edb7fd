"""The limit as if it were a peer: one copy into warm shared memory, which nobody can restore."""

from __future__ import annotations

from benchmarks.machine import PlainCopy
from benchmarks.peers.base import Peer
from benchmarks.workload import State, tensors_of


class PlainCopyPeer(Peer):
    """What no save can be faster than."""

    title = "plain copy into warm shared memory"
    tiers = ()

    def set_up(self, state: State) -> None:
        self._copy = PlainCopy([tensor for _, tensor in tensors_of(state)])
        self._copy.copy()

    def save(self, step: int) -> bool:
        self._copy.copy()
        return True
