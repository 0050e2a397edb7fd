"""A job's life as one HTML file that needs nothing else: no network, no server, no script but its own.

Headline and tables are written here, in the words of `stepfast status`; the timeline is drawn by the page's script
(`page/`) from what the page carries as JSON. All text of the job's is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from stepfast.histories import SaveRow
from stepfast.page.markup import definitions, notes, number_head, numbers, page, sentence, table
from stepfast.sizes import size_text
from stepfast.step import attempt_of
from stepfast_operator.life import AttemptSpan, Happening, Life
from stepfast_operator.record import Recovery, State, Status
from stepfast_operator.recoveryphases import PHASES, Phase, phases_of
from stepfast_operator.report import NONE, RECOVERY_HEADINGS, recovery_cells
from stepfast_operator.sentences import count_text, span_text

_SAVES_SHOWN = 50  # in the table; the timeline shows all
_LEFT = frozenset({"after attempt", "cause", "tier"})
_MOODS = {State.FAILED: "bad", State.RUNNING: "good", State.COMPLETE: "good"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the page says beside the picture. `facts`: as `stepfast status` has them, the state first; `notes`: what
    could not be read, and what of the picture is not exact.
    """

    title: str
    where: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    seen_time: float


def life_page(life: Life, status: Status, told: Told) -> str:
    """The page."""
    has_nodes = status.nodes.desired > 1
    parts = {
        "title": escape(told.title),
        "where": escape(f"{told.where}, as it was on {_moment(told.seen_time)}"),
        "verdict": _MOODS.get(status.state, "neutral"),
        "headline": sentence(_headline(life, status, told)),
        "facts": definitions("settings", told.facts),
        "notes": notes(told.notes),
        "attempts": _attempts(life),
        "recoveries": _recoveries(life, has_nodes=has_nodes),
        "saves": _saves(life),
        "happenings": _happenings(life.happenings),
    }
    return page("stepfast_operator.lifepage", scripts=("life.js",), data=_drawn(life), parts=parts)


def _headline(life: Life, status: Status, told: Told) -> str:
    """The state, and since when the job is there."""
    reason = dict(told.facts).get("reason")
    state = f"{status.state}: {reason}" if reason else str(status.state)
    length = span_text(life.end - life.begin)
    if status.is_terminal:
        return f"{state}, after {length}"
    return f"{state}; begun {length} ago" if life.attempts else f"{state}; no attempt has begun yet"


def _drawn(life: Life) -> dict[str, object]:
    """What the timeline is drawn from; times in seconds since the life's begin."""
    begin = life.begin

    def at(time: float | None) -> float | None:
        return None if time is None else round(time - begin, 3)

    return {
        "begin": round(begin, 3),
        "length": at(life.end),
        "attempts": [
            {
                "attempt": span.attempt,
                "begin": at(span.begin),
                "end": at(span.end),
                "training": at(span.training_time),
                "from": span.start_step,
                "to": span.reached_step,
                "ending": span.ending,
                "known": [span.is_begin_known, span.is_end_known],
            }
            for span in life.attempts
        ],
        "recoveries": [
            {
                "attempt": each.attempt,
                "inPlace": each.in_place_restart,
                "cause": str(each.cause),
                "lost": each.steps_lost,
                "phases": [[phase.name, at(phase.begin), at(phase.end)] for phase in phases_of(each)],
                "failed": at(each.failure_time),
            }
            for each in life.recoveries
        ],
        "lines": [[line.attempt, [[at(time), step] for time, step in line.points]] for line in life.lines],
        "saves": [
            [at(row.saved_time), row.global_step, row.stall_seconds, row.duration_seconds, row.size_bytes, row.outcome]
            for row in life.saves
        ],
        "happenings": [[at(each.time), each.type, each.reason, each.message] for each in life.happenings],
    }


def _attempts(life: Life) -> str:
    head = f'<tr><th scope="col">attempt</th><th scope="col">begun</th>{number_head("lasted")}'
    head += "".join(map(number_head, ("from step", "to step", "steps lost"))) + '<th scope="col">ended by</th></tr>'
    rows = [
        f'<tr><th scope="row">{span.attempt}</th><td>{escape(_begun(span))}</td>'
        + numbers(_lasted(span), *map(_or_none, (span.start_step, span.reached_step, span.steps_lost)))
        + f"<td>{escape(span.ending or NONE)}</td></tr>"
        for span in life.attempts
    ]
    return table("Attempts", head, rows) if rows else ""


def _begun(span: AttemptSpan) -> str:
    return _moment(span.begin) if span.is_begin_known else f"by {_moment(span.begin)}"


