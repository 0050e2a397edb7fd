"""Training over a file system that fails: full, read-only, forbidden, replaced, standing still."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from eventual import wait_until
from stepfast.layout import CHUNK_BYTES, MANIFEST
from stepfast.step import OnBusy
from stepfast.storage import open_store
from stepfast_operator.policies.flush import COMMIT_SECONDS

if TYPE_CHECKING:
    from faults import HeldStorage, Mounts


def test_full_file_system_stops_nothing_and_loses_nothing(
    tmpfs: Mounts, start_node: Callable[..., Any], train: Callable[..., Any]
) -> None:
    place = tmpfs("size=5m")
    training = train(start_node(place.as_uri()))
    with closing(open_store(place.as_uri())) as store:
        # It fills by itself: every step is kept.
        training.live_through(lambda: None, lambda: tmpfs.remount(place, "size=64m"), "No space left on device", store)
        training.check_history(store)


def test_file_system_that_becomes_read_only_is_written_again_when_it_is_writable(
    tmpfs: Mounts, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    place = tmpfs("size=64m")
    training = train(start_node(place.as_uri()))

    def break_down() -> None:
        wait_until(lambda: tmpfs.remount(place, "ro"), "nobody writes")

    with closing(open_store(place.as_uri())) as store:
        heal = lambda: tmpfs.remount(place, "rw")  # noqa: E731
        training.live_through(break_down, heal, "Read-only file system", store)
        training.check_history(store)


def test_path_that_is_forbidden_is_named_and_used_once_it_is_allowed(
    tmp_path: Path, start_node: Callable[..., Any], train: Callable[..., Any]
) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    # Root may write anywhere, but for what it gives up.
    without = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    training = train(start_node(root.as_uri(), command=without))
    folder = root / "local" / "bad-storage"
    with closing(open_store(root.as_uri())) as store:
        training.live_through(lambda: folder.chmod(0o555), lambda: folder.chmod(0o755), "Permission denied", store)
        training.check_history(store)


def test_file_in_the_place_of_the_storage_is_named(
    tmp_path: Path,
    start_node: Callable[..., Any],
    train: Callable[..., Any],
    file_in_the_way: Callable[[Path], Any],
) -> None:
    root = tmp_path / "storage"
    training = train(start_node(root.as_uri()))
    obstacle = file_in_the_way(root)
    with closing(open_store(root.as_uri())) as store:
        training.live_through(obstacle.place, obstacle.heal, "Not a directory|File exists", store)
        training.check_history(store)


def test_storage_that_stands_still_delays_commits_and_nothing_else(
    tmp_path: Path, held_storage: HeldStorage, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    root = tmp_path / "storage"
    node = start_node(root.as_uri(), environment=held_storage.environment())
    training = train(node)
    training.save().wait(timeout_seconds=90)
    held_storage.hold()
    training.stalls.clear()
    training.save_until(lambda: node.job().saves.dropped > 5, "older steps are given up for newer ones")
    assert max(training.stalls) < bench.STALL_SECONDS
    newest = training.save()
    with closing(open_store(root.as_uri())) as store:
        assert bench.verify(store) == [1]
        held_storage.release()
        newest.wait(timeout_seconds=90)
        assert newest.step in bench.verify(store, at_least=[1])
        training.check_history(store)


SAVES_AND_FAILS = """
import torch
from stepfast.torch import Checkpointer

checkpointer = Checkpointer(state={"weights": torch.ones(4)})
if not checkpointer.restore():
    checkpointer.save(5)
    raise SystemExit("once more")
