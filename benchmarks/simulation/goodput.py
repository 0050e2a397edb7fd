"""Goodput of fixed intervals and of auto, by failure trace and by what becomes of a save; and as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.results import Record, add_record
from benchmarks.simulation.job import Costs, Outcome, System, simulate
from benchmarks.simulation.traces import LLAMA_NODE_LOST, Trace, all_traces

from stepfast.admission import Interval

POLICIES: Mapping[str, Interval] = {
    "10 s": Interval(seconds=10),
    "1 min": Interval(seconds=60),
    "10 min": Interval(seconds=600),
    "30 min": Interval(seconds=1800),
    "1 h": Interval(seconds=3600),
    "auto": Interval(),
}
NODE_LOST = (0.0, LLAMA_NODE_LOST, 1.0)
SEEDS = 20


def measure(trace: Trace, system: System, policy: str, *, node_lost: float, seeds: int, costs: Costs) -> Record:
    """Goodput over the seeds: mean, standard deviation, least and most; where the rest of the time went on average."""
    outcomes = [
        simulate(trace.draw(seed, node_lost), POLICIES[policy], system, trace.horizon_seconds, costs)
        for seed in range(seeds)
    ]
    goodputs = [outcome.goodput for outcome in outcomes]

    def share(of: Callable[[Outcome], float]) -> float:
        return fmean(of(outcome) / outcome.horizon for outcome in outcomes)

    return {
        "trace": trace.name, "mtbf_seconds": trace.mtbf_seconds, "horizon_seconds": trace.horizon_seconds,
        "system": str(system), "policy": policy, "node_lost": node_lost, "seeds": seeds, "costs": asdict(costs),
        "goodput_mean": fmean(goodputs), "goodput_stdev": stdev(goodputs) if seeds > 1 else 0.0,
        "goodput_min": min(goodputs), "goodput_max": max(goodputs),
        "lost_share": share(lambda outcome: outcome.lost), "stalled_share": share(lambda outcome: outcome.stalled),
        "down_share": share(lambda outcome: outcome.down), "failures_mean": fmean(one.failures for one in outcomes),
        "saves_mean": fmean(one.saves for one in outcomes),
    }  # fmt: skip


def measure_all(*, seeds: int = SEEDS, costs: Costs | None = None) -> Iterator[Record]:
    """Every trace, system and policy, with the share of lost nodes that Llama 3 had; then other shares, for auto."""
    costs = costs or Costs()
    for trace in all_traces():
        for system in System:
            for policy in POLICIES:
                yield measure(trace, system, policy, node_lost=LLAMA_NODE_LOST, seeds=seeds, costs=costs)
    first = all_traces()[0]
    for node_lost in (share for share in NODE_LOST if share != LLAMA_NODE_LOST):
        for system in System:
            yield measure(first, system, "auto", node_lost=node_lost, seeds=seeds, costs=costs)


def add_all(results: Path, *, seeds: int = SEEDS) -> list[Record]:
    """Measures and records."""
    return [add_record("goodput", results=results, **record) for record in measure_all(seeds=seeds)]


def lines_of(records: list[Record]) -> Iterator[str]:
    """Tables as text: a trace each, systems by policies, percent of time (± one standard deviation over the seeds)."""
    for trace, node_lost in dict.fromkeys((record["trace"], record["node_lost"]) for record in records):
        mine = [record for record in records if (record["trace"], record["node_lost"]) == (trace, node_lost)]
        policies = list(dict.fromkeys(record["policy"] for record in mine))
        yield f"\n{trace}; {node_lost:.0%} of failures lose a node's memory"
        yield f"{'':30}" + "".join(f"{policy:>15}" for policy in policies)
        for system in dict.fromkeys(record["system"] for record in mine):
            row = [record for record in mine if record["system"] == system]
            cells = (f"{100 * record['goodput_mean']:.2f} ±{100 * record['goodput_stdev']:.2f}" for record in row)
            yield f"{system:30}" + "".join(f"{cell:>15}" for cell in cells)
