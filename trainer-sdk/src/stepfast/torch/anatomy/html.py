"""A report as one HTML file that needs nothing else: no network, no server, no script but its own.

Headline and tables are written here; the charts are drawn by the page's scripts (`page/`) from the report, which the
page carries as JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from stepfast.page.markup import definitions, notes, number_head, numbers, page, sentence, table
from stepfast.sizes import size_text
from stepfast.torch.anatomy import sentences
from stepfast.torch.anatomy.moduletree import module_rows
from stepfast.torch.anatomy.report import CurvePoint, MemoryReport, Report

_SCRIPTS = ("parts.js", "curve.js", "treemap.js", "roofline.js")
_COLOURED = (
    *("weights", "optimizer", "gradients", "activations", "temporary", "buffers", "inputs", "communication"),
    *("context", "contraction", "normalisation", "element-wise", "unused", "free"),
)
_UNUSED, _FREE = "unused", "free"


def html_report(report: Report) -> str:
    """The page. Raises ValueError when the report holds a number that is none."""
    memory = report.memory
    parts = {
        "title": escape(report.title or "Training step"),
        "headline": sentence(sentences.headline(report)),
        "verdict": {None: "unknown", True: "fits", False: "not"}[memory.fits],
        "fit": sentence(sentences.fit(report)),
        "fit_bar": _fit_bar(report),
        "fit_key": _fit_key(memory),
        "components": _components(memory),
        "peak_moment": sentence(f"most is allocated in {sentences.peak_moment(report)}" if memory.curve else ""),
        "phases": _phases(memory),
        "modules": _modules(memory),
        "pace": definitions("figures", sentences.pace(report)),
        "source_of_times": sentence(sentences.source_of_times(report)),
        "operations": _operations(report),
        "settings": definitions("settings", report.settings.items()),
        "notes": notes(report.notes),
    }
    return page("stepfast.torch.anatomy", scripts=_SCRIPTS, data=asdict(report), parts=parts)


def _fit_bar(report: Report) -> str:
    """What the device's memory is taken by, from its left edge; its right edge is the limit, or what is needed."""
    memory = report.memory
    whole = max(memory.occupied_bytes, memory.limit_bytes or 0, 1)
    sizes = [("context", memory.context_bytes), *memory.peak_components.items()]
    sizes.append((_UNUSED, max(0, memory.reserved_bytes - memory.peak_bytes)))
    rects, left = [], 0.0
    for name, size in sizes:
        if size:
            width = 1000 * size / whole
            title = f"{'reserved, not in use' if name == _UNUSED else name} {size_text(size)}"
            rects.append(
                f'<rect class="{_colour(name)}" x="{left:.3f}" y="0" width="{width:.3f}" height="30">'
                f"<title>{escape(title)}</title></rect>"
            )
            left += width
    if not memory.fits and memory.limit_bytes is not None:
        limit = 1000 * memory.limit_bytes / whole
        rects.append(f'<line class="limit" x1="{limit:.3f}" x2="{limit:.3f}" y1="0" y2="30"></line>')
    return (
        '<svg class="fit-bar" viewBox="0 0 1000 30" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(sentences.fit(report))}"><defs><pattern id="hatch" width="6" height="6" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="hatch" x1="0" x2="0" y1="0" y2="6">'
        f'</line></pattern></defs><rect class="c-free" width="1000" height="30"></rect>{"".join(rects)}</svg>'
    )


