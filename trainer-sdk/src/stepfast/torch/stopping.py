"""The end of a job that is to be stopped: which step is the last, on all ranks the same, and the wait behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from stepfast.admission import Decision, RankReport
from stepfast.messages import FinalSaved
from stepfast.torch.gang import Gang
from stepfast.torch.link import AgentLink
from stepfast.torch.writer import Writer

log = logging.getLogger("stepfast")

_FINAL_WAIT_SECONDS = 3600.0
_ASK_SECONDS = 1.0


class Stopping:
    """Rank 0 says at which step all are to save and stop; about once a second all ask it, at the same step."""

    def __init__(self, gang: Gang, link: AgentLink | None) -> None:
        self._gang, self._link = gang, link
        self._step, self._next_step, self._stride = 0, 0, 1  # the first is what this rank asked about last
        self._asked_time = time.monotonic()
        self._is_last = False
        self._is_told: bool | None = None  # whether an agent may tell any rank to stop; None: not asked yet

    def is_last(self, step: int) -> bool:
        """Whether all ranks are to save this step, and to wait behind it. Every rank asks about the same steps, in
        their order, and none of them goes on without rank 0. Raises GangError.
        """
        if step < self._step:  # another training of this process, which counts anew, or an older state was loaded
            self._next_step, self._stride = 0, 1
        self._step = step
        if self._is_last or step < self._next_step:
            return self._is_last
        if self._is_told is None:  # an agent may be each rank's own affair, but whether to consult is not
            self._is_told = any(self._gang.exchange("stopping", "agent" if self._link is not None else ""))
        if not self._is_told:
            return False
        decision = self._gang.consult(self._report(), lambda reports: self._decide(step, reports))
        self._gang.publish(self._report())
        self._next_step, self._is_last = decision.next_step, decision.final
        return self._is_last

    def _decide(self, step: int, reports: Sequence[RankReport]) -> Decision:
        now = time.monotonic()
        if self._gang.world_size > 1:
            self._stride = next_stride(self._stride, now - self._asked_time)
        self._asked_time = now
        is_last = self._report().wants_save or any(report.wants_save for report in reports)
        return Decision(step=step, save=is_last, final=is_last, next_step=step + self._stride, time=now)

    def _report(self) -> RankReport:
        wants_save = self._link is not None and self._link.save_requested
        return RankReport(rank=self._gang.rank, wants_save=wants_save)


def next_stride(stride: int, seconds: float) -> int:
    """How many steps take about a second, when the last `stride` took that many; at most twice as many as these."""
    return max(1, min(2 * stride, int(stride * _ASK_SECONDS / max(seconds, 1e-6))))


def wait_to_be_stopped(link: AgentLink | None, writer: Writer, step: int) -> None:
    """After a save that was asked for: nothing is trained that would be lost; whoever asked ends the process.

    A rank without an agent waits as the others do. Raises StorageUnavailable, CheckpointNotFound.
    """
    log.warning("stepfast: step %s is saved on request; waiting to be stopped", step)
    writer.wait_committed(step, _FINAL_WAIT_SECONDS)
    if link is not None:
        link.tell(FinalSaved(step=step))
    threading.Event().wait(_FINAL_WAIT_SECONDS)


__all__ = ["Stopping", "next_stride", "wait_to_be_stopped"]
