"""Gangs of processes that run a function of a test each as a rank of torch.distributed, over gloo on this machine.

They are forked from a server that has torch already; what does not end in time is killed.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "stepfast.torch.elastic_pipeline"])


def run_gang(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank's `function(*arguments)` returned, by rank. A rank that fails fails the test, with its trace."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank,
                args=(theirs, Path(folder) / "store", (rank, world_size), function, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + SECONDS
        try:
            said = [_said(ours, deadline) for _, ours in ranks]
        finally:
            for process, ours in ranks:
                process.kill()
                process.join()
                ours.close()
    failures = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(said) if kind == "failure"]
    assert not failures, "\n".join(failures)
    return [result for _, result in said]


def _said(pipe: Connection, deadline: float) -> tuple[str, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return "failure", f"said nothing within {SECONDS} seconds"
    try:
        said: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "failure", "ended without a word"
    return said


def _rank(
    pipe: Connection, store: Path, place: tuple[int, int], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
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
