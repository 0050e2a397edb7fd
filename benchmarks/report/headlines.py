"""Training time that saves to a blob storage cost: torch.save beside Stepfast, by size and by ranks. Pure; seconds.

A `headline` record is of one peer, one size of a rank's state (`size_bytes`) and a number of `ranks`; each of its
`saves` is one rank's. What a gang stands still, or loses, is what its slowest rank does; each record's first step is
left out. Nobody loses less than the stall: where training went faster after a save than just before it, the machine
was disturbed, and the stall is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.report import markdown
from benchmarks.report.markdown import GIB, number, ratio, seconds, size
from benchmarks.report.samples import Save, middle
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.report.verdicts import Verdict, joined
from benchmarks.results import Record

OURS, THEIRS = "stepfast_blob", "torch_save_blob"
TITLES = {THEIRS: "torch.save", OURS: "stepfast"}
HEADER = (
    "state of a rank", "ranks", "torch.save: stall, s", "stepfast: stall, s", "less", "torch.save: lost, s",
    "stepfast: lost, s", "less", "stepfast: lost, s per GiB", "stall, s per GiB",
)  # fmt: skip

Place: TypeAlias = tuple[int, int]
"""The bytes of a rank's state, and how many ranks there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Medians, of so many saves; in `raised` of them less than the stall was lost."""

    lost_seconds: float
    stall_seconds: float
    count: int
    raised: int


def costs_of(found: Measurements) -> Mapping[Place, Mapping[str, Cost]]:
    """From few ranks to many, from small to large: by peer, what a save costs."""
    records: dict[Place, dict[str, list[Record]]] = {}
    for one in found.done("headline"):
        place = int(one["ranks"]), int(one["size_bytes"])
        records.setdefault(place, {}).setdefault(str(one["peer"]), []).append(one)
    return {
        (bytes_, ranks): {peer: cost for peer, mine in records[ranks, bytes_].items() if (cost := _cost(mine))}
        for ranks, bytes_ in sorted(records)
    }


def lines_of(costs: Mapping[Place, Mapping[str, Cost]], *, by_ranks: bool) -> dict[str, list[tuple[float, float]]]:
    """Lost seconds by peer: over the GiB of one rank, or over the ranks, at the size that most of them have."""
    places = _over_ranks(costs) if by_ranks else _over_sizes(costs)
    lines: dict[str, list[tuple[float, float]]] = {}
    for bytes_, ranks in places:
        for peer, cost in costs[bytes_, ranks].items():
            if cost.lost_seconds > 0:
                at = float(ranks) if by_ranks else bytes_ / GIB
                lines.setdefault(TITLES.get(peer, peer), []).append((at, cost.lost_seconds))
    return lines


def judge(found: Measurements, *, bound: float) -> Verdict | None:
    """The share of the lost training time that is saved, everywhere; of the stall beside it."""
    reached, limits, words = [], [], []
    for place, by_peer in costs_of(found).items():
        ours, theirs = by_peer.get(OURS), by_peer.get(THEIRS)
        if ours is None or theirs is None or theirs.lost_seconds <= 0:
            continue
        less = 1 - ours.lost_seconds / theirs.lost_seconds
        reached.append(less >= bound)
        limits.append(f"torch.save {seconds(theirs.lost_seconds)}")
        stall = _less(ours.stall_seconds, theirs.stall_seconds)
        words.append(f"{_named(place)}: {100 * less:.2f} % less ({seconds(ours.lost_seconds)}; stall {stall} less)")
    return joined(reached, limits, words)


