"""Copies that go on while training does: what is restored is what was there at the save, and nothing is torn.

The accelerator is a double: its tensors lie in ordinary memory, and it copies when it is told to. It reads the late
ones no sooner than that, and what training does to them before is what a tear would be made of.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import os
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepfast.errors import CheckpointNotFound, StorageUnavailable
from stepfast.messages import GaveUp, Message
from stepfast.slot import CONTROL_BYTES, SlotState, read_control
from stepfast.step import JobKey, Tier
from stepfast.torch import Checkpointer, every, link

SECONDS = 30.0


class Late:
    """Copies that are made when `Deferring` is told to make them."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], told: threading.Event) -> None:
        self._done = threading.Event()
        self.failure: RuntimeError | None = None
        threading.Thread(target=self._copy, args=(copies, told), daemon=True).start()

    def _copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], told: threading.Event) -> None:
        told.wait()
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source)
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.failure is not None:
            raise self.failure

    def gate(self) -> None:
        self._done.wait()


class Deferring:
    """An accelerator whose late copies wait until they are told."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.told.set()
        self.is_recording = False
        self.begun: list[tuple[int, int]] = []  # of each save, how many tensors at once and how many late
        self.pending: list[Late] = []
        self.pinned: set[int] = set()

    def is_in_use(self) -> bool:
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is not torch.uint8  # the states of random generators are not on it

    def is_capturing(self) -> bool:
        return self.is_recording

    def begin(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], deferrable: Sequence[bool]
    ) -> Late:
        pairs = list(zip(targets, sources, strict=True))
        with torch.no_grad():
            for (target, source), is_late in zip(pairs, deferrable, strict=True):
                if not is_late:
                    target.copy_(source)
        late = [pair for pair, is_late in zip(pairs, deferrable, strict=True) if is_late]
        self.begun.append((len(pairs) - len(late), len(late)))
        self.pending.append(Late(late, self.told))
        return self.pending[-1]

    def pin(self, address: int, size_bytes: int) -> bool:
        assert size_bytes > 0
        self.pinned.add(address)
        return True

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


class Net(nn.Module):
    """With parameters, and buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(self.norm(batch)).relu())
        return out


class Training:
    """A model, its optimizer and a checkpointer of both."""

    def __init__(self, bench: Any, *, overlap: bool = True, **objects: Any) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.checkpointer: Checkpointer = bench.make(
            model=self.model, optimizer=self.optimizer, interval=every(steps=10**6), overlap=overlap, **objects
        )

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 8)).square().sum().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """A copy of what a save would hold now."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        optimizer = self.optimizer.state_dict()["state"]
        moments = {i: {name: value.clone() for name, value in state.items()} for i, state in optimizer.items()}
        return {"model": model, "optimizer": moments}

    def begin(self) -> None:
        """A first save, behind which the optimizer's hook was seen to run: from here on copies may come late."""
        self.train()
        self.checkpointer.save(1).wait(Tier.MEMORY, SECONDS)
        self.train()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deferring]:
    made = Deferring()
    monkeypatch.setattr(link, "find_device", lambda: made)
    try:
        yield made
    finally:
        made.told.set()


@pytest.fixture
def agent_bench(bench: Any, shared_agent: Any) -> Any:
    """Checkpointers of a new job, with an agent."""
    bench.socket, bench.job = shared_agent.socket, JobKey(namespace="local", name=f"job-{uuid.uuid4().hex[:8]}")
    return bench


@pytest.fixture
def training(agent_bench: Any, device: Deferring) -> Iterator[Training]:
    """One that copies late."""
    made = Training(agent_bench)
    made.begin()
    device.told.clear()
    try:
        yield made
    finally:
        device.told.set()  # before the bench ends its checkpointers, which waits for them


def restored(bench: Any, step: int) -> dict[str, Any]:
    """What another process would restore of that step."""
    other = Training(bench)
    assert other.checkpointer.restore(step) == step
    return other.state()


