"""torch.save: what a training script does that uses nothing."""

from __future__ import annotations

import os

import torch
from benchmarks.peers.base import Peer, Tier, copy_into
from benchmarks.workload import State


class TorchSave(Peer):
    """Returns once the bytes are the page cache's."""

    title = "torch.save"

    def set_up(self, state: State) -> None:
        self._state = state
        self.site.storage.mkdir(exist_ok=True)

    def save(self, step: int) -> bool:
        torch.save(self._state, self.path(step))
        return True

    def restore(self, tier: Tier, step: int, state: State) -> None:
        copy_into(state, torch.load(self.path(step), weights_only=True, mmap=True))


class TorchSaveSynced(TorchSave):
    """Returns once the bytes are on disk, under a name that no half-written file ever has."""

    title = "torch.save + fsync"

    def save(self, step: int) -> bool:
        path = self.path(step)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        return True
