"""Gangs whose ranks hold the same state, as under DDP: who writes what, and how long all of them stand still.

`python -m benchmarks.gangs.ddp -h`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import WORK, launcher_of
from benchmarks.processes.agentprocess import agent_command, is_answering, memory_limit
from benchmarks.processes.cellprocess import Workplace
from benchmarks.results import RESULTS, add_record
from benchmarks.workload import size_of, state_of

WAYS = ("stepfast", "torch_save", "dcp_save", "dcp_async_process")
_SLOTS = 3
_RANK_IN_NAME = (re.compile(r"__(\d+)_\d+\.distcp"), re.compile(r"-rank-(\d+)$"), re.compile(r"-(\d+)-of-\d+-"))


def measure_gang(
    way: str, layout: str = "gpt:0.25", *, ranks: int = 4, saves: int = 4, time_limit_seconds: float = 300.0,
    results: Path = RESULTS,
) -> None:  # fmt: skip
    """Adds a `ddp` record: for each save a value per rank; the stall of the gang is the largest of them."""
    size = size_of(state_of(layout))
    with Workplace(WORK, time_limit_seconds) as workplace:
        storage = workplace.folder / "storage"
        storage.mkdir()
        if way == "stepfast":
            _start_agent(workplace, size, ranks)
        outcome = workplace.run(
            "benchmarks.gangs.ddprank",
            ["--way", way, "--layout", layout, "--storage", str(storage), "--saves", str(saves)],
            launcher=launcher_of(ranks),
        )
        told = [{name: value for name, value in save.items() if name != "event"} for save in outcome.told("save")]
        record = add_record(
            "ddp", results=results, peer=way, layout=layout, size_bytes=size, ranks=ranks, status=outcome.status,
            error=outcome.error, saves=told, **_written(storage, ranks),
        )  # fmt: skip
        print(json.dumps(record))


def _start_agent(workplace: Workplace, size_bytes: int, ranks: int) -> None:
    socket, memory = workplace.folder / "agent.sock", Path("/dev/shm") / f"stepfast-{workplace.key}"
    limit = memory_limit(-(-size_bytes // ranks), slots=_SLOTS, ranks=ranks)
    workplace.add_environment(
        {"STEPFAST_SOCKET": str(socket), "STEPFAST_JOB": "bench/ddp", "STEPFAST_RUN": f"{workplace.key}-1"}
    )
    workplace.start_helper(agent_command(socket, memory, limit), lambda: is_answering(socket))


def _written(storage: Path, ranks: int) -> dict[str, Any]:
    """Bytes of the newest step's files, by the rank that their names say."""
    files = [path for path in storage.rglob("*") if path.is_file()]
    if not files:
        return {}
    last = max(number for path in files if (number := _step_of(path)) is not None)
    mine = [path for path in files if _step_of(path) == last]
    by_rank = [0] * ranks
    for path in mine:
        if (rank := _rank_of(path.name)) is not None:
            by_rank[rank] += path.stat().st_size
    return {"bytes_by_rank": by_rank, "written_bytes": sum(path.stat().st_size for path in mine)}


def _step_of(path: Path) -> int | None:
    match = re.search(r"(?:step-|global_step)(\d+)", f"{path.parent.name}/{path.name}")
    return int(match.group(1)) if match else None


def _rank_of(name: str) -> int | None:
    return next((int(match.group(1)) for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the ways that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, action="append", help="repeatable (default: all)")
    parser.add_argument("--layout", default="gpt:0.25")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    for way in asked.way or WAYS:
        measure_gang(
            way, asked.layout, ranks=asked.ranks, saves=asked.saves, time_limit_seconds=asked.time_limit,
            results=asked.results,
        )  # fmt: skip


if __name__ == "__main__":
    main()
