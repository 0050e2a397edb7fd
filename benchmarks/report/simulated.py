"""Goodput under failure traces and the traffic of thousands of nodes, as tables with what they assume. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import markdown
from benchmarks.report.markdown import number, share, size
from benchmarks.report.selection import Measurements
from benchmarks.results import Record
from benchmarks.simulation import scale

MISSING = f"{markdown.NOT_MEASURED}: no record of the kind"
_FIGURES = (
    ("data_bytes", "written of one save", size),
    ("data_requests", "requests that write it", None),
    ("part_requests", "requests for the parts' records", None),
    ("part_bytes", "one part's record", size),
    ("manifest_bytes", "the manifest", size),
    ("leader_requests", "requests of the agent that commits", None),
    ("other_requests", "requests of all other agents until they see the commit", None),
    ("other_lists", "listings among them", None),
    ("requests_a_second", "requests a second while parts come in", None),
    ("storage_limit_share", "the same as a share of what one storage account takes", share),
    ("parts_read_seconds", "reading the parts' records (no network), s", None),
    ("last_commit_seconds", "commit after the last part (no network), s", None),
    ("progress_writes_a_second", "CheckpointNode writes a second: progress", None),
    ("news_writes_a_second", "CheckpointNode writes a second: saves", None),
    ("lease_writes_a_second", "for comparison: Lease writes of the kubelets a second", None),
    ("bytes_a_second", "CheckpointNode bytes a second to whoever watches", size),
    ("watch_parse_share", "of one processor, to parse them", share),
)


def goodput_section(found: Measurements) -> list[str]:
    """Intervals against each other, and what the memory tier and the flush add."""
    records = found.of("goodput")
    if not records:
        return [f"{MISSING} `goodput`."]
    shares = _most_common([record["node_lost"] for record in records])
    usual = [record for record in records if record["node_lost"] == shares]
    systems = list(dict.fromkeys(str(record["system"]) for record in usual))
    lines = _assumptions(usual)
    lines += ["", f"Auto against fixed intervals, with all of Stepfast ({systems[-1]}):", ""]
    lines += _pivot([one for one in usual if one["system"] == systems[-1]], "policy")
    lines += ["", "What each part adds, the interval being auto:", ""]
    lines += _pivot([one for one in usual if one["policy"] == "auto"], "system")
    other = [one for one in records if one["policy"] == "auto" and one["trace"] == usual[0]["trace"]]
    lines += ["", f"The same, as more or fewer failures take a node's memory along ({usual[0]['trace']}):", ""]
    lines += _pivot(sorted(other, key=lambda one: one["node_lost"]), "system", rows="node_lost")
    lines += [
        "",
        "Where the time of the first trace went (percent lost / stalled / down):",
        "",
    ]
    lines += _where([one for one in usual if one["trace"] == usual[0]["trace"]])
    return lines


def scale_section(found: Measurements) -> list[str]:
    """One column for each number of nodes, without and with a flush."""
    records = sorted(found.of("scale"), key=lambda one: (one["nodes"], one["is_flush"]))
    if not records:
        return [f"{MISSING} `scale`."]
    header = ("", *(f"{one['nodes']:,} nodes{', flush after a failure' if one['is_flush'] else ''}" for one in records))
    rows = [
        [words, *((form(one[name]) if form else _count(one[name])) for one in records)]
        for name, words, form in _FIGURES
        if all(name in one for one in records)
    ]
    return [
        f"{scale.RANKS_PER_NODE} ranks a node with {size(scale.RANK_BYTES)} of state each; the parts of a save are "
        f"written evenly over {records[0].get('spread_seconds', scale.SPREAD_SECONDS):.0f} s; a save each "
        f"{scale.SAVE_SECONDS:.0f} s; a storage account takes {scale.STORAGE_REQUESTS_A_SECOND:,} requests a second. "
        "Records, sizes and the commit are those of the code as shipped, against a storage in memory; a request takes "
        "no time, so seconds are those of our own processing. Requests are counted as Azure Blob Storage bills them.",
        "",
        *markdown.table(header, rows),
    ]


def _assumptions(records: Sequence[Record]) -> list[str]:
    one = records[0]
    costs = one["costs"]
    return [
        f"Assumed: a stall of {costs['stall']:g} s, {costs['persist']:g} s to persist, a restart of "
        f"{costs['restart']:g} s, a restore of {costs['restore_memory']:g} s from memory and "
        f"{costs['restore_storage']:g} s from the storage; {100 * one['node_lost']:.0f} % of failures lose a node's "
        "memory (the share of Llama 3's). When a save falls due is decided by the code as shipped; all else is a model "
        "(`benchmarks/simulation`). Goodput in percent of all time, mean ± one standard deviation over "
        f"{one['seeds']} seeds, the best of each row in bold.",
    ]


def _pivot(records: Sequence[Record], columns: str, rows: str = "trace") -> list[str]:
    heads = list(dict.fromkeys(one[columns] for one in records))
    lines = []
    for key in dict.fromkeys(one[rows] for one in records):
        by_head = {one[columns]: one for one in records if one[rows] == key}
        found = [by_head.get(head) for head in heads]
        values = [-round(one["goodput_mean"], 4) if one else None for one in found]
        texts = [_goodput(one) if one else markdown.NOT_MEASURED for one in found]
        name = f"{key:.0%}".replace("%", " %") if isinstance(key, float) else str(key)
        lines.append([name, *_bold_equal(values, texts)])
    return markdown.table((rows.replace("node_lost", "lose a node's memory"), *map(str, heads)), lines)


def _bold_equal(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    best = min((value for value in values if value is not None), default=None)
    return [
        markdown.bold(text) if value is not None and value == best else text
        for value, text in zip(values, texts, strict=True)
    ]


def _where(records: Sequence[Record]) -> list[str]:
    policies = list(dict.fromkeys(str(one["policy"]) for one in records))
    rows = []
    for system in dict.fromkeys(str(one["system"]) for one in records):
        mine = {one["policy"]: one for one in records if one["system"] == system}
        rows.append([system, *(_parts(mine[policy]) if policy in mine else markdown.NONE for policy in policies)])
    return markdown.table(("system", *policies), rows)


def _parts(record: Record) -> str:
    return " / ".join(f"{100 * record[f'{name}_share']:.1f}" for name in ("lost", "stalled", "down"))


def _goodput(record: Record) -> str:
    return f"{100 * record['goodput_mean']:.2f} ± {100 * record['goodput_stdev']:.2f}"


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)


def _most_common(values: Sequence[float]) -> float:
    return max(dict.fromkeys(values), key=values.count)
