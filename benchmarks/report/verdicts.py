"""What measurements say of one goal: whether it is reached, by how much, and beside which limit. Pure.

Each returns None where there is nothing to judge by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.report import blobs, markdown
from benchmarks.report.markdown import ratio, seconds, share, size
from benchmarks.report.samples import (
    Figure,
    Save,
    first_saves,
    lost_of,
    middle_of,
    persist_of,
    planning_of,
    restore_of,
    saves_of,
    stall_of,
    steady_saves,
)
from benchmarks.report.selection import Measurements

OURS = "stepfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`limit`: what it is held against, as measured in this run; `measured`: in words."""

    is_reached: bool
    limit: str
    measured: str


def steady_stall(found: Measurements, *, layout: str, bound: float) -> Verdict | None:
    """Saves but the first of each process, against the plain copy before each of them."""
    return _stall(steady_saves(found.done("save", peer=OURS, layout=layout)), bound)


def first_stall(found: Measurements, *, layout: str, bound: float) -> Verdict | None:
    """The first save of each process."""
    return _stall(first_saves(found.done("save", peer=OURS, layout=layout)), bound)


def busy_stall(found: Measurements, *, layout: str, bound: float) -> Verdict | None:
    """Saves that came while the one before them was not persisted; none may be skipped."""
    records = found.done("back_to_back", peer=OURS, layout=layout)
    verdict = _stall([save for save in saves_of(records) if save.get("is_busy")], bound)
    if verdict is None:
        return None
    skipped = sum(record.get("skipped", 0) for record in records)
    dropped = [record.get("dropped") for record in records]
    words = "?" if None in dropped else sum(count or 0 for count in dropped)
    return Verdict(
        is_reached=verdict.is_reached and skipped == 0,
        limit=verdict.limit,
        measured=f"{verdict.measured}; {skipped} skipped, {words} given up for newer ones before they were persisted",
    )


def shared_evenly(found: Measurements, *, slack: float) -> Verdict | None:
    """The largest share of a rank, and how long the ranks plan, in all records of DDP."""
    records = [one for one in found.done("ddp", peer=OURS) if one.get("bytes_by_rank")]
    planned, others = planning_of(records), planning_of(found.done("ddp", peer="dcp_save"))
    if planned is None or others is None:
        return None
    largest = max(max(one["bytes_by_rank"]) / one["size_bytes"] * one["ranks"] for one in records)
    return Verdict(
        is_reached=largest <= 1 + slack and planned <= slack * others,
        limit=f"DCP plans {seconds(others)} a save",
        measured=f"largest share {largest:.3f}/{records[-1]['ranks']} of the state; {seconds(planned)} a save to agree "
        f"on it and lay out the files ({share(planned / others)} of DCP's planning)",
    )


def disk_rate(found: Measurements, *, layout: str, bound: float) -> Verdict | None:
    """From the return of save() to the commit, against a direct write of as many bytes in the same process."""
    records = found.done("save", peer=OURS, layout=layout)
    saves = [save for save in saves_of(records) if save.get("direct_write_seconds")]
    if not saves:
        return None
    pairs = [(persist_of(save), save["direct_write_seconds"]) for save in saves]
    rate = median(direct / persist for persist, direct in pairs)
    whole = median(save["stall_seconds"] + persist_of(save) for save in saves)
    bytes_ = records[-1]["size_bytes"]
    persist, direct = (median(column) for column in zip(*pairs, strict=True))
    return Verdict(
        is_reached=rate >= bound,
        limit=f"O_DIRECT, four threads, {size(bytes_ / direct)}/s",
        measured=f"{share(rate)} ({size(bytes_ / persist)}/s once save() has returned, "
        f"{size(bytes_ / whole)}/s from its begin; n={len(pairs)})",
    )


def blob_rate(found: Measurements, *, way: str) -> Verdict | None:
    """Uploads of the same bytes against the fastest of others; every size counts."""
    reached, limits, words = [], [], []
    for bytes_, ways in blobs.medians_of(found).items():
        ours = ways.get(way)
        others = {other: ways[other] for other in blobs.OTHERS if other in ways}
        if ours is None or not others:
            continue
        best = min(others, key=lambda other: others[other])
        reached.append(ours <= others[best])
        limits.append(f"{best} {size(bytes_ / others[best])}/s")
        words.append(f"{size(bytes_)}: {size(bytes_ / ours)}/s ({ratio(others[best] / ours)} the rate)")
    return joined(reached, limits, words)


