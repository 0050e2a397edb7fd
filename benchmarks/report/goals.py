"""The goals, as data: what is asked of which records, and the pure function that judges them.

Fields that other kinds of records are expected to have, beside those that `benchmarks.cells` writes:

 - `slow_store`: those of `back_to_back`, against a storage that is slower than the saves come;
 - `blob`: as `benchmarks.report.blobs` reads it;
 - `recovery`: limit_seconds[], recovery_seconds[], parts (seconds by name, one or several);
 - `load`: stall_seconds[], stall_alone_seconds[], persist_seconds[], persist_alone_seconds[] of other jobs;
 - `headline`: way (stepfast, torch_save), size_bytes, lost_seconds[]: training time lost per save to a blob storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks.report import verdicts
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
    return [
        *(stall("Stall, steady", layout, 1.2, verdicts.steady_stall) for layout in layouts.large),
        *(stall("Stall of the first save", layout, 1.4, verdicts.first_stall) for layout in layouts.large),
        *(stall("Stall, steady", layout, 1.5, verdicts.steady_stall) for layout in layouts.small),
        _ours(
            f"{name}, {title_of(first)} back to back", asked, "back_to_back",
            partial(verdicts.busy_stall, kind="back_to_back", layout=first, bound=1.2), lacking=lacking, layout=first,
        ),
        _ours(
            f"{name}, slow storage", asked, "slow_store",
            partial(verdicts.busy_stall, kind="slow_store", layout=None, bound=1.2), lacking=lacking,
        ),
    ]  # fmt: skip


def _gangs() -> list[Goal]:
    asked = "1/N of the bytes each (+ 5 %), no planning"
    return [_ours("Replicated state on N ranks (DDP)", asked, "ddp", partial(verdicts.shared_evenly, slack=0.05))]


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
        Goal(
            name="Persisted to Azurite", asked="≥ the faster of adlfs and obstore", kind="blob",
            judge=verdicts.blob_rate,
        ),
        *(
            _ours(
                f"Training time lost per save, {title_of(layout)}", "≤ the stall + 3 % of the persist time", "save",
                partial(verdicts.lost_time, layout=layout, bound=0.03), layout=layout,
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
            ("memory", "memory", "a preadv of warm tmpfs", 1.15),
            ("disk-cold", "disk, cold", "a cold read of the same files", 1.2),
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
        Goal(
            name="Recovery on one machine", asked="≤ the limit + 1 s", kind="recovery",
            judge=partial(verdicts.recovery, allowed_seconds=1.0),
        ),
        Goal(
            name="Other jobs while one loads the agent", asked="stall and persist change ≤ 10 %", kind="load",
            judge=partial(verdicts.under_load, bound=0.1),
        ),
        Goal(
            name="Training time lost, saving to a blob storage", asked="≥ 99 % less than torch.save at every size",
            kind="headline", judge=partial(verdicts.headline, bound=0.99),
        ),
    ]  # fmt: skip


def _ours(name: str, asked: str, kind: str, judge: Judge, *, lacking: str = "", **fields: object) -> Goal:
    return Goal(
        name=name, asked=asked, kind=kind, judge=judge, lacking=lacking, fields={"peer": verdicts.OURS, **fields}
    )
