"""Where a planned state goes: into the agent's slots, or, without an agent, straight into the storage.

Owns I6: with an agent the training process never waits for storage; it waits for a slot only when memory is exhausted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from stepfast import catalog
from stepfast.commit import FileUpload, read_manifest, try_commit, write_part
from stepfast.environment import Environment
from stepfast.errors import (
    AgentUnavailable,
    CheckpointError,
    CheckpointNotFound,
    ObjectNotFound,
    ReferenceMissing,
    StorageError,
    StorageUnavailable,
)
from stepfast.histories import SaveRow, append_rows
from stepfast.layout import (
    CHUNK_BYTES,
    FileEntry,
    Manifest,
    Part,
    data_path,
    job_folder,
    join,
    named_ranks,
    part_path,
)
from stepfast.messages import Reserved, Staged
from stepfast.ranks import EVERY_RANK, UNKNOWN, RankSet
from stepfast.slot import CONTROL_BYTES, MAX_SHARERS_BYTES, SlotRecord, SlotState
from stepfast.storage import Store
from stepfast.torch.link import AgentLink
from stepfast.torch.overlap import Copying, Overlap
from stepfast.torch.plan import SavePlan
from stepfast.torch.staging import MappedSlot

log = logging.getLogger("stepfast")

AGENT_AWAY_SECONDS = 30.0  # how long a save waits for a lost agent before it goes to the storage itself
DIRECT_NODE = 100_000  # part records of ranks without an agent are numbered from here, one a rank
_COMMIT_SECONDS = 600.0
_WINDOW_CHUNKS = 4
_OVERLAP_SLOTS = 3
_GIVEN_UP_KEPT = 100
_DRAIN_SECONDS = 60.0  # at the end: a device that hangs must not keep the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One rank's share of one step, ready to be written."""

    step: int
    due: bool
    drop: tuple[int, ...]
    plan: SavePlan
    header_tail: bytes
    sources: Sequence[torch.Tensor]
    began: float  # time.perf_counter() when training stopped for it
    tag: str = ""
    sharers: str = EVERY_RANK  # which ranks have files in the step (`stepfast.ranks`)

    @property
    def refers(self) -> tuple[int, ...]:
        """Older steps whose files hold what this one leaves out."""
        return self.plan.refers