def lost_time(found: Measurements, *, layout: str, bound: float) -> Verdict | None:
    """Training time lost over the stall, as a share of the time that persisting takes once save() has returned."""
    steady = lost_of(steady_saves(found.done("save", peer=OURS, layout=layout)))
    saves = [save for save in steady if persist_of(save) > 0]
    if not saves:
        return None
    over = median((save["lost_seconds"] - save["stall_seconds"]) / persist_of(save) for save in saves)
    lost, stall = (middle_of(saves, f"{name}_seconds") or 0.0 for name in ("lost", "stall"))
    return Verdict(
        is_reached=over <= bound,
        limit=f"stall {seconds(stall)}, persist {seconds(median(map(persist_of, saves)))}",
        measured=f"stall + {share(over)} (lost {seconds(lost)}, n={len(saves)})",
    )


def restore(found: Measurements, *, layout: str, tier: str, bound: float) -> Verdict | None:
    """Into the caller's own tensors, in a new process each time."""
    records = found.done("restore", peer=OURS, layout=layout, tier=tier)
    taken = restore_of(records)
    wrong = sum(record.get("wrong_tensors", 0) > 0 for record in records)
    if taken is None:
        return None
    verdict = against(taken, str(records[-1].get("limit", "the limit")), bound)
    if verdict is None or not wrong:
        return verdict
    return Verdict(is_reached=False, limit=verdict.limit, measured=f"{verdict.measured}; {wrong} restored wrongly")


def survives_kill(found: Measurements, *, helper_killed: bool) -> Verdict | None:
    """The step whose save() had returned."""
    records = found.done("kill", peer=OURS, helper_killed=helper_killed)
    if not records:
        return None
    tiers = {
        tier: all(record.get("is_restorable") for record in records if record["tier"] == tier)
        for tier in dict.fromkeys(str(record["tier"]) for record in records)
    }
    return Verdict(
        is_reached=all(tiers.get(tier, False) for tier in ("memory", "disk")),
        limit=markdown.NONE,
        measured=", ".join(f"{tier}: {'restored' if whole else 'lost'}" for tier, whole in tiers.items()),
    )


def finds_damage(found: Measurements) -> Verdict | None:
    """One bit of the largest file."""
    records = found.done("corrupt", peer=OURS)
    if not records:
        return None
    is_found = all(record["is_detected"] for record in records)
    is_named = all(record["names_file"] for record in records)
    return Verdict(
        is_reached=is_found and is_named,
        limit=markdown.NONE,
        measured=f"{'found' if is_found else 'not found'}, file {'named' if is_named else 'not named'}",
    )


def trainer_memory(found: Measurements, *, slack: float) -> Verdict | None:
    """What the training process grew by; what the training loop itself allocates is in it."""
    records = [record for record in found.done("memory", peer=OURS) if "trainer_peak_bytes" in record]
    if not records:
        return None
    extra = max(record["trainer_peak_bytes"] - record["trainer_before_bytes"] for record in records)
    state = records[-1]["size_bytes"]
    return Verdict(
        is_reached=extra <= slack * state,
        limit=f"state {size(state)}",
        measured=f"{size(extra)} ({share(extra / state)}), with what the training loop itself takes",
    )


def agent_memory(found: Measurements, *, slack: float) -> Verdict | None:
    """Shared memory, and what the agent's processes hold themselves."""
    records = [record for record in found.done("memory", peer=OURS) if "shared_growth_bytes" in record]
    if not records:
        return None
    record = records[-1]
    slots = record["slots"] * record["size_bytes"]
    own, shared = record["helpers_peak_bytes"], record["shared_growth_bytes"]
    return Verdict(
        is_reached=own + shared <= (1 + slack) * slots,
        limit=f"{record['slots']} slots of {size(record['size_bytes'])}",
        measured=f"slots {share((own + shared) / slots - 1)} over: {size(shared)} shared, {size(own)} of its own",
    )


def against(taken: Figure, limit: str, bound: float) -> Verdict | None:
    """A figure against the limit beside it."""
    if taken.ratio is None or taken.limit_seconds is None:
        return None
    return Verdict(
        is_reached=taken.ratio <= bound,
        limit=f"{limit} {seconds(taken.limit_seconds)}",
        measured=f"{ratio(taken.ratio)} ({seconds(taken.seconds)}, n={taken.count})",
    )


def joined(reached: Sequence[bool], limits: Sequence[str], words: Sequence[str]) -> Verdict | None:
    """One verdict of several; None where there are none."""
    if not reached:
        return None
    return Verdict(is_reached=all(reached), limit="; ".join(limits), measured="; ".join(words))


def _stall(saves: Sequence[Save], bound: float) -> Verdict | None:
    taken = stall_of(saves)
    return against(taken, "plain copy", bound) if taken is not None else None
