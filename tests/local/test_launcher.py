"""The launcher on real torchrun: it tells the first failure at once, and leaves with the rank's own exit
status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventual import wait_until

Launcher = subprocess.Popen[bytes]

SCRIPT = """
import os, signal, sys
if os.environ["RANK"] == "1" and sys.argv[1] != "wait":
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
    os.kill(os.getpid(), signals[sys.argv[1]]) if sys.argv[1] in signals else sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    open(os.path.join(os.path.dirname(__file__), "waiting-" + os.environ["RANK"]), "w").close()
    signal.pause()
"""


class Launchers:
    """Launchers in a folder, which end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, options: list[str], *script: str, termination_log: str = "termination.json") -> Launcher:
        process = subprocess.Popen(
            [sys.executable, "-m", "stepfast.launcher", *options, "--", *script],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "STEPFAST_TERMINATION_LOG": str(self.folder / termination_log),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def launchers(owned: str, tmp_path: Path) -> Iterator[Launchers]:
    started = Launchers(tmp_path)
    yield started
    started.end()


def start(launchers: Launchers, how: str) -> Launcher:
    folder = launchers.folder
    (folder / "script.py").write_text(SCRIPT)
    options = [
        "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1", "--max-restarts=0", f"--log-dir={folder}/logs", "--redirects=3",
    ]  # fmt: skip
    return launchers.start(options, str(folder / "script.py"), how)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("3", {"exitCode": 3, "signal": None, "message": "exit code 3"}, id="exit"),
        pytest.param("raise", {"exitCode": 1, "message": "ValueError: boom (exit code 1)"}, id="exception"),
        pytest.param("kill", {"exitCode": 137, "signal": "SIGKILL", "message": "killed by SIGKILL"}, id="signal"),
        # Left to torchrun to tell, which sends this signal itself to the ranks that have not failed.
        pytest.param("term", {"exitCode": 143, "signal": "SIGTERM", "message": "killed by SIGTERM"}, id="SIGTERM"),
    ],
)
def test_first_failure_is_told_and_its_exit_status_kept(
    launchers: Launchers, tmp_path: Path, how: str, expected: dict[str, object]
) -> None:
    process = start(launchers, how)
    assert process.wait() == expected["exitCode"]
    said = json.loads((tmp_path / "termination.json").read_text())
    assert {key: said[key] for key in expected} == expected
    assert (said["rank"], said["localRank"]) == (1, 1)


def test_success_is_told(launchers: Launchers, tmp_path: Path) -> None:
    assert start(launchers, "0").wait() == 0
    assert json.loads((tmp_path / "termination.json").read_text())["exitCode"] == 0


def test_stopped_launcher_ends_its_ranks_and_blames_none(launchers: Launchers, tmp_path: Path) -> None:
    process = start(launchers, "wait")
    wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, "both ranks wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert not (tmp_path / "termination.json").exists()


RESTARTED = """
import os, signal, sys
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
open(os.path.join(os.path.dirname(__file__), f"rank-{rank}-launch-{restarts}"), "x").close()
if rank == "1" and restarts in sys.argv[1].split(","):
    os._exit(3 + int(restarts))
if restarts in sys.argv[1].split(","):
    signal.pause()
"""


MEETING = """
import os, sys, time
import torch, torch.distributed as dist
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if restarts == "1" and rank == "1":
    time.sleep(2)  # the other rank is sooner back, and looks for this one
dist.init_process_group("gloo")
open(os.path.join(os.path.dirname(__file__), f"rank-{rank}-launch-{restarts}"), "x").close()
while True:
    dist.all_reduce(torch.ones(1))
    if restarts == "1":
        break
    if rank == "1":
        os._exit(3)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(
    launchers: Launchers, node: int, port: int, *, script: str = RESTARTED, failing_launches: str = ""
) -> Launcher:
    """One of two nodes, each with one rank; rank 1 fails in these launches, in which rank 0 waits for ever."""
    folder = launchers.folder
    (folder / "restarted.py").write_text(script)
    options = [
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=test", f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}", "--local-addr=127.0.0.1",
        "--max-restarts=1", "--monitor-interval=0.1",
    ]  # fmt: skip
    arguments = (str(folder / "restarted.py"), failing_launches)
    return launchers.start(options, *arguments, termination_log=f"termination-{node}.json")


def test_ranks_of_all_nodes_count_a_restart_in_place_alike(launchers: Launchers, tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(launchers, node, port, failing_launches="0") for node in (0, 1)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == [
        "rank-0-launch-0",
        "rank-0-launch-1",
        "rank-1-launch-0",
        "rank-1-launch-1",
    ]
    said = [json.loads((tmp_path / f"termination-{node}.json").read_text()) for node in (0, 1)]
    assert [document["exitCode"] for document in said] == [0, 0], "what was survived is no failure"


def test_ranks_meet_again_after_a_restart_in_place(launchers: Launchers, tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(launchers, node, port, script=MEETING) for node in (0, 1)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("rank-*-launch-1")) == ["rank-0-launch-1", "rank-1-launch-1"]


def test_failure_after_a_restart_in_place_is_told_and_not_the_one_before_it(
    launchers: Launchers, tmp_path: Path
) -> None:
    port = free_port()
    nodes = [start_node(launchers, node, port, failing_launches="0,1") for node in (0, 1)]
    # The other one's rank waits for ever.
    wait_until(lambda: any(node.poll() is not None for node in nodes), "a node ends", seconds=600)
    [failed] = [node for node in nodes if node.returncode is not None]
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("termination-*.json"))]
    assert failed.returncode == 4
    assert 4 in [document["exitCode"] for document in said]
