"""Measurements as JSON lines in one file: benchmarks append, the report reads. Knows nothing of what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(".stepfast/bench/results.jsonl")

Record = dict[str, Any]
"""`kind` says which table the record belongs to, `time` when it was measured (seconds since the epoch)."""


def add_record(kind: str, *, results: Path = RESULTS, **values: Any) -> Record:
    """Appends a record and returns it."""
    record: Record = {"kind": kind, "time": time.time(), **values}
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def read_records(results: Path = RESULTS) -> Sequence[Record]:
    """All records, oldest first."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line]
