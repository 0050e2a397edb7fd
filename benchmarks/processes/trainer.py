"""A training process that saves with one peer, and says what it cost. A child of `benchmarks.cells`.

Each save: the state is stamped, training goes on for a second to learn its rate, the same tensors are copied plainly
into warm shared memory (the limit), the peer saves, the stamps are overwritten as an optimizer would (some before each
of the next steps), and training goes on until the peer calls the step persisted. Where it is asked for, what was
copied plainly is first written past the page cache (the limit of persisting).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.machine import PlainCopy
from benchmarks.peers.base import Peer, Site
from benchmarks.peers.roster import make_peer
from benchmarks.processes.cellprocess import Teller
from benchmarks.workload import State, size_of, stamp, stamps, state_of, tensors_of

_WARM_UP_STEPS = 30
_STAMPED_AT_ONCE = 1000  # tensors: what overwrites them takes milliseconds, as a step does


class TrainingLoop:
    """A small two-layer perceptron, trained by one thread; a few milliseconds a step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._first = torch.randn(512, 1024, generator=generator, requires_grad=True)
        self._second = torch.randn(1024, 512, generator=generator, requires_grad=True)
        self._batch = torch.randn(64, 512, generator=generator)

    def train_step(self) -> float:
        """One step; seconds."""
        begin = time.perf_counter()
        loss = torch.relu(self._batch @ self._first).matmul(self._second).square().mean()
        gradients = torch.autograd.grad(loss, (self._first, self._second))
        with torch.no_grad():
            torch._foreach_add_([self._first, self._second], gradients, alpha=-1e-9)
        return time.perf_counter() - begin

    def train_for(self, seconds: float) -> float:
        """Steps per second over that long."""
        begin, steps = time.perf_counter(), 0
        while (past := time.perf_counter() - begin) < seconds:
            self.train_step()
            steps += 1
        return steps / past


@dataclass(slots=True)
class Trainer:
    """One peer, one state, one loop; `meet` waits for the other ranks, where there are others."""

    peer: Peer
    state: State
    loop: TrainingLoop
    limit: PlainCopy | None
    idle_seconds: float
    teller: Teller
    meet: Callable[[], None] = lambda: None
    direct_folder: Path | None = None
    _kept: list[int] = field(default_factory=list)

    def save_and_follow(self, step: int) -> None:
        """A save that is followed until it is persisted; tells `save`."""
        stamp(self.state, step)
        direct = self._write_directly()
        os.sync()  # what the save before left in the page cache is not this one's to write
        rate = self.loop.train_for(self.idle_seconds)
        plain = self.limit.copy() if self.limit is not None else None
        self.meet()
        self.teller.tell("save_begins", step=step)
        begin = time.perf_counter()
        is_saved, stall, steps = self._save(step, rate)
        returned = time.perf_counter()
        self.peer.follow(step)
        overwriting, stamping, durations = stamps(self.state, -step, _STAMPED_AT_ONCE), 0.0, []
        while is_saved and not self.peer.is_persisted(step):
            before = time.perf_counter()
            next(overwriting, None)
            stamping += time.perf_counter() - before
            durations.append(self.loop.train_step())
        whole = time.perf_counter() - begin - stamping
        for _ in overwriting:
            pass
        self.meet()  # the others' work is not to slow this one's undisturbed training
        os.sync()
        # The machine's pace drifts by more than a save costs: what is undisturbed is measured on both sides of it.
        rate = (rate + self.loop.train_for(self.idle_seconds)) / 2
        self.teller.tell(
            "save", step=step, is_saved=is_saved, idle_steps_per_second=rate, plain_seconds=plain, stall_seconds=stall,
            persist_seconds=whole, persist_after_return_seconds=whole - (returned - begin),
            lost_seconds=whole - (steps + len(durations)) / rate, worst_step_seconds=max(durations, default=None),
            steps_while_persisting=len(durations), direct_write_seconds=direct,
            stamping_seconds=stamping,
        )  # fmt: skip
        if step > 1:
            self.peer.remove(step - 1)

    def save_and_go_on(self, step: int, interval_seconds: float) -> None:
        """A save that nobody waits for; tells `save`. `is_busy`: the one before it is not persisted yet."""
        stamp(self.state, step)
        self._remove_older()
        rate = self.loop.train_for(interval_seconds)
        plain = self.limit.copy() if self.limit is not None else None
        is_busy = bool(self._kept) and not self.peer.is_persisted(self._kept[-1])
        is_saved, stall, _ = self._save(step, rate)
        stamp(self.state, -step)
        self.teller.tell(
            "save", step=step, is_saved=is_saved, is_busy=is_busy, plain_seconds=plain, stall_seconds=stall,
            idle_steps_per_second=rate,
        )  # fmt: skip
        if is_saved:
            self._kept.append(step)

    def _remove_older(self) -> None:
        persisted = [step for step in self._kept if self.peer.is_persisted(step)]
        for step in persisted[:-1]:
            self.peer.remove(step)
            self._kept.remove(step)

    def save_and_die(self, step: int) -> None:
        """SIGKILL as soon as the save has returned."""
        stamp(self.state, step)
        self.peer.save(step)
        self.peer.sync_point()
        os.kill(os.getpid(), signal.SIGKILL)

    def _write_directly(self) -> float | None:
        """The limit of persisting: the same bytes past the page cache; seconds."""
        if self.direct_folder is None or self.limit is None:
            return None
        try:
            return self.limit.write_direct(self.direct_folder)
        except OSError as error:
            print(f"no direct write: {error}", file=sys.stderr)  # the saves can be measured without it
            return None

    def _save(self, step: int, rate: float) -> tuple[bool, float, int]:
        """Whether it saved, the stall in seconds, and the training steps that were made meanwhile.

        Where staging overlaps with a step, what that step takes longer than another is stall too.
        """
        begin = time.perf_counter()
        is_saved = self.peer.save(step)
        if not self.peer.overlaps:
            return is_saved, time.perf_counter() - begin, 0
        self.loop.train_step()
        self.peer.sync_point()
        return is_saved, max(0.0, time.perf_counter() - begin - 1 / rate), 1


