"""What the ranks of a run with tags tell each other about in the gang's store, by its name there."""

from __future__ import annotations

from enum import StrEnum


class Topic(StrEnum):
    """A name, or, with `of`, names of one kind."""

    BOOK = "tags"  # the run's tags
    # Who shares in a step (`stepfast.torch.attendance`), by the number of an opening, of a question, or a rank.
    ASKED = "tags/asked"  # the question about that opening
    QUESTIONS = "tags/asks"  # how many there are
    QUESTION = "tags/ask"
    ANSWER = "tags/answer"  # to that question, by that rank
    SHARERS = "tags/sharers"
    FAILED = "tags/failed"  # nobody is to wait for what that opening was to become, and why
    PRESENT = "tags/present"  # that rank has been here
    LEFT = "tags/left"  # that rank has ended
    # What ranks hold in their slots (`stepfast.torch.reports`).
    REPORT = "tags/report"  # that rank's last
    REPORTERS = "tags/reporters"  # how many ranks have one
    REPORTER = "tags/reporter"  # which rank came as that one
    # What the run goes on from (`stepfast.torch.resumption`, `stepfast.torch.branch`).
    READ = "tags/from"  # the newest step that a rank has read
    RESUMED = "tags/resume"  # the step on which all have agreed, by trainer
    BRANCHING = "tags/branching"  # the rank whose agent supersedes what is newer
    BRANCHED = "tags/branched"  # that is done
    REMOVED = "tags/removed"  # that step
    EXCHANGE = "tags/exchange"
    PROCESS = "tags/process"  # the mark of the process that is that rank

    def of(self, *which: int | str) -> str:
        """That one of them."""
        return "/".join([self, *map(str, which)])


__all__ = ["Topic"]
