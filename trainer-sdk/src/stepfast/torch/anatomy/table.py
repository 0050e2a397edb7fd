"""A report for a terminal or a pipe, by rich. Nothing is cut: a line that is too long goes on in the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stepfast.sizes import size_text
from stepfast.terminal import printable
from stepfast.torch.anatomy import sentences
from stepfast.torch.anatomy.moduletree import module_rows
from stepfast.torch.anatomy.report import Report

_BAR = 24  # characters
_GAP = "  "


def print_report(report: Report, console: Console) -> None:
    """Prints it all: what fits, where memory goes, where time goes."""
    page = _Page(console)
    page.say(report.title or "Training step", "bold")
    page.say(f"{sentences.headline(report)}.")
    for name, value in report.settings.items():
        page.say(f"  {name}: {value}", "dim")
    _print_memory(report, page)
    _print_modules(report, page)
    _print_time(report, page)
    if report.notes:
        page.head("Notes")
        for note in report.notes:
            page.say(f"- {note}")


class _Page:
    """Lines on a console, whole whatever its width."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._full, self._empty = ("#", ".") if console.options.ascii_only else ("█", "░")

    def say(self, line: str, style: str = "") -> None:
        self._console.print(Text(printable(line), style), soft_wrap=True, highlight=False)

    def head(self, title: str) -> None:
        self._console.print()
        self.say(title, "bold")

    def bar(self, share: float) -> str:
        full = min(_BAR, max(0, round(share * _BAR)))
        return self._full * full + self._empty * (_BAR - full)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int]) -> None:
        """Aligned columns, one row a line: those of `left` to the left, numbers to the right."""
        lines = [[printable(cell) for cell in line] for line in (columns, *rows)]
        widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
        for number, line in enumerate(lines):
            padded = (
                cell + " " * (width - cell_len(cell)) if at in left else " " * (width - cell_len(cell)) + cell
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.say(_GAP.join(padded).rstrip(), "" if number else "dim")


def _print_memory(report: Report, page: _Page) -> None:
    memory = report.memory
    page.head("Memory")
    page.say(f"{sentences.fit(report)}.", {None: "", True: "green", False: "bold red"}[memory.fits])
    if memory.limit_bytes:
        share = memory.occupied_bytes / memory.limit_bytes
        page.say(f"{page.bar(share)} {sentences.share_text(share)}")
    page.say(", ".join(f"{name} {size_text(size)}" for name, size in sentences.occupation(memory)), "dim")
    page.say(f"Most is allocated in {sentences.peak_moment(report)}." if memory.curve else "Nothing is allocated.")
    names = list(memory.component_peaks)
    rows = [
        [
            name,
            page.bar(memory.peak_components.get(name, 0) / max(memory.peak_bytes, 1)),
            size_text(memory.peak_components.get(name, 0)),
            sentences.share_text(memory.peak_components.get(name, 0) / max(memory.peak_bytes, 1)),
            size_text(memory.component_peaks[name]),
            size_text(memory.steady_components.get(name, 0)),
        ]
        for name in names
    ]
    total = ["all", page.bar(1), size_text(memory.peak_bytes), "", "", size_text(memory.steady_bytes)]
    if names:
        page.table(
            ["component", "", "at the peak", "share", "its own most", "between steps"], [*rows, total], left={0, 1}
        )


def _print_modules(report: Report, page: _Page) -> None:
    rows = module_rows(report.memory.modules)
    if not rows:
        return
    page.head("Modules at the peak")
    page.table(
        ["module", "kind", "bytes", "share", "made of"],
        [
            [
                "  " * row.depth + row.name,
                row.kind,
                size_text(row.total_bytes),
                sentences.share_text(row.total_bytes / max(report.memory.peak_bytes, 1)),
                _largest(row.components),
            ]
            for row in rows
        ],
        left={0, 1, 4},
    )


def _largest(components: Mapping[str, int]) -> str:
    """The components that make up most of it."""
    total = sum(components.values())
    largest = sorted(components.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size_text(size)}" for name, size in largest if size >= total / 50)


def _print_time(report: Report, page: _Page) -> None:
    page.head("One step")
    page.say(", ".join(f"{name}: {value}" for name, value in sentences.pace(report)) + ".")
    page.say(f"Here {sentences.source_of_times(report)}.", "dim")
    if not report.time.classes:
        return
    rows = [
        [
            each.kind,
            each.phase,
            each.bound,
            sentences.seconds_text(each.seconds),
            sentences.share_text(each.seconds / report.time.step_seconds if report.time.step_seconds else 0),
            sentences.number_text(each.calls),
            sentences.number_text(each.flops),
            size_text(each.moved_bytes),
            sentences.ratio_text(each.flops / max(each.moved_bytes, 1)),
        ]
        for each in report.time.classes
    ]
    columns = ["operations", "pass", "bound by", "time", "share", "calls", "FLOPs", "bytes moved", "FLOP/byte"]
    page.table(columns, rows, left={0, 1, 2})
