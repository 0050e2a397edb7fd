"""How the ranks of a gang agree: through the rendezvous store that torchrun keeps, one round trip, no collective.

All ranks make the same consultations in the same order; each has a number. Rank 0 reads what everybody published after
the one before, decides, and posts; the others read the post (I7). What was said stays in the store: nothing that is
said later may have its key.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed gives them no types

from stepfast.admission import Decision, RankReport
from stepfast.errors import GangError

_TIMEOUT = timedelta(minutes=30)  # a rank may wait so long for the others; hangs are the supervisor's to end


class Gang(Protocol):
    """All ranks of the job, as one of them sees them."""

    rank: int
    world_size: int

    def consult(self, report: RankReport, decide: Callable[[Sequence[RankReport]], Decision]) -> Decision:
        """This consultation's decision. `decide` runs on rank 0 alone, with what all ranks last published."""

    def publish(self, report: RankReport) -> None:
        """What this rank wants known at the next consultation."""

    def exchange(self, topic: str, text: str) -> list[str]:
        """Every rank's text, in the order of ranks; all ranks call it."""

    def update(self, topic: str, change: Callable[[str], str]) -> str:
        """Makes the topic's text (empty at first) what `change` makes of it, between two ranks' changes; returns it.

        Any ranks call it, whenever they like. `change` is called again with what another rank made of it meanwhile.
        What two ranks make of one text must differ, unless it does not matter whose it is.
        """

    def count(self, topic: str) -> int:
        """How many ranks have called it with that topic so far, this call among them."""

    def tell(self, topic: str, text: str) -> None:
        """Lets any rank `hear` the text from now on."""

    def hear(self, topics: Sequence[str]) -> list[str] | None:
        """What was told of each, or None when something of it was not told yet. Waits for nobody."""


class Alone:
    """A gang of one."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def consult(self, report: RankReport, decide: Callable[[Sequence[RankReport]], Decision]) -> Decision:
        return decide([report])

    def publish(self, report: RankReport) -> None:
        """There is nobody to tell."""

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text]

    def update(self, topic: str, change: Callable[[str], str]) -> str:
        with self._lock:
            self._texts[topic] = text = change(self._texts.get(topic, ""))
        return text

    def count(self, topic: str) -> int:
        return int(self.update(topic, lambda known: str(int(known or 0) + 1)))

    def tell(self, topic: str, text: str) -> None:
        self._texts[topic] = text

    def hear(self, topics: Sequence[str]) -> list[str] | None:
        return [self._texts[topic] for topic in topics] if self._texts.keys() >= set(topics) else None


class StoreGang:
    """A gang that meets in a torch.distributed store. Errors of the store become GangError.

    A process may make several of one run, one after the other. All ranks use them in the same order, and each has its
    own consultations and exchanges; all else that is said is the run's.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._number = 0
        self._exchanges: Counter[str] = Counter()  # by topic

    @cached_property
    def _ordinal(self) -> int:
        """Which of this rank's gangs this is, counted in the store, as a new store has messages of none. Counted when
        the ranks first meet: one that was made and never used, on some ranks alone, does not count.
        """
        return int(self._store.add(f"gangs/{self.rank}", 1))

    def consult(self, report: RankReport, decide: Callable[[Sequence[RankReport]], Decision]) -> Decision:
        number = self._number
        # Before the first decision nothing was published: the ranks show each other what they begin with.
        first = [RankReport.from_json(text) for text in self.exchange("begin", report.to_json())] if number == 0 else []
        try:
            key = self._decision_key(number)
            if self.rank == 0:
                reports = first or self._reports(number - 1)
                error = None
                try:
                    decision = decide(reports)
                except GangError as refused:
                    error, decision = refused, None
                self._store.set(key, decision.to_json() if decision is not None else f"!{error}")
                if number >= 2:
                    self._store.delete_key(self._decision_key(number - 2))
                if decision is None:
                    raise GangError(str(error))
                return decision
            text = self._store.get(key).decode()
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error
        if text.startswith("!"):
            raise GangError(text[1:])
        return Decision.from_json(text)

    def publish(self, report: RankReport) -> None:
        number, self._number = self._number, self._number + 1
        try:
            self._store.set(self._report_key(number, self.rank), report.to_json())
            if number >= 2:
                # Rank 0 has read it: it posted the decision after it, which this rank has seen.
                self._store.delete_key(self._report_key(number - 2, self.rank))
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def exchange(self, topic: str, text: str) -> list[str]:
        number, self._exchanges[topic] = self._exchanges[topic], self._exchanges[topic] + 1
        try:
            keys = [f"{self._ordinal}/{topic}/{number}/{rank}" for rank in range(self.world_size)]
            self._store.set(keys[self.rank], text)
            return [value.decode() for value in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def update(self, topic: str, change: Callable[[str], str]) -> str:
        known = (self.hear([topic]) or [""])[0]
        try:
            while True:
                changed = change(known)
                # What a store that has nothing yet compares with is the empty text.
                found = self._store.compare_set(topic, known, changed).decode()
                if found == changed:
                    return changed
                known = found
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def count(self, topic: str) -> int:
        try:
            return int(self._store.add(topic, 1))
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def tell(self, topic: str, text: str) -> None:
        try:
            self._store.set(topic, text)
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def hear(self, topics: Sequence[str]) -> list[str] | None:
        try:
            if not self._store.check(list(topics)):
                return None
            return [text.decode() for text in self._store.multi_get(list(topics))]
        except dist.DistError as error:
            raise GangError(f"rank {self.rank}: the rendezvous store does not answer: {error}") from error

    def _reports(self, number: int) -> list[RankReport]:
        keys = [self._report_key(number, rank) for rank in range(self.world_size)]
        return [RankReport.from_json(value) for value in self._store.multi_get(keys)]

    def _decision_key(self, number: int) -> str:
        return f"{self._ordinal}/decision/{number}"

    def _report_key(self, number: int, rank: int) -> str:
        return f"{self._ordinal}/report/{number}/{rank}"


def grouped_world_size() -> int:
    """How many ranks torch.distributed's default group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def has_others() -> bool:
    """Whether this process is known to be one rank of several. It may turn out to be later."""
    return grouped_world_size() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1


def find_gang(scope: str) -> Gang:
    """This process's gang: torch.distributed's default group, or torchrun's own store, or nobody else.

    `scope` keeps runs apart within one store. Raises GangError when there are other ranks but no way to meet them.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_grouped = dist.is_available() and dist.is_initialized()
    # One rank may look for the others before its process group is there and another after: torchrun's store is the same
    # for both.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_grouped and not (is_torchruns and dist.get_world_size() == world_size):
        if dist.get_world_size() == 1:
            return Alone()
        store = dist.distributed_c10d._get_default_store()  # no public way to the group's own store
        return StoreGang(_scoped(store.clone(), scope), rank=dist.get_rank(), world_size=dist.get_world_size())
    if world_size == 1:
        return Alone()
    if not is_torchruns:
        raise GangError("call torch.distributed.init_process_group() before making a Checkpointer")
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=False,
        timeout=_TIMEOUT,
    )
    return StoreGang(_scoped(store, scope), rank=int(os.environ["RANK"]), world_size=world_size)


def _scoped(store: Store, scope: str) -> Store:
    scoped = PrefixStore(f"stepfast/{scope}", store)
    scoped.set_timeout(_TIMEOUT)
    return scoped
