"""What this machine takes for the same work with nothing of ours in it: `python -m benchmarks.controls`.

Where a goal is missed, these say how much of it the machine itself is: shared memory that was filled and then left
alone is read (as a restore does, and as a first copy writes it), and a file is written past the page cache beside a
training loop (as a persister does).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.cells import WORK
from benchmarks.machine import direct_write
from benchmarks.processes.trainer import TrainingLoop
from benchmarks.results import RESULTS, add_record
from benchmarks.workload import MIB

SIZES = (1024 * MIB, 4096 * MIB)
QUICK_SIZES = (32 * MIB,)
_RANGE_BYTES = 16 * MIB
_READ_BYTES = MIB
_TIMES_READ = 3  # the second time, Linux moves every page to its list of active ones, which takes as long again
_NICENESS = 19  # the persister's


def measure_controls(
    sizes: Sequence[int], repeats: int, left_alone_seconds: float = 20.0, results: Path = RESULTS
) -> None:
    """Adds a `control` record for each size, and one of the writes."""
    for size in sizes:
        reads = [_read_left_alone(size, left_alone_seconds) for _ in range(repeats)]
        print(json.dumps(add_record("control", results=results, what="read", size_bytes=size,
                                    left_alone_seconds=left_alone_seconds, reads=reads)))  # fmt: skip
    writes = _write_beside_training(sizes[0], 3 * repeats)
    print(json.dumps(add_record("control", results=results, what="write", size_bytes=sizes[0], writes=writes)))


def _read_left_alone(size: int, seconds: float) -> list[list[float]]:
    """Seconds of each 16 MiB, in order, each time that they are read."""
    descriptor = os.memfd_create("control")
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as shared:
            _fill(shared)
        time.sleep(seconds)
        buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        buffer[:] = bytes(_READ_BYTES)
        return [_read(descriptor, size, buffer) for _ in range(_TIMES_READ)]
    finally:
        os.close(descriptor)


def _fill(memory: mmap.mmap) -> None:
    block = os.urandom(_READ_BYTES)
    for offset in range(0, len(memory), len(block)):
        memory[offset : offset + len(block)] = block


def _read(descriptor: int, size: int, buffer: memoryview) -> list[float]:
    taken = []
    for first in range(0, size, _RANGE_BYTES):
        begin = time.perf_counter()
        for offset in range(first, min(first + _RANGE_BYTES, size), _READ_BYTES):
            os.preadv(descriptor, [buffer], offset)
        taken.append(time.perf_counter() - begin)
    return taken


def _write_beside_training(size: int, repeats: int) -> list[dict[str, float]]:
    """The seconds of each write, and of training that were lost meanwhile."""
    torch.set_num_threads(1)
    loop, found = TrainingLoop(), []
    loop.train_for(1.0)
    WORK.mkdir(parents=True, exist_ok=True)
    writer = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--write", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer, writer.stdin, writer.stdout:
        writer.stdout.readline()  # its memory is there
        for _ in range(repeats):
            os.sync()
            rate = loop.train_for(1.0)
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            begin, steps = time.perf_counter(), 0
            while not select.select([writer.stdout], [], [], 0)[0]:
                loop.train_step()
                steps += 1
            told = writer.stdout.readline()
            whole = time.perf_counter() - begin
            rate = (rate + loop.train_for(1.0)) / 2
            found.append({"seconds": float(told), "lost_seconds": whole - steps / rate})
    return found


def _write_when_told(size: int) -> None:
    """A line on standard output for each on standard input: the seconds of a write."""
    os.nice(_NICENESS)
    with mmap.mmap(-1, size) as source:
        _fill(source)
        print("ready", flush=True)
        for _ in sys.stdin.buffer:
            print(direct_write(WORK, size, source), flush=True)


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 MiB, once")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        _write_when_told(arguments.write)
    elif arguments.quick:
        measure_controls(QUICK_SIZES, 1, 1.0, arguments.results)
    else:
        measure_controls(SIZES, arguments.repeats, results=arguments.results)


if __name__ == "__main__":
    main()
