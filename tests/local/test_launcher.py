"""The launcher on real torchrun: it tells the first failure at once, and leaves with the rank's own exit
status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def start(folder: Path, how: str) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(SCRIPT)
    options = [
        "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1", "--max-restarts=0", f"--log-dir={folder}/logs", "--redirects=3",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "stepfast.launcher", *options, "--", str(folder / "script.py"), how],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "STEPFAST_TERMINATION_LOG": str(folder / "termination.json"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


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
    owned: str, tmp_path: Path, how: str, expected: dict[str, object]
) -> None:
    process = start(tmp_path, how)
    assert process.wait(timeout=180) == expected["exitCode"]
    said = json.loads((tmp_path / "termination.json").read_text())
    assert {key: said[key] for key in expected} == expected
    assert (said["rank"], said["localRank"]) == (1, 1)


def test_success_is_told(owned: str, tmp_path: Path) -> None:
    assert start(tmp_path, "0").wait(timeout=180) == 0
    assert json.loads((tmp_path / "termination.json").read_text())["exitCode"] == 0


def test_stopped_launcher_ends_its_ranks_and_blames_none(
    owned: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    process = start(tmp_path, "wait")
    wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, "both ranks wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 128 + signal.SIGTERM
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
    folder: Path, node: int, port: int, *, script: str = RESTARTED, failing_launches: str = ""
) -> subprocess.Popen[bytes]:
    """One of two nodes, each with one rank; rank 1 fails in these launches, in which rank 0 waits for ever."""
    (folder / "restarted.py").write_text(script)
    options = [
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=test", f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}", "--local-addr=127.0.0.1",
        "--max-restarts=1", "--monitor-interval=0.1",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "stepfast.launcher", *options, "--", str(folder / "restarted.py"), failing_launches],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "STEPFAST_TERMINATION_LOG": str(folder / f"termination-{node}.json"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_ranks_of_all_nodes_count_a_restart_in_place_alike(owned: str, tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, failing_launches="0") for node in (0, 1)]
    assert [node.wait(timeout=180) for node in nodes] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == [
        "rank-0-launch-0",
        "rank-0-launch-1",
        "rank-1-launch-0",
        "rank-1-launch-1",
    ]
    said = [json.loads((tmp_path / f"termination-{node}.json").read_text()) for node in (0, 1)]
    assert [document["exitCode"] for document in said] == [0, 0], "what was survived is no failure"


def test_ranks_meet_again_after_a_restart_in_place(owned: str, tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, script=MEETING) for node in (0, 1)]
    assert [node.wait(timeout=180) for node in nodes] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("rank-*-launch-1")) == ["rank-0-launch-1", "rank-1-launch-1"]


def test_failure_after_a_restart_in_place_is_told_and_not_the_one_before_it(owned: str, tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, port, failing_launches="0,1") for node in (0, 1)]
    failed = _ended(nodes)
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("termination-*.json"))]
    assert failed.returncode == 4
    assert 4 in [document["exitCode"] for document in said]
    for node in nodes:
        node.terminate()
        node.wait(timeout=60)


def _ended(nodes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """The node that ends first: the other's rank waits for ever."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for node in nodes:
            if node.poll() is not None:
                return node
        time.sleep(0.05)
    raise AssertionError("no node has ended")
