"""Which records a page is made of: of each cell those of the newest run that has it. Pure.

A run begins with a record of the kind `machine`. A cell is what was measured once or several times in a run: its
samples are pooled. A record that failed before it came to its parts does not say which cell it is of: it counts until
a newer run has measured anything of its kind and peer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.results import Record

_KEYS: Mapping[str, tuple[str, ...]] = {
    "save": ("peer", "layout"),
    "back_to_back": ("peer", "layout"),
    "slow_store": ("peer",),
    "memory": ("peer", "layout"),
    "restore": ("peer", "layout"),  # its tiers are measured together
    "kill": ("peer", "layout", "helper_killed"),
    "corrupt": ("peer", "layout"),
    "ddp": ("peer", "layout", "ranks"),
    "blob": ("size_bytes",),
    "recovery": ("ranks",),  # its ways are measured side by side
    "load": (),
    "control": ("what", "size_bytes"),
    "headline": ("peer", "layout", "ranks"),
    "goodput": ("trace", "system", "policy", "node_lost"),
    "scale": ("nodes", "is_flush"),
}
"""What tells the cells of a kind apart."""
_ONCE = ("goodput", "scale")
"""Simulated: measured again they are the same samples, not more of them."""
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/'\",:;<>()]+/)+")


@dataclass(frozen=True, slots=True)
class Measurements:
    """The records of a page, and the machines that they were measured on."""

    records: Sequence[Record]
    machines: Sequence[Record]

    def of(self, kind: str, **fields: object) -> list[Record]:
        """Those of the kind whose fields are so, oldest first."""
        return [record for record in self.records if _is(record, kind, fields)]

    def done(self, kind: str, **fields: object) -> list[Record]:
        """The same without those that failed."""
        return [record for record in self.of(kind, **fields) if not is_failed(record)]

    @property
    def is_quick(self) -> bool:
        """Whether the newest run was to show that everything works, not how fast."""
        return bool(self.machines) and bool(self.machines[-1].get("is_quick"))


def select(records: Sequence[Record]) -> Measurements:
    """Of each cell what its newest run measured."""
    runs = list(accumulate(records, lambda run, record: run + (record["kind"] == "machine"), initial=0))[1:]
    numbered = [(run, record) for run, record in zip(runs, records, strict=True) if record["kind"] != "machine"]
    newest: dict[tuple[object, ...], int] = {}
    newest_of_kind: dict[tuple[object, ...], int] = {}
    for run, record in numbered:
        newest[_cell(record)] = newest_of_kind[_kind(record)] = run
    kept = [
        (run, record)
        for run, record in numbered
        if run == (newest_of_kind[_kind(record)] if _is_homeless(record) else newest[_cell(record)])
    ]
    last = {_cell(record): record for _, record in kept}
    chosen = [(run, one) for run, one in kept if one["kind"] not in _ONCE or last[_cell(one)] is one]
    used = {run for run, _ in chosen}
    machines = [
        record for run, record in zip(runs, records, strict=True) if record["kind"] == "machine" and run in used
    ]
    return Measurements([record for _, record in chosen], machines)


def is_failed(record: Record) -> bool:
    """Whether it says why there is no measurement instead of one."""
    return bool(record.get("status", "done") != "done")


def reason_of(record: Record) -> str:
    """Why there is no measurement, in one line."""
    return told(f"{record.get('status', 'failed')}: {record.get('error') or 'no reason was given'}")


def told(error: str) -> str:
    """An error in one line, its files by their names alone: the page is read on another machine."""
    return _FOLDERS.sub("…/", " ".join(error.split()))


def _is(record: Record, kind: str, fields: Mapping[str, object]) -> bool:
    return all(record.get(name) == value for name, value in {"kind": kind, **fields}.items())


def _cell(record: Record) -> tuple[object, ...]:
    kind = str(record["kind"])
    return kind, *(record.get(name) for name in _KEYS.get(kind, ()))


def _kind(record: Record) -> tuple[object, ...]:
    kind = str(record["kind"])
    return kind, record.get("peer") if "peer" in _KEYS.get(kind, ()) else None


def _is_homeless(record: Record) -> bool:
    return is_failed(record) and any(record.get(name) is None for name in _KEYS.get(str(record["kind"]), ()))
