"""What the ranks tell each other of their slots: whoever opens a tag decides from it what is saved and dropped (I7)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from stepfast.admission import RankReport
from stepfast.errors import GangError
from stepfast.torch.gang import Gang
from stepfast.torch.link import AgentLink
from stepfast.torch.topics import Topic
from stepfast.torch.writer import Writer


class Reports:
    """This rank's, and what it hears. `sharers`: the ranks that share in every step; None: nobody knows."""

    def __init__(
        self, gang: Gang, writer: Writer, link: AgentLink | None, *, rank: int, sharers: Iterable[int] | None
    ) -> None:
        self._gang, self._writer, self._link, self._rank = gang, writer, link, rank
        self._is_known = sharers is not None
        self._reporters = [str(other) for other in sharers or ()]
        self._step: int | None = None  # until it has saved something
        self._published = ""

    def saved(self, step: int) -> None:
        """This rank has staged the step."""
        self._step = step
        self.publish()

    def publish(self) -> None:
        """Tells what this rank holds, once it has saved something, if that is news."""
        if self._step is None:
            return
        report = self._report(self._step).to_json()
        if report == self._published:
            return
        is_first, self._published = not self._published, report
        self._gang.tell(Topic.REPORT.of(self._rank), report)
        if is_first and not self._is_known:
            self._gang.tell(Topic.REPORTER.of(self._gang.count(Topic.REPORTERS) - 1), str(self._rank))

    def hear(self) -> list[RankReport]:
        """What the ranks that share in every step last published; nothing while one of them has not yet. Where nobody
        knows who shares: what all have that have saved so far.
        """
        if not self._is_known:
            while (told := self._gang.hear([Topic.REPORTER.of(len(self._reporters))])) is not None:
                self._reporters += told
        texts = self._gang.hear([Topic.REPORT.of(rank) for rank in self._reporters])
        return [RankReport.from_json(text) for text in texts or ()]

    def end(self) -> None:
        """Who has ended keeps nothing that others would wait for."""
        if self._published:
            with suppress(GangError):
                self._gang.tell(Topic.REPORT.of(self._rank), RankReport(rank=-1).to_json())

    def _report(self, step: int) -> RankReport:
        agent = self._writer.agent
        return RankReport(
            rank=self._rank,
            step=agent.staged_step if agent is not None else step,
            slots=agent.slots if agent is not None else 0,
            persisting=agent.persisting if agent is not None else (),
            unpersisted=self._writer.unpersisted(),
            waited=self._link.waited_steps if self._link is not None else (),
        )


__all__ = ["Reports"]