def _fit_key(memory: MemoryReport) -> str:
    """The parts of the bar that are no component."""
    shown = {"CUDA's context": "context", "reserved, not in use": _UNUSED}
    parts = [(name, size, shown.get(name, "")) for name, size in sentences.occupation(memory)]
    if memory.limit_bytes is not None:
        free = memory.limit_bytes - memory.occupied_bytes
        parts.append(("free", free, _FREE) if free >= 0 else ("missing", -free, ""))
    items = (
        f"<li>{_swatch(colour) if colour else ''}{escape(name)} <b>{size_text(size)}</b></li>"
        for name, size, colour in parts
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _components(memory: MemoryReport) -> str:
    most = max(memory.peak_components.values(), default=0)
    rows = []
    for name, own_most in memory.component_peaks.items():
        size = memory.peak_components.get(name, 0)
        width = 100 * size / most if most else 0
        bar = (
            '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="{_colour(name)}" width="{width:.2f}" height="10"></rect></svg>'
        )
        rows.append(
            f'<tr><th scope="row">{_swatch(name)}{escape(name)}</th><td class="bar-cell">{bar}</td>'
            + numbers(
                size_text(size),
                sentences.share_text(size / memory.peak_bytes) if memory.peak_bytes else "",
                size_text(own_most),
                size_text(memory.steady_components.get(name, 0)),
            )
            + "</tr>"
        )
    foot = (
        '<tr><th scope="row">all</th><td class="bar-cell"></td>'
        f"{numbers(size_text(memory.peak_bytes), '', '', size_text(memory.steady_bytes))}</tr>"
    )
    head = (
        '<tr><th scope="col">component</th><th class="bar-cell" aria-hidden="true"></th>'
        + "".join(number_head(name) for name in ("at the peak", "share", "its own most", "between steps"))
        + "</tr>"
    )
    return table("Memory by component", head, rows, foot)


def _phases(memory: MemoryReport) -> str:
    """For each phase of each step the moment with most memory."""
    most: dict[tuple[int, str], CurvePoint] = {}
    for point in memory.curve:
        key = (point.step, point.phase)
        if key not in most or sum(point.components) > sum(most[key].components):
            most[key] = point
    head = "<tr>" + '<th scope="col">step</th><th scope="col">phase</th>'
    head += "".join(map(number_head, ("allocated", "reserved", *memory.curve_components))) + "</tr>"
    rows = [
        f'<tr><th scope="row">{step}</th><td>{escape(phase)}</td>'
        + numbers(*map(size_text, (sum(point.components), point.reserved_bytes, *point.components)))
        + "</tr>"
        for (step, phase), point in most.items()
    ]
    return table("Most memory in each phase", head, rows)


def _modules(memory: MemoryReport) -> str:
    names = [name for name, size in memory.peak_components.items() if size]
    head = '<tr><th scope="col">module</th><th scope="col">class</th>'
    head += "".join(map(number_head, ("bytes", "share", *names))) + "</tr>"
    rows = [
        # The indent is a picture, because the policy allows no style in the markup.
        f'<tr><th scope="row"><span class="indent"><svg width="{18 * row.depth}"></svg></span>{escape(row.name)}</th>'
        f"<td>{escape(row.kind)}</td>"
        + numbers(
            size_text(row.total_bytes),
            sentences.share_text(row.total_bytes / max(memory.peak_bytes, 1)),
            *(size_text(row.components.get(name, 0)) for name in names),
        )
        + "</tr>"
        for row in module_rows(memory.modules, most=40)
    ]
    return table("The largest modules at the peak", head, rows)


def _operations(report: Report) -> str:
    time = report.time
    head = '<tr><th scope="col">operations</th><th scope="col">pass</th><th scope="col">bound by</th>'
    head += "".join(map(number_head, ("time", "share", "calls", "FLOPs", "bytes moved", "FLOP/byte"))) + "</tr>"
    rows = [
        f'<tr><th scope="row">{_swatch(each.kind)}{escape(each.kind)}</th><td>{escape(each.phase)}</td>'
        f"<td>{escape(each.bound)}</td>"
        + numbers(
            sentences.seconds_text(each.seconds),
            sentences.share_text(each.seconds / time.step_seconds if time.step_seconds else 0),
            sentences.number_text(each.calls),
            sentences.number_text(each.flops),
            size_text(each.moved_bytes),
            sentences.ratio_text(each.flops / max(each.moved_bytes, 1)),
        )
        + "</tr>"
        for each in time.classes
    ]
    return table("Operation classes of one step", head, rows) if rows else ""


def _swatch(name: str) -> str:
    return f'<span class="swatch {_colour(name)}"></span>'


def _colour(name: str) -> str:
    """The style's class: only names that it knows, so that no name of a report becomes markup."""
    return f"c-{name}" if name in _COLOURED else "c-other"
