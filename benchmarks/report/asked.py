"""The table of goals. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import markdown
from benchmarks.report.goals import Goal
from benchmarks.report.selection import Measurements, is_failed, reason_of

HEADER = ("goal", "limit or best peer in this run", "asked", "measured", "verdict")


def table_of(goals: Sequence[Goal], found: Measurements) -> list[str]:
    """One row a goal."""
    return markdown.text_table(HEADER, [row_of(goal, found) for goal in goals])


def row_of(goal: Goal, found: Measurements) -> list[str]:
    """Reached, not reached, or not measured with the reason."""
    verdict = goal.judge(found)
    failed = _failed(goal, found)
    if verdict is None:
        return [
            goal.name,
            markdown.NONE,
            goal.asked,
            f"{markdown.NOT_MEASURED}: {_why(goal, found)}",
            markdown.NOT_MEASURED,
        ]
    measured = f"{verdict.measured}; one cell {failed[-1]}" if failed else verdict.measured
    is_reached = verdict.is_reached and not failed
    return [goal.name, verdict.limit, goal.asked, measured, "reached" if is_reached else markdown.bold("not reached")]


def _why(goal: Goal, found: Measurements) -> str:
    if failed := _failed(goal, found):
        return failed[-1]
    if found.done(goal.kind, **goal.fields):
        return goal.lacking or f"records of the kind `{goal.kind}` hold no such samples"
    return f"no record of the kind `{goal.kind}`"


def _failed(goal: Goal, found: Measurements) -> list[str]:
    """What failed before it came to its parts does not name the part that the goal is about."""
    failed = [record for record in found.of(goal.kind) if is_failed(record)]
    mine = (one for one in failed if all(one.get(name) in (value, None, "") for name, value in goal.fields.items()))
    return [reason_of(one) for one in mine]
