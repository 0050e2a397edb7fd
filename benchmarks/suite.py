"""Which cells `make bench` measures, and in which order: `python -m benchmarks.suite [--core | --quick]`.

This project's own cells are spread between the others', so that all of them meet the same machine. Everything is
appended to the results; a cell that fails or hangs is a record, and the next one begins.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.cells import (
    Cell,
    measure_back_to_back,
    measure_corruption,
    measure_kill,
    measure_memory,
    measure_restores,
    measure_saves,
)
from benchmarks.controls import QUICK_SIZES, SIZES, measure_controls
from benchmarks.gangs import load
from benchmarks.gangs.ddp import WAYS, measure_gang
from benchmarks.gangs.load import Load, measure_load
from benchmarks.gangs.recovery import measure_recoveries
from benchmarks.machine import describe
from benchmarks.peers.install import install
from benchmarks.peers.roster import ASYNCHRONOUS, ON_BLOB, PEERS
from benchmarks.results import RESULTS, add_record
from benchmarks.stores import blob, headline, slowstore
from benchmarks.stores.blob import measure_uploads
from benchmarks.stores.headline import measure_headline
from benchmarks.stores.slowstore import SlowStore, measure_slow_blob, measure_slow_disk

OURS = "stepfast"
LIMIT = "plain_copy"
OTHERS = tuple(peer for peer in PEERS if peer not in (OURS, LIMIT, *ON_BLOB))
FORMATS = ("torch_save", "safetensors", "dcp_save", "dlrover", "nvrx", "torchsnapshot")
"""One peer for each way to write and read a file: what restores and damage are about."""
_OTHERS_BETWEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question's cell, and who answers it beside this project; where they take long, with fewer saves."""

    cell: Cell
    others: Sequence[str]
    others_saves: int | None = None

    def cell_of(self, peer: str) -> Cell:
        saves = self.cell.saves if peer == OURS else (self.others_saves or self.cell.saves)
        return replace(self.cell, peer=peer, saves=saves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. A layout comes with the saves, slots and time that its size allows."""

    saves: Sequence[Asked]
    back_to_back: Sequence[Asked]
    memory: Sequence[Asked]
    restores: Sequence[Asked]
    kill: Asked
    corruption: Asked
    gang_ways: Sequence[str]
    gang_layout: str
    repeats: int
    blob_sizes: Sequence[int]
    blob_rounds: int
    headline: Sequence[Cell]
    headline_rounds: int
    slow_blob: SlowStore
    slow_disk: SlowStore
    slow_disk_others: Sequence[str]
    load: Load
    recoveries: int
    control_sizes: Sequence[int]
    controls: int


_GIB_1 = Cell(peer=OURS, layout="gpt:1", saves=6)
# Three slots, the state and the plain copy's buffer would not leave a machine of 24 GiB room to write.
_GIB_4 = Cell(peer=OURS, layout="gpt:4", saves=4, slots=2, time_limit_seconds=900)
_SMALL = Cell(peer=OURS, layout="small:20000", saves=6)
_ALL = (*OTHERS, LIMIT)

FULL = Plan(
    saves=[
        Asked(cell=_GIB_1, others=_ALL),
        Asked(cell=_SMALL, others=_ALL),
        Asked(cell=_GIB_4, others=_ALL, others_saves=3),
    ],
    back_to_back=[Asked(cell=cell, others=ASYNCHRONOUS) for cell in (_GIB_1, _SMALL)],
    memory=[Asked(cell=replace(_GIB_1, saves=3), others=OTHERS)],
    restores=[Asked(cell=cell, others=FORMATS) for cell in (_GIB_1, _SMALL, _GIB_4)],
    kill=Asked(cell=replace(_GIB_1, layout="gpt:0.5"), others=ASYNCHRONOUS),
    corruption=Asked(cell=replace(_GIB_1, layout="gpt:0.06"), others=FORMATS),
    gang_ways=WAYS,
    gang_layout="gpt:0.25",
    repeats=3,
    blob_sizes=blob.SIZES,
    blob_rounds=3,
    headline=headline.CELLS,
    headline_rounds=2,
    slow_blob=slowstore.BLOB,
    slow_disk=slowstore.DISK,
    slow_disk_others=ASYNCHRONOUS,
    load=Load(),
    recoveries=6,
    control_sizes=SIZES,
    controls=3,
)

_STRONGEST = ("dlrover", "nvrx")
"""Those that stall least."""
_AT_RESTORING = ("torch_save", "dlrover")
_STRONG = (*_STRONGEST, "dcp_async_process", "torch_save", LIMIT)
CORE = replace(
    FULL,
    saves=[
        Asked(cell=_GIB_1, others=_STRONG),
        Asked(cell=replace(_SMALL, saves=4), others=_STRONG),
        Asked(cell=replace(_GIB_4, saves=3), others=("dlrover", LIMIT)),
    ],
    back_to_back=[Asked(cell=cell, others=_STRONGEST) for cell in (_GIB_1, _SMALL)],
    memory=[Asked(cell=replace(_GIB_1, saves=3), others=("dlrover", "dcp_async_process"))],
    restores=[
        Asked(cell=_GIB_1, others=_AT_RESTORING),
        Asked(cell=_SMALL, others=_AT_RESTORING),
        Asked(cell=_GIB_4, others=()),
    ],
    kill=replace(FULL.kill, others=_STRONGEST),
    corruption=replace(FULL.corruption, others=_AT_RESTORING),
    gang_ways=("stepfast", "torch_save", "dcp_save"),
    repeats=2,
    blob_sizes=blob.SIZES[:2],
    headline_rounds=1,
    slow_disk_others=_STRONGEST,
    load=Load(phases=4),
    recoveries=3,
    controls=1,
)
"""The main cells, in about half an hour: every question, but only the strongest peers and fewer samples."""

_TINY = Cell(peer=OURS, layout="gpt:0.06", saves=3, time_limit_seconds=120)
_TINY_SMALL = replace(_TINY, layout="small:1000")
QUICK = Plan(
    saves=[Asked(cell=cell, others=_ALL) for cell in (_TINY, _TINY_SMALL)],
    back_to_back=[Asked(cell=cell, others=ASYNCHRONOUS) for cell in (_TINY, _TINY_SMALL)],
    memory=[Asked(cell=_TINY, others=OTHERS)],
    restores=[Asked(cell=_TINY, others=FORMATS)],
    kill=Asked(cell=_TINY, others=ASYNCHRONOUS),
    corruption=Asked(cell=_TINY, others=FORMATS),
    gang_ways=WAYS,
    gang_layout="gpt:0.03",
    repeats=1,
    blob_sizes=blob.QUICK_SIZES,
    blob_rounds=1,
    headline=headline.QUICK_CELLS,
    headline_rounds=1,
    slow_blob=slowstore.QUICK_BLOB,
    slow_disk=slowstore.QUICK_DISK,
    slow_disk_others=ASYNCHRONOUS,
    load=load.QUICK,
    recoveries=2,
    control_sizes=QUICK_SIZES,
    controls=1,
)

KINDS = (
    "save", "back_to_back", "memory", "restore", "kill", "corrupt", "ddp", "blob", "headline", "slow_store", "load",
    "recovery", "control",
)  # fmt: skip


def measurements(plan: Plan, results: Path) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """All cells in order: kind, peer, and what measures it."""

    def of(kind: str, measure: Callable[[Cell], None], asked: Asked, peers: Iterable[str]) -> Iterator[_Entry]:
        for peer in peers:
            yield kind, peer, partial(measure, replace(asked.cell_of(peer), results=results))

    for asked in plan.saves:
        yield from of("save", measure_saves, asked, interleaved(asked.others))
    for asked in plan.back_to_back:
        yield from of("back_to_back", measure_back_to_back, asked, interleaved(asked.others))
    for asked in plan.memory:
        yield from of("memory", measure_memory, asked, (OURS, *asked.others))
    for asked in plan.restores:
        peers = interleaved(asked.others) if asked.others else (OURS,)
        yield from of("restore", partial(measure_restores, repeats=plan.repeats), asked, peers)
    yield from of("kill", measure_kill, plan.kill, (OURS, *plan.kill.others))
    yield "kill", OURS, partial(measure_kill, replace(plan.kill.cell, results=results), kill_helper=True)
    yield from of("corrupt", measure_corruption, plan.corruption, (OURS, *plan.corruption.others))
    for way in plan.gang_ways:
        yield "ddp", way, partial(measure_gang, way, plan.gang_layout, results=results)
    yield from _on_blob(plan, results)
    for ranks in (1, 2):
        yield "recovery", OURS, partial(measure_recoveries, ranks, plan.recoveries, results)
    yield "control", OURS, partial(measure_controls, plan.control_sizes, plan.controls, results=results)


def _on_blob(plan: Plan, results: Path) -> Iterator[_Entry]:
    """What a Blob Storage takes part in. Each measures all of its ways by itself."""
    yield "blob", OURS, partial(measure_uploads, plan.blob_sizes, plan.blob_rounds, results)
    for cell in headline.cells(plan.headline, rounds=plan.headline_rounds):
        yield "headline", cell.peer, partial(measure_headline, replace(cell, results=results))
    yield "slow_store", plan.slow_blob.cell.peer, partial(measure_slow_blob, plan.slow_blob, results)
    yield "slow_store", OURS, partial(measure_slow_disk, plan.slow_disk, results, (OURS, *plan.slow_disk_others))
    yield "load", OURS, partial(measure_load, plan.load, results)


_Entry = tuple[str, str, Callable[[], None]]


def interleaved(others: Sequence[str]) -> Iterator[str]:
    """Ours first, and again after every few of the others."""
    for index, peer in enumerate(others):
        if index % _OTHERS_BETWEEN == 0:
            yield OURS
        yield peer


def main() -> None:
    """Installs the foreign peers and measures what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--core", action="store_true", help="the main cells: all questions, the strongest peers alone")
    size.add_argument("--quick", action="store_true", help="small sizes: whether everything works, not how fast")
    parser.add_argument("--kind", choices=KINDS, action="append", help="repeatable (default: all)")
    parser.add_argument("--peer", choices=PEERS, action="append", help="repeatable (default: all)")
    parser.add_argument("--no-install", action="store_true", help="use the peers that are installed")
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else CORE if arguments.core else FULL
    chosen = [
        (kind, peer, measure)
        for kind, peer, measure in measurements(plan, arguments.results)
        if kind in (arguments.kind or KINDS) and peer in (arguments.peer or PEERS)
    ]
    if arguments.list:
        print("\n".join(f"{kind} {peer}" for kind, peer, _ in chosen))
        return
    if not arguments.no_install:
        install()
    add_record("machine", results=arguments.results, is_quick=arguments.quick, is_core=arguments.core, **describe())
    for index, (kind, peer, measure) in enumerate(chosen, 1):
        begin = time.monotonic()
        try:
            measure()
        except Exception:  # noqa: BLE001 - one broken cell must not take hours of others with it
            error = traceback.format_exc()
            add_record(kind, results=arguments.results, peer=peer, status="failed", error=error[-400:])
        print(f"{index}/{len(chosen)} {kind} {peer}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
