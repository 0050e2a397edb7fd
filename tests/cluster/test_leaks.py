"""What `make soak` calls a leak."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from testsoak.leaks import LEAST_SAMPLES, WARM_UP_SAMPLES, Usage, leaks, peers_of, rests, trends, usage_of

MIB = 1 << 20


def usage(component: str = "agent on n1: agent", *, started: str = "first", **taken: int) -> Usage:
    whole = {"memory_bytes": 60 * MIB, "files": 20, "sockets": 5, "processes": 1, **taken}
    return Usage(kind=component.partition(" ")[0].strip(":"), component=component, started=started, **whole)


OTHERS = [usage("agent on n2: agent", memory_bytes=64 * MIB), usage("operator: operator")]
LONG = [usage(which) for which in ("agent on n1: agent", "operator: operator") for _ in range(60)]


def found(*after: Usage, whole: Sequence[Usage] = LONG) -> list[str]:
    return list(leaks(rests([usage(), *OTHERS], after), trends(whole)))


def test_what_is_as_it_was_at_rest_is_no_leak_however_it_was_seen_beside_that() -> None:
    busy = usage(memory_bytes=900 * MIB, files=200, sockets=60, processes=12)
    assert found(busy, usage(), busy, *OTHERS) == []


@pytest.mark.parametrize(
    ("measure", "grown", "margin"),
    [("memory_bytes", 100 * MIB, 97 * MIB), ("files", 34, 31), ("sockets", 16, 13), ("processes", 2, 1)],
)
def test_what_is_more_at_rest_is_one(measure: str, grown: int, margin: int) -> None:
    assert found(usage(**{measure: margin})) == []
    [leak] = found(usage(**{measure: grown}), *OTHERS)
    assert leak.startswith(f"agent on n1: agent: {measure} at rest grew from ")


def test_an_agent_is_held_against_the_largest_there_was_and_the_operator_against_itself() -> None:
    assert found(usage("agent on n3: agent", started="later", memory_bytes=96 * MIB)) == []
    assert len(found(usage("operator: operator", memory_bytes=96 * MIB))) == 1


def test_what_was_not_seen_long_enough_is_told() -> None:
    operator = [usage("operator: operator")] * 60
    least = WARM_UP_SAMPLES["agent"] + LEAST_SAMPLES
    assert found(whole=[usage()] * least + operator) == []
    short = [*[usage()] * (least - 1), *[usage(started="second")] * 5, *operator]
    assert found(whole=short) == ["no agent lived long enough to tell whether it leaks"]


def test_a_trend_is_of_the_longest_life_once_it_was_warm() -> None:
    warm = WARM_UP_SAMPLES["operator"]
    life = [usage("operator: operator", files=number) for number in range(warm + 30)]
    [trend] = trends([*[usage("operator: operator", started="other", files=1000)] * 9, *life])
    assert (trend.samples, trend.first.files, trend.last.files) == (30, warm + 4, warm + 24)


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
        seen = usage_of(Path("/proc"), parent.pid, kind="agent", component="both", started="now")
        parent.communicate(b"\n")
    assert seen is not None
    assert seen.memory_bytes > 1.5 * alone
    assert seen.sockets == 1  # the child was given none
    assert seen.files >= 7
    assert seen.processes == 2
    assert usage_of(Path("/proc"), parent.pid, kind="agent", component="both", started="now") is None


def test_the_other_ends_of_sockets_are_told() -> None:
    one, other = socket.socketpair()
    with one, other, socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        told = peers_of(Path("/proc"), os.getpid())
        assert told[f"0100007F:{server.getsockname()[1]:04X} 01"] == 1  # established
        assert told["00000000:0000 0A"] >= 1  # listening
        assert told["other"] >= 2
