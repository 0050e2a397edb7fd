"""Kills, damage, gangs and blobs: who stood what, as tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import blobs, markdown
from benchmarks.report.markdown import number, ratio, share, size
from benchmarks.report.peers import Notes
from benchmarks.report.plan import Expected
from benchmarks.report.samples import Save, figure, is_asynchronous, middle, planning_of
from benchmarks.report.selection import Measurements, is_failed, reason_of, told
from benchmarks.results import Record


def kill_table(found: Measurements, expected: Expected) -> list[str]:
    """Which tiers have the step whose save() had returned."""
    notes, names = Notes(), expected.titles
    keys = {(str(one["peer"]), bool(one.get("helper_killed"))) for one in found.of("kill")}
    keys |= {(peer, False) for kind, peer, _ in expected.cells if kind == "kill"} | {("stepfast", True)}
    rows = []
    for peer, helper_killed in sorted(keys, key=lambda key: (key[0] != "stepfast", key)):
        records = [one for one in found.of("kill", peer=peer) if bool(one.get("helper_killed")) == helper_killed]
        left = sorted({name for one in records for name in one.get("left_processes") or []})
        rows.append([
            names.get(peer, peer),
            "trainer and helper" if helper_killed else "trainer",
            *(_survived(records, tier, peer, notes) for tier in ("memory", "disk")),
            str(len(left)) if any("left_processes" in one for one in records) else markdown.NONE,
        ])  # fmt: skip
    header = ("peer", "killed", "from memory", "from storage", "processes left behind")
    return [*markdown.text_table(header, rows), *notes.lines()]


def corruption_table(found: Measurements, expected: Expected) -> list[str]:
    """Whether the restore says that a byte of the largest file is another one."""
    notes, names, rows = Notes(), expected.titles, []
    asked = [peer for kind, peer, _ in expected.cells if kind == "corrupt"]
    for peer in _ours_first({*asked, *(str(one["peer"]) for one in found.of("corrupt"))}):
        records = found.of("corrupt", peer=peer)
        rows.append([names.get(peer, peer), *_damage(records, peer, notes)])
    header = ("peer", "found", "file named", "wrong elements restored")
    return [*markdown.text_table(header, rows), *notes.lines()]


def gang_table(found: Measurements, expected: Expected) -> list[str]:
    """Ranks that hold the same state; the stall of a gang is its slowest rank's."""
    notes, rows = Notes(), []
    asked = [peer for kind, peer, _ in expected.cells if kind == "ddp"]
    for way in _ours_first({*asked, *(str(one["peer"]) for one in found.of("ddp"))}):
        records = found.of("ddp", peer=way)
        done = [one for one in records if not is_failed(one) and one.get("saves")]
        marks = "".join(notes.mark(f"{way}: {reason_of(one)}") for one in records if is_failed(one))
        cells = _gang(done) if done else [markdown.NOT_MEASURED if not records else f"failed {marks}"] * 5
        rows.append([f"{way} {marks}".strip() if done else way, *cells])
    header = ("way", "stall of the gang, s", "persist, s", "planning, s", "largest share of a rank", "written, × state")
    return [*markdown.table(header, rows), *notes.lines()]


def blob_table(found: Measurements) -> list[str]:
    """Uploads to Azurite, way by way, the best of each size in bold; then whose processor time it took."""
    sizes = blobs.medians_of(found)
    failed = [reason_of(one) for one in found.of("blob") if is_failed(one)]
    missing = [f"{way}: {why}" for one in found.of("blob") for way, why in (one.get("missing") or {}).items()]
    notes = Notes(list(dict.fromkeys([*failed, *missing])))
    if not sizes:
        return [f"{markdown.NOT_MEASURED}: no samples of the kind `blob`.", *notes.lines()]
    ways = _ours_first({way for medians in sizes.values() for way in medians})
    columns = [_rates(bytes_, [medians.get(way) for way in ways]) for bytes_, medians in sizes.items()]
    rows = [list(row) for row in zip(ways, *columns, strict=True)]
    header = ("way", *(f"{size(bytes_)}, s" for bytes_ in sizes))
    return [*markdown.table(header, rows), *_processors(found, ways), *notes.lines()]


