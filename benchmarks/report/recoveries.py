"""Recoveries on one machine as records have them, beside their limits. Pure; seconds.

A `recovery` record is of one run: `way` (stepfast: a recovery; python: the bare script from nothing to its first step;
torchrun: the same under torch's launcher), `ranks`, `seconds`, `moments` (by name, after the death or the start), and
of a recovery `standby_pss_bytes`, the memory of the launcher that waits for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import markdown
from benchmarks.report.markdown import number, seconds, size
from benchmarks.report.samples import middle, middle_of
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.report.verdicts import Verdict
from benchmarks.results import Record

OURS, LIMIT, LAUNCHED = "stepfast", "python", "torchrun"
WAYS = (OURS, LIMIT, LAUNCHED)
RANKS = (1, 2)
HEADER = ("moment", "stepfast, s", "after the one before, s", "bare python, s", "torchrun, s")


def judge(found: Measurements, *, ranks: int, allowed_seconds: float) -> Verdict | None:
    """The median of recoveries against that of the bare script, side by side in one run."""
    ours, limits = (found.done("recovery", way=way, ranks=ranks) for way in (OURS, LIMIT))
    taken, limit = middle_of(ours, "seconds"), middle_of(limits, "seconds")
    if taken is None or limit is None:
        return None
    torchrun = middle_of(found.done("recovery", way=LAUNCHED, ranks=ranks), "seconds")
    return Verdict(
        is_reached=taken <= limit + allowed_seconds,
        limit=f"bare python {seconds(limit)}" + (f", torchrun {seconds(torchrun)}" if torchrun is not None else ""),
        measured=f"{seconds(taken)}: the limit {taken - limit:+.2f} s (n={len(ours)})",
    )


def tables(found: Measurements) -> list[str]:
    """For each number of ranks: the moments' medians in their order, then the whole, then what waits beside it."""
    records = found.of("recovery")
    failed = [reason_of(one) for one in records if is_failed(one)]
    done = [one for one in records if not is_failed(one)]
    if not done:
        return [f"{markdown.NOT_MEASURED}: {(failed or ['no record of the kind `recovery`'])[-1]}."]
    lines: list[str] = []
    for ranks in sorted({*RANKS, *(int(one["ranks"]) for one in done)}):
        mine = [one for one in done if one["ranks"] == ranks]
        words = [reason_of(one) for one in records if is_failed(one) and one.get("ranks") == ranks]
        lines += ["", f"On {ranks} rank{'s' if ranks > 1 else ''}:", ""]
        lines += _table(mine) if mine else [f"{markdown.NOT_MEASURED}: {(words or ['no record'])[-1]}."]
    lines += ["", _standby(done)]
    return lines[1:]


def _table(records: Sequence[Record]) -> list[str]:
    ways = {way: [one["moments"] for one in records if one["way"] == way] for way in WAYS}
    names = dict.fromkeys(name for moments in ways.values() for one in moments for name in one)
    medians = {
        name: {way: middle([one[name] for one in moments if name in one]) for way, moments in ways.items()}
        for name in names
    }
    known = {name: taken for name in names if (taken := medians[name][OURS]) is not None}
    ordered = [*sorted(known, key=lambda name: known[name]), *(name for name in names if name not in known)]
    before, rows = 0.0, []
    for name in ordered:
        after = markdown.NONE
        if name in known:
            after, before = number(known[name] - before), known[name]
        ours, limit, launched = (_told(medians[name][way]) for way in WAYS)
        rows.append([name, ours, after, limit, launched])
    ours, limit, launched = (_told(middle_of((one for one in records if one["way"] == way), "seconds")) for way in WAYS)
    return markdown.table(HEADER, [*rows, ["in all", ours, markdown.NONE, limit, launched]])


def _standby(records: Sequence[Record]) -> str:
    name = "standby_pss_bytes"
    values = [one[name] for one in records if one.get(name) is not None]
    if (taken := middle(values)) is None:
        return f"Memory of the launcher that waits beside the training: {markdown.NOT_MEASURED}."
    return (
        f"The launcher that waits beside the training takes {size(taken)} of memory (Pss: of what it shares, its part; "
        f"n={len(values)})."
    )


def _told(value: float | None) -> str:
    return markdown.NONE if value is None else number(value)
