"""What `make soak` calls a leak."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from testsoak.leaks import LEAST_SAMPLES, WARM_UP_SAMPLES, Usage, growths, trends, usage_of

MIB = 1 << 20


def samples(
    *memory_mib: float, started: str = "first", component: str = "agent on n1", kind: str = "agent", **counts: int
) -> list[Usage]:
    taken = {"files": 20, "sockets": 5, **counts}
    return [
        Usage(
            kind=kind, component=component, started=started, memory_bytes=int(each * MIB), files=taken["files"],
            sockets=taken["sockets"],
        )
        for each in memory_mib
    ]  # fmt: skip


OPERATOR = samples(*[90] * 40, component="operator: operator", kind="operator")


def found(*seen: Usage) -> list[str]:
    return list(growths(trends([*OPERATOR, *seen])))


def test_what_goes_up_and_down_is_no_leak() -> None:
    assert found(*samples(*[100, 140, 90] * 40)) == []


def test_what_goes_up_and_up_is_one() -> None:
    [growth] = found(*samples(*range(100, 220)))
    assert growth.startswith("agent on n1: memory_bytes grew from ")


def test_an_agent_fills_until_the_first_jobs_have_left_it() -> None:
    assert found(*samples(*range(100, 130), *[130] * 90)) == []


def test_descriptors_are_looked_at_as_well() -> None:
    seen = [one for number in range(120) for one in samples(100, files=20 + number, sockets=5 + number)]
    files, sockets = found(*seen)
    assert "files grew" in files
    assert "sockets grew" in sockets


def test_a_component_that_begins_anew_is_not_held_against_its_life_before() -> None:
    assert found(*samples(*[50] * 60), *samples(*[150] * 60, started="second")) == []


def test_one_that_lives_too_short_says_nothing_beside_one_that_lives_long() -> None:
    assert found(*samples(*[100] * 60), *samples(*range(40), component="agent on n2")) == []


def test_what_was_not_seen_long_enough_is_told() -> None:
    warm = WARM_UP_SAMPLES["agent"]
    assert found(*samples(*[100] * (warm + LEAST_SAMPLES))) == []
    assert found(*samples(*[100] * (warm + LEAST_SAMPLES - 1))) == [
        "no agent lived long enough to tell whether it grows"
    ]


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
        usage = usage_of(Path("/proc"), parent.pid, kind="agent", component="both", started="now")
        parent.communicate(b"\n")
    assert usage is not None
    assert usage.memory_bytes > 1.5 * alone
    assert usage.sockets == 1  # the child was given none
    assert usage.files >= 7
    assert usage_of(Path("/proc"), parent.pid, kind="agent", component="both", started="now") is None