"""


def test_step_whose_commit_stands_still_is_what_the_next_attempt_goes_on_from(
    runs: Any, tmp_path: Path, held_storage: HeldStorage
) -> None:
    (tmp_path / "train.py").write_text(SAVES_AND_FAILS)
    held_storage.hold()
    process = runs.start("train.py", **held_storage.environment(name=MANIFEST))
    runs.wait_for(lambda: "once more" in runs.log, process)
    time.sleep(COMMIT_SECONDS + 3)  # by then all is committed that will be, were it only looked for
    assert "attempt 2 launched" not in runs.log
    held_storage.release()
    assert runs.finish(process) == 0, runs.log[-6000:]
    assert runs.summary["checkpoint"]["restoredStep"] == 5


def test_step_that_is_on_its_way_survives_the_commit_of_a_newer_one(
    tmp_path: Path, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    root = tmp_path / "storage"
    node = start_node(root.as_uri())
    training = train(node)
    with closing(open_store(root.as_uri())) as store:
        upload = store.upload(f"{bench.JOB}/global_step1/state-of-another-node", 1)
        training.step = 1
        training.save().wait(timeout_seconds=90)
        training.save().wait(timeout_seconds=90)  # by now the retention after the first has begun
        training.end()
        node.terminate()  # and is over
        upload.put(0, memoryview(b"1"))
        upload.finish()
        assert store.read(f"{bench.JOB}/global_step1/state-of-another-node") == b"1"


def two_slots(bench: Any) -> int:
    return int(2.5 * bench.STATE_BYTES)


def test_save_waits_for_a_slot_and_goes_on_when_the_storage_heals(
    tmpfs: Mounts, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    place = tmpfs("size=64m")
    node = start_node(place.as_uri(), memory_limit=two_slots(bench))
    training = train(node, on_busy=OnBusy.WAIT)
    training.save().wait(timeout_seconds=90)
    wait_until(lambda: tmpfs.remount(place, "ro"), "nobody writes")
    training.save()
    training.save()
    saving = threading.Thread(target=training.save, name="training")
    saving.start()
    try:
        wait_until(lambda: node.log.count("was not persisted") >= 3, "it fails again and again")
        assert saving.is_alive()
        assert "Read-only file system" in node.error
        assert node.job().saves.count == 3
    finally:
        tmpfs.remount(place, "rw")
        saving.join(90)
    assert not saving.is_alive()
    training.checkpointer.close(timeout_seconds=90)
    with closing(open_store(place.as_uri())) as store:
        # A close waits for the newest step alone.
        wait_until(lambda: bench.committed(store) == [1, 2, 3, 4], "what was held up is committed too")
        assert bench.verify(store) == [1, 2, 3, 4]
        training.check_history(store)
    assert node.job().saves.dropped == 0


def test_state_larger_than_memory_goes_on_where_the_disk_was_full(
    tmpfs: Mounts, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    place = tmpfs("size=20m")
    # It is saved in windows of one chunk; the third does not fit.
    node = start_node(place.as_uri(), memory_limit=2 * CHUNK_BYTES + (1 << 20))
    training = train(node, size_bytes=4 * CHUNK_BYTES + 4096)
    saving = threading.Thread(target=training.save, name="training")
    saving.start()
    try:
        # One reading for all: when another window succeeds meanwhile, there is no error for a moment.
        says = f"step 1 is not persisted: {place.as_uri()}: .*No space left on device"
        wait_until(lambda: re.search(says, node.error or ""), "the status says why")
    finally:
        tmpfs.remount(place, "size=128m")
        saving.join(90)
    assert not saving.is_alive()
    training.checkpointer.close(timeout_seconds=90)
    assert node.error is None
    with closing(open_store(place.as_uri())) as store:
        assert bench.verify(store) == [1]


# A rank that does what it reads, and says what came of it.
RANK = """
import json, sys, torch
from stepfast.torch import Checkpointer, every
state = {"weights": torch.zeros(1 << 18)}
checkpointer = Checkpointer(state=state, interval=every(steps=1_000_000))
saves = {}
for line in sys.stdin:
    command, step = line.split()
    said = None
    if command == "save":
        saves[step] = checkpointer.save(int(step))
        said = [saves[step].saved, saves[step].stall_seconds]
    elif command == "wait":
        saves[step].wait(timeout_seconds=90)
    else:
        checkpointer.close(timeout_seconds=90)
    print(json.dumps(said), flush=True)
"""


class Ranks:
    """A gang of two processes that do each command together."""

    def __init__(self, node: Any, bench: Any) -> None:
        self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"onBusy": "Skip", "persistIntervalSeconds": 0, "maxToKeep": 0, "node": 0}
        common = {
            **node.rank_environment(), "STEPFAST_SETTINGS": json.dumps(settings), "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._rendezvous.port),
        }  # fmt: skip
        self._bystander = bench.Bystander()
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(2):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip

    def save(self, step: int) -> list[tuple[bool, float]]:
        """Whether each rank saved, and its stall in seconds, but for what held up a bystander, too."""
        late = self._bystander.late_seconds()
        answers = self.do("save", step)
        late = self._bystander.late_seconds() - late
        return [(is_saved, stall - late) for is_saved, stall in answers]

    def do(self, command: str, step: int = 0) -> list[Any]:
        for process in self.processes:
            assert process.stdin is not None
            print(command, step, file=process.stdin, flush=True)
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"a rank ended instead of doing {command} {step}"
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        self._bystander.end()
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()


@pytest.fixture
def start_ranks(bench: Any) -> Iterator[Callable[[Any], Ranks]]:
    """Starts a gang of two ranks on a node."""
    started: list[Ranks] = []

    def start(node: Any) -> Ranks:
        started.append(Ranks(node, bench))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


def test_saves_without_a_free_slot_are_skipped_by_the_whole_gang_and_counted(
    tmpfs: Mounts, start_node: Callable[..., Any], start_ranks: Callable[[Any], Ranks], bench: Any
) -> None:
    place = tmpfs("size=64m")
    node = start_node(place.as_uri(), memory_limit=2 * two_slots(bench))
    ranks = start_ranks(node)
    assert [saved for saved, _ in ranks.save(1)] == [True, True]
    ranks.do("wait", 1)
    wait_until(lambda: tmpfs.remount(place, "ro"), "nobody writes")
    outcomes = {step: ranks.save(step) for step in range(2, 12)}
    wait_until(lambda: node.error, "the status says why")
    assert "Read-only file system" in node.error
    saved = [step for step, (one, other) in outcomes.items() if one[0] or other[0]]
    assert all(one[0] == other[0] for one, other in outcomes.values())
    assert saved == [2, 3]
    assert max(stall for answers in outcomes.values() for _, stall in answers) < bench.STALL_SECONDS
    wait_until(lambda: node.job().saves.skipped == 8, "every skipped save is counted once")

    tmpfs.remount(place, "rw")
    ranks.do("wait", 3)
    # Ranks decide upon what they knew when they last met: one more save may be skipped.
    ranks.save(12)
    assert [done for done, _ in ranks.save(13)] == [True, True]
    ranks.do("close")
    with closing(open_store(place.as_uri())) as store:
        wait_until(lambda: {1, 2, 3, 13} <= set(bench.committed(store)), "what was held up is committed too")
        bench.verify(store, at_least=[1, 2, 3, 13])
    wait_until(lambda: node.error is None, "the status forgets the failure")
    assert node.job().saves.skipped <= 9
