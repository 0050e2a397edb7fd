"""Measures one peer at one layout, one question at a time; every answer is a record. `python -m benchmarks.cells -h`.

A peer that fails, hangs or cannot be installed is a record as well: `status` and `error` say so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from benchmarks.machine import drop_caches
from benchmarks.peers.base import Peer, Site
from benchmarks.peers.install import missing_reason
from benchmarks.peers.roster import PEERS, peer_class
from benchmarks.processes.cellprocess import Event, Outcome, Workplace
from benchmarks.processes.memorypeaks import MemoryPeaks
from benchmarks.processes.procfs import busy_seconds, families, processor_seconds
from benchmarks.results import RESULTS, add_record
from benchmarks.workload import size_of, state_of

WORK = Path(".stepfast/bench/work")
DISK = ("disk-warm", "disk-cold")
WRITTEN_DIRECTLY = ("stepfast", "plain_copy")
_ROOM_COPIES = 6  # two that are kept, one that is written, one that is being removed, the limit's, one to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One peer at one layout. `slots`: how many copies of the state the peer may keep in memory; `ranks`: that each
    save a state of that layout, together; `work`: the folder that the cell's own folder is made in."""

    peer: str
    layout: str
    saves: int = 5
    slots: int = 3
    ranks: int = 1
    work: Path = WORK
    idle_seconds: float = 1.0
    interval_seconds: float = 0.3
    time_limit_seconds: float = 300.0
    results: Path = field(default=RESULTS)


@dataclass(slots=True)
class Run:
    """A cell that is being measured."""

    cell: Cell
    workplace: Workplace
    peer: Peer
    site: Site

    def start_helper(self) -> None:
        if (command := self.peer.helper_command()) is not None:
            self.workplace.start_helper(command, self.peer.is_helper_ready)

    def train(
        self, mode: str, *more: str, saves: int | None = None, on_event: Callable[[Event], None] = lambda _: None
    ) -> Outcome:
        cell = self.cell
        return self.workplace.run(
            "benchmarks.processes.trainer",
            ["--peer", cell.peer, "--site", self.site.to_text(), "--layout", cell.layout, "--mode", mode,
             "--saves", str(saves or cell.saves), "--idle-seconds", str(cell.idle_seconds),
             "--interval-seconds", str(cell.interval_seconds), *more],
            on_event,
            launcher=launcher_of(cell.ranks),
        )  # fmt: skip

    def restore(self, tier: str, step: int, *more: str) -> Outcome:
        cell = self.cell
        return self.workplace.run(
            "benchmarks.processes.restorer",
            ["--peer", cell.peer, "--site", self.site.to_text(), "--layout", cell.layout, "--tier", tier,
             "--step", str(step), *more],
        )  # fmt: skip

    def leave_disk_alone(self) -> None:
        """A new helper without memory: whatever is restored from here on was on disk."""
        self.workplace.kill_helper()
        self.peer.clear_memory()
        self.start_helper()

    def add(self, kind: str, **values: Any) -> None:
        cell = self.cell
        record = add_record(
            kind, results=cell.results, peer=cell.peer, title=self.peer.title, layout=cell.layout,
            size_bytes=self.site.size_bytes, slots=cell.slots, ranks=cell.ranks, **values,
        )  # fmt: skip
        print(json.dumps(record))


def launcher_of(ranks: int) -> tuple[str, ...]:
    """Python's options before a module that so many processes run, together where they are several."""
    if ranks == 1:
        return ("-m",)
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--module")


P = ParamSpec("P")


def measuring(
    kind: str,
) -> Callable[[Callable[Concatenate[Run, P], None]], Callable[Concatenate[Cell, P], None]]:
    """Makes what measures a run with its helper into what measures a cell: a failure on the way is a record."""

    def decorate(measure: Callable[Concatenate[Run, P], None]) -> Callable[Concatenate[Cell, P], None]:
        @wraps(measure)
        def measure_cell(cell: Cell, /, *arguments: P.args, **named: P.kwargs) -> None:
            size = size_of(state_of(cell.layout))
            with Workplace(cell.work, cell.time_limit_seconds) as workplace:
                site = Site(
                    folder=workplace.folder, key=workplace.key, size_bytes=size, slots=cell.slots, ranks=cell.ranks
                )
                site.storage.mkdir()
                peer = peer_class(cell.peer)(site)
                run = Run(cell, workplace, peer, site)
                if peer.installed and (reason := missing_reason(cell.peer)):
                    run.add(kind, status="missing", error=reason)
                    return
                workplace.add_environment(peer.environment())
                try:
                    run.start_helper()
                    measure(run, *arguments, **named)
                except (RuntimeError, OSError) as error:
                    run.add(kind, status="failed", error=str(error))
                finally:
                    workplace.kill_helper()
                    peer.clear_memory()

        return measure_cell

    return decorate


