"""The goals, as data: what is asked of which records, and the pure function that judges them.

Which fields of a record count is said where they are read: `blobs`, `headlines`, `loads`, `recoveries`, `slowstores`;
those that `benchmarks.cells` writes, in `samples` and `verdicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks.report import blobs, headlines, loads, recoveries, slowstores, verdicts
from benchmarks.report.layouts import Layouts, title_of
from benchmarks.report.selection import Measurements
from benchmarks.report.verdicts import Verdict

Judge = Callable[[Measurements], Verdict | None]
"""None: nothing of it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One row of the table. `kind` and `fields` tell its records; `lacking` why these may hold no sample of it."""

    name: str
    asked: str
    kind: str
    judge: Judge
    fields: Mapping[str, object] = field(default_factory=dict)
    lacking: str = ""


def goals_of(layouts: Layouts) -> list[Goal]:
    """All goals, in the order of the page."""
    return [*_stalls(layouts), *_gangs(), *_persisting(layouts), *_restoring(layouts), *_surviving(), *_whole_jobs()]


def _stalls(layouts: Layouts) -> list[Goal]:
    def stall(what: str, layout: str, bound: float, judge: Callable[..., Verdict | None]) -> Goal:
        judge = partial(judge, layout=layout, bound=bound)
        return _ours(f"{what}, {title_of(layout)}", f"≤ {bound} × the plain copy", "save", judge, layout=layout)

    first, name = layouts.large[0], "Stall while the save before is being persisted"
    asked, lacking = "≤ 1.2 × the plain copy, none skipped", "every save was persisted before the next one came"
    whole = "≤ 1.2 × the plain copy; none skipped, dropped or waited for; the newest committed"
    return [
        *(stall("Stall, steady", layout, 1.2, verdicts.steady_stall) for layout in layouts.large),
        *(stall("Stall of the first save", layout, 1.4, verdicts.first_stall) for layout in layouts.large),
        *(stall("Stall, steady", layout, 1.5, verdicts.steady_stall) for layout in layouts.small),
        _ours(
            f"{name}, {title_of(first)} back to back", asked, "back_to_back",
            partial(verdicts.busy_stall, layout=first, bound=1.2), lacking=lacking, layout=first,
        ),
        Goal(
            name=f"{name}, slow Azurite", kind="slow_store", judge=partial(slowstores.judge_blob, bound=1.2),
            asked=whole, fields={"peer": slowstores.ON_BLOB}, lacking=lacking,
        ),
        Goal(
            name=f"{name}, slow disk", kind="slow_store", judge=partial(slowstores.judge_disk, bound=1.2),
            asked=whole, fields={"peer": slowstores.ON_DISK}, lacking=lacking,
        ),
    ]  # fmt: skip


def _gangs() -> list[Goal]:
    asked = "1/N of the bytes each (+ 5 %), no planning (≤ 5 % of DCP's)"
    judge = partial(verdicts.shared_evenly, slack=0.05)
    lacking = "nobody's planning was measured beside it"
    return [_ours("Replicated state on N ranks (DDP)", asked, "ddp", judge, lacking=lacking)]


def _persisting(layouts: Layouts) -> list[Goal]:
    return [
        *(
            _ours(
                f"Persisted to local disk (fsync, checksums, commit), {title_of(layout)}",
                "≥ 80 % of the O_DIRECT write rate", "save", partial(verdicts.disk_rate, layout=layout, bound=0.8),
                lacking="no direct write was measured beside the saves", layout=layout,
            )
            for layout in layouts.large
        ),
        *(
            Goal(name=words, asked="≥ the fastest of adlfs and obstore", kind="blob",
                 judge=partial(verdicts.blob_rate, way=way))
            for words, way in (("Uploaded to Azurite", blobs.STORE),
                               ("Persisted to Azurite, from save() to the commit", blobs.AGENT))
        ),
        *(
            _ours(
                f"Training time lost per save, {title_of(layout)}", "≤ the stall + 3 % of the persist time", "save",
                partial(verdicts.lost_time, layout=layout, bound=0.03),
                lacking="every save was persisted before training went on", layout=layout,
            )
            for layout in (*layouts.large, *layouts.small)
        ),
    ]  # fmt: skip


def _restoring(layouts: Layouts) -> list[Goal]:
    return [
        _ours(
            f"Restored from {name}, {title_of(layout)}", f"≤ {bound} × {limit}", "restore",
            partial(verdicts.restore, layout=layout, tier=tier, bound=bound), layout=layout, tier=tier,
        )
        for tier, name, limit, bound in (
            ("memory", "memory", "one thread's preadv of warm tmpfs", 1.15),
            ("disk-cold", "disk, cold", "one thread's cold read of the same files", 1.2),
        )
        for layout in (*layouts.large, *layouts.small)
    ]  # fmt: skip


def _surviving() -> list[Goal]:
    return [
        *(
            _ours(
                f"SIGKILL of the trainer right after save(){words}", "restored from memory and from storage", "kill",
                partial(verdicts.survives_kill, helper_killed=helper_killed), helper_killed=helper_killed,
            )
            for words, helper_killed in (("", False), (", and of the agent", True))
        ),
        _ours("One flipped byte on disk", "found, the file named", "corrupt", verdicts.finds_damage),
        _ours(
            "Memory in the trainer", "nothing extra (< 5 % of the state)", "memory",
            partial(verdicts.trainer_memory, slack=0.05),
        ),
        _ours("Memory of the agent", "≤ its slots + 5 %", "memory", partial(verdicts.agent_memory, slack=0.05)),
    ]  # fmt: skip


def _whole_jobs() -> list[Goal]:
    return [
        *(
            Goal(
                name=f"Recovery on one machine, {ranks} rank{'s' if ranks > 1 else ''}",
                asked="≤ the bare script's start + 1 s", kind="recovery", fields={"ranks": ranks},
                judge=partial(recoveries.judge, ranks=ranks, allowed_seconds=1.0),
            )
            for ranks in recoveries.RANKS
        ),
        *(
            Goal(
                name=f"{words} of other jobs while the storage of one hangs", asked="≤ 10 % more", kind="load",
                judge=partial(loads.judge, measure=measure, bound=0.1),
            )
            for words, measure in (("Stall", "stall_seconds"), ("Persist time", "persist_seconds"))
        ),
        Goal(
            name="Training time lost, saving to a blob storage",
            asked="≥ 99 % less than torch.save, at every size and number of ranks",
            kind="headline", judge=partial(headlines.judge, bound=0.99),
        ),
    ]  # fmt: skip


def _ours(name: str, asked: str, kind: str, judge: Judge, *, lacking: str = "", **fields: object) -> Goal:
    return Goal(
        name=name, asked=asked, kind=kind, judge=judge, lacking=lacking, fields={"peer": verdicts.OURS, **fields}
    )
