"""A rank without torch: makes valid safetensors files, stages them through the real client, can be run as a
process of its own that is killed.

Run as a program it stages one step and says so: `python rankpeer.py '<json of Script>'`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from stepfast.client import RankClient
from stepfast.messages import VERSION, Committed, Dropped, Hello, Message, PersistFailed, Reserved, Staged, Want
from stepfast.slot import CONTROL_BYTES, SlotRecord, SlotState, rank_record
from stepfast.tensorfile import HeaderPlan, TensorSpec

JOB = "default/train"
RUN = "uid1-0"
_PATTERN_BYTES = 1 << 20


def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Waits until the condition holds; fails when it does not within the deadline."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        pause.wait(0.01)


class RankFile:
    """A safetensors file with bytes that depend on rank and step alone, of any size, never held whole."""

    def __init__(self, *, rank: int, step: int, data_bytes: int = 100_000) -> None:
        specs = [
            TensorSpec(name="weights", dtype="U8", shape=(data_bytes,)),
            TensorSpec(name="scale", dtype="F32", shape=(2, 2)),
        ]
        plan = HeaderPlan(specs, constant={"rank": str(rank)}, variable_bytes=64)
        tail = plan.tail({"step": str(step)})
        assert tail is not None
        self.header = plan.prefix + tail
        self.size_bytes = plan.size_bytes
        self._pattern = random.Random(f"{rank} {step}").randbytes(_PATTERN_BYTES)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of the file."""
        head = self.header[begin:end]
        begin = max(begin, len(self.header)) - len(self.header)
        end = max(end - len(self.header), begin)
        shift = begin % _PATTERN_BYTES
        repeats = -(-(shift + end - begin) // _PATTERN_BYTES)
        return head + (self._pattern * repeats)[shift : shift + end - begin]

    def bytes(self) -> bytes:
        return self.read(0, self.size_bytes)


def hello(storage_uri: str, **values: object) -> Hello:
    """A rank's first words; `values` replace the usual ones."""
    usual: dict[str, object] = {
        "version": VERSION,
        "job": JOB,
        "run": RUN,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "node": 0,
        "pid": os.getpid(),
        "storage_uri": storage_uri,
        "memory_bytes": 0,
        "max_to_keep": 0,
        "resume_step": 0,
    }
    return Hello(**{**usual, **values})  # type: ignore[arg-type]  # checked by Hello itself


class RankPeer:
    """A rank's connection to a real agent, and what the agent pushed to it."""

    def __init__(self, socket_path: str, greeting: Hello) -> None:
        self.hello = greeting
        self.pushed: list[Message] = []
        self.lost = threading.Event()
        self.client = RankClient(socket_path, greeting, on_push=self._take, on_lost=self.lost.set)

    def _take(self, message: Message, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self.pushed.append(message)

    # ------------------------------------------------------------ saving

    def reserve(
        self,
        step: int,
        size_bytes: int,
        *,
        name: str = "state",
        window_begin: int = 0,
        drop: tuple[int, ...] = (),
    ) -> tuple[Reserved, int]:
        return self.client.reserve(step=step, name=name, size_bytes=size_bytes, window_begin=window_begin, drop=drop)

    def record(self, step: int, seq: int, file_bytes: int, /, **values: object) -> SlotRecord:
        """What this rank writes into a control page; `values` replace the honest ones."""
        usual: dict[str, object] = {
            "seq": seq,
            "state": SlotState.STAGED,
            "run": self.hello.run,
            "step": step,
            "name": "state",
            "rank": self.hello.rank,
            "world_size": self.hello.world_size,
            "node": self.hello.node,
            "file_bytes": file_bytes,
            "window_begin": 0,
            "window_bytes": file_bytes,
            "files": 1,
            "saved_time": time.time(),
            "replicated": "",
            "due": True,
        }
        return SlotRecord(**{**usual, **values})  # type: ignore[arg-type]  # a test may lie

    @staticmethod
    def write_record(descriptor: int, record: SlotRecord) -> None:
        place, data = rank_record(record)
        os.pwrite(descriptor, data, place)

    def fill(self, descriptor: int, file: RankFile, begin: int, end: int) -> None:
        """Copies a window of the file into the slot, piece by piece."""
        for offset in range(begin, end, 8 << 20):
            piece = file.read(offset, min(end, offset + (8 << 20)))
            os.pwrite(descriptor, piece, CONTROL_BYTES + offset - begin)

    def save(
        self,
        step: int,
        *,
        data_bytes: int = 100_000,
        due: bool = True,
        drop: tuple[int, ...] = (),
        files: int = 1,
        name: str = "state",
        file: RankFile | None = None,
        **values: object,
    ) -> Staged:
        """Stages the step, in windows when the slots are smaller than the file; `values`: of the slots' records."""
        file = file or RankFile(rank=self.hello.rank, step=step, data_bytes=data_bytes)
        begin = 0
        while True:
            begin, staged = self.stage_window(step, file, begin, drop=drop, due=due, files=files, name=name, **values)
            if begin == file.size_bytes:
                return staged

    def stage_window(
        self,
        step: int,
        file: RankFile,
        begin: int,
        *,
        drop: tuple[int, ...] = (),
        name: str = "state",
        **values: object,
    ) -> tuple[int, Staged]:
        """Stages the file's next window, from `begin`; returns where it ends."""
        reserved, descriptor = self.reserve(step, file.size_bytes, name=name, window_begin=begin, drop=drop)
        try:
            end = min(file.size_bytes, begin + reserved.capacity_bytes)
            record = self.record(
                step, reserved.seq, file.size_bytes, window_begin=begin, window_bytes=end - begin, name=name, **values
            )
            self.write_record(descriptor, replace(record, state=SlotState.WRITING))
            self.fill(descriptor, file, begin, end)
            self.write_record(descriptor, record)
        finally:
            os.close(descriptor)
        staged = Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=0.001)
        self.client.send(staged)
        return end, staged

    def want(self, step: int) -> None:
        self.client.send(Want(step=step))

    # ------------------------------------------------------------ waiting

    def committed(self) -> list[int]:
        return [message.step for message in self.pushed if isinstance(message, Committed)]

    def dropped(self) -> list[int]:
        return [message.step for message in self.pushed if isinstance(message, Dropped)]

    def failures(self) -> list[str]:
        return [message.reason for message in self.pushed if isinstance(message, PersistFailed)]

    def wait_committed(self, step: int, seconds: float = 60.0) -> None:
        eventually(lambda: step in self.committed(), f"commit of step {step}; pushed: {self.pushed[-5:]}", seconds)

    def wait_dropped(self, step: int, seconds: float = 60.0) -> None:
        eventually(lambda: step in self.dropped(), f"drop of step {step}; pushed: {self.pushed[-5:]}", seconds)

    def wait_lost(self, seconds: float = 60.0) -> None:
        eventually(self.lost.is_set, "the agent closes this connection", seconds)

    def close(self) -> None:
        """Says goodbye."""
        self.client.close()

    def die(self) -> None:
        """Ends the connection as a death does: without goodbye."""
        self.client._closing = True
        self.client._connection.close()
        self.client._reader.join(timeout=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the rank process does: greets, stages `steps`, says `ready`, and waits to be killed."""

    socket: str
    hello: dict[str, object]
    steps: list[int]
    half_written: int | None = None  # a step whose copy has begun, and does not end
    due: bool = True
    borrow: str | None = None  # memory of that name, of which it writes a megabyte

    def text(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    script = Script(**json.loads(sys.argv[1]))
    peer = RankPeer(script.socket, Hello(**{**script.hello, "pid": os.getpid()}))
    for step in script.steps:
        peer.save(step, due=script.due)
    if script.half_written is not None:
        file = RankFile(rank=peer.hello.rank, step=script.half_written)
        reserved, descriptor = peer.reserve(script.half_written, file.size_bytes)
        record = peer.record(script.half_written, reserved.seq, file.size_bytes, state=SlotState.WRITING)
        peer.write_record(descriptor, record)
        peer.fill(descriptor, file, 0, file.size_bytes // 2)
    if script.borrow is not None:
        granted, lent = peer.client.borrow(script.borrow, 4 << 20)
        assert lent is not None and granted == 4 << 20  # noqa: PT018  # a program, not a test
        os.pwrite(lent, bytes(1 << 20), 0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