@measuring("save")
def measure_saves(run: Run) -> None:
    """Stall, persist time and training time lost of saves that are each followed to the end."""
    follower = OtherWork(run.workplace)
    more = ["--direct-write"] if _can_write_directly(run) else []
    outcome = run.train("follow", *more, on_event=follower.hear)
    run.add("save", **told(outcome), other_processors=follower.others)


@measuring("back_to_back")
def measure_back_to_back(run: Run) -> None:
    """Stall of saves that come while the ones before them are still being persisted."""
    outcome, counts = train_counted(run)
    saves = outcome.told("save")
    run.add(
        "back_to_back",
        interval_seconds=run.cell.interval_seconds,
        skipped=sum(not save["is_saved"] for save in saves),
        dropped=counts.get("dropped"),
        blocked=_blocked(saves),
        **told(outcome),
    )


@measuring("memory")
def measure_memory(run: Run) -> None:
    """Peaks of memory over a run of saves without the plain copy's buffer."""
    peaks: list[MemoryPeaks] = []

    def hear(event: Event) -> None:
        if event["event"] == "built":
            peaks.append(MemoryPeaks(run.workplace, event["pid"]))

    outcome = run.train("follow", "--no-limit", on_event=hear)
    found = peaks[0].stop() if peaks else {}
    run.add("memory", status=outcome.status, error=outcome.error, saves=len(outcome.told("save")), **found)


@measuring("restore")
def measure_restores(run: Run, repeats: int = 3) -> None:
    """Restores in new processes: from memory, then (memory cleared) from disk, warm and cold."""
    trained = run.train("follow", "--no-limit", saves=2)
    if trained.status != "done":
        run.add("restore", tier="", status=trained.status, error=trained.error)
        return
    for tier in _tiers(run.peer):
        if tier == DISK[0]:
            run.leave_disk_alone()
        for _ in range(repeats):
            _add_restore(run, tier, run.restore(tier, 2))


@measuring("kill")
def measure_kill(run: Run, wait_seconds: float = 10.0, *, kill_helper: bool = False) -> None:
    """SIGKILL of the trainer when its last save has returned: which tiers still have that step?

    With `kill_helper` the helper is killed right after it and started anew; its memory is left as it is.
    """
    trained = run.train("die", "--no-limit", saves=2)
    if kill_helper:
        run.workplace.kill_helper()
        run.start_helper()
    if trained.status != "killed":
        run.add("kill", helper_killed=kill_helper, tier="", status=trained.status, error=trained.error)
        return
    time.sleep(wait_seconds)
    left = run.workplace.left_processes()
    for tier in run.peer.tiers:
        if tier == "disk":
            run.leave_disk_alone()
        outcome = run.restore("memory" if tier == "memory" else DISK[0], 2, "--no-limit")
        restored = next(iter(outcome.told("restored")), {})
        run.add(
            "kill", helper_killed=kill_helper, tier=tier, status=outcome.status, error=_refusal(outcome),
            is_restorable=restored.get("step") == 2, restored_step=restored.get("step"),
            waited_seconds=wait_seconds, left_processes=left,
        )  # fmt: skip


@measuring("corrupt")
def measure_corruption(run: Run) -> None:
    """One byte of the largest file is flipped: does the restore say so?"""
    trained = run.train("follow", "--no-limit", saves=1)
    if trained.status != "done":
        run.add("corrupt", status=trained.status, error=trained.error)
        return
    run.workplace.kill_helper()
    file = max(run.peer.files(1), key=lambda path: path.stat().st_size)
    _flip_middle_byte(file)
    drop_caches()
    run.leave_disk_alone()
    outcome = run.restore(DISK[0], 1, "--no-limit", "--count-elements")
    restored = next(iter(outcome.told("restored")), {})
    refusal = _refusal(outcome)
    run.add(
        "corrupt", status=outcome.status, error=refusal, file=file.name, is_detected=bool(refusal),
        names_file=file.name in refusal, wrong_elements=restored.get("wrong_elements"),
    )  # fmt: skip


