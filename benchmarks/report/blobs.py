"""Uploads to a blob storage as records have them. Pure; seconds.

A `blob` record is of one size, and holds `samples`: by way, a list of values with `seconds`
and the processor time of both sides, `client_processor_seconds` and `server_processor_seconds`; and `missing`: by way,
why it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.report.samples import middle
from benchmarks.report.selection import Measurements

STORE, AGENT = "stepfast_store", "stepfast_agent"
"""The upload alone, as the agent's persister does it; and the whole way from save() to the commit."""
OTHERS = ("adlfs", "adlfs_8", "obstore", "obstore_4")
"""Those of others; the numbers are how many requests they make at once."""


def medians_of(found: Measurements) -> Mapping[int, Mapping[str, float]]:
    """By size, from small to large: by way, the median."""
    return _medians_of(found, "seconds")


def processors_of(found: Measurements, who: str) -> Mapping[int, Mapping[str, float]]:
    """The same of the processor time that the `client` or the `server` took."""
    return _medians_of(found, f"{who}_processor_seconds")


def _medians_of(found: Measurements, field: str) -> Mapping[int, Mapping[str, float]]:
    samples: dict[int, dict[str, list[float]]] = {}
    for record in found.done("blob"):
        for way, values in (record.get("samples") or {}).items():
            taken = samples.setdefault(int(record["size_bytes"]), {}).setdefault(str(way), [])
            taken += [float(value[field]) for value in values if field in value]
    return {
        size: {way: median for way, taken in samples[size].items() if (median := middle(taken)) is not None}
        for size in sorted(samples)
    }
