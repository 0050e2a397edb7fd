"""What Azure's Scheduled Events say about this machine: whether, and when, it is about to be taken away. Pure.

Source: "Azure Metadata Service: Scheduled Events for Linux VMs", the document of api-version 2020-07-01: `Events`, each
with `EventId`, `EventType`, `Resources` (names of machines), `EventStatus` (Scheduled, then Started; one that is over
is in no document any more) and `NotBefore` (RFC 1123, empty once it has started).
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from stepfast.nodestatus import EvictionNotice

# What ends all that runs on the machine. Freeze pauses it for seconds, which training survives.
ENDING = frozenset({"Preempt", "Redeploy", "Reboot", "Terminate"})


def notice_in(document: Mapping[str, Any], machine: str, now: float) -> EvictionNotice | None:
    """The first event that ends what runs on the machine of that name; `now` is when it was seen, in seconds since the
    epoch.

    Raises KeyError, TypeError or ValueError when the document is none of Scheduled Events.
    """
    found = [
        EvictionNotice(
            kind=event["EventType"], event=event["EventId"], seen_time=now, not_before_time=_time(event["NotBefore"])
        )
        for event in document["Events"]
        if event["EventType"] in ENDING and machine.lower() in map(str.lower, event["Resources"])
    ]
    return min(found, key=lambda notice: notice.not_before_time or 0.0, default=None)


def _time(text: str) -> float | None:
    return parsedate_to_datetime(text).timestamp() if text else None
