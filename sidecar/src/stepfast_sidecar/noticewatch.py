"""Asks Azure's instance metadata service, once a second, whether this machine is about to be taken away.

Where there is no such service, as in any other cloud, that is said once, and asked ever less often.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from stepfast.nodestatus import EvictionNotice
from stepfast_sidecar.notices import notice_in

log = logging.getLogger(__name__)

_NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_POLL_SECONDS = 1.0  # a preemption is announced half a minute ahead
_TIMEOUT_SECONDS = 5.0  # the first answer about events may take long: asking turns the service on for the machine
_RETRY_SECONDS = (1.0, 2.0, 5.0)  # of a service that has answered before
_ABSENT_SECONDS = 60.0
_MOST_BYTES = 1 << 20


class NoticeWatch:
    """`told` is called with what is known, whenever that changes: None when the machine is to stay. `run` never ends by
    itself, and raises nothing.
    """

    def __init__(self, endpoint: str, told: Callable[[EvictionNotice | None], None]) -> None:
        """`endpoint`: of the metadata service, as in http://169.254.169.254."""
        self._endpoint, self._told = endpoint.rstrip("/"), told
        # The service answers no proxy, and a proxy of the cluster's would ask it about another machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._machine: str | None = None
        self._notice: EvictionNotice | None = None
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._ask()
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                await asyncio.sleep(self._failed(error))
                continue
            if self._failures:
                log.info("%s answers about scheduled events", self._endpoint)
                self._failures = 0
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self) -> None:
        if self._machine is None:
            self._machine = (await self._get(_NAME_PATH)).decode().strip()
            log.info("scheduled events of the machine %s are looked for at %s", self._machine, self._endpoint)
        document: Any = json.loads(await self._get(_EVENTS_PATH))
        notice = notice_in(document, self._machine, time.time())
        known = self._notice
        if (notice and (notice.event, notice.not_before_time)) == (known and (known.event, known.not_before_time)):
            return
        self._notice = notice
        self._told(notice)

    async def _get(self, path: str) -> bytes:
        return await asyncio.to_thread(self._read, path)

    def _read(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self._endpoint}{path}", headers={"Metadata": "true"})
        with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            data: bytes = answer.read(_MOST_BYTES)
        return data

    def _failed(self, error: Exception) -> float:
        """Says so, once; how long to wait."""
        self._failures += 1
        if self._failures == 1:
            log.warning("%s tells of no scheduled events; asked again and again: %s", self._endpoint, error)
        if self._machine is None:
            return _ABSENT_SECONDS
        return _RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS)) - 1]
