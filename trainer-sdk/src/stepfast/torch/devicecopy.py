"""Copies from an accelerator's memory into a slot that go on while training does, and the page-locked memory for them.

Knows streams and addresses; nothing of steps, slots or optimizers: see `overlap`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

log = logging.getLogger("stepfast")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device's context


class Pending(Protocol):
    """Copies that were begun. The tensors must not be freed before they are done."""

    def wait(self) -> None:
        """Returns when the bytes are there. Raises RuntimeError when a copy failed."""

    def gate(self) -> None:
        """What is enqueued on the current streams from now on runs after the copies; returns at once."""


class DeviceCopy(Protocol):
    """A kind of accelerator."""

    def is_in_use(self) -> bool:
        """Whether this process works with it; quick, and starts nothing."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in its memory."""

    def is_capturing(self) -> bool:
        """Whether what is enqueued now is recorded, to run later, rather than run."""

    def begin(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], deferrable: Sequence[bool]
    ) -> Pending | None:
        """Begins to copy each source, as the current streams leave it, into its target; None: all is copied.

        Whatever the current streams do next waits for the sources that are not deferrable. The caller sees to it that
        the others stay as they are.
        """

    def pin(self, address: int, size_bytes: int) -> bool:
        """Locks the pages, so that copies run at full speed and beside the processor; False: not now, or not at all."""

    def unpin(self, address: int) -> None:
        """Undoes `pin`, before the memory goes."""


def find_device() -> DeviceCopy | None:
    """The accelerator that this torch is built for, if copies from it can overlap; asks no driver."""
    return CudaCopy() if torch.version.cuda is not None or torch.version.hip is not None else None


class _CudaPending:
    """By device, the event behind its last copy."""

    def __init__(self, events: Sequence[tuple[torch.device, torch.cuda.Event]]) -> None:
        self._events = events

    def wait(self) -> None:
        for _, event in self._events:
            event.synchronize()

    def gate(self) -> None:
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)


class CudaCopy:
    """CUDA, and ROCm under its name: a side stream a device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pid = os.getpid()
        self._is_refused = False

    def is_in_use(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch gives it no types

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], deferrable: Sequence[bool]
    ) -> Pending | None:
        by_device: dict[torch.device, list[int]] = {}
        for index, source in enumerate(sources):
            by_device.setdefault(source.device, []).append(index)
        events = []
        for device, indexes in by_device.items():
            ordered = [index for index in indexes if not deferrable[index]]
            deferred = [index for index in indexes if deferrable[index]]
            side, current = self._stream(device), torch.cuda.current_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side), torch.no_grad():
                if ordered:
                    _copy_in_order(targets, sources, ordered)
                    current.wait_stream(side)
                if deferred:
                    _copy_in_order(targets, sources, deferred)
                # Who waits for it sleeps: a thread that spun would take a core, and the GIL's turns, from training.
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # nor this
                done.record(side)
            events.append((device, done))
        return _CudaPending(events) if events else None

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # nor this
        return self._streams[device]

    def pin(self, address: int, size_bytes: int) -> bool:
        if self._is_refused or not self.is_in_use():
            return False
        try:
            return _with_context(lambda cudart: cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        except (RuntimeError, OSError) as error:
            self._is_refused = True
            log.warning(
                "stepfast: %d bytes of shared memory could not be page-locked (%s): training waits for copies "
                "from the GPU",
                size_bytes, error,
            )  # fmt: skip
            return False

    def unpin(self, address: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the parent's mapping, and no CUDA
        try:
            _with_context(lambda cudart: cudart.cudaHostUnregister(address))
        except (RuntimeError, OSError) as error:
            log.warning("stepfast: shared memory stays page-locked until this process ends: %s", error)


def _copy_in_order(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], indexes: Sequence[int]) -> None:
    torch._foreach_copy_([targets[i] for i in indexes], [sources[i] for i in indexes], non_blocking=True)


def _with_context(call: Callable[[Any], int]) -> bool:
    """Makes the call of the runtime under a device that this process uses; False when it uses none yet.

    In a thread of its own: CUDA keeps a failed call's error for the same thread's next kernel launch, which would then
    fail in its stead. A new thread stands on device 0, where the call would take memory for a context. Raises
    RuntimeError.
    """
    used = next((i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)), None)
    if used is None:
        return False
    errors: list[RuntimeError | OSError] = []

    def run() -> None:
        try:
            with torch.cuda.device(used):
                torch.cuda.check_error(call(torch.cuda.cudart()))  # type: ignore[no-untyped-call]  # nor this
        except (RuntimeError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="stepfast-pin", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and starts no more threads
        run()
    else:
        thread.join()
    if errors:
        raise errors[0]
    return True
