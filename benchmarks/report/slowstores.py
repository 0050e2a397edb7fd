"""Saves that come faster than their storage takes them. Pure; seconds.

A `slow_store` record is of one peer. `store` is `azurite …` behind a slow link, or `disk`, a slow one that this project
and its peers are measured on. Ours also say what the agent and the storage had of the saves (`skipped`, `dropped`,
`waited`, `is_newest_committed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.report import markdown
from benchmarks.report.markdown import number, ratio, seconds
from benchmarks.report.samples import Save, saves_of, stall_of
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.report.verdicts import Verdict, against
from benchmarks.results import Record

ON_BLOB, ON_DISK = "stepfast_blob", "stepfast"
_COUNTS = ("skipped", "dropped", "waited")
_HEADER = (
    "peer", "storage", "stall while busy, s", "longest, s", "saves while busy", "not saved",
    "skipped / dropped / waited for", "newest committed",
)  # fmt: skip


def judge_blob(found: Measurements, *, bound: float) -> Verdict | None:
    """The stall while the save before is being persisted; nothing is lost, and nobody waits."""
    return _judge(found.done("slow_store", peer=ON_BLOB), bound)


def judge_disk(found: Measurements, *, bound: float) -> Verdict | None:
    """The same of a slow disk, beside the peers' stalls on it."""
    verdict = _judge(found.done("slow_store", peer=ON_DISK), bound)
    if verdict is None:
        return None
    others = {str(one["peer"]) for one in found.done("slow_store")} - {ON_BLOB, ON_DISK}
    beside = [f"{peer} {words}" for peer in sorted(others) if (words := _beside(found, peer))]
    return replace(verdict, limit="; ".join([verdict.limit, *beside]))


def _judge(records: Sequence[Record], bound: float) -> Verdict | None:
    verdict = _stall(records, bound)
    if verdict is None:
        return None
    counts = {name: [one.get(name) for one in records] for name in _COUNTS}
    is_whole = all(count == 0 for taken in counts.values() for count in taken) and not _unsaved(records)
    is_newest = all(one.get("is_newest_committed") for one in records)
    words = [f"{_sum(taken)} {name}" for name, taken in counts.items()]
    words += [f"{_unsaved(records)} not saved", f"newest {'' if is_newest else 'not '}committed"]
    return Verdict(
        is_reached=verdict.is_reached and is_whole and is_newest,
        limit=verdict.limit,
        measured="; ".join([verdict.measured, *words]),
    )


def table(found: Measurements, titles: Mapping[str, str]) -> list[str]:
    """Ours first, to both storages."""
    records = found.of("slow_store")
    if not records:
        return [f"{markdown.NOT_MEASURED}: no record of the kind `slow_store`."]
    peers = dict.fromkeys(str(one.get("peer")) for one in records)
    rows, notes = [], []
    for peer in sorted(peers, key=lambda peer: (peer != ON_BLOB, peer != ON_DISK, peer)):
        mine = found.of("slow_store", peer=peer)
        done = [one for one in mine if not is_failed(one)]
        notes += [f"{peer}: {reason_of(one)}" for one in mine if is_failed(one)]
        store = next((str(one["store"]) for one in mine if one.get("store")), markdown.NONE)
        rows.append([titles.get(peer, peer), store, *_cells(done, str(mine[-1].get("status", "failed")))])
    lines = [f"- {reason}" for reason in dict.fromkeys(notes)]
    return [*markdown.text_table(_HEADER, rows), *(["", *lines] if lines else [])]


def _cells(records: Sequence[Record], status: str) -> list[str]:
    if not records:
        return [status, *[markdown.NONE] * 5]
    busy, saves = _busy(records), sum(len(one.get("saves") or []) for one in records)
    stall = stall_of(busy)
    told = all(name in one for name in _COUNTS for one in records)
    newest = [one["is_newest_committed"] for one in records if "is_newest_committed" in one]
    return [
        number(stall.seconds) + (f" ({ratio(stall.ratio)})" if stall.ratio else "") if stall else markdown.NONE,
        number(max(save["stall_seconds"] for save in busy)) if busy else markdown.NONE,
        f"{len(busy)} of {saves}",
        str(_unsaved(records)),
        " / ".join(_sum([one[name] for one in records]) for name in _COUNTS) if told else markdown.NONE,
        ("yes" if all(newest) else markdown.bold("no")) if newest else markdown.NONE,
    ]


def _stall(records: Sequence[Record], bound: float) -> Verdict | None:
    taken = stall_of(_busy(records))
    return against(taken, "plain copy", bound) if taken is not None else None


def _beside(found: Measurements, peer: str) -> str:
    taken = stall_of(_busy(found.done("slow_store", peer=peer)))
    if taken is None:
        return ""
    return seconds(taken.seconds) + (f" ({ratio(taken.ratio)})" if taken.ratio is not None else "")


def _busy(records: Sequence[Record]) -> list[Save]:
    """Saves that came while the one before them was not persisted."""
    return [save for save in saves_of(records) if save.get("is_busy")]


def _unsaved(records: Sequence[Record]) -> int:
    return sum(not save["is_saved"] for one in records for save in one.get("saves") or [])


def _sum(counts: Sequence[int | None]) -> str:
    """Where the agent was never heard, nobody knows."""
    known = [count for count in counts if count is not None]
    return str(sum(known)) if len(known) == len(counts) else "?"
