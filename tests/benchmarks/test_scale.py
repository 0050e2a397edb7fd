"""What a save of many nodes asks of storage and API server grows with the nodes, not with their square."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.results import read_records
from benchmarks.simulation import goodput, scale

from stepfast_sidecar.checkpointnode import progress_seconds


def test_requests_of_a_commit_grow_with_the_nodes() -> None:
    manifest = scale.commit_record(10)["manifest_bytes"]
    for is_over in (False, True):
        small, large = (scale.traffic_record(nodes, manifest, is_over=is_over) for nodes in (500, 5_000))
        for figure in ("leader_requests", "other_misses"):
            assert large[figure] <= 12 * small[figure]
        assert large["storage_limit_share"] < 0.25


def test_manifest_names_every_part_and_is_small_beside_them() -> None:
    seen = scale.commit_record(40, rank_bytes=2**26)
    assert seen["last_commit_requests"] == 4  # the manifest looked for, a listing, the last part, the manifest written
    assert 200 < seen["manifest_bytes"] / 40 < 400


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 5.0), (1_000, 5.0), (10_000, 20.0), (100_000, 30.0)])
def test_large_gangs_tell_of_progress_more_rarely(nodes: int, seconds: float) -> None:
    assert progress_seconds(scale.node_status(nodes)) == seconds


def test_records_are_written_for_the_report(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    scale.add_all(results, nodes=(20,))
    trace = goodput.all_traces()[0]
    record = goodput.measure(
        trace, goodput.System.FLUSH, "auto", node_lost=0.2, seeds=2, costs=goodput.Costs()
    )  # fmt: skip
    assert 0.9 < record["goodput_mean"] < 1.0
    assert json.dumps(record)
    records = read_records(results)
    assert [(one["kind"], one["is_flush"]) for one in records] == [("scale", False), ("scale", True)]
    assert list(scale.lines_of(list(records)))