class AgentSaver:
    """Stages into slots. What lies on an accelerator may still be on its way into one when a save returns."""

    def __init__(self, link: AgentLink, environment: Environment, name: str, overlap: Overlap) -> None:
        self._link, self._environment, self._name, self._overlap = link, environment, name, overlap
        self._given_up: dict[int, str] = {}
        self.staged_step: int | None = None  # the newest whose bytes are all there
        self.slots = 0
        self.persisting: tuple[int, ...] = ()
        self.unpersisted: tuple[int, ...] = ()

    def save(self, save: Save) -> None:
        """Returns when the step is staged, or its copies are under way and safe from what training does to it.

        Raises AgentUnavailable when the agent stays away.
        """
        while True:
            try:
                self._stage(save)
                return
            except AgentUnavailable:
                self._link.client(AGENT_AWAY_SECONDS)  # raises when it does not come back
            except StorageUnavailable as error:
                log.warning("stepfast: step %s is staged again from its beginning: %s", save.step, error)

    def wait_staged(self, step: int, timeout_seconds: float | None) -> None:
        """Until the step's bytes are all there. Raises StorageUnavailable, CheckpointNotFound (given up)."""
        if not self._overlap.wait(step, timeout_seconds):
            raise StorageUnavailable(f"step {step} was not copied within {timeout_seconds} s")
        if step in self._given_up:
            raise CheckpointNotFound(f"step {step} was given up: {self._given_up[step]}")

    def drain(self) -> None:
        """Until nothing is on its way any more."""
        self._overlap.drain()

    def close(self) -> None:
        """Sees through what is on its way."""
        self._overlap.close(_DRAIN_SECONDS)

    def _stage(self, save: Save) -> None:
        size, begin = save.plan.size_bytes, 0
        self._given_up.pop(save.step, None)
        while begin < size:
            client = self._link.client(AGENT_AWAY_SECONDS)
            # One slot stays for the newest whole step, and one for this.
            self._overlap.drain(keep=max(0, self.slots - 2))
            under_way = self._overlap.steps
            reserved, descriptor = client.reserve(
                step=save.step, name=self._name, size_bytes=size, window_begin=begin, drop=save.drop,
                copying=self._overlap.slots,
            )  # fmt: skip
            self._link.begin(save.step)  # behind the answer: what the agent said of an earlier try has arrived
            slot, _ = self._link.maps.take(reserved.slot, reserved.capacity_bytes, descriptor)
            slot.pin()
            self.slots, self.persisting = reserved.slots, reserved.persisting
            held = {*reserved.unpersisted, *(step for step, is_due in under_way.items() if is_due)}
            self.unpersisted = tuple(sorted(held))
            begin += self._fill(slot, reserved, save, begin)
        if save.due:
            self.unpersisted = (*self.unpersisted, save.step)

    def _fill(self, slot: MappedSlot, reserved: Reserved, save: Save, begin: int) -> int:
        """Copies what fits of the file from there on; how many bytes that is."""
        window = min(save.plan.size_bytes - begin, reserved.capacity_bytes)
        is_whole = window == save.plan.size_bytes
        record = self._record(save, reserved, begin, window)
        slot.write_record(record)
        # With two slots a step that is given up would leave the other ranks without room for the next.
        if is_whole and reserved.slots >= _OVERLAP_SLOTS and self._overlap.takes(save.sources):
            self._begin(slot, record, reserved, save)
            return window
        self._overlap.drain()  # steps are staged in their order
        if is_whole:
            slot.stage(save.plan, save.header_tail, save.sources)
        else:
            slot.stage_window(save.plan, save.header_tail, save.sources, begin, window)
        self._staged(slot, record, reserved, time.perf_counter() - save.began)
        return window

    def _begin(self, slot: MappedSlot, record: SlotRecord, reserved: Reserved, save: Save) -> None:
        """Leaves the copies to go on, and what is to be done when they are there to the thread that follows them."""
        deferrable, watch = self._overlap.plan(save.sources)
        pending = self._overlap.begin(slot, save.plan, save.header_tail, save.sources, deferrable)
        stall = time.perf_counter() - save.began
        if pending is None:
            self._overlap.drain()
            self._staged(slot, record, reserved, stall)
            return
        copying = Copying(
            save.step, reserved.slot, is_due=save.due, pending=pending, sources=save.sources,
            watch=watch, names=save.plan.names,
        )  # fmt: skip

        def finish(why_not: str | None) -> None:
            if why_not is None:
                self._staged(slot, record, reserved, stall)
                return
            log.error(
                "stepfast: step %s is given up, and saves wait for their copies from now on: %s", save.step, why_not
            )
            self._given_up[save.step] = why_not
            self._link.give_up(save.step)

        self._overlap.follow(copying, finish)

    def _staged(self, slot: MappedSlot, record: SlotRecord, reserved: Reserved, stall_seconds: float) -> None:
        # From here on the step survives this process: the record says so in the slot itself.
        slot.write_record(replace(record, state=SlotState.STAGED))
        self.staged_step = record.step
        self._link.offer(Staged(slot=reserved.slot, seq=reserved.seq, stall_seconds=stall_seconds))

    def _record(self, save: Save, reserved: Reserved, begin: int, window: int) -> SlotRecord:
        environment = self._environment
        return SlotRecord(
            seq=reserved.seq, state=SlotState.WRITING, run=environment.run, step=save.step, name=self._name,
            rank=environment.rank, world_size=environment.world_size, node=environment.node,
            file_bytes=save.plan.size_bytes, window_begin=begin, window_bytes=window, files=1, saved_time=time.time(),
            replicated=save.plan.replicated_digest, due=save.due, tag=save.tag,
            sharers=save.sharers if len(save.sharers) <= MAX_SHARERS_BYTES else UNKNOWN, refers=save.refers,
        )  # fmt: skip


