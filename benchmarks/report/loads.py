"""One agent with several jobs, while the storage of one hangs: what the others feel. Pure; seconds.

A `load` record holds by measure (`stall_seconds`, `persist_seconds`: of the other jobs; `hung_job_stall_seconds`) and
by phase (`healthy`, `hanging`) the samples; `lost_saves`, by phase, how many of the other jobs' were skipped or never
committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import markdown
from benchmarks.report.markdown import number, seconds
from benchmarks.report.samples import middle
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.report.verdicts import Verdict
from benchmarks.results import Record

HEALTHY, HANGING = "healthy", "hanging"
_ROWS = (
    ("stall_seconds", "stall of the other jobs"),
    ("persist_seconds", "persist of the other jobs"),
    ("hung_job_stall_seconds", "stall of the job whose storage hangs"),
)


def judge(found: Measurements, *, measure: str, bound: float) -> Verdict | None:
    """The median while a storage hangs, against that while none does."""
    records = found.done("load")
    healthy, hanging = (_samples(records, measure, phase) for phase in (HEALTHY, HANGING))
    before, after = middle(healthy), middle(hanging)
    if not before or after is None:
        return None
    change = after / before - 1
    lost = sum(sum(one["lost_saves"].values()) for one in records)
    return Verdict(
        is_reached=change <= bound and lost == 0,
        limit=f"while none hangs {seconds(before)} (n={len(healthy)})",
        measured=f"{_signed(change)} ({seconds(after)}, n={len(hanging)}); {lost} saves skipped or never committed",
    )


def table(found: Measurements) -> list[str]:
    """Medians of both kinds of phase."""
    records = found.done("load")
    if not records:
        failed = [reason_of(one) for one in found.of("load") if is_failed(one)] or ["no record of the kind `load`"]
        return [f"{markdown.NOT_MEASURED}: {failed[-1]}."]
    rows = []
    for measure, words in _ROWS:
        healthy, hanging = (_samples(records, measure, phase) for phase in (HEALTHY, HANGING))
        before, after = middle(healthy), middle(hanging)
        texts = [markdown.NOT_MEASURED if value is None else number(value) for value in (before, after)]
        change = _signed(after / before - 1) if before and after is not None else markdown.NONE
        rows.append([words, *texts, change, f"{len(healthy)} / {len(hanging)}"])
    return markdown.table(("", "healthy, s", "hanging, s", "change", "samples"), rows)


def _samples(records: Sequence[Record], measure: str, phase: str) -> list[float]:
    return [float(value) for one in records for value in (one.get(measure) or {}).get(phase) or []]


def _signed(change: float) -> str:
    return f"{100 * change:+.1f} %"
