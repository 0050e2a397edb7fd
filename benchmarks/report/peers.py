"""Peers side by side: a table for each layout, the best of each column in bold, failures with their reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.report import markdown
from benchmarks.report.layouts import title_of
from benchmarks.report.markdown import number, ratio
from benchmarks.report.plan import Expected
from benchmarks.report.samples import (
    Figure,
    first_saves,
    lost_of,
    middle_of,
    restore_of,
    saves_of,
    stall_of,
    steady_persist,
    steady_saves,
)
from benchmarks.report.selection import Measurements, is_failed, reason_of, told
from benchmarks.results import Record

LIMIT = "plain_copy"
COLUMNS = (
    "peer", "first stall, s", "steady stall, s", "persist, s", "lost, s", "worst step, ms", "memory, × state",
    "restore: memory, s", "restore: disk, warm, s", "restore: disk, cold, s",
)  # fmt: skip

_KINDS = ("save", "restore", "memory")
Value = tuple[float | None, str]
"""What a column compares, and how it reads."""


@dataclass(slots=True)
class Notes:
    """The reasons below a table, numbered."""

    reasons: list[str] = field(default_factory=list)

    def mark(self, reason: str) -> str:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"[{self.reasons.index(reason) + 1}]"

    def lines(self) -> list[str]:
        return ["", *(f"{number}. {reason}" for number, reason in enumerate(self.reasons, 1))] if self.reasons else []


def peer_tables(found: Measurements, expected: Expected) -> list[str]:
    """One table for each layout."""
    lines: list[str] = []
    for layout in dict.fromkeys([*expected.layouts_of("save"), *layouts_seen(found, *_KINDS)]):
        lines += ["", f"### {title_of(layout)}", "", *peer_table(found, expected, layout)]
    return lines


def peer_table(found: Measurements, expected: Expected, layout: str) -> list[str]:
    """All peers that the layout is measured with, this project's first and the limit last."""
    seen = [str(one["peer"]) for kind in _KINDS for one in found.of(kind, layout=layout)]
    peers = sorted({*expected.peers("save", layout), *seen}, key=lambda peer: (peer == LIMIT, peer != "stepfast", peer))
    notes, names = Notes(), expected.titles
    rows = [_row(found, expected, notes, peer, layout) for peer in peers]
    return [*markdown.table(COLUMNS, _with_best(peers, rows, names)), *notes.lines()]


def cell(
    found: Measurements, expected: Expected, notes: Notes, read: Callable[[Sequence[Record]], Value | None],
    *, kind: str, peer: str, layout: str, tier: str | None = None,
) -> Value:  # fmt: skip
    """What was measured, why it was not, or a dash where nobody meant to."""
    records = found.of(kind, peer=peer, layout=layout)
    failed = [one for one in records if is_failed(one) and one.get("tier") in (None, "", tier)]
    marks = "".join(dict.fromkeys(notes.mark(f"{peer}: {reason_of(one)}") for one in failed))
    done = [one for one in records if not is_failed(one) and (tier is None or one.get("tier") == tier)]
    value = read(done) if done else None
    if value is not None:
        return value[0], f"{value[1]} {marks}".strip()
    if failed:
        return None, f"{failed[-1]['status']} {marks}"
    refused = [one for one in done if one.get("error")]
    if refused:
        mark = notes.mark(f"{peer}: {told(refused[-1]['error'])}")
        return None, f"refused {mark}"
    if done or records or (kind, peer, layout) not in expected.cells:
        return None, markdown.NONE
    return None, markdown.NOT_MEASURED


def _row(found: Measurements, expected: Expected, notes: Notes, peer: str, layout: str) -> list[Value]:
    read = partial(cell, found, expected, notes, peer=peer, layout=layout)
    persists = peer != LIMIT  # which is no save: nobody can restore it
    return [
        read(_first, kind="save"),
        read(_steady, kind="save"),
        *(
            read(column, kind="save") if persists else (None, markdown.NONE)
            for column in (_persist, _lost, _worst_step)
        ),
        read(_memory, kind="memory"),
        *(read(_restore, kind="restore", tier=tier) for tier in ("memory", "disk-warm", "disk-cold")),
    ]  # fmt: skip