def _first_of(sharers: str, environment: Environment) -> int:
    """The first of the ranks that have files in a step."""
    if sharers in (EVERY_RANK, UNKNOWN):
        return 0
    return RankSet.parse(sharers, environment.world_size).first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A step whose part this rank has written, and of whose commit it does not know yet."""

    step: int
    saved_time: float
    stall_seconds: float
    leads: bool  # whether the step's row, and what is kept after it, are this rank's to see to
    is_shared_by_some: bool  # there is no file of every rank to wait for


class DirectSaver:
    """Writes to the storage at once, to the same layout, with the same commit rule. Training waits meanwhile, each rank
    for its own part alone: whoever writes the last one commits (I2), and a rank that fails keeps no other waiting.
    """

    def __init__(self, store: Store, environment: Environment, name: str) -> None:
        self._store, self._environment, self._name = store, environment, name
        self._folder = job_folder(environment.job)
        self._threads = ThreadPoolExecutor(_WINDOW_CHUNKS, thread_name_prefix="stepfast-upload")
        self._buffer: MappedSlot | None = None
        self._open: _Open | None = None
        self._unshared: dict[int, Part] = {}  # of files that are stored, by step, until `share`
        self._given_up: dict[int, str] = {}
        self.referable: Collection[int] = ()  # steps that later saves may refer to: they are kept
        self._lock = threading.RLock()  # who shares in a step is told in another thread than the one that saves

    def save(self, save: Save) -> None:
        """Writes this rank's part, and commits the step when it was the last. Raises StorageError."""
        # All ranks are through with the step before, or they had not agreed on this one.
        with self._lock:
            self._try_commit()
            if self._open is not None and self._open.step not in self._unshared:
                log.warning("stepfast: step %s is not committed so far: the part of a rank is missing", self._open.step)
            self._open = None
        saved_time = time.time()
        part = self._write_file(save, saved_time) if not self._has_part(save.step) else None
        with self._lock:
            if part is not None and save.sharers == UNKNOWN:
                self._unshared[save.step] = part
            elif part is not None:
                self._write_part(part, save.sharers)
            stall = time.perf_counter() - save.began
            leads = self._environment.rank == _first_of(save.sharers, self._environment)
            self._open = _Open(
                step=save.step, saved_time=saved_time, stall_seconds=stall, leads=leads,
                is_shared_by_some=save.sharers not in (EVERY_RANK, UNKNOWN),
            )  # fmt: skip
            self._try_commit()

    def share(self, step: int, sharers: str) -> None:
        """These ranks have files in a step of which nobody knew it when it was saved. Raises StorageError."""
        with self._lock:
            part = self._unshared.pop(step, None)
            if part is None:
                return
            self._write_part(part, sharers)
            if self._open is not None and self._open.step == step:
                leads = self._environment.rank == _first_of(sharers, self._environment)
                self._open = replace(self._open, leads=leads, is_shared_by_some=True)
                self._try_commit()
            else:
                try_commit(self._store, self._folder, step, self._environment.run)

    def give_up(self, step: int, reason: str) -> None:
        """The step will never be whole. Its file is left to whoever sweeps."""
        with self._lock:
            self._given_up[step] = reason
            while len(self._given_up) > _GIVEN_UP_KEPT:
                del self._given_up[next(iter(self._given_up))]
            self._unshared.pop(step, None)
            if self._open is not None and self._open.step == step:
                self._open = None

    def wait_committed(self, step: int, timeout_seconds: float | None) -> None:
        """Until all ranks wrote their part and the step is committed, by whomever. Raises StorageError."""
        deadline, pause = time.monotonic() + (timeout_seconds or _COMMIT_SECONDS), 0.01
        while (manifest := try_commit(self._store, self._folder, step, self._environment.run)) is None:
            if step in self._given_up:
                raise CheckpointNotFound(f"step {step} was given up: {self._given_up[step]}")
            if time.monotonic() > deadline:
                raise StorageUnavailable(f"step {step}: not all ranks wrote their part in time")
            time.sleep(pause)
            pause = min(1.0, pause * 2)
        with self._lock:
            self._note(manifest)

    def check_committed(self, step: int) -> None:
        """What all ranks are through with is committed, or never will be. Raises CheckpointNotFound, StorageError."""
        manifest = try_commit(self._store, self._folder, step, self._environment.run)
        if manifest is None or manifest.run != self._environment.run:
            raise CheckpointNotFound(f"step {step} is not committed: the part of a rank is missing, or it was removed")

    def is_committed(self, step: int) -> bool:
        """Whether the step is committed, and is this run's."""
        try:
            manifest = read_manifest(self._store, self._folder, step)
        except (StorageError, CheckpointError):
            return False
        return manifest is not None and manifest.run == self._environment.run

    def close(self) -> None:
        """Takes down a commit that is not known yet; ends the threads."""
        with self._lock:
            self._try_commit()
        self._threads.shutdown()

    def _try_commit(self) -> None:
        opened = self._open
        if opened is None:
            return
        try:
            manifest = try_commit(
                self._store, self._folder, opened.step, self._environment.run, is_eager=opened.is_shared_by_some
            )
        except ReferenceMissing as error:
            log.error("stepfast: step %s is given up: %s", opened.step, error)
            self.give_up(opened.step, str(error))
            return
        except (StorageError, CheckpointError) as error:
            log.warning("stepfast: step %s is not committed yet: %s", opened.step, error)
            return
        if manifest is not None:
            self._note(manifest)

    def _note(self, manifest: Manifest) -> None:
        """After a commit: its row and what is kept are the first rank's to see to, whoever committed."""
        opened, environment = self._open, self._environment
        if opened is None or opened.step != manifest.step:
            return
        self._open = None
        if not opened.leads:
            return
        row = SaveRow(
            global_step=opened.step, run=environment.run, outcome="Committed", saved_time=opened.saved_time,
            stall_seconds=opened.stall_seconds, duration_seconds=manifest.committed_time - opened.saved_time,
            size_bytes=manifest.size_bytes, world_size=environment.world_size,
        )  # fmt: skip
        try:
            append_rows(self._store, self._folder, [row])
            catalog.retain(
                self._store, self._folder, run=environment.run, max_to_keep=environment.max_to_keep,
                protected=[*([environment.resume_step] if environment.resume_step else []), *self.referable],
            )  # fmt: skip
        except StorageError as error:
            log.warning("stepfast: after the commit of step %s: %s", opened.step, error)

    def _write_file(self, save: Save, saved_time: float) -> Part:
        """This rank's part, its file stored."""
        environment = self._environment
        upload = FileUpload(
            self._store,
            self._folder,
            data_path(save.step, environment.run, self._name, environment.rank, environment.world_size),
            name=self._name,
            rank=environment.rank,
            size_bytes=save.plan.size_bytes,
        )
        try:
            entry = self._write(save, upload)
        except BaseException:
            upload.abort()
            raise
        return Part(
            step=save.step, run=environment.run, node=DIRECT_NODE + environment.rank,
            world_size=environment.world_size, ranks=(environment.rank,), files=(entry,), saved_time=saved_time,
            persisted_time=time.time(), replicated=save.plan.replicated_digest, tag=save.tag, refers=save.refers,
        )  # fmt: skip

    def _write_part(self, part: Part, sharers: str) -> None:
        write_part(self._store, self._folder, replace(part, ranks=named_ranks(part.ranks, sharers, part.world_size)))

    def _has_part(self, step: int) -> bool:
        """Whether this rank saved the step before in this run: what a manifest may name is never written over."""
        path = part_path(step, self._environment.run, DIRECT_NODE + self._environment.rank)
        try:
            self._store.read(join(self._folder, path))
        except ObjectNotFound:
            return False
        log.warning("stepfast: step %s was saved before in this run: that save stays", step)
        return True

    def _write(self, save: Save, upload: FileUpload) -> FileEntry:
        if self._buffer is None:
            size = _WINDOW_CHUNKS * CHUNK_BYTES
            descriptor = os.memfd_create("stepfast-window", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, CONTROL_BYTES + size)
                self._buffer = MappedSlot(descriptor, size)
            finally:
                os.close(descriptor)
        window = self._buffer.capacity_bytes // upload.chunk_bytes * upload.chunk_bytes
        for begin in range(0, save.plan.size_bytes, window):
            size = min(window, save.plan.size_bytes - begin)
            self._buffer.stage_window(save.plan, save.header_tail, save.sources, begin, size)
            upload.put(begin, self._buffer.data[:size], self._threads)
        return upload.finish()