def table(found: Measurements) -> list[str]:
    """Both peers, what is saved, and how flat ours is over sizes and ranks."""
    costs = costs_of(found)
    failed = [f"{one.get('peer')}: {reason_of(one)}" for one in found.of("headline") if is_failed(one)]
    notes = ["", *(f"- {reason}" for reason in dict.fromkeys(failed))] if failed else []
    if not costs:
        return [f"{markdown.NOT_MEASURED}: no samples of the kind `headline`.", *notes]
    flat = [
        f"Ours over {what}: {words}." for what, places in (("sizes, on one rank", _over_sizes(costs)),
        ("ranks, at one size", _over_ranks(costs))) if (words := _flatness(costs, places))
    ]  # fmt: skip
    ours = [by_peer[OURS] for by_peer in costs.values() if OURS in by_peer]
    if raised := sum(cost.raised for cost in ours):
        flat.append(
            f"In {raised} of {sum(cost.count for cost in ours)} saves of ours training went faster after the save than "
            "just before it, so less than the stall seemed lost; they count with their stall."
        )
    rows = [_row(place, by_peer) for place, by_peer in costs.items()]
    return [*markdown.table(HEADER, rows), *(line for words in flat for line in ("", words)), *notes]


def _row(place: Place, by_peer: Mapping[str, Cost]) -> list[str]:
    ours, theirs, gib = by_peer.get(OURS), by_peer.get(THEIRS), place[0] / GIB
    cells = [size(place[0]), str(place[1])]
    pairs: Sequence[tuple[float | None, float | None]] = (
        (ours.stall_seconds if ours else None, theirs.stall_seconds if theirs else None),
        (ours.lost_seconds if ours else None, theirs.lost_seconds if theirs else None),
    )
    for mine, other in pairs:
        texts = [markdown.NOT_MEASURED if value is None else number(value) for value in (other, mine)]
        cells += [*texts, _less(mine, other)]
    per_gib = (markdown.NONE,) * 2 if ours is None else (ours.lost_seconds / gib, ours.stall_seconds / gib)
    return [*cells, *(text if isinstance(text, str) else number(text) for text in per_gib)]


def _less(ours: float | None, theirs: float | None) -> str:
    return markdown.NONE if ours is None or not theirs else f"{100 * (1 - ours / theirs):.2f} %"


def _flatness(costs: Mapping[Place, Mapping[str, Cost]], places: Sequence[Place]) -> str:
    """The range of seconds per GiB of a rank's state; the ratio of its ends."""
    mine = [(costs[place][OURS], place[0] / GIB) for place in places if OURS in costs[place]]
    if len(mine) < 2:
        return ""
    parts = []
    for name, values in (
        ("lost", [cost.lost_seconds / gib for cost, gib in mine]),
        ("stall", [cost.stall_seconds / gib for cost, gib in mine]),
    ):
        least, most = min(values), max(values)
        apart = f" ({ratio(most / least)})" if least > 0 else ""
        parts.append(f"{name} {number(least)} to {number(most)} s per GiB{apart}")
    return ", ".join(parts)


def _over_sizes(costs: Mapping[Place, object]) -> list[Place]:
    return [place for place in costs if place[1] == 1]


def _over_ranks(costs: Mapping[Place, object]) -> list[Place]:
    sizes = [bytes_ for bytes_, _ in costs]
    usual = max(dict.fromkeys(sizes), key=sizes.count, default=0)
    mine = [place for place in costs if place[0] == usual]
    return mine if len(mine) > 1 else []


def _named(place: Place) -> str:
    return f"{size(place[0])} × {place[1]} rank{'s' if place[1] > 1 else ''}"


def _cost(records: Sequence[Record]) -> Cost | None:
    gangs = [gang for one in records for gang in _steps(one)[1:] if all(save["is_saved"] for save in gang)]
    stalls = [max(save["stall_seconds"] for save in gang) for gang in gangs]
    told = [max(save["lost_seconds"] for save in gang) for gang in gangs]
    lost, stall = middle([max(pair) for pair in zip(told, stalls, strict=True)]), middle(stalls)
    if lost is None or stall is None:
        return None
    raised = sum(less < least for less, least in zip(told, stalls, strict=True))
    return Cost(lost_seconds=lost, stall_seconds=stall, count=len(gangs), raised=raised)


def _steps(record: Record) -> list[list[Save]]:
    """The saves of all ranks, by step."""
    steps: dict[int, list[Save]] = {}
    for save in record.get("saves") or []:
        steps.setdefault(int(save["step"]), []).append(save)
    return [steps[step] for step in sorted(steps)]
