"""Finding processes by the environment that they were started with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from stepfast_operator.backends import processes

# Replaces itself by itself, again and again, then waits for its input to end.
CHAIN = """
import os, sys
n, code = int(sys.argv[1]), sys.argv[2]
if n:
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, str(n - 1), code])
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def slow_processor() -> Iterator[int]:
    """A processor that another process keeps busy: what runs on it with a lower priority is often interrupted."""
    processor = max(os.sched_getaffinity(0))
    busy = subprocess.Popen(
        ["taskset", "--cpu-list", str(processor), sys.executable, "-I", "-S", "-c", "while True: pass"]
    )
    try:
        yield processor
    finally:
        busy.kill()
        busy.wait()


@contextmanager
def chain(execs: int, *before: str, environment: dict[str, str]) -> Iterator[tuple[int, IO[bytes]]]:
    """A process that replaces itself so many times, started by way of `before`: its pid and output."""
    command = [*before, sys.executable, "-I", "-S", "-c", CHAIN, str(execs), CHAIN]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout
        finally:
            process.kill()


def test_a_process_in_the_middle_of_an_exec_is_not_missed(slow_processor: int) -> None:
    often_interrupted = ("taskset", "--cpu-list", str(slow_processor), "nice", "-n", "10")
    marked = {**os.environ, "STEPFAST_TEST_MARK": "exec-chain"}
    with chain(20, *often_interrupted, environment=marked) as (pid, output):
        os.set_blocking(output.fileno(), False)
        looks = 0
        while not output.read():
            assert processes.started_with(pid, "STEPFAST_TEST_MARK") == "exec-chain"
            looks += 1
        assert looks > 30


def test_a_process_that_was_given_no_environment_is_no_exec_to_wait_for() -> None:
    with chain(0, environment={}) as (pid, output):
        assert output.readline() == b"done\n"
        assert processes.started_with(pid, "STEPFAST_TEST_MARK") is None