def _processors(found: Measurements, ways: Sequence[str]) -> list[str]:
    sides = [blobs.processors_of(found, who) for who in ("client", "server")]
    sizes = [bytes_ for bytes_, medians in sides[0].items() if medians]
    if not sizes:
        return []
    taken = [[[side[bytes_].get(way) for side in sides] for bytes_ in sizes] for way in ways]
    rows = [
        [way, *(" + ".join(markdown.NONE if one is None else number(one) for one in cell) for cell in cells)]
        for way, cells in zip(ways, taken, strict=True)
    ]
    header = ("processor time: the sender's + Azurite's", *(f"{size(bytes_)}, s" for bytes_ in sizes))
    return ["", *markdown.table(header, rows)]


def _rates(bytes_: int, taken: Sequence[float | None]) -> list[str]:
    texts = [f"{number(one)} ({size(bytes_ / one)}/s)" if one else markdown.NOT_MEASURED for one in taken]
    return markdown.bold_best(taken, texts)


def _survived(records: Sequence[Record], tier: str, peer: str, notes: Notes) -> str:
    mine = [one for one in records if one.get("tier") in (tier, "", None)]
    failed = [one for one in mine if is_failed(one)]
    if failed:
        return f"{failed[-1]['status']} {notes.mark(f'{peer}: {reason_of(failed[-1])}')}"
    if not mine:
        return markdown.NONE if records else markdown.NOT_MEASURED
    if all(one["is_restorable"] for one in mine):
        return "restored"
    step = mine[-1].get("restored_step")
    words = f"lost (step {step} instead)" if step else "lost"
    error = next((one["error"] for one in mine if one.get("error")), None)
    return f"{words} {notes.mark(f'{peer}, {tier}: {told(error)}')}" if error else words


def _damage(records: Sequence[Record], peer: str, notes: Notes) -> list[str]:
    failed = [one for one in records if is_failed(one)]
    if failed:
        mark = notes.mark(f"{peer}: {reason_of(failed[-1])}")
        return [f"{failed[-1]['status']} {mark}", markdown.NONE, markdown.NONE]
    if not records:
        return [markdown.NOT_MEASURED, markdown.NONE, markdown.NONE]
    one = records[-1]
    wrong = one.get("wrong_elements")
    return [
        "yes" if one["is_detected"] else markdown.bold("no"),
        "yes" if one["names_file"] else "no",
        markdown.NONE if wrong is None else f"{wrong:,}",
    ]


def _gang(records: Sequence[Record]) -> list[str]:
    saves = [save for one in records for save in one["saves"][1:]]
    stall = figure((max(save["stall_seconds"]), max(save["plain_seconds"])) for save in saves)
    persist = middle([max(_persists(save, records[-1]["peer"])) for save in saves])
    planning = planning_of(records)
    one = records[-1]
    shares = one.get("bytes_by_rank")
    written = one.get("written_bytes")
    return [
        f"{number(stall.seconds)} ({ratio(stall.ratio or 0.0)})" if stall else markdown.NONE,
        number(persist) if persist is not None else markdown.NONE,
        number(planning) if planning is not None else markdown.NONE,
        share(max(shares) / one["size_bytes"]) if shares else markdown.NONE,
        number(written / one["size_bytes"]) if written else markdown.NONE,
    ]


def _persists(save: Save, peer: str) -> list[float]:
    """Of each rank, from the return of its save(); where that returns no earlier, its save()."""
    if not is_asynchronous(peer):
        return list(save["stall_seconds"])
    return [whole - stall for whole, stall in zip(save["persist_seconds"], save["stall_seconds"], strict=True)]


def _ours_first(names: set[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.startswith("stepfast"), name))
