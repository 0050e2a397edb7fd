"""Saves that come faster than the storage takes them: `python -m benchmarks.stores.slowstore [--quick]`.

Stepfast saves to Azurite behind a link that lets so many bytes a second through. For peers that know disks alone, the
disk is as slow as that, and Stepfast takes its turn on it with them.
"""

from __future__ import annotations

import argparse
import csv
import io
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cells import WORK, Cell, Run, measuring, told, train_counted
from benchmarks.peers.blobpeers import new_container
from benchmarks.peers.roster import ASYNCHRONOUS
from benchmarks.peers.stepfastpeer import JOB, Stepfast
from benchmarks.processes.cellprocess import Outcome
from benchmarks.results import RESULTS, add_record
from benchmarks.stores.azurite import AZURITE_VERSION, Azurite, running_azurite
from benchmarks.stores.slowdisk import slow_disk, unlimited_reason
from benchmarks.stores.slowlink import slow_link
from benchmarks.workload import MIB, size_of, state_of

from stepfast.catalog import committed_steps
from stepfast.layout import HISTORIES, job_folder, join
from stepfast.step import JobKey
from stepfast.storage import Store, open_store

PEERS_ON_DISK = ("stepfast", *ASYNCHRONOUS)
_FILES_KEPT = 12  # steps that the disk has room for: whoever removes none has room for all of its saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStore:
    """How many bytes a second it takes, and saves that come faster than that: of others, who stall, as many as show
    it."""

    bytes_per_second: int
    cell: Cell
    others_saves: int = 4

    def saves_of(self, peer: str) -> int:
        return self.cell.saves if peer == self.cell.peer else self.others_saves


# A tenth faster than the store: each save finds the one before it on its way, and three slots are enough.
_SAVES = Cell(peer="stepfast", layout="gpt:1", saves=8, time_limit_seconds=400)
DISK = SlowStore(bytes_per_second=128 * MIB, cell=replace(_SAVES, interval_seconds=7.0))  # a GiB takes eight seconds
# So slow that the link is what takes the time, not Azurite, which shares the processors with training.
BLOB = SlowStore(bytes_per_second=64 * MIB, cell=replace(_SAVES, peer="stepfast_blob", interval_seconds=14.0))
_QUICK_SAVES = replace(_SAVES, layout="gpt:0.03", saves=6, interval_seconds=0.5, time_limit_seconds=90)
QUICK_DISK = SlowStore(bytes_per_second=16 * MIB, cell=_QUICK_SAVES)
QUICK_BLOB = replace(QUICK_DISK, cell=replace(_QUICK_SAVES, peer="stepfast_blob"))


def measure_slow_blob(slow: SlowStore, results: Path) -> None:
    """Adds a `slow_store` record of saves to Azurite behind a slow link, and of what was committed in the end."""
    rate = slow.bytes_per_second
    with tempfile.TemporaryDirectory(prefix="bench-azurite-") as folder:
        with (
            running_azurite(Path(folder)) as azurite,
            slow_link(azurite.port, bytes_per_second=rate) as link,
            new_container(azurite, link.port) as container,
        ):
            cell = replace(slow.cell, results=results)
            _measure_to_blob(cell, azurite=azurite, container=container, bytes_per_second=rate)


@measuring("slow_store")
def _measure_to_blob(run: Run, *, azurite: Azurite, container: str, bytes_per_second: int) -> None:
    outcome, counts = train_counted(run)
    options = {"connection_string": azurite.connection_string()}
    stored = _stored(open_store(f"abfs://{container}/jobs", options=options), outcome)
    run.add(
        "slow_store", store=f"azurite {AZURITE_VERSION}, in memory", bytes_per_second=bytes_per_second,
        interval_seconds=run.cell.interval_seconds, **stored, **counts, **told(outcome),
    )  # fmt: skip


def _stored(store: Store, outcome: Outcome) -> dict[str, Any]:
    """What the storage has of the saves, once training has ended."""
    folder = job_folder(JobKey.parse(JOB))
    with closing(store):
        committed = [found.step for found in committed_steps(store, folder)]
        rows = csv.DictReader(io.StringIO(store.read(join(folder, HISTORIES)).decode()))
        fates = {row["global_step"]: row["outcome"] for row in rows}
    newest = max((save["step"] for save in outcome.told("save") if save["is_saved"]), default=None)
    return {
        "committed_steps": committed,
        "newest_saved_step": newest,
        "is_newest_committed": newest in committed,
        "fates": fates,
    }


def measure_slow_disk(slow: SlowStore, results: Path, peers: Sequence[str] = PEERS_ON_DISK) -> None:
    """Adds `slow_store` records of this project's saves and its peers' to a slow disk; or ones that say why not."""
    if reason := unlimited_reason():
        for peer in peers:
            add_record("slow_store", results=results, peer=peer, store="disk", status="missing", error=reason)
        return
    rate, size = slow.bytes_per_second, _FILES_KEPT * size_of(state_of(slow.cell.layout)) + 64 * MIB
    for peer in peers:
        try:
            with slow_disk(WORK, size, rate) as folder:
                cell = replace(slow.cell, peer=peer, saves=slow.saves_of(peer), results=results, work=folder)
                _measure_to_disk(cell, bytes_per_second=rate)
        except OSError as error:
            add_record("slow_store", results=results, peer=peer, store="disk", status="failed", error=str(error))


@measuring("slow_store")
def _measure_to_disk(run: Run, *, bytes_per_second: int) -> None:
    outcome, counts = train_counted(run)
    stored = _stored(open_store(run.site.storage.as_uri()), outcome) if isinstance(run.peer, Stepfast) else {}
    run.add(
        "slow_store", store="disk", bytes_per_second=bytes_per_second, interval_seconds=run.cell.interval_seconds,
        **stored, **counts, **told(outcome),
    )  # fmt: skip


def main() -> None:
    """Measures both stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 MiB, few saves")
    parser.add_argument("--store", choices=("blob", "disk"), action="append", help="repeatable (default: both)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    stores = arguments.store or ("blob", "disk")
    if "blob" in stores:
        measure_slow_blob(QUICK_BLOB if arguments.quick else BLOB, arguments.results)
    if "disk" in stores:
        measure_slow_disk(QUICK_DISK if arguments.quick else DISK, arguments.results)


if __name__ == "__main__":
    main()