def _with_best(peers: Sequence[str], rows: Sequence[Sequence[Value]], names: Mapping[str, str]) -> list[list[str]]:
    """The rows as text, the least of each column in bold; the limit does not take part."""
    texts = [[names.get(peer, peer) for peer in peers]]
    for column in zip(*rows, strict=True):
        compared = [None if peer == LIMIT else value for peer, (value, _) in zip(peers, column, strict=True)]
        texts.append(markdown.bold_best(compared, [text for _, text in column]))
    return [list(row) for row in zip(*texts, strict=True)]


def _first(records: Sequence[Record]) -> Value | None:
    return _figure(stall_of(first_saves(records)))


def _steady(records: Sequence[Record]) -> Value | None:
    return _figure(stall_of(steady_saves(records)))


def _persist(records: Sequence[Record]) -> Value | None:
    value = steady_persist(records)
    return None if value is None else (value, number(value))


def _lost(records: Sequence[Record]) -> Value | None:
    value = middle_of(lost_of(steady_saves(records)), "lost_seconds")
    return None if value is None else (value, number(value))


def _worst_step(records: Sequence[Record]) -> Value | None:
    value = middle_of(steady_saves(records), "worst_step_seconds")
    return None if value is None else (value, number(value * 1000))


def _memory(records: Sequence[Record]) -> Value | None:
    """Shared memory, helpers, and what the trainer grew by, as copies of the state."""
    peaks = [one for one in records if "shared_growth_bytes" in one]
    if not peaks:
        return None
    copies = max(memory_bytes(one) / one["size_bytes"] for one in peaks)
    return copies, number(copies)


def memory_bytes(record: Record) -> float:
    """All that a save of it takes beside the state."""
    grown = record["trainer_peak_bytes"] - record["trainer_before_bytes"]
    return float(record["shared_growth_bytes"] + record["helpers_peak_bytes"] + grown)


def _restore(records: Sequence[Record]) -> Value | None:
    return _figure(restore_of(records))


def _figure(taken: Figure | None) -> Value | None:
    if taken is None:
        return None
    return taken.seconds, number(taken.seconds) + (f" ({ratio(taken.ratio)})" if taken.ratio is not None else "")


def back_to_back_table(found: Measurements, expected: Expected, layout: str) -> list[str]:
    """Saves that nobody waits for."""
    peers = dict.fromkeys([*expected.peers("back_to_back", layout), *_peers(found, "back_to_back", layout)])
    notes, names = Notes(), expected.titles
    rows: list[list[Value]] = []
    ordered = sorted(peers, key=lambda peer: (peer != "stepfast", peer))
    for peer in ordered:
        read = partial(cell, found, expected, notes, kind="back_to_back", peer=peer, layout=layout)
        rows.append([read(column) for column in (_all, _busy, _skipped, _dropped, _blocked)])
    header = ("peer", "stall, s", "stall while busy, s", "skipped", "given up for newer ones", "over 2 × the quickest")
    return [*markdown.table(header, _with_best(ordered, rows, names)), *notes.lines()]


def _all(records: Sequence[Record]) -> Value | None:
    return _figure(stall_of(steady_saves(records)))


def _busy(records: Sequence[Record]) -> Value | None:
    return _figure(stall_of([save for save in saves_of(records) if save.get("is_busy")]))


def _skipped(records: Sequence[Record]) -> Value | None:
    return None, f"{sum(one['skipped'] for one in records)} of {sum(len(one['saves']) for one in records)}"


def _dropped(records: Sequence[Record]) -> Value | None:
    known = [one["dropped"] for one in records if one.get("dropped") is not None]
    return None, str(sum(known)) if known else markdown.NONE


def _blocked(records: Sequence[Record]) -> Value | None:
    return None, str(sum(one["blocked"] for one in records))


def layouts_seen(found: Measurements, *kinds: str) -> list[str]:
    """The layouts that records of those kinds have."""
    return list(dict.fromkeys(str(one["layout"]) for kind in kinds for one in found.of(kind) if one.get("layout")))


def _peers(found: Measurements, kind: str, layout: str) -> list[str]:
    return list(dict.fromkeys(str(one["peer"]) for one in found.of(kind, layout=layout)))
