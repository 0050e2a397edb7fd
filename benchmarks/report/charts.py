"""What is plotted, as data. Pure: drawing it is `plots`' task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.report import headlines
from benchmarks.report.layouts import title_of
from benchmarks.report.peers import LIMIT, layouts_seen
from benchmarks.report.plan import Expected
from benchmarks.report.samples import (
    lost_of,
    middle,
    middle_of,
    restore_of,
    saves_of,
    stall_of,
    steady_persist,
    steady_saves,
)
from benchmarks.report.selection import Measurements
from benchmarks.results import Record

GIB = 2**30
DIRECT = "O_DIRECT write (limit)"
READ = "limit (plain read)"
_SECONDS = {"10 s": 10.0, "1 min": 60.0, "10 min": 600.0, "30 min": 1800.0, "1 h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """By panel: names and values. Ours and the limits stand out."""

    title: str
    unit: str
    panels: Mapping[str, Sequence[tuple[str, float]]]
    is_logarithmic: bool = True
    ours: str = ""
    limits: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """By panel: lines by name, their points from left to right; `levels`: by panel, dashed lines across it; `ticks`:
    what values of x are called.
    """

    title: str
    x: str
    y: str
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
    levels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ticks: Mapping[float, str] = field(default_factory=dict)


Chart: TypeAlias = Bars | Lines


def charts_of(found: Measurements, expected: Expected) -> dict[str, Chart]:
    """By file name; what has no data has no chart."""
    layouts = list(dict.fromkeys([*expected.layouts_of("save"), *layouts_seen(found, "save")]))
    restores = list(dict.fromkeys([*expected.layouts_of("restore"), *layouts_seen(found, "restore")]))
    titles, charts = expected.titles, dict[str, Chart]()
    for layout in layouts:
        name = f"stall-{layout.replace(':', '-')}"
        charts[name] = _bars(titles, "Training stands still for a save (steady)", "seconds", {
            title_of(layout): _by_peer(found, "save", layout, _stall)})  # fmt: skip
    charts["lost"] = _bars(titles, "Training time lost per save", "seconds", {
        title_of(layout): _by_peer(found, "save", layout, _lost, limit=False) for layout in layouts})  # fmt: skip
    charts["persist"] = _bars(titles, "State persisted to local disk, once save() has returned", "GiB/s", {
        title_of(layout): [*_by_peer(found, "save", layout, _rate, limit=False), *_direct(found, layout)]
        for layout in layouts}, is_logarithmic=False)  # fmt: skip
    for tier in ("memory", "disk-warm", "disk-cold"):
        charts[f"restore-{tier}"] = _bars(titles, f"Restore, {tier.replace('-', ', ')}", "seconds", {
            title_of(layout): _restores(found, layout, tier) for layout in restores})  # fmt: skip
    if goodput := _goodput(found):
        charts["goodput"] = goodput
    costs = headlines.costs_of(found)
    for name, x, by_ranks in (("headline", "GiB of one rank", False), ("headline-ranks", "ranks", True)):
        if lines := headlines.lines_of(costs, by_ranks=by_ranks):
            charts[name] = _headline(lines, x)
    return {name: chart for name, chart in charts.items() if any(chart.panels.values())}


def _bars(
    names: Mapping[str, str], title: str, unit: str, panels: Mapping[str, Sequence[tuple[str, float]]],
    *, is_logarithmic: bool = True,
) -> Bars:  # fmt: skip
    named = {panel: [(names.get(name, name), value) for name, value in bars] for panel, bars in panels.items() if bars}
    return Bars(
        title=title, unit=unit, panels=named,
        is_logarithmic=is_logarithmic, ours=names.get("stepfast", "stepfast"),
        limits=(names.get(LIMIT, LIMIT), DIRECT, READ),
    )  # fmt: skip


def _by_peer(
    found: Measurements, kind: str, layout: str, value_of: Callable[[Sequence[Record]], float | None],
    *, limit: bool = True, tier: str | None = None,
) -> list[tuple[str, float]]:  # fmt: skip
    """Least first."""
    records = found.done(kind, layout=layout) if tier is None else found.done(kind, layout=layout, tier=tier)
    bars = []
    for peer in dict.fromkeys(str(one["peer"]) for one in records):
        value = value_of([one for one in records if one["peer"] == peer])
        if value is not None and value > 0 and (limit or peer != LIMIT):
            bars.append((peer, value))
    return sorted(bars, key=lambda bar: bar[1])


def _stall(records: Sequence[Record]) -> float | None:
    taken = stall_of(steady_saves(records))
    return taken.seconds if taken else None


def _lost(records: Sequence[Record]) -> float | None:
    return middle_of(lost_of(steady_saves(records)), "lost_seconds")


def _rate(records: Sequence[Record]) -> float | None:
    persist = steady_persist(records)
    return float(records[-1]["size_bytes"]) / GIB / persist if persist else None


def _direct(found: Measurements, layout: str) -> list[tuple[str, float]]:
    records = found.done("save", layout=layout)
    taken = middle_of(saves_of(records), "direct_write_seconds")
    return [(DIRECT, float(records[-1]["size_bytes"]) / GIB / taken)] if taken else []


def _restores(found: Measurements, layout: str, tier: str) -> list[tuple[str, float]]:
    bars = _by_peer(found, "restore", layout, _restored, tier=tier)
    ours = found.done("restore", layout=layout, tier=tier, peer="stepfast")
    limit = middle([middle(one["limit_seconds"]) or 0.0 for one in ours if one.get("limit_seconds")])
    return sorted([*bars, *([(READ, limit)] if limit and bars else [])], key=lambda bar: bar[1])


def _restored(records: Sequence[Record]) -> float | None:
    taken = restore_of(records)
    return taken.seconds if taken else None


def _goodput(found: Measurements) -> Lines | None:
    records = found.of("goodput")
    if not records:
        return None
    shares = [one["node_lost"] for one in records]
    usual = [one for one in records if one["node_lost"] == max(dict.fromkeys(shares), key=shares.count)]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    levels: dict[str, dict[str, float]] = {}
    for one in usual:
        trace, system, percent = str(one["trace"]), str(one["system"]), 100 * (1 - one["goodput_mean"])
        if one["policy"] in _SECONDS:
            panels.setdefault(trace, {}).setdefault(system, []).append((_SECONDS[one["policy"]], percent))
        else:
            levels.setdefault(trace, {})[system] = percent
    return Lines(
        title="Time that is no kept training, 100 % − goodput, by interval (simulated); dashed: auto",
        x="interval", y="% of time", panels=panels, levels=levels,
        ticks={seconds: name for name, seconds in _SECONDS.items()},
    )  # fmt: skip


def _headline(lines: Mapping[str, Sequence[tuple[float, float]]], x: str) -> Lines:
    return Lines(
        title="Training time lost per save to a blob storage", x=x, y="seconds", panels={"Azurite": lines},
        ticks={at: f"{at:.3g}" for points in lines.values() for at, _ in points},
    )  # fmt: skip
