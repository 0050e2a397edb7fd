"""Uploads to a blob storage as records have them. Pure; seconds.

A `blob` record is of one size. It has either `way` and `seconds` (a list), or `samples`: by way, a list of values with
`seconds`; and maybe `missing`: by way, why it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.report.samples import middle
from benchmarks.report.selection import Measurements
from benchmarks.results import Record

OURS = ("stepfast_agent", "stepfast", "stepfast_store")
"""From the whole way of a save to the upload alone: the first that was measured is the one that counts."""
OTHERS = ("adlfs", "obstore")
"""How the names of others' ways begin; what follows is how they were tuned."""


def medians_of(found: Measurements) -> Mapping[int, Mapping[str, float]]:
    """By size, from small to large: by way, the median."""
    samples: dict[int, dict[str, list[float]]] = {}
    for record in found.done("blob"):
        for way, seconds in _samples(record):
            samples.setdefault(int(record["size_bytes"]), {}).setdefault(way, []).append(seconds)
    return {
        size: {way: median for way, taken in samples[size].items() if (median := middle(taken)) is not None}
        for size in sorted(samples)
    }


def _samples(record: Record) -> Iterator[tuple[str, float]]:
    if "way" in record:
        yield from ((str(record["way"]), float(value)) for value in record.get("seconds") or [])
    for way, values in (record.get("samples") or {}).items():
        yield from ((str(way), float(value["seconds"])) for value in values)
