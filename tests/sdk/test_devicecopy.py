"""What is asked of CUDA, and in which order, on a double of its calls: whether CUDA then does it, tests/gpu proves."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stepfast.torch.devicecopy import CudaCopy


class Stream:
    """Remembers what waited for what, and which targets were filled by then."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, "waits for", event.name))


class Event:
    def __init__(self, log: list[Any]) -> None:
        self.name, self.log = "copied", log

    def record(self, stream: Stream) -> None:
        self.log.append((self.name, "behind", stream.name))

    def synchronize(self) -> None:
        self.log.append((self.name, "awaited", ""))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    @contextmanager
    def on(stream: Stream) -> Any:
        made.append(("on", stream.name, ""))
        yield

    def copy(targets: list[str], sources: list[torch.Tensor], *, non_blocking: bool) -> None:
        assert non_blocking
        made.extend((target, "copied", float(source)) for target, source in zip(targets, sources, strict=True))

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", made))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: Event(made))
    return made


def test_training_waits_on_the_device_for_what_may_not_be_late_and_for_that_alone(log: list[Any]) -> None:
    targets: Any = ["late", "ordered"]
    pending = CudaCopy().begin(targets, [torch.tensor(1.0), torch.tensor(2.0)], [True, False])

    assert log == [
        ("side", "waits for", "current"),
        ("on", "side", ""),
        ("ordered", "copied", 2.0),
        ("current", "waits for", "side"),
        ("late", "copied", 1.0),
        ("copied", "behind", "side"),
    ]
    log.clear()
    assert pending is not None
    pending.gate()
    pending.wait()
    assert log == [("current", "waits for", "copied"), ("copied", "awaited", "")]


def test_nothing_waits_when_all_may_be_late(log: list[Any]) -> None:
    targets: Any = ["late"]
    CudaCopy().begin(targets, [torch.tensor(1.0)], [True])

    assert ("current", "waits for", "side") not in log


class Runtime:
    """A CUDA runtime whose registrations end as they are told to."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.calls: list[tuple[str, int, int | None, str]] = []
        self.device: int | None = None

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, self.device, threading.current_thread().name))
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, self.device, threading.current_thread().name))
        return self.result

    def check(self, result: int) -> None:
        if result:
            raise RuntimeError(f"CUDA error {result}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Four devices, of which this process works with the third."""
    made = Runtime(0)

    @contextmanager
    def on(index: int) -> Any:
        made.device = index
        yield
        made.device = None

    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", made.check)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 2)
    return made


def test_pages_are_locked_from_a_thread_of_its_own_under_a_device_that_is_used(runtime: Runtime) -> None:
    copy = CudaCopy()

    assert copy.pin(4096, 100)
    copy.unpin(4096)
    assert runtime.calls == [("register", 4096, 2, "stepfast-pin"), ("unregister", 4096, 2, "stepfast-pin")]


def test_pages_that_cannot_be_locked_are_told_once(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.result = 2
    copy = CudaCopy()
    with caplog.at_level(logging.WARNING, "stepfast"):
        assert not copy.pin(4096, 100)
        assert not copy.pin(8192, 100)

    assert len(runtime.calls) == 1
    assert ["page-locked" in record.message for record in caplog.records] == [True]


def test_pages_are_not_locked_before_a_device_is_used(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = CudaCopy()
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)
    assert not copy.pin(4096, 100)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not copy.pin(4096, 100)

    assert runtime.calls == []
    assert caplog.records == []
