"""What the machine takes without any of ours, as records have it. Pure; seconds.

A `control` record is of `what`: `read` (`size_bytes`; `reads`: by attempt, by time it was read, the seconds of each
16 MiB of shared memory that had been left alone), or `write` (`writes`: `seconds` of each file that was written past
the page cache, and the `lost_seconds` of the training loop beside it).
"""

from __future__ import annotations

from statistics import median

from benchmarks.report import markdown
from benchmarks.report.markdown import number, ratio, share, size
from benchmarks.report.samples import middle_of
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.results import Record

HEADER = ("shared memory", "first read, s", "read again, s", "ratio", "16 MiB: median, ms", "slowest twentieth, ms",
          "its share of the first read")  # fmt: skip


def lines(found: Measurements) -> list[str]:
    """A table of the reads, and a sentence about the writes."""
    records = found.done("control")
    if not records:
        failed = [reason_of(one) for one in found.of("control") if is_failed(one)] or [
            "no record of the kind `control`"
        ]
        return [f"{markdown.NOT_MEASURED}: {failed[-1]}."]
    reads = sorted((one for one in records if one["what"] == "read"), key=lambda one: int(one["size_bytes"]))
    table = markdown.table(HEADER, [_row(one) for one in reads])
    return [*table, "", *(_written(one) for one in records if one["what"] == "write")]


def _row(record: Record) -> list[str]:
    """Medians of the attempts; `again` is the last time that it was read."""
    attempts = record["reads"]
    first, again = (median(sum(times[which]) for times in attempts) for which in (0, -1))
    ranges = [sorted(times[0], reverse=True) for times in attempts]
    slowest = [taken[: max(1, len(taken) // 20)] for taken in ranges]
    return [
        size(record["size_bytes"]), number(first), number(again), ratio(first / again),
        number(1000 * median(map(median, ranges))),
        number(1000 * median(map(median, slowest))),
        share(median(sum(few) / sum(taken) for few, taken in zip(slowest, ranges, strict=True))),
    ]  # fmt: skip


def _written(record: Record) -> str:
    writes = record["writes"]
    lost = median(one["lost_seconds"] / one["seconds"] for one in writes)
    least, most = (pick(one["lost_seconds"] / one["seconds"] for one in writes) for pick in (min, max))
    return (
        f"A file of {size(record['size_bytes'])} written past the page cache by a process of the lowest priority takes "
        f"{number(middle_of(writes, 'seconds') or 0.0)} s, of which the training loop beside it loses {share(lost)} "
        f"(from {share(least)} to {share(most)}, n={len(writes)})."
    )
