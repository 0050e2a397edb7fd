"""Ways to save to a Blob Storage that somebody else has started: where it is, the environment says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.peers.base import Peer
from benchmarks.peers.stepfastpeer import Stepfast
from benchmarks.stores.azurite import Azurite
from benchmarks.workload import State

from stepfast.storage.open import OPTIONS_VARIABLE

_CONTAINER_VARIABLE = "STEPFAST_BENCH_CONTAINER"


@contextmanager
def new_container(azurite: Azurite, port: int | None = None) -> Iterator[str]:
    """A container in which the peers here save, in cells that are begun meanwhile; `port`: of a proxy before it."""
    container = azurite.new_container()
    values = {
        _CONTAINER_VARIABLE: container,
        OPTIONS_VARIABLE: json.dumps({"connection_string": azurite.connection_string(port)}),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield container
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class TorchSaveToBlob(Peer):
    """torch.save into a file of adlfs', each rank its own: what a training script does that uses nothing."""

    title = "torch.save to Blob Storage"
    tiers = ()

    def set_up(self, state: State) -> None:
        import adlfs

        self._state = state
        options = json.loads(os.environ[OPTIONS_VARIABLE])
        self._files: Any = adlfs.AzureBlobFileSystem(**options, use_listings_cache=False)
        # The first request opens connections; a training's first save is not its only one.
        self._files.pipe_file(self._name(0), b"warm")

    def save(self, step: int) -> bool:
        with self._files.open(self._name(step), "wb") as file:
            torch.save(self._state, file)
        return True

    def remove(self, step: int) -> None:
        self._files.rm_file(self._name(step))

    def _name(self, step: int) -> str:
        return f"{os.environ[_CONTAINER_VARIABLE]}/step-{step}-rank-{os.environ.get('RANK', '0')}"


class StepfastToBlob(Stepfast):
    """Copies into a slot of the agent's; the agent uploads it and commits it."""

    title = "Stepfast to Blob Storage"

    @property
    def _run(self) -> str:
        return f"{self.site.key}-1"  # all ranks' own

    @property
    def _storage_uri(self) -> str:
        return f"abfs://{os.environ[_CONTAINER_VARIABLE]}/jobs"
