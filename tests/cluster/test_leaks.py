"""What `make soak` calls a leak."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from testsoak.leaks import LEAST_SAMPLES, Usage, growths, trends, usage_of

MIB = 1 << 20


def samples(
    *memory_mib: float, started: str = "first", files: int = 20, sockets: int = 5, component: str = "agent"
) -> list[Usage]:
    return [
        Usage(
            component=component, started=started, memory_bytes=int(each * MIB), files=files, sockets=sockets
        )
        for each in memory_mib
    ]  # fmt: skip


def test_what_goes_up_and_down_is_no_leak() -> None:
    assert list(growths(trends(samples(*[100, 140, 90] * 20)))) == []


def test_what_goes_up_and_up_is_one() -> None:
    (found,) = growths(trends(samples(*range(100, 160))))
    assert found.startswith("agent: memory_bytes grew from ")


def test_descriptors_are_looked_at_as_well() -> None:
    seen = [one for number in range(60) for one in samples(100, files=20 + number, sockets=5 + number)]
    files, sockets = growths(trends(seen))
    assert "files grew" in files
    assert "sockets grew" in sockets


def test_a_component_that_begins_anew_is_not_held_against_its_life_before() -> None:
    assert list(growths(trends([*samples(*[50] * 20), *samples(*[150] * 20, started="second")]))) == []


def test_what_was_not_seen_long_enough_is_told() -> None:
    (found,) = growths(trends(samples(*[100] * (LEAST_SAMPLES - 1))))
    assert found == f"agent: only {LEAST_SAMPLES - 1} samples of its longest life"


def test_children_count_and_so_do_their_sockets() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with (
        socket.socket() as one,
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[one.fileno()]
        ) as parent,
    ):
        assert parent.stdout is not None
        parent.stdout.readline()
        alone = int(Path(f"/proc/{parent.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        usage = usage_of(Path("/proc"), parent.pid, component="both", started="now")
        parent.communicate(b"\n")
    assert usage is not None
    assert usage.memory_bytes > 1.5 * alone
    assert usage.sockets == 1  # the child was given none
    assert usage.files >= 7
    assert usage_of(Path("/proc"), parent.pid, component="both", started="now") is None
