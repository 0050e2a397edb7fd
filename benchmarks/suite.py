"""Which cells `make bench` measures, and in which order: `python -m benchmarks.suite [--quick]`.

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

from benchmarks import blob, headline, load, slowstore
from benchmarks.blob import measure_uploads
from benchmarks.cells import (
    Cell,
    measure_back_to_back,
    measure_corruption,
    measure_kill,
    measure_memory,
    measure_restores,
    measure_saves,
)
from benchmarks.ddp import WAYS, measure_gang
from benchmarks.headline import measure_headline
from benchmarks.load import Load, measure_load
from benchmarks.machine import describe
from benchmarks.peers.install import install
from benchmarks.peers.roster import ASYNCHRONOUS, ON_BLOB, PEERS
from benchmarks.recovery import measure_recoveries
from benchmarks.results import RESULTS, add_record
from benchmarks.slowstore import measure_slow_blob, measure_slow_disk

OURS = "stepfast"
LIMIT = "plain_copy"
OTHERS = tuple(peer for peer in PEERS if peer not in (OURS, LIMIT, *ON_BLOB))
FORMATS = ("torch_save", "safetensors", "dcp_save", "dlrover", "nvrx", "torchsnapshot")
"""One peer for each way to write and read a file: what restores and damage are about."""
_OTHERS_BETWEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. A layout comes with the saves, slots and time that its size allows."""

    saves: Sequence[Cell]
    restores: Sequence[Cell]
    kill: Cell
    corruption: Cell
    gang_layout: str
    repeats: int
    blob_sizes: Sequence[int]
    headline: Sequence[Cell]
    slow_store: Cell
    slow_store_bytes_per_second: int
    load: Load


_GIB_1 = Cell(peer=OURS, layout="gpt:1", saves=6)
# Three slots, the state and the plain copy's buffer would not leave a machine of 24 GiB room to write.
_GIB_4 = Cell(peer=OURS, layout="gpt:4", saves=4, slots=2, time_limit_seconds=900)
_SMALL = Cell(peer=OURS, layout="small:20000", saves=6)

FULL = Plan(
    saves=(_GIB_1, _SMALL, _GIB_4),
    restores=(_GIB_1, _SMALL, _GIB_4),
    kill=replace(_GIB_1, layout="gpt:0.5"),
    corruption=replace(_GIB_1, layout="gpt:0.06"),
    gang_layout="gpt:0.25",
    repeats=3,
    blob_sizes=blob.SIZES,
    headline=headline.CELLS,
    slow_store=slowstore.CELL,
    slow_store_bytes_per_second=slowstore.BYTES_PER_SECOND,
    load=Load(),
)
_TINY = Cell(peer=OURS, layout="gpt:0.06", saves=3, time_limit_seconds=120)
QUICK = Plan(
    saves=(_TINY, replace(_TINY, layout="small:1000")),
    restores=(_TINY,),
    kill=_TINY,
    corruption=_TINY,
    gang_layout="gpt:0.03",
    repeats=1,
    blob_sizes=blob.QUICK_SIZES,
    headline=headline.QUICK_CELLS,
    slow_store=slowstore.QUICK_CELL,
    slow_store_bytes_per_second=slowstore.QUICK_BYTES_PER_SECOND,
    load=load.QUICK,
)

KINDS = (
    "save", "back_to_back", "memory", "restore", "kill", "corrupt", "ddp", "blob", "headline", "slow_store", "load",
    "recovery",
)  # fmt: skip


def measurements(plan: Plan, results: Path) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """All cells in order: kind, peer, and what measures it."""

    def of(kind: str, measure: Callable[[Cell], None], cell: Cell, peers: Iterable[str]) -> Iterator[_Entry]:
        for peer in peers:
            yield kind, peer, partial(measure, replace(cell, peer=peer, results=results))

    for cell in plan.saves:
        yield from of("save", measure_saves, cell, interleaved((*OTHERS, LIMIT)))
    for cell in plan.saves[:2]:
        yield from of("back_to_back", measure_back_to_back, cell, interleaved(ASYNCHRONOUS))
    for cell in plan.saves[:1]:
        yield from of("memory", measure_memory, replace(cell, saves=3), (OURS, *OTHERS))
    for cell in plan.restores:
        yield from of("restore", partial(measure_restores, repeats=plan.repeats), cell, interleaved(FORMATS))
    yield from of("kill", measure_kill, plan.kill, (OURS, *ASYNCHRONOUS))
    yield "kill", OURS, partial(measure_kill, replace(plan.kill, results=results), kill_helper=True)
    yield from of("corrupt", measure_corruption, plan.corruption, (OURS, *FORMATS))
    for way in WAYS:
        yield "ddp", way, partial(measure_gang, way, plan.gang_layout, results=results)
    yield from _on_blob(plan, results)
    for ranks in (1, 2):
        yield "recovery", OURS, partial(measure_recoveries, ranks, 2 * plan.repeats, results)


def _on_blob(plan: Plan, results: Path) -> Iterator[_Entry]:
    """What a Blob Storage takes part in. Each measures all of its ways by itself."""
    yield "blob", OURS, partial(measure_uploads, plan.blob_sizes, plan.repeats, results)
    for cell in headline.cells(plan.headline, rounds=1 if plan.repeats == 1 else 2):
        yield "headline", cell.peer, partial(measure_headline, replace(cell, results=results))
    slow, rate = replace(plan.slow_store, results=results), plan.slow_store_bytes_per_second
    yield "slow_store", slow.peer, partial(measure_slow_blob, slow, rate)
    yield "slow_store", OURS, partial(measure_slow_disk, slow, rate)
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
    parser.add_argument("--quick", action="store_true", help="small sizes: whether everything works, not how fast")
    parser.add_argument("--kind", choices=KINDS, action="append", help="repeatable (default: all)")
    parser.add_argument("--peer", choices=PEERS, action="append", help="repeatable (default: all)")
    parser.add_argument("--no-install", action="store_true", help="use the peers that are installed")
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    chosen = [
        (kind, peer, measure)
        for kind, peer, measure in measurements(QUICK if arguments.quick else FULL, arguments.results)
        if kind in (arguments.kind or KINDS) and peer in (arguments.peer or PEERS)
    ]
    if arguments.list:
        print("\n".join(f"{kind} {peer}" for kind, peer, _ in chosen))
        return
    if not arguments.no_install:
        install()
    add_record("machine", results=arguments.results, is_quick=arguments.quick, **describe())
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
