"""The page: sections in their order, as one text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from benchmarks.report import (
    asked,
    controls,
    headlines,
    loads,
    markdown,
    peers,
    recoveries,
    simulated,
    slowstores,
    trials,
)
from benchmarks.report.charts import Chart
from benchmarks.report.goals import goals_of
from benchmarks.report.layouts import title_of
from benchmarks.report.plan import Expected
from benchmarks.report.selection import Measurements, is_failed, reason_of
from benchmarks.results import Record

NO_NOTES = "Nothing was written about them yet."


def page_of(found: Measurements, expected: Expected, charts: Mapping[str, Chart], notes: str, folder: str) -> str:
    """All of it. `notes`: what was written by hand; `folder`: of the plots, as seen from the page."""
    seen = peers.layouts_seen(found, "back_to_back")
    layouts = dict.fromkeys([*expected.layouts_of("back_to_back"), *seen])
    lines = [
        "# What was measured",
        "",
        *_machine(found),
        *_section("Asked and measured", asked.table_of(goals_of(expected.layouts), found)),
        *_section("Peers side by side", [_READING, *peers.peer_tables(found, expected)]),
    ]
    for layout in layouts:
        lines += ["", f"### Saves back to back: {title_of(layout)}", ""]
        lines += peers.back_to_back_table(found, expected, layout)
    for title, words, table in (
        ("Killed right after save()", _KILL, trials.kill_table(found, expected)),
        ("One flipped byte", _FLIP, trials.corruption_table(found, expected)),
        ("Ranks that hold the same state (DDP)", _GANG, trials.gang_table(found, expected)),
        ("Saves faster than the storage", _SLOW, slowstores.table(found, expected.titles)),
        ("Uploads to Azurite", _UPLOADS, trials.blob_table(found)),
        ("Training time lost, saving to Azurite", _HEADLINE, headlines.table(found)),
        ("Several jobs, and a storage that hangs for one", _LOAD, loads.table(found)),
        ("A recovery on one machine", _RECOVERY, recoveries.tables(found)),
        ("The machine alone", _CONTROL, controls.lines(found)),
    ):
        lines += ["", f"### {title}", "", words, "", *table]
    lines += _failures(found)
    lines += _section("Plots", _plots(charts, folder))
    lines += _section("Simulation: goodput", simulated.goodput_section(found))
    lines += _section("Simulation: 1,000 and 10,000 nodes", simulated.scale_section(found))
    lines += _section("Where a goal is not reached", [])
    return "\n".join(lines) + f"\n{notes.strip() or NO_NOTES}\n"


_READING = (
    "Medians. In brackets: the ratio to the limit beside it: of a stall, the plain copy of the same tensors into warm "
    "shared memory, just before the save; of a restore from memory, a preadv of the same bytes by one thread; of one "
    "from disk, such a read of the same files. 'Steady' leaves out each process's first save. 'Lost' is the training "
    "time that a save costs in all: the stall, and what training is slowed down by until the step is persisted, where "
    "it was not before training went on; 'persist' is the time "
    "from the return of save() until the step is persisted, with the while in which the trainer overwrites its stamps "
    "and nobody trains (`persist_after_return_seconds + stamping_seconds`; for peers that persist before they return, "
    "it is their save()), in every table, plot and goal; 'worst step' is the longest training step meanwhile. 'Memory' "
    "is what is taken beside the state, shared and private, in every process; it is measured for one size. When a step "
    "is persisted is the peer's own word: torch.save without fsync, safetensors, torchsnapshot and DLRover give it "
    "once the page cache has all. The best of each column is bold; — means that there is no such thing to measure."
)
_KILL = "SIGKILL as soon as save() has returned. Which tier gives that very step to a new process?"
_FLIP = "One bit of one byte of the largest file of a persisted step is changed, and the step is restored."
_GANG = (
    "The stall of a gang is that of its slowest rank (in brackets: to the slowest rank's plain copy of all the state); "
    "medians without the first save. Shares and bytes are those of the newest step's files."
)
_SLOW = (
    "The storage takes less than the saves bring, so most of them come while the one before is still being persisted; "
    "whoever is content with the page cache is never busy here. Medians of the busy ones; in brackets, the ratio to "
    "the plain copy. What was skipped, dropped or waited for, the agent says, where there is one to ask."
)
_UPLOADS = (
    "Medians. `stepfast_store` is the upload as the agent's persister does it, `stepfast_agent` all from save() to the "
    "commit."
)
_HEADLINE = (
    "torch.save into adlfs beside Stepfast, each rank with a state of its own. What a gang loses is what its slowest "
    "rank does; medians without the first save; per GiB of one rank's state. Azurite runs on the same "
    "processors: what it takes of them while Stepfast persists counts as lost, as no real service's would."
)
_LOAD = (
    "One agent; all jobs store in one Azurite, which for phases of equal length never answers the first of them. "
    "Medians; persist is from save() to the commit."
)
_RECOVERY = (
    "From the death of a rank to the first new step; beside it the same script from nothing to its first step, under a "
    "bare Python (the limit) and under torchrun. Medians of the moments; where several ranks have one, the latest."
)
_CONTROL = (
    "The same work with nothing of ours in it: shared memory is filled, left alone for a while, and read by one thread "
    "into one small buffer; and a file is written. Medians."
)


def _machine(found: Measurements) -> list[str]:
    lines = ["`make bench` measures all of this again and writes this page.", ""]
    for machine in found.machines:
        words = ", ".join(str(machine[name]) for name in ("processor", "memory", "open_files") if machine.get(name))
        quick = "; a quick run: it shows that everything works, not how fast" if machine.get("is_quick") else ""
        core = "; the main cells alone (`make bench-core`)" if machine.get("is_core") else ""
        versions = f"Linux {machine.get('kernel', '?')}, torch {machine.get('torch', '?')}"
        lines.append(f"- {_day(machine)}: {words}, {versions}{quick}{core}.")
    if not found.machines:
        lines.append("Which machine it was is not recorded.")
    lines += [
        "",
        "Ratios of stalls, restores and writes to disk are to a limit that was measured in the same process, right "
        "beside them: what the machine did at that moment is in both. Uploads, jobs and recoveries are held against "
        "others of the same run. Numbers are medians; all samples are in that run's results file, which is not kept "
        "here. For each cell (one peer, one layout, one question) the newest run counts, "
        "and samples of the same run are pooled. What failed or was not measured says so.",
    ]
    return lines


def _day(record: Record) -> str:
    return datetime.fromtimestamp(record["time"], UTC).date().isoformat()


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *lines]


def _failures(found: Measurements) -> list[str]:
    """What failed without a cell of its own: no table has a place for it."""
    homeless = [
        one for one in found.records if is_failed(one) and "peer" in one and not (one.get("layout") or one.get("store"))
    ]
    if not homeless:
        return []
    rows = [[str(one["kind"]), str(one["peer"]), reason_of(one)] for one in homeless]
    return ["", "### Measurements that broke", "", *markdown.text_table(("kind", "peer", "reason"), rows)]


def _plots(charts: Mapping[str, Chart], folder: str) -> list[str]:
    if not charts:
        return [f"{markdown.NOT_MEASURED}: there is nothing to plot."]
    return [line for name, chart in charts.items() for line in (f"![{chart.title}]({folder}/{name}.svg)", "")][:-1]
