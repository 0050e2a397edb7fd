"""The files of a committed step open with the safetensors package alone, and hold the tensors (I3)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from stepfast.slot import CONTROL_BYTES
from stepfast.torch.objects import ObjectSet
from stepfast.torch.plan import SavePlan
from stepfast.torch.planner import Planner
from stepfast.torch.staging import MappedSlot

CUT = """
import torch, torch.distributed as dist
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
whole = {"weight": torch.arange(300_000.0).reshape(3000, 100), "bias": torch.arange(7.0)}
ckpt = Checkpointer(model=whole, own={"rank": torch.tensor(dist.get_rank())}, replicated=["model"])
ckpt.save(1).wait(timeout_seconds=60)
ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_files_open_with_the_package_alone_and_hold_the_tensors(bench: Any) -> None:
    memory = torch.arange(20.0)
    state = {
        "weight": torch.randn(7, 5), "half": torch.randn(3).bfloat16(), "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]), "count": torch.tensor(3), "none": torch.empty(0, 2),
        "complex": torch.randn(
            3, dtype=torch.complex64), "tied": memory, "view": memory[3:5],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "\ud800": torch.ones(2),
        "#": torch.ones(1),
        "__metadata__": torch.ones(1), "": torch.ones(2), "deep": {"er": [torch.ones(3)]}, "text": "ü" * 70_000,
    }  # fmt: skip
    bench.make(state=state).save(1)
    (file,) = bench.step_folder(1).glob("*.safetensors")
    opened = load_file(file)

    for name in ("weight", "half", "flags", "count", "none", "complex", "tied", "channels"):
        assert torch.equal(opened[f"state.{name}"], state[name]), name  # type: ignore[arg-type]
    assert torch.equal(opened["state.eight"].view(torch.uint8), state["eight"].view(torch.uint8))  # type: ignore[attr-defined]
    assert torch.equal(opened["state.deep.er.0"], torch.ones(3))
    assert "state.view" not in opened
    with safe_open(file, "pt") as reader:
        assert {"stepfast", "values"} <= set(reader.metadata())
    # Data begins on a page, so that it can be written and read directly.
    assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 4096 == 0


def test_save_is_laid_out_as_its_header_says_while_a_thread_prepares_another_layout(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(**state: torch.Tensor) -> tuple[SavePlan, bytes, list[torch.Tensor]]:
        objects = ObjectSet({"state": state}, ())
        return Planner(objects, bench.environment(), weights_only=True).prepare(1)

    plan, tail, sources = planned(weight=torch.arange(1000.0), bias=torch.ones(500))
    other, _, _ = planned(weight=torch.zeros(2000), bias=torch.zeros(500))
    descriptor = os.memfd_create("slot")
    os.ftruncate(descriptor, CONTROL_BYTES + (1 << 20))
    slot = MappedSlot(descriptor, 1 << 20)
    os.close(descriptor)
    write_header = MappedSlot._write_header

    def write_header_and_prepare(self: MappedSlot, *arguments: Any) -> Any:
        views = write_header(self, *arguments)
        self.prepare(other)  # as the link's thread does
        return views

    monkeypatch.setattr(MappedSlot, "_write_header", write_header_and_prepare)
    for _ in range(2):
        slot.stage(plan, tail, sources)
        staged = load(bytes(slot.data[: plan.size_bytes]))
        assert len(sources) >= 2
        assert all(torch.equal(staged[name], source) for name, source in zip(plan.names, sources, strict=True))


def test_cut_tensors_are_rows_in_the_files_of_the_ranks(launcher: Any) -> None:
    finished = launcher.run(CUT, ranks=2)
    assert finished.code == 0, finished.output

    files = sorted(launcher.bench.step_folder(1).glob("*.safetensors"))
    opened = [load_file(file) for file in files]
    rows: dict[int, torch.Tensor] = {}
    for found in opened:
        for name, tensor in found.items():
            if name.startswith("model.weight#rows="):
                rows[int(name.partition("=")[2].partition(":")[0])] = tensor
    assert len(rows) == 2
    assert torch.equal(torch.cat([rows[begin] for begin in sorted(rows)]), torch.arange(300_000.0).reshape(3000, 100))
    assert sum("model.bias" in found for found in opened) == 1
    assert [int(found["own.rank"]) for found in opened] == [0, 1]
