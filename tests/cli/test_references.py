"""Steps that refer to older ones, as `stepfast checkpoints` shows, verifies, exports, removes and brings them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

Invoke = Callable[..., Any]


class Stage:
    """A frozen layer and one that is trained."""

    def __init__(self) -> None:
        self.frozen, self.free = torch.arange(50_000.0), torch.zeros(3, 5_000)

    def state_dict(self) -> dict[str, Any]:
        self.free += 1  # a step of training between any two saves
        return {"frozen": self.frozen, "free": self.free}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.frozen, self.free = state["frozen"], state["free"]

    def settled(self) -> list[tuple[torch.Tensor, int]]:
        return [(self.frozen, 0)]


@pytest.fixture
def referring(any_job: Any) -> Any:
    """A job whose steps 2 and 3 refer to step 1."""
    any_job.train(1, 2, 3, objects={"stage": Stage()})
    return any_job


def test_list_shows_own_bytes_and_what_a_step_refers_to(referring: Any, invoke: Invoke) -> None:
    rows = invoke("list", referring.uri, "--json").document
    assert [row["refers"] for row in rows] == [[], [1], [1]]
    assert rows[0]["sizeBytes"] - rows[1]["sizeBytes"] > 0.9 * 4 * 50_000
    assert [line.rpartition("committed")[2] for line in invoke("list", referring.uri).out.splitlines()[1:]] == [
        "", ", refers to 1", ", refers to 1",
    ]  # fmt: skip


def test_show_says_where_each_tensor_is(referring: Any, invoke: Invoke) -> None:
    said = invoke("show", referring.uri, "--step", "3")
    assert "refers to step 1" in said.out.splitlines()[0]
    row = next(line for line in said.out.splitlines() if "stage.frozen" in line)
    assert "in global_step1/state-00000-of-00001" in row
    document = invoke("show", referring.uri, "--step", "3", "--json").document
    assert document["refers"] == [1]
    ((path, references),) = document["referred"].items()
    assert "stage.frozen" not in document["tensors"][path]
    assert references["stage.frozen"]["path"].startswith("global_step1/")
    assert references["stage.frozen"]["name"] == "stage.frozen"


def test_verify_reads_what_a_step_refers_to_and_counts_its_own_bytes(referring: Any, invoke: Invoke) -> None:
    rows = invoke("list", referring.uri, "--json").document
    document = invoke("verify", referring.uri, "--json").document
    assert [row["sizeBytes"] for row in document] == [row["sizeBytes"] for row in rows]
    assert invoke("verify", referring.uri, "--step", "3").code == 0


def test_verify_finds_the_damage_of_what_steps_refer_to(job: Any, invoke: Invoke) -> None:
    job.train(1, 2, 3, objects={"stage": Stage()})
    (file,) = job.step_folder(1).glob("state-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said = invoke("verify", job.uri)
    assert said.code == 1
    assert "step 3 is damaged: global_step1/" in said.err


def test_list_says_that_a_step_cannot_be_read_any_more(job: Any, invoke: Invoke) -> None:
    job.train(1, 2, objects={"stage": Stage()})
    (job.step_folder(1) / "manifest.json").unlink()
    (row,) = invoke("list", job.uri).out.splitlines()[1:]
    assert "damaged: global_step2/manifest.json: it refers to step 1, not committed by its run" in row


def test_verify_finds_a_tensor_that_is_not_where_a_step_looks_for_it(job: Any, invoke: Invoke) -> None:
    job.train(1, 2, objects={"stage": Stage()})
    (file,) = job.step_folder(1).glob("state-*")
    file.write_bytes(file.read_bytes().replace(b'"stage.frozen":{', b'"stage.frozem":{'))
    said = invoke("verify", job.uri, "--step", "2")
    assert said.code == 1
    assert "tensor 'stage.frozen', for which step 2 refers to it, is not in the file" in said.err


def test_exports_are_whole(referring: Any, invoke: Invoke, tmp_path: Path) -> None:
    first, third, file = tmp_path / "first", tmp_path / "third", tmp_path / "third.pt"
    assert invoke("export", referring.uri, first, "--step", "1").code == 0
    assert invoke("export", referring.uri, third, "--step", "3").code == 0
    assert invoke("export", referring.uri, file, "--step", "3").code == 0

    (one,), (three,) = first.iterdir(), third.iterdir()
    before, after = safetensors.torch.load_file(one), safetensors.torch.load_file(three)
    assert before.keys() == after.keys()
    assert torch.equal(after["stage.frozen"], torch.arange(50_000.0))
    assert torch.equal(after["stage.free"], before["stage.free"] + 2)
    state = torch.load(file)["stage"]
    assert torch.equal(state["frozen"], after["stage.frozen"])
    assert torch.equal(state["free"], after["stage.free"])
    with safetensors.safe_open(three, framework="pt") as opened:
        assert "stepfast.referred" not in opened.metadata()


def test_step_that_others_refer_to_is_removed_only_with_them(referring: Any, invoke: Invoke) -> None:
    said = invoke("rm", referring.uri, "1", "2", "--yes")
    assert said.code == 2
    assert "not removed without them: 1 by 3. Name 3, too" in said.err
    assert len(invoke("list", referring.uri, "--json").document) == 3

    said = invoke("rm", referring.uri, "1", "2", "3", "--yes")
    assert (said.code, said.out.splitlines()) == (0, ["removed step 3", "removed step 2", "removed step 1"])
    assert invoke("list", referring.uri, "--json").document == []


def test_step_that_refers_to_a_superseded_one_is_brought_back_after_it(referring: Any, invoke: Invoke) -> None:
    referring.train(4)  # begins anew: all else is superseded
    invoke("rm", referring.uri, "4", "--yes")
    said = invoke("reinstate", referring.uri, "3")
    assert said.code == 2
    assert "refers to step 1, which is not committed by that run" in said.err
    assert [invoke("reinstate", referring.uri, step).code for step in ("1", "3")] == [0, 0]
    assert invoke("verify", referring.uri).code == 0
