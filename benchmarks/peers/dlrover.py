"""DLRover's flash checkpoint, with its saver in a process of its own, as dlrover-run has it."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Peer, StepMissing, Tier, copy_into
from benchmarks.workload import State

_SAVER = """
import sys; sys.path.append({folder!r})
import torch; torch.set_num_threads(1)
from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save
start_async_save()
"""


class DLRoverFlash(Peer):
    """Copies into shared memory; the saver writes that to disk, and names the step in a file once it is there."""

    title = "DLRover flash checkpoint"
    tiers = ("memory", "disk")
    installed = True

    def environment(self) -> dict[str, str]:
        # The role says that a saver is there already.
        return {"ROLE_NAME": "dlrover-trainer", "TORCHELASTIC_RUN_ID": self.site.key}

    def helper_command(self) -> Sequence[str]:
        from benchmarks.peers.install import FOLDER

        return [sys.executable, "-c", _SAVER.format(folder=str(FOLDER.absolute()))]

    def is_helper_ready(self) -> bool:
        return any(self._sockets.glob("*factory*"))

    def clear_memory(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)
        for segment in Path("/dev/shm").glob(f"*{self.site.key}*"):
            segment.unlink()

    def path(self, step: int) -> Path:
        return self.site.storage / str(step)

    @property
    def _sockets(self) -> Path:
        return Path("/tmp/ckpt_sock") / self.site.key

    def set_up(self, state: State) -> None:
        logging.disable(logging.WARNING)
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # type: ignore[import-not-found]

        self.site.storage.mkdir(exist_ok=True)
        self._state = state
        self._checkpointer: Any = DdpCheckpointer(str(self.site.storage))

    def save(self, step: int) -> bool:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # type: ignore[import-not-found]

        self._checkpointer.save_checkpoint(step, self._state, storage_type=StorageType.DISK)
        # The call tells nobody that the saver was busy and nothing was saved.
        return bool(self._checkpointer._engine._cached_step == step)

    def is_persisted(self, step: int) -> bool:
        try:
            latest = (self.site.storage / "dlrover_latest.txt").read_text()
        except FileNotFoundError:
            return False
        return latest.isdigit() and int(latest) >= step

    def prepare_restore(self, tier: Tier) -> None:
        self.set_up({})

    def restore(self, tier: Tier, step: int, state: State) -> None:
        if tier == "memory":
            _, states = self._checkpointer._engine.get_state_dict_from_memory()
            if not states:
                raise StepMissing("the saver has nothing in memory")
            restored = next(iter(states.values()))
        else:
            restored = self._checkpointer.load_checkpoint()
            if not restored:
                raise StepMissing("load_checkpoint() returned nothing")
        copy_into(state, restored)
