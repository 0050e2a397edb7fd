"""What a benchmark asks of a peer, and where one measurement (a cell) of it takes place. Knows no peer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from benchmarks.workload import State

Tier = Literal["memory", "disk"]


class StepMissing(Exception):
    """The tier that was asked does not hold the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a cell's processes meet.

    key: names the cell on this machine: in process environments, run ids and shared memory.
    size_bytes: of the state's tensors.
    slots: how many copies of the state the peer may keep in memory, where it can be told.
    ranks: how many training processes there are, each with a state of that size.
    """

    folder: Path
    key: str
    size_bytes: int
    slots: int = 3
    ranks: int = 1

    @property
    def storage(self) -> Path:
        """The folder that stands for the storage."""
        return self.folder / "storage"

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @staticmethod
    def from_text(text: str) -> Site:
        values: dict[str, Any] = json.loads(text)
        return Site(**{**values, "folder": Path(values["folder"])})


class Peer(Protocol):
    """One way to save and restore. An instance lives in one process, and sees only its own side of the calls.

    title: what a table calls it.
    tiers: where a new process can restore from.
    overlaps: staging goes on after `save` returned, until `sync_point`; training may run a step meanwhile.
    installed: needs the folder that `benchmarks.peers.install` fills.
    """

    site: Site
    title: ClassVar[str]
    tiers: ClassVar[tuple[Tier, ...]] = ("disk",)
    overlaps: ClassVar[bool] = False
    installed: ClassVar[bool] = False

    def __init__(self, site: Site) -> None:
        self.site = site

    # ------------------------------------------------------------ by whoever runs the cell

    def environment(self) -> dict[str, str]:
        """Variables of all processes of the cell."""
        return {}

    def helper_command(self) -> Sequence[str] | None:
        """The process that has to be there before the trainer, and survives it."""
        return None

    def is_helper_ready(self) -> bool:
        return True

    def counts(self) -> dict[str, int]:
        """What the helper says of the saves so far, if one can be asked: those `skipped`, `dropped` (given up for newer
        ones before they were persisted) and `waited` for. Called after each save.
        """
        return {}

    def clear_memory(self) -> None:
        """Empties the memory tier while no helper runs: what is restored after it comes from disk."""

    def files(self, step: int) -> list[Path]:
        """The persisted step's files."""
        path = self.path(step)
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def path(self, step: int) -> Path:
        """The persisted step: a file or a folder."""
        return self.site.storage / f"step-{step}"

    # ------------------------------------------------------------ in the training process

    def set_up(self, state: State) -> None:
        """Once, before training: whatever a training script does up front. The same state is saved each time."""

    def save(self, step: int) -> bool:
        """Training stands still until this returns; False when the peer skipped the save."""
        raise NotImplementedError

    def sync_point(self) -> None:
        """Before the state changes, where `overlaps`."""

    def follow(self, step: int) -> None:
        """The step was saved, and will be waited for: where steps may be given up for newer ones, this one may not."""

    def is_persisted(self, step: int) -> bool:
        """Whether the peer calls the step durable by now; asked between training steps, so it must not wait."""
        return True

    def remove(self, step: int) -> None:
        """Deletes a persisted step, where the peer does not do that by itself."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """The end of training."""

    # ------------------------------------------------------------ in a new process

    def prepare_restore(self, tier: Tier) -> None:
        """Imports and connections, which are timed apart."""

    def restore(self, tier: Tier, step: int, state: State) -> None:
        """Fills the caller's own tensors. Raises StepMissing, or what the peer raises."""
        raise NotImplementedError

    def check_restored(self, tier: Tier) -> None:
        """After `restore`, and not timed: raises StepMissing when the step came from another tier."""


def copy_into(state: State, restored: State) -> None:
    """Copies what a peer returned into the caller's tensors; those that it filled itself are left alone."""
    for name, value in state.items():
        if isinstance(value, dict):
            copy_into(value, restored[name])
        elif isinstance(value, torch.Tensor) and value is not restored[name]:
            value.copy_(restored[name])