def main() -> None:
    """Saves as it was asked to, and ends."""
    arguments = _arguments()
    torch.set_num_threads(1)
    teller, meet = Teller(), _meeting()
    state = state_of(arguments.layout)
    tensors = [tensor for _, tensor in tensors_of(state)]
    teller.tell("built", bytes=size_of(state), tensors=len(tensors))
    loop = TrainingLoop()
    site = Site.from_text(arguments.site)
    peer = make_peer(arguments.peer, site)
    begin = time.perf_counter()
    peer.set_up(state)
    teller.tell("set_up", seconds=time.perf_counter() - begin)
    limit = PlainCopy(tensors) if arguments.limit else None
    if limit is not None:
        limit.copy()
    for _ in range(_WARM_UP_STEPS):
        loop.train_step()
    direct_folder = site.folder if arguments.direct_write else None
    trainer = Trainer(peer, state, loop, limit, arguments.idle_seconds, teller, meet, direct_folder)
    last = arguments.saves
    if arguments.mode == "back-to-back":
        for step in range(1, last + 1):
            trainer.save_and_go_on(step, arguments.interval_seconds)
    else:
        for step in range(1, last + (arguments.mode == "follow")):
            trainer.save_and_follow(step)
        if arguments.mode == "die":
            trainer.save_and_die(last)
    peer.close()
    teller.tell("closed")
    os._exit(0)  # what a peer does when the interpreter ends is not measured, and may hang


def _meeting() -> Callable[[], None]:
    """What waits until all ranks are there: under torchrun they are several, and each of them trains for itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return lambda: None
    dist.init_process_group("gloo")

    def meet() -> None:
        dist.barrier()

    return meet


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--site", required=True, help="a Site as text")
    parser.add_argument("--layout", required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--mode", choices=("follow", "back-to-back", "die"), default="follow")
    parser.add_argument("--idle-seconds", type=float, default=1.0)
    parser.add_argument("--interval-seconds", type=float, default=0.3)
    parser.add_argument("--limit", action=argparse.BooleanOptionalAction, default=True, help="copy plainly beside it")
    parser.add_argument("--direct-write", action="store_true", help="measure that limit of a disk, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
