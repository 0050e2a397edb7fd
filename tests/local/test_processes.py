"""Finding processes by the environment that they were started with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

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


def test_a_process_in_the_middle_of_an_exec_is_not_missed(slow_processor: int) -> None:
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(slow_processor), "nice", "-n", "10",
         sys.executable, "-I", "-S", "-c", CHAIN, "60", CHAIN],
        env={**os.environ, "STEPFAST_TEST_MARK": "exec-chain"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        os.set_blocking(process.stdout.fileno(), False)
        looks = 0
        while not process.stdout.read():
            assert processes.started_with(process.pid, "STEPFAST_TEST_MARK") == "exec-chain"
            looks += 1
        assert looks > 100
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_process_that_was_given_no_environment_is_no_exec_to_wait_for() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", CHAIN, "0", ""], env={}, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"done\n"
        assert processes.started_with(process.pid, "STEPFAST_TEST_MARK") is None
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