def train_counted(run: Run) -> tuple[Outcome, dict[str, int]]:
    """Saves that nobody waits for, and what the peer's helper counted of them."""

    def hear(event: Event) -> None:
        if event["event"] == "save":
            run.peer.counts()

    return run.train("back-to-back", on_event=hear), run.peer.counts()


class OtherWork:
    """How many processors the rest of the machine used during each save, from its begin to its persistence."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._before = (0.0, 0.0, 0.0)
        self.others: list[float] = []

    def hear(self, event: Event) -> None:
        if event["event"] == "save_begins":
            self._before = self._now()
        elif event["event"] == "save":
            wall, busy, own = (now - before for now, before in zip(self._now(), self._before, strict=True))
            self.others.append(round(max(0.0, busy - own) / max(wall, 0.05), 2))

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), busy_seconds(), processor_seconds(families(self._workplace.sessions))


def _can_write_directly(run: Run) -> bool:
    """Whether the limit of persisting is measured beside the saves: where one more file leaves disk to spare."""
    free = shutil.disk_usage(run.site.folder).free
    return run.cell.peer in WRITTEN_DIRECTLY and free > _ROOM_COPIES * run.site.size_bytes


def told(outcome: Outcome) -> dict[str, Any]:
    """What a trainer told, as fields of a record."""
    fields = [{name: value for name, value in save.items() if name != "event"} for save in outcome.told("save")]
    built = next(iter(outcome.told("built")), {})
    return {
        "status": outcome.status,
        "error": outcome.error,
        "tensors": built.get("tensors"),
        "set_up_seconds": next((event["seconds"] for event in outcome.told("set_up")), None),
        "saves": fields,
    }


def _add_restore(run: Run, tier: str, outcome: Outcome) -> None:
    limits = next(iter(outcome.told("limits")), {})
    restored = next(iter(outcome.told("restored")), {})
    values = {name: value for name, value in {**limits, **restored}.items() if name != "event"}
    run.add("restore", tier=tier, status=outcome.status, error=_refusal(outcome), **values)


def _refusal(outcome: Outcome) -> str:
    """What the peer raised, or why the process did not come so far."""
    return next((str(event["error"]) for event in outcome.told("refused")), outcome.error)


def _blocked(saves: Sequence[Event]) -> int:
    """Busy saves with more than twice the stall of the quickest one: most likely they waited for the one before."""
    made = [save for save in saves if save["is_saved"]]
    quickest = min((save["stall_seconds"] for save in made), default=0.0)
    return sum(save["is_busy"] and save["stall_seconds"] > 2 * quickest for save in made)


def _tiers(peer: Peer) -> Iterator[str]:
    for tier in peer.tiers:
        yield from (tier,) if tier == "memory" else DISK


def _flip_middle_byte(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 0x40]))


def main() -> None:
    """Measures the cell that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = ("save", "back-to-back", "memory", "restore", "kill", "kill-both", "corrupt")
    parser.add_argument("what", choices=what)
    parser.add_argument("--peer", choices=PEERS, default="stepfast")
    parser.add_argument("--layout", default="gpt:1", help="gpt:<GiB>, odd:<GiB> or small:<number of tensors>")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cell = Cell(
        peer=arguments.peer, layout=arguments.layout, saves=arguments.saves, slots=arguments.slots,
        time_limit_seconds=arguments.time_limit, results=arguments.results,
    )  # fmt: skip
    match arguments.what:
        case "save":
            measure_saves(cell)
        case "back-to-back":
            measure_back_to_back(cell)
        case "memory":
            measure_memory(cell)
        case "restore":
            measure_restores(cell)
        case "corrupt":
            measure_corruption(cell)
        case kind:
            measure_kill(cell, kill_helper=kind == "kill-both")


if __name__ == "__main__":
    main()
