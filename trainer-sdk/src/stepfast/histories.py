"""`checkpointHistories.csv`: one row per save, what Nebula's users look at (duration, throughput, size), and more."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from stepfast.errors import ObjectNotFound
from stepfast.layout import HISTORIES, join
from stepfast.storage.base import Store

COLUMNS = (
    "global_step", "run", "outcome", "saved_time", "stall_seconds", "duration_seconds",
    "throughput_mb_per_second", "size_bytes", "world_size",
)  # fmt: skip
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRow:
    """One save. `duration_seconds`: from the save to its commit; `outcome`: Committed, or Dropped: given up for a newer
    step, or another run's save of the step is the one that is kept.
    """

    global_step: int
    run: str
    outcome: str
    saved_time: float
    stall_seconds: float
    duration_seconds: float | None
    size_bytes: int
    world_size: int

    def cells(self) -> list[str]:
        # As it is written, so that the throughput beside it is that of the row's own figures.
        duration = None if self.duration_seconds is None else round(self.duration_seconds, 6)
        throughput = f"{self.size_bytes / 1e6 / duration:.3f}" if duration else ""
        return [
            str(self.global_step), self.run, self.outcome,
            datetime.fromtimestamp(self.saved_time, UTC).isoformat(timespec="milliseconds"),
            f"{self.stall_seconds:.6f}", "" if duration is None else f"{duration:.6f}", throughput,
            str(self.size_bytes), str(self.world_size),
        ]  # fmt: skip


def read_rows(store: Store, folder: str) -> tuple[SaveRow, ...]:
    """The job's saves, as they were noted; none where nothing was ever saved. Lines that are no row of ours are left
    out. Raises StorageError.
    """
    return tuple(row for line in _read_lines(store, folder) if (row := _row_of(line)) is not None)


def append_rows(store: Store, folder: str, rows: Sequence[SaveRow]) -> None:
    """Adds rows to the job's file; only the agent of rank 0 writes it. The oldest rows go beyond `MAX_ROWS`.

    Rows that are there already are not added again: a writer whose answer was lost says them twice.
    """
    kept = _read_lines(store, folder)
    known = {tuple(line) for line in kept}
    kept += [cells for row in rows if tuple(cells := row.cells()) not in known]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(kept[-MAX_ROWS:])
    store.replace(join(folder, HISTORIES), out.getvalue().encode())


def _read_lines(store: Store, folder: str) -> list[list[str]]:
    """The rows as they stand; none of a file with other columns."""
    try:
        text = store.read(join(folder, HISTORIES)).decode("utf-8", "replace")
    except ObjectNotFound:
        return []
    lines = list(csv.reader(io.StringIO(text)))
    return lines[1:] if lines and tuple(lines[0]) == COLUMNS else []


def _row_of(line: list[str]) -> SaveRow | None:
    """The inverse of `SaveRow.cells`."""
    try:
        step, run, outcome, saved, stall, duration, _, size, world_size = line
        return SaveRow(
            global_step=int(step),
            run=run,
            outcome=outcome,
            saved_time=datetime.fromisoformat(saved).timestamp(),
            stall_seconds=float(stall),
            duration_seconds=float(duration) if duration else None,
            size_bytes=int(size),
            world_size=int(world_size),
        )
    except ValueError:
        return None
