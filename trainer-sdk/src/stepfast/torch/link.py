"""This rank's link to the node's agent: kept up across restarts of the agent, and what the agent said over it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from stepfast.client import RankClient
from stepfast.errors import AgentUnavailable, CheckpointNotFound, StepfastError, StorageUnavailable
from stepfast.messages import (
    MAX_METRIC_NAME,
    MAX_METRICS,
    Committed,
    Dropped,
    Expect,
    GaveUp,
    Hello,
    Message,
    PersistFailed,
    Progress,
    Referable,
    SaveRequested,
    Sharers,
    SlotReady,
    Staged,
    Unreferable,
    Want,
)
from stepfast.torch.devicecopy import find_device
from stepfast.torch.staging import MappedSlot, SlotMaps

log = logging.getLogger("stepfast")

_RECONNECT_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_METRICS_SECONDS = 1.0
_AWAY_SECONDS = 60.0
_LASTING_SECONDS = 5.0  # a connection that ends sooner was none: the pauses before the next go on growing


class AgentLink:
    """The connection, made again with backoff whenever it is lost. Raises AgentUnavailable when first there is none."""

    def __init__(self, path: str, hello: Hello) -> None:
        self._path, self._hello = path, hello
        self.device = find_device()
        self.maps = SlotMaps(self.device)
        self.save_requested = False
        self.total_steps = 0  # that the script is to make; 0: it has not said
        self._metrics_cut = False
        self._metrics_time = -math.inf
        self._metrics_left: Mapping[str, object] = {}  # of the newest step, not yet told
        self._last_step = 0
        self._committed: dict[int, float] = {}
        self._dropped: set[int] = set()
        self._failure: str | None = None
        self._offers: dict[int, Staged] = {}  # the last message of each slot: said again to an agent that restarted
        self._sharers: dict[int, str] = {}  # by step, until it is settled
        self._wanted: set[int] = set()
        self._referable: tuple[int, ...] = ()
        self._unreferable: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._lost_time = time.monotonic()
        self._reconnecting = False
        self._attempts, self._connect_time = 0, self._lost_time
        self._ready: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._preparing: Callable[[MappedSlot], None] = MappedSlot.populate
        self._client: RankClient | None = None
        self._client = self._connect()
        self._worker = threading.Thread(target=self._work, name="stepfast-prepare", daemon=True)
        self._worker.start()
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    # ------------------------------------------------------------ requests

    def client(self, timeout_seconds: float) -> RankClient:
        """The connection, waiting for it to come back. Raises AgentUnavailable."""
        with self._changed:
            # Counted from the loss: a second request does not wait as long again.
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - self._lost_time))
            if not self._changed.wait_for(lambda: self._client is not None or self._closed, timeout_seconds):
                away = time.monotonic() - self._lost_time
                raise AgentUnavailable(f"the agent at {self._path} has been away for {away:.1f} s")
            if self._client is None:
                raise AgentUnavailable("this checkpointer is closed")
            return self._client

    def tell(self, message: Message) -> None:
        """Sends what may be lost with the agent."""
        client = self._client
        if client is not None:
            with contextlib.suppress(AgentUnavailable):
                client.send(message)

    def progress(self, step: int, metrics: Mapping[str, object]) -> None:
        """The heartbeat. Metrics go with it once a second: reading one from a GPU waits for the GPU."""
        now = time.monotonic()
        carried: dict[str, float] = {}
        if metrics and now - self._metrics_time >= _METRICS_SECONDS:
            self._metrics_time, self._metrics_left = now, {}
            carried = self._readable(metrics)
        else:
            self._metrics_left = metrics or self._metrics_left
        self._last_step = step
        self.tell(Progress(step=step, time=time.time(), metrics=carried, total_steps=self.total_steps))

    def _readable(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """What a heartbeat can carry: none of the rest may end training."""
        carried: dict[str, float] = {}
        for key, value in metrics.items():
            if len(key) <= MAX_METRIC_NAME and len(carried) < MAX_METRICS:
                with contextlib.suppress(TypeError, ValueError, RuntimeError):
                    carried[key] = float(value)  # type: ignore[arg-type]  # whatever has a number: also a tensor
        if len(carried) < len(metrics) and not self._metrics_cut:
            self._metrics_cut = True
            log.warning(
                "stepfast: not shown of the metrics: %s (numbers are, at most %s, names of at most %s characters)",
                ", ".join(sorted(set(metrics) - set(carried)))[:200], MAX_METRICS, MAX_METRIC_NAME,
            )  # fmt: skip
        return carried

    def expect(self, size_bytes: int, prepare: Callable[[MappedSlot], None]) -> None:
        """Announces the next save's size; slots that are made for it are mapped and prepared in the background."""
        self._preparing = prepare
        self.tell(Expect(size_bytes=size_bytes))

    def offer(self, message: Staged) -> None:
        """Tells that a slot holds a step now. If the agent is away it reads the slot itself when it is back."""
        self._offers[message.slot] = message
        self.tell(message)

    def share(self, step: int, sharers: str) -> None:
        """Tells which ranks have files in a step whose slot does not say so."""
        self._sharers[step] = sharers
        self.tell(Sharers(step=step, ranks=sharers))

    def keep_referable(self, steps: Sequence[int]) -> None:
        """Asks that these steps be kept, as later ones may refer to them."""
        if tuple(steps) != self._referable:
            self._referable = tuple(steps)
            self.tell(Referable(steps=self._referable))

    def is_referable(self, step: int) -> bool:
        """Whether the step was committed as this run's, and is known to be there still."""
        return step in self._committed and step not in self._unreferable

    def borrow(self, name: str, size_bytes: int) -> tuple[int, int | None]:
        """Memory that this node's ranks of the run share under the name: see `RankClient.borrow`. It is gone, and may
        be borrowed anew, after the connection of the node's last rank was lost. Raises AgentUnavailable.
        """
        return self.client(_AWAY_SECONDS).borrow(name, size_bytes)

    def want(self, step: int) -> None:
        """Asks that this step be committed, whatever comes after it."""
        self._wanted.add(step)
        self.tell(Want(step=step))

    def supersede_in_background(self, step: int, on_done: Callable[[Sequence[int]], None]) -> None:
        """Marks other runs' steps above this one superseded; training goes on, and no step is committed before.

        `on_done` is called, in a thread, with those steps.
        """
        try:
            answer = self.client(0.0).supersede_after(step)
        except AgentUnavailable:
            answer = None
        work = threading.Thread(
            target=self._supersede, args=(step, answer, on_done), name="stepfast-supersede", daemon=True
        )
        work.start()

    def _supersede(
        self, step: int, answer: Callable[[float | None], Sequence[int]] | None,
        on_done: Callable[[Sequence[int]], None],
    ) -> None:  # fmt: skip
        while not self._closed:
            try:
                answer = answer or self.client(_AWAY_SECONDS).supersede_after(step)
                superseded = answer(None)
            except AgentUnavailable:
                answer = None  # the next agent is asked again
            except StepfastError as error:
                log.error("stepfast: steps of earlier runs were not marked superseded: %s", error)
                return
            else:
                on_done(superseded)
                return

    def wait_committed(self, step: int, timeout_seconds: float | None) -> float:
        """Until the step is committed; its time. Raises StorageUnavailable, CheckpointNotFound (dropped)."""
        if step in self._committed:
            return self._committed[step]
        self.want(step)
        with self._changed:
            settled = self._changed.wait_for(lambda: step in self._committed or step in self._dropped, timeout_seconds)
            if step in self._committed:
                return self._committed[step]
            if settled:
                raise CheckpointNotFound(f"step {step} was given up for a newer one")
            raise StorageUnavailable(
                f"step {step} was not committed within {timeout_seconds} s"
                + (f": {self._failure}" if self._failure else "")
            )

    def give_up(self, step: int) -> None:
        """This rank has not staged the step, and never will: nobody waits for its commit."""
        with self._changed:
            self._dropped.add(step)
            self._wanted.discard(step)
            self._changed.notify_all()
        self.tell(GaveUp(step=step))

    def begin(self, step: int) -> None:
        """The step is staged now, be it that it was given up before."""
        self._dropped.discard(step)

    def is_settled(self, step: int) -> bool:
        """Whether the step was committed or dropped: nobody persists it any more."""
        return step in self._committed or step in self._dropped

    def is_dropped(self, step: int) -> bool:
        """Whether the step will not be committed."""
        return step in self._dropped

    @property
    def waited_steps(self) -> tuple[int, ...]:
        """Steps that somebody waits for and that are not committed."""
        return tuple(sorted(self._wanted))

    def close(self) -> None:
        """Says goodbye."""
        if self._metrics_left:
            left = self._readable(self._metrics_left)
            self.tell(Progress(step=self._last_step, time=time.time(), metrics=left, total_steps=self.total_steps))
        with self._changed:
            self._closed = True
            client, self._client = self._client, None
            self._changed.notify_all()
        self._ready.put(None)
        if client is not None:
            client.close()
        self._worker.join(timeout=5)
        self.maps.clear()

    # ------------------------------------------------------------ inside

    def _connect(self) -> RankClient:
        return RankClient(self._path, self._hello, on_push=self._on_push, on_lost=self._on_lost)

    def _on_push(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case SlotReady():
                descriptor = descriptors.pop()
                self._ready.put(lambda: self._map(message, descriptor))
                return
            case SaveRequested():
                self.save_requested = True
            case PersistFailed():
                self._failure = message.reason
                log.error("stepfast: step %s is not persisted yet: %s", message.step, message.reason)
        with self._changed:
            if isinstance(message, Committed):
                self._committed[message.step] = message.committed_time
                self._sharers.pop(message.step, None)
                self._wanted.discard(message.step)
                self._failure = None
                while len(self._committed) > 1000:
                    del self._committed[min(self._committed)]
            elif isinstance(message, Unreferable):
                self._unreferable.update(message.steps)
                while len(self._unreferable) > 1000:
                    self._unreferable.remove(min(self._unreferable))
            elif isinstance(message, Dropped):
                self._dropped.add(message.step)
                self._sharers.pop(message.step, None)
                self._wanted.discard(message.step)
            self._changed.notify_all()

    def _map(self, message: SlotReady, descriptor: int) -> None:
        mapped, is_new = self.maps.take(message.slot, message.capacity_bytes, descriptor)
        if is_new:
            mapped.populate()
        mapped.pin()
        self._preparing(mapped)

    def _work(self) -> None:
        while (job := self._ready.get()) is not None:
            job()

    def _on_lost(self) -> None:
        with self._changed:
            self._client = None
            if self._closed or self._reconnecting:
                return
            self._lost_time = time.monotonic()
            self._reconnecting = True
        log.warning("stepfast: the agent went away; training goes on while it is looked for")
        threading.Thread(target=self._reconnect, name="stepfast-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        if time.monotonic() - self._connect_time > _LASTING_SECONDS:
            self._attempts = 0
        while not self._closed:
            time.sleep(_RECONNECT_SECONDS[min(self._attempts, len(_RECONNECT_SECONDS) - 1)])
            self._attempts += 1
            try:
                client = self._connect()
                told = list(self._offers.values())
                for offer in told:
                    client.send(offer)
                for step, sharers in list(self._sharers.items()):
                    client.send(Sharers(step=step, ranks=sharers))
                for step in self.waited_steps:
                    client.send(Want(step=step))
                if self._referable:
                    client.send(Referable(steps=self._referable))
            except (StepfastError, OSError):
                continue
            self._connect_time = time.monotonic()
            with self._changed:
                is_lost = client.is_lost  # asked once: it may be lost a moment later, which is then `_on_lost`'s
                self._reconnecting = is_lost
                self._client = None if is_lost else client
                self._changed.notify_all()
            if not is_lost:
                for offer in [offer for offer in list(self._offers.values()) if offer not in told]:
                    self.tell(offer)  # made meanwhile: a copy was completed
                log.warning("stepfast: the agent is back")
                return

    def _forked(self) -> None:
        # A child (a data loader's worker) has its parent's connection; it must neither use nor keep it open, or the
        # agent would not see the parent die.
        client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.abandon()
