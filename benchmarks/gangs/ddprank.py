"""One rank of a gang whose ranks hold the same state, saving it in one of several ways. A child of
`benchmarks.gangs.ddp`.

Every rank takes part in each save; rank 0 gathers what each of them measured and tells it.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from benchmarks.machine import PlainCopy
from benchmarks.processes.cellprocess import Teller
from benchmarks.processes.trainer import TrainingLoop
from benchmarks.workload import State, size_of, stamp, state_of, tensors_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from stepfast.torch import Checkpointer, every

_IDLE_SECONDS = 0.5


class Way(Protocol):
    """How a gang saves. `planning_seconds`: of the latest save on this rank, where it can be seen."""

    planning_seconds: float | None

    def __init__(self, state: State, storage: Path) -> None: ...

    def save(self, step: int) -> None: ...

    def wait(self, step: int) -> None:
        """Until the step is persisted."""

    def close(self) -> None: ...


class RankZero:
    """Rank 0 writes all with torch.save; the others wait for it."""

    planning_seconds: float | None = None

    def __init__(self, state: State, storage: Path) -> None:
        self._state, self._storage = state, storage

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            torch.save(self._state, self._storage / f"step-{step}-rank-0")
        dist.barrier()

    def wait(self, step: int) -> None:
        """It has been written."""

    def close(self) -> None:
        """Holds nothing."""


class _TimedPlanner(DefaultSavePlanner):
    """Says how long it took from its first call to its last: planning, and meeting the other ranks for it."""

    def set_up_planner(self, *arguments: Any, **named: Any) -> None:
        self._begin = time.perf_counter()
        super().set_up_planner(*arguments, **named)

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        self.seconds = time.perf_counter() - self._begin
        return plan


class Dcp:
    """DCP, blocking."""

    planning_seconds: float | None = None

    def __init__(self, state: State, storage: Path) -> None:
        self._state, self._storage = state, storage

    def save(self, step: int) -> None:
        planner = _TimedPlanner()
        save(self._state, storage_writer=FileSystemWriter(self._storage / f"step-{step}"), planner=planner)
        self.planning_seconds = planner.seconds

    def wait(self, step: int) -> None:
        """It has been written."""

    def close(self) -> None:
        """Holds nothing."""


class DcpProcess(Dcp):
    """DCP: staged into shared memory, persisted by a process of each rank."""

    def __init__(self, state: State, storage: Path) -> None:
        super().__init__(state, storage)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))
        self._upload: Future[Any] | None = None

    def save(self, step: int) -> None:
        response = async_save(
            self._state,
            storage_writer=FileSystemWriter(self._storage / f"step-{step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        self._upload = response if isinstance(response, Future) else response.upload_completion

    def wait(self, step: int) -> None:
        if self._upload is not None:
            self._upload.result()

    def close(self) -> None:
        self._stager.close()


class StepfastGang:
    """Stepfast: the state is declared replicated, so each rank stages its share of it.

    What comes nearest to planning is timed: what the ranks agree on before a save, and the layout of their files.
    """

    def __init__(self, state: State, storage: Path) -> None:
        self.planning_seconds: float | None = None
        self._checkpointer = Checkpointer(
            state=state, replicated=("state",), interval=every(steps=10**9), storage_uri=storage.as_uri()
        )
        self._checkpointer.restore()
        self._checkpointer.step(0)
        # Nothing public tells of either by itself.
        self._time(self._checkpointer._gang, "consult")
        self._time(self._checkpointer._planner, "prepare")

    def _time(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.planning_seconds = (self.planning_seconds or 0.0) + time.perf_counter() - begin

        setattr(owner, name, timed)

    def save(self, step: int) -> None:
        self.planning_seconds = None
        self._saved = self._checkpointer.save(step)

    def wait(self, step: int) -> None:
        self._saved.wait()

    def close(self) -> None:
        self._checkpointer.close()


WAYS: dict[str, type[Way]] = {
    "torch_save": RankZero,
    "dcp_save": Dcp,
    "dcp_async_process": DcpProcess,
    "stepfast": StepfastGang,
}


def main() -> None:
    """Saves, and on rank 0 tells `save` with one value per rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    teller = Teller()
    dist.init_process_group("gloo")
    state = state_of(arguments.layout)
    tensors = [tensor for _, tensor in tensors_of(state)]
    limit, loop = PlainCopy(tensors), TrainingLoop()
    limit.copy()
    way = WAYS[arguments.way](state, arguments.storage)
    if dist.get_rank() == 0:
        teller.tell("built", bytes=size_of(state), tensors=len(tensors))
    for step in range(1, arguments.saves + 1):
        measured = _gathered(_save(step, state, way, limit, loop))
        if dist.get_rank() == 0:
            teller.tell("save", step=step, **measured)
    way.close()
    dist.barrier()
    os._exit(0)


def _save(step: int, state: State, way: Way, limit: PlainCopy, loop: TrainingLoop) -> dict[str, float | None]:
    """One save of this rank, begun together with the others'."""
    stamp(state, step)
    loop.train_for(_IDLE_SECONDS)
    plain = limit.copy()
    dist.barrier()
    begin = time.perf_counter()
    way.save(step)
    stall = time.perf_counter() - begin
    stamp(state, -step)
    way.wait(step)
    persist = time.perf_counter() - begin
    return {
        "plain_seconds": plain,
        "stall_seconds": stall,
        "persist_seconds": persist,
        "planning_seconds": way.planning_seconds,
    }


def _gathered(mine: dict[str, float | None]) -> dict[str, list[float | None]]:
    """Every rank's values, in the order of ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {name: [values[name] for values in ranks] for name in mine}


if __name__ == "__main__":
    main()
