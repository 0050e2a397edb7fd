"""Samples of records, and what is said of them: medians and ratios to limits. Pure; seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.peers.roster import ASYNCHRONOUS
from benchmarks.results import Record

_ASYNCHRONOUS = ("stepfast", *ASYNCHRONOUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median in seconds, of how many samples; the median of the limits beside them, and of their ratios to these."""

    seconds: float
    limit_seconds: float | None
    ratio: float | None
    count: int


Save = dict[str, Any]


def first_saves(records: Iterable[Record]) -> list[Save]:
    """The first save of each process."""
    return [record["saves"][0] for record in records if record.get("saves") and record["saves"][0]["is_saved"]]


def steady_saves(records: Iterable[Record]) -> list[Save]:
    """All but the first of each process."""
    return [save for record in records for save in (record.get("saves") or [])[1:] if save["is_saved"]]


def saves_of(records: Iterable[Record]) -> list[Save]:
    """All that were made."""
    return [save for record in records for save in record.get("saves") or [] if save["is_saved"]]


def stall_of(saves: Sequence[Save]) -> Figure | None:
    """Stalls, each beside its plain copy."""
    return figure(
        (save["stall_seconds"], save.get("plain_seconds")) for save in saves if save.get("stall_seconds") is not None
    )


def is_asynchronous(peer: str) -> bool:
    """Whether its save() returns before the step is persisted."""
    return peer in _ASYNCHRONOUS


def persist_of(save: Save, *, is_asynchronous: bool = True) -> float:
    """From the return of save() until the step is persisted; of a peer that persists before it returns, its save().

    The trainer takes out the while in which it overwrites the stamps, as nobody trains then; persisting goes on, so it
    is put back in here. For small states that is an upper bound.
    """
    if not is_asynchronous:
        return float(save["stall_seconds"])
    return float(save["persist_after_return_seconds"] + save.get("stamping_seconds", 0.0))


def steady_persist(records: Iterable[Record]) -> float | None:
    """The median of all saves but the first of each process."""
    return middle([
        persist_of(save, is_asynchronous=is_asynchronous(record["peer"]))
        for record in records
        for save in steady_saves([record])
    ])  # fmt: skip


def restore_of(records: Sequence[Record]) -> Figure | None:
    """Restores of the step that was asked for, each beside the limit that its own process measured."""
    return figure(
        (record["seconds"], middle(record.get("limit_seconds") or [])) for record in records if is_restored(record)
    )


def is_restored(record: Record) -> bool:
    """Whether every tensor was."""
    return record.get("seconds") is not None and record.get("wrong_tensors", 0) == 0


def figure(pairs: Iterable[tuple[float, float | None]]) -> Figure | None:
    """Of seconds and the limit beside each of them; None where there are no samples."""
    found = list(pairs)
    if not found:
        return None
    return Figure(
        seconds=median(seconds for seconds, _ in found),
        limit_seconds=middle([limit for _, limit in found if limit]),
        ratio=middle([seconds / limit for seconds, limit in found if limit]),
        count=len(found),
    )


def lost_of(saves: Iterable[Save]) -> list[Save]:
    """Those that tell what they cost training: where the step was persisted before a training step was made, nobody
    could lose anything.
    """
    return [save for save in saves if save.get("steps_while_persisting", 1)]


def planning_of(records: Iterable[Record]) -> float | None:
    """The median time that the slowest rank of a gang plans, of all saves but the first of each process."""
    known = [
        [value for value in save.get("planning_seconds") or [] if value is not None]
        for record in records
        for save in (record.get("saves") or [])[1:]
    ]
    return middle([max(values) for values in known if values])


def middle(values: Sequence[float]) -> float | None:
    """The median, where there is one."""
    return median(values) if values else None


def middle_of(items: Iterable[Record], field: str) -> float | None:
    """The median of a field of those that have it."""
    return middle([item[field] for item in items if item.get(field) is not None])
