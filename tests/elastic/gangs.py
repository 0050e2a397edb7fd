"""Gangs of processes that run a function of a test each as a rank of torch.distributed, over gloo on this machine.

They are forked from a server that has torch already; what does not end in time is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 600

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "stepfast.torch.elastic_pipeline", "pytest"])


def run_gang(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank's `function(*arguments)` returned, by rank. A rank that fails fails the test, with its trace."""
    said = _run(world_size, function, arguments)
    failures = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(said) if kind != "result"]
    assert not failures, "\n".join(failures)
    return [result for _, result in said]


def run_gang_that_may_die(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
    """As `run_gang`; None where a rank was killed. What its end does to the other ranks is no failure."""
    said = _run(world_size, function, arguments)
    if any(kind == "death" for kind, _ in said):
        return None
    assert all(kind == "result" for kind, _ in said), said
    return [result for _, result in said]


def be_rank(folder: Path, job: str, attempt: int) -> None:
    """This process' surroundings, as a launcher would say them: no agent, a storage in that folder."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world_size, STEPFAST_JOB=f"tests/{job}",
        STEPFAST_RUN=f"{job}-{attempt}", STEPFAST_STORAGE_URI=folder.as_uri(),
    )  # fmt: skip


def _run(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """What each rank said; all are ended when one of them has died."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(
                    target=_rank, args=(theirs, Path(folder) / "store", (rank, world_size), function, arguments)
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _all_said([ours for _, ours in ranks])
        finally:
            for process, ours in ranks:
                process.kill()
                process.join()
                ours.close()


def _all_said(pipes: Sequence[Connection]) -> list[tuple[str, Any]]:
    deadline = time.monotonic() + SECONDS
    said: dict[int, tuple[str, Any]] = {}
    left = dict(enumerate(pipes))
    while left and not any(kind == "death" for kind, _ in said.values()):
        ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            said.update(dict.fromkeys(left, ("silence", f"said nothing within {SECONDS} seconds")))
            break
        for rank in [rank for rank, pipe in left.items() if pipe in ready]:
            said[rank] = _said(left.pop(rank))
    return [said.get(rank, ("silence", "ended with the others")) for rank in range(len(pipes))]


def _said(pipe: Connection) -> tuple[str, Any]:
    try:
        said: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "death", "ended without a word"
    return said


def _rank(
    pipe: Connection, store: Path, place: tuple[int, int], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the server had is no garbage of this process: to look through it copies its pages
    torch.set_num_threads(1)
    rank, world_size = place
    try:
        timeout = timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", f"file://{store}", timeout=timeout, rank=rank, world_size=world_size)
        said = "result", function(*arguments)
        dist.barrier()  # none ends while another still talks to it
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - it is told, and fails the test
        said = "failure", traceback.format_exc()
    pipe.send_bytes(pickle.dumps(said))  # torch's own pipes share memory, which would have to outlive this process