def _lasted(span: AttemptSpan) -> str:
    length = span_text(span.end - span.begin)
    return length if span.is_begin_known and span.is_end_known else f"at least {length}"


def _recoveries(life: Life, *, has_nodes: bool) -> str:
    if not life.recoveries:
        return '<p class="quiet">Nothing has failed that training went on after.</p>'
    longest = max((_total(phases_of(each)) for each in life.recoveries), default=0.0)
    heads = [
        f'<th scope="col">{escape(name)}</th>' if name in _LEFT else number_head(name) for name in RECOVERY_HEADINGS
    ]
    head = f'<tr>{heads[0]}{heads[1]}<th class="bar-cell" aria-hidden="true"></th>{"".join(heads[2:])}</tr>'
    rows = []
    for each in life.recoveries:
        first, cause, *middle, tier = recovery_cells(each, has_nodes=has_nodes)
        rows.append(
            f'<tr><th scope="row">{escape(first)}</th><td>{escape(cause)}</td><td class="bar-cell">'
            f"{_bar(each, longest)}</td>{numbers(*middle)}<td>{escape(tier)}</td></tr>"
        )
    key = "".join(f'<li><span class="swatch c-{name}"></span>{name}</li>' for name in PHASES)
    return f'<ul class="key">{key}</ul>{table("Recoveries", head, rows)}'


def _bar(recovery: Recovery, longest: float) -> str:
    """Its phases one after the other, on one scale with all others."""
    rects, left = [], 0.0
    for phase in phases_of(recovery):
        width = 100 * phase.seconds / longest if longest else 0.0
        rects.append(
            f'<rect class="c-{phase.name}" x="{left:.3f}" width="{width:.3f}" height="10">'
            f"<title>{phase.name} {phase.seconds:.2f} s</title></rect>"
        )
        left += width
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(rects)}</svg>'


def _total(phases: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _saves(life: Life) -> str:
    if not life.saves:
        return '<p class="quiet">No save is written down.</p>'
    stalls = sorted(row.stall_seconds for row in life.saves)
    waits = sorted(row.duration_seconds for row in life.saves if row.duration_seconds is not None)
    figures = [
        ("saves written down", str(len(life.saves))),
        ("committed", str(sum(row.outcome == "Committed" for row in life.saves))),
        ("stall, median", _short(_at(stalls, 0.5))),
        ("stall, 99 of 100 below", _short(_at(stalls, 0.99))),
    ]
    if waits:
        figures += [("until committed, median", _short(_at(waits, 0.5))), ("at most", _short(waits[-1]))]
    figures.append(("newest size", size_text(life.saves[-1].size_bytes)))
    head = '<tr><th scope="col">step</th><th scope="col">saved</th><th scope="col">outcome</th>'
    head += "".join(map(number_head, ("attempt", "stall", "until committed", "size", "ranks"))) + "</tr>"
    rows = [_save_row(row) for row in reversed(life.saves[-_SAVES_SHOWN:])]
    shown = count_text(len(rows), "newest save") if len(rows) > 1 else "The newest save"
    return (
        f"{definitions('figures', figures)}<details><summary>{shown}, as a table</summary>"
        f"{table('The newest saves', head, rows)}</details>"
    )


def _save_row(row: SaveRow) -> str:
    duration = _short(row.duration_seconds) if row.duration_seconds is not None else NONE
    return (
        f'<tr><th scope="row">{row.global_step}</th><td>{_moment(row.saved_time)}</td><td>{escape(row.outcome)}</td>'
        + numbers(
            str(attempt_of(row.run)),
            _short(row.stall_seconds),
            duration,
            size_text(row.size_bytes),
            str(row.world_size),
        )
        + "</tr>"
    )


def _happenings(happenings: Sequence[Happening]) -> str:
    if not happenings:
        return ""
    head = '<tr><th scope="col">when</th><th scope="col">reason</th><th scope="col">what</th></tr>'
    rows = [
        f'<tr class="{"warning" if each.type == "Warning" else "normal"}"><td>{_moment(each.time)}</td>'
        f'<th scope="row">{escape(each.reason)}</th><td class="text">{escape(each.message)}'
        f"{f' ({each.count} times)' if each.count > 1 else ''}</td></tr>"
        for each in happenings
    ]
    title = '<section aria-labelledby="events-head"><h2 id="events-head">Events</h2>'
    return f"{title}{table('Events', head, rows)}</section>"


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else span_text(seconds)


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _or_none(value: int | None) -> str:
    return NONE if value is None else str(value)