@contextlib.contextmanager
def beside(call: Callable[[], object]) -> Iterator[threading.Thread]:
    """The call in a thread of its own, which must end with the block."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)
    assert not thread.is_alive()


# ---------------------------------------------------------------- what is saved


def test_values_at_the_save_are_restored_though_training_goes_on(
    agent_bench: Any, device: Deferring, training: Training, assert_same: Any
) -> None:
    expected = training.state()
    saved = training.checkpointer.save(2)
    training.backward()
    changed = training.state()["model"]
    with beside(training.optimizer.step):
        device.told.set()
    saved.wait(timeout_seconds=SECONDS)

    assert not torch.equal(expected["model"]["norm.running_mean"], changed["norm.running_mean"])
    assert not torch.equal(expected["model"]["first.weight"], training.state()["model"]["first.weight"])
    assert_same(expected, restored(agent_bench, 2))


def test_only_what_the_optimizer_changes_is_copied_late(device: Deferring, training: Training) -> None:
    training.checkpointer.save(2)

    parameters = len(list(training.model.parameters()))
    at_once, late = device.begun[-1]
    assert late == parameters * 4  # the parameter, two moments, and how many steps
    assert at_once >= len(list(training.model.buffers()))


def test_nothing_is_copied_late_of_an_optimizer_whose_step_was_not_seen_since(
    device: Deferring, training: Training
) -> None:
    training.checkpointer.save(2)
    device.told.set()
    training.backward()
    training.checkpointer.save(3)

    assert [late > 0 for _, late in device.begun] == [False, True, False]


def test_nothing_is_copied_late_of_an_optimizer_whose_step_was_recorded(device: Deferring, training: Training) -> None:
    training.checkpointer.save(2)
    device.told.set()
    device.is_recording = True
    training.train()
    device.is_recording = False
    training.train()
    training.checkpointer.save(3)

    assert [late > 0 for _, late in device.begun] == [False, True, False]


def test_optimizer_that_is_not_the_checkpointers_has_nothing_copied_late(agent_bench: Any, device: Deferring) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = agent_bench.make(overlap=True, model=model, moments=optimizer.state_dict())
    for step in (1, 2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        checkpointer.save(step).wait(timeout_seconds=SECONDS)

    assert [late for _, late in device.begun] == [0, 0]


def test_overlap_can_be_refused(agent_bench: Any, device: Deferring) -> None:
    training = Training(agent_bench, overlap=False)
    training.begin()
    training.checkpointer.save(2).wait(timeout_seconds=SECONDS)

    assert device.begun == []


# ---------------------------------------------------------------- the optimizer's step


def test_optimizers_step_is_held_until_its_tensors_are_copied(device: Deferring, training: Training) -> None:
    training.checkpointer.save(2)
    training.backward()
    before = training.state()
    with beside(training.optimizer.step) as step:
        step.join(0.3)
        assert step.is_alive()
        assert torch.equal(training.state()["model"]["first.weight"], before["model"]["first.weight"])
        device.told.set()

    assert not torch.equal(training.state()["model"]["first.weight"], before["model"]["first.weight"])


@pytest.mark.parametrize("is_stepped", [True, False], ids=["seen by the hook", "seen when the copy is done"])
def test_parameter_changed_too_early_gives_the_step_up_and_the_next_save_waits(
    *, is_stepped: bool, agent_bench: Any, device: Deferring, training: Training, assert_same: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    saved = training.checkpointer.save(2)
    with torch.no_grad():
        training.model.first.weight.mul_(2.0)
    if is_stepped:
        training.backward()
        with beside(training.optimizer.step):
            device.told.set()
    device.told.set()
    for tier in (Tier.MEMORY, Tier.PERSISTENT):
        with pytest.raises(CheckpointNotFound, match=r"step 2 .*model\.first\.weight"):
            saved.wait(tier, SECONDS)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert [("step 2 is given up" in message, "model.first.weight" in message) for message in errors] == [(True, True)]

    device.told.clear()
    training.train()
    expected = training.state()
    begun = len(device.begun)
    training.checkpointer.save(3).wait(timeout_seconds=SECONDS)
    training.train()
    assert len(device.begun) == begun
    assert [found.step for found in training.checkpointer.steps()][-1] == 3
    assert 2 not in [found.step for found in training.checkpointer.steps()]
    assert_same(expected, restored(agent_bench, 3))


def test_step_given_up_is_told_to_the_agent_and_may_be_saved_again_on_request(
    device: Deferring, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert training.checkpointer._link is not None
    told: list[Message] = []
    tell = training.checkpointer._link.tell
    monkeypatch.setattr(training.checkpointer._link, "tell", lambda message: (told.append(message), tell(message)))
    saved = training.checkpointer.save(2)
    with torch.no_grad():
        training.model.first.weight.mul_(2.0)
    device.told.set()
    with pytest.raises(CheckpointNotFound):
        saved.wait(Tier.MEMORY, SECONDS)
    assert GaveUp(step=2) in told

    training.checkpointer._link.save_requested = True
    monkeypatch.setattr("stepfast.torch.checkpoint.wait_to_be_stopped", lambda *_: None)
    training.checkpointer.save(2).wait(timeout_seconds=SECONDS)


def test_change_is_seen_through_an_alias_with_a_count_of_its_own(agent_bench: Any, device: Deferring) -> None:
    weight = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer = agent_bench.make(overlap=True, state={"alias": weight.data}, optimizer=optimizer)
    for step in (1, 2):
        weight.sum().backward()
        optimizer.step()
        device.told.clear()
        saved = checkpointer.save(step)
        if step == 1:
            device.told.set()
    with torch.no_grad():
        weight.zero_()
    device.told.set()

    with pytest.raises(CheckpointNotFound, match="alias"):
        saved.wait(timeout_seconds=SECONDS)


def test_copy_that_fails_gives_the_step_up(
    device: Deferring, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    saved = training.checkpointer.save(2)
    device.pending[-1].failure = RuntimeError("the device is lost")
    device.told.set()

    with pytest.raises(CheckpointNotFound, match="the device is lost"):
        saved.wait(timeout_seconds=SECONDS)
    assert "step 2 is given up" in caplog.text
    training.checkpointer.save(3).wait(timeout_seconds=SECONDS)


# ---------------------------------------------------------------- when a step counts


def test_rank_reports_the_newest_step_that_is_complete(device: Deferring, training: Training) -> None:
    assert training.checkpointer._report().step == 1
    saved = training.checkpointer.save(2)
    report = training.checkpointer._report()
    assert report.step == 1
    assert 2 in report.unpersisted
    device.told.set()
    saved.wait(Tier.MEMORY, SECONDS)

    assert training.checkpointer._report().step == 2


def test_waiting_for_memory_waits_for_the_copy(device: Deferring, training: Training) -> None:
    saved = training.checkpointer.save(2)
    for tier in (Tier.MEMORY, Tier.PERSISTENT):
        with pytest.raises(StorageUnavailable, match="not copied within"):
            saved.wait(tier, 0.1)
    device.told.set()

    saved.wait(Tier.MEMORY, SECONDS)
    saved.wait(timeout_seconds=SECONDS)


def test_save_beside_one_that_is_still_copied_takes_another_slot(
    agent_bench: Any, device: Deferring, training: Training, assert_same: Any
) -> None:
    expected = training.state()
    first = training.checkpointer.save(2)
    training.backward()
    later = training.state()
    second = training.checkpointer.save(3)
    assert training.checkpointer._report().step == 1
    device.told.set()
    for saved in (first, second):
        saved.wait(timeout_seconds=SECONDS)

    assert_same(expected, restored(agent_bench, 2))
    assert_same(later, restored(agent_bench, 3))


def test_third_save_waits_for_the_first_ones_slot(device: Deferring, training: Training) -> None:
    for step in (2, 3):
        training.checkpointer.save(step)
    with beside(lambda: training.checkpointer.save(4)) as third:
        third.join(0.3)
        assert third.is_alive()
        device.told.set()
    training.checkpointer.close(SECONDS)


@pytest.mark.parametrize("is_failed", [False, True], ids=["close", "a script that fails"])
def test_end_sees_through_what_is_still_copied(
    *, is_failed: bool, agent_bench: Any, device: Deferring, training: Training, until: Callable[..., Any],
    assert_same: Any,
) -> None:  # fmt: skip
    expected = training.state()
    training.checkpointer.save(2)
    end = training.checkpointer.close if not is_failed else lambda: agent_bench.leave(training.checkpointer)
    with beside(end) as ending:
        ending.join(0.3)
        assert ending.is_alive()
        device.told.set()

    until((agent_bench.step_folder(2) / "manifest.json").exists, "the commit")
    assert_same(expected, restored(agent_bench, 2))


def test_restore_waits_for_what_is_still_copied(
    agent_bench: Any, device: Deferring, training: Training, until: Callable[..., Any], assert_same: Any
) -> None:
    until((agent_bench.step_folder(1) / "manifest.json").exists, "the commit of what is restored")
    expected = training.state()
    saved = training.checkpointer.save(2)
    with beside(lambda: training.checkpointer.restore(1)) as restoring:
        restoring.join(0.3)
        assert restoring.is_alive()
        device.told.set()
    saved.wait(timeout_seconds=SECONDS)

    assert_same(expected, restored(agent_bench, 2))


def test_agent_that_is_lost_during_a_copy_is_offered_the_step_when_it_is_back(
    bench: Any, start_agent: Any, device: Deferring, assert_same: Any
) -> None:
    agent = start_agent()
    bench.socket = agent.socket
    training = Training(bench)
    training.begin()
    device.told.clear()
    expected = training.state()
    saved = training.checkpointer.save(2)
    agent.kill()
    agent.start()
    device.told.set()
    saved.wait(timeout_seconds=SECONDS)

    assert_same(expected, restored(bench, 2))


KILLED = """
import os, signal
from stepfast.step import Tier
training = Training(Here())
training.begin()
device.told.clear()
print("saved", training.checkpointer.save(2).step, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_process_killed_during_a_copy_leaves_the_step_before_as_the_newest(
    agent_bench: Any, shared_agent: Any, tmp_path: Path, device: Deferring, until: Callable[..., Any]
) -> None:
    here = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_overlap import Deferring, Training, link
from stepfast.torch import Checkpointer
device = Deferring()
link.find_device = lambda: device
class Here:
    def make(self, **objects):
        return Checkpointer(**objects)
"""
    script = tmp_path / "killed.py"
    script.write_text(here + KILLED)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("STEPFAST_")}
    run = f"{uuid.uuid4().hex[:8]}-1"
    variables |= {
        "STEPFAST_JOB": str(agent_bench.job), "STEPFAST_RUN": run,
        "STEPFAST_STORAGE_URI": agent_bench.storage.as_uri(), "STEPFAST_SOCKET": agent_bench.socket,
    }  # fmt: skip
    killed = subprocess.run(
        [sys.executable, str(script)], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert "saved 2" in killed.stdout, killed.stderr
    slots = (shared_agent.memory / str(agent_bench.job)).glob("*/slot-*")  # other jobs' come and go
    pages = [read_control(slot.read_bytes()[:CONTROL_BYTES]) for slot in slots]
    found = {page.record.step: page.state for page in pages if page.record is not None and page.record.run == run}
    assert found[2] is SlotState.WRITING
    assert found[1] in (SlotState.STAGED, SlotState.PERSISTED)

    until((agent_bench.step_folder(1) / "manifest.json").exists, "the flush of what was staged")
    assert Training(agent_bench).checkpointer.restore() == 1


def test_nothing_of_a_step_that_is_complete_keeps_the_devices_memory(
    device: Deferring, training: Training, until: Callable[..., Any]
) -> None:
    saved = training.checkpointer.save(2)
    device.told.set()
    saved.wait(timeout_seconds=SECONDS)
    old = weakref.ref(next(iter(training.optimizer.state.values()))["exp_avg"])
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))

    until(lambda: gc.collect() >= 0 and old() is None, "the old state's end")


# ---------------------------------------------------------------- page-locked slots


def test_slots_are_page_locked_while_they_are_mapped(
    agent_bench: Any, device: Deferring, training: Training, until: Callable[..., Any]
) -> None:
    until(lambda: len(device.pinned) >= 1, "the slots' pages")
    device.told.set()
    agent_bench.leave(training.checkpointer)

    assert device.pinned == set()


def test_every_method_of_the_double_is_the_protocols() -> None:
    from stepfast.torch.devicecopy import CudaCopy, DeviceCopy

    names = [name for name, _ in inspect.getmembers(DeviceCopy, inspect.isfunction) if not name.startswith("_")]
    assert names
    for name in names:
        wanted = list(inspect.signature(getattr(DeviceCopy, name)).parameters)
        assert list(inspect.signature(getattr(Deferring, name)).parameters) == wanted
        assert list(inspect.signature(getattr(CudaCopy, name)).parameters) == wanted
