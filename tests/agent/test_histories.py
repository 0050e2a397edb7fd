"""checkpointHistories.csv: what a row says agrees with itself, as whoever reads it has nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stepfast.histories import COLUMNS, SaveRow, append_rows, read_rows
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


def test_saves_are_read_as_they_were_noted(store: Store) -> None:
    rows = [row(1, 0.5, 1 << 20), row(2, None, 1 << 21)]
    append_rows(store, "job", rows)
    assert read_rows(store, "job") == tuple(rows)
    assert read_rows(store, "another") == ()


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        pytest.param("", [], id="empty"),
        pytest.param("step,seconds\n1,2\n", [], id="other-columns"),
        pytest.param(f"{','.join(COLUMNS)}\nx,u-1\n3,u-1,Committed,noon,0,,,1,1\n{{row}}\n", [7], id="broken-lines"),
    ],
)
def test_lines_that_are_no_save_are_left_out(store: Store, text: str, steps: list[int]) -> None:
    store.replace("job/checkpointHistories.csv", text.replace("{row}", ",".join(row(7, 0.5, 1).cells())).encode())
    assert [found.global_step for found in read_rows(store, "job")] == steps
