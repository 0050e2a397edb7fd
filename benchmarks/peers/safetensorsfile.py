"""safetensors: one file, written by its own code."""

from __future__ import annotations

from benchmarks.peers.base import Peer, Tier
from benchmarks.workload import State, tensors_of
from safetensors.torch import load_file, save_file


class SafetensorsFile(Peer):
    """Returns once the bytes are the page cache's."""

    title = "safetensors"

    def set_up(self, state: State) -> None:
        self._tensors = dict(tensors_of(state))
        self.site.storage.mkdir(exist_ok=True)

    def save(self, step: int) -> bool:
        save_file(self._tensors, self.path(step))
        return True

    def restore(self, tier: Tier, step: int, state: State) -> None:
        loaded = load_file(self.path(step))
        for name, tensor in tensors_of(state):
            tensor.copy_(loaded[name])
