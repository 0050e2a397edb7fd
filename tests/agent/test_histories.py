"""checkpointHistories.csv: what a row says agrees with itself, as whoever reads it has nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stepfast.histories import SaveRow, append_rows
from stepfast.storage import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(f"file://{tmp_path}")) as opened:
        yield opened


def row(step: int, duration_seconds: float | None, size_bytes: int) -> SaveRow:
    return SaveRow(
        global_step=step,
        run="uid-1",
        outcome="Dropped" if duration_seconds is None else "Committed",
        saved_time=1.8e9 + step,
        stall_seconds=0.001,
        duration_seconds=duration_seconds,
        size_bytes=size_bytes,
        world_size=1,
    )


def test_throughput_is_that_of_the_size_and_the_duration_beside_it(store: Store, bench: Any) -> None:
    chance = random.Random(0)
    saves = [(chance.uniform(0.001, 0.2), chance.randrange(1 << 20, 1 << 30)) for _ in range(1000)]
    append_rows(store, "job", [row(step, *save) for step, save in enumerate(saves)])
    for written in bench.history(store, "job"):
        throughput = int(written["size_bytes"]) / 1e6 / float(written["duration_seconds"])
        assert float(written["throughput_mb_per_second"]) == pytest.approx(throughput, rel=0, abs=0.000501)


@pytest.mark.parametrize("duration_seconds", [None, 0.0, 4e-7])
def test_save_without_a_duration_to_be_seen_has_no_throughput(
    store: Store, bench: Any, duration_seconds: float | None
) -> None:
    append_rows(store, "job", [row(1, duration_seconds, 1 << 20)])
    (written,) = bench.history(store, "job")
    assert written["throughput_mb_per_second"] == ""
