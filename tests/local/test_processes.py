"""Finding processes by the environment that they were started with."""

from __future__ import annotations

import os
import subprocess
import sys

from stepfast_operator.backends import processes

# Replaces itself by itself, some hundred times, then waits for its input to end.
CHAIN = """
import os, sys
n, code = int(sys.argv[1]), sys.argv[2]
if n:
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, str(n - 1), code])
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_in_the_middle_of_an_exec_is_not_missed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CHAIN, "150", CHAIN],
        env={**os.environ, "STEPFAST_TEST_MARK": "exec-chain"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
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
