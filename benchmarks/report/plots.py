"""Plots as SVG files: the same records give the same bytes. Owns matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmarks.report.charts import Bars, Chart, Lines
from matplotlib.figure import Figure

_SETTINGS: Any = {
    "svg.hashsalt": "stepfast",
    "svg.fonttype": "none",  # text stays text: small files
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_OURS, _OTHERS, _LIMIT = "#1261a6", "#a9b4bf", "#4f9d5d"
_COLORS = ("#a9b4bf", "#d08c3f", "#4f9d5d", "#1261a6", "#8a5aa5", "#b3423d", "#333333")
_WIDTH, _PANEL_HEIGHT, _BAR_HEIGHT = 8.0, 2.8, 0.24


def write_plots(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """A file for each chart; plots that were there before and are none of them are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in charts]
    for old in set(folder.glob("*.svg")) - set(paths):
        old.unlink()
    with mpl.rc_context(_SETTINGS):
        for path, chart in zip(paths, charts.values(), strict=True):
            figure = _draw_bars(chart) if isinstance(chart, Bars) else _draw_lines(chart)
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            _end_lines_bare(path)
    return paths


def _draw_bars(chart: Bars) -> Figure:
    heights = [max(1, len(bars)) * _BAR_HEIGHT + 0.5 for bars in chart.panels.values()]
    figure, panels = _panels(len(chart.panels), sum(heights) + 0.4, heights)
    for axes, (title, bars) in zip(panels, chart.panels.items(), strict=True):
        names, values = [name for name, _ in bars], [value for _, value in bars]
        colors = [_color(name, chart) for name in names]
        drawn = axes.barh(range(len(bars)), values, color=colors, height=0.72)
        axes.bar_label(drawn, labels=[f"{value:.3g}" for value in values], padding=3, fontsize=8)
        axes.set_yticks(range(len(bars)), names)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9)
        if chart.is_logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(left=10.0 ** floor(log10(min(values))))
            _write_plainly(axes.xaxis)
        axes.margins(x=0.12)
    panels[-1].set_xlabel(chart.unit)
    figure.suptitle(chart.title, fontsize=10)
    return figure


def _draw_lines(chart: Lines) -> Figure:
    columns = min(2, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    figure, panels = _panels(len(chart.panels), rows * _PANEL_HEIGHT, [_PANEL_HEIGHT] * rows, columns)
    for axes, (title, lines) in zip(panels, chart.panels.items(), strict=True):
        for index, (name, points) in enumerate(lines.items()):
            color = _OURS if name == "stepfast" else _COLORS[index % len(_COLORS)]
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, color=color, markersize=3)
        for name, level in chart.levels.get(title, {}).items():
            color = _COLORS[list(lines).index(name) % len(_COLORS)] if name in lines else "#333333"
            axes.axhline(level, color=color, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _write_plainly(axes.xaxis)
        _write_plainly(axes.yaxis)
        if chart.ticks:
            axes.set_xticks(list(chart.ticks), list(chart.ticks.values()))
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel(chart.y)
        axes.set_xlabel(chart.x)
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(chart.title, fontsize=10)
    return figure


def _panels(count: int, height: float, ratios: Sequence[float], columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    found = figure.subplots(len(ratios), columns, squeeze=False, gridspec_kw={"height_ratios": list(ratios)})
    for unused in found.flat[count:]:
        unused.remove()
    return figure, list(found.flat[:count])


def _write_plainly(axis: Any) -> None:
    """Numbers, not powers of ten; only those of whole decades."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda _value, _position: "")


def _color(name: str, chart: Bars) -> str:
    if name in chart.limits:
        return _LIMIT
    return _OURS if name == chart.ours else _OTHERS


def _end_lines_bare(path: Path) -> None:
    """matplotlib leaves blanks at the ends of lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
