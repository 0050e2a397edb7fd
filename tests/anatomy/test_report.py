"""A report as a value: written and read again, refused when it is none, and read from above as a tree of modules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from anatomyreports import of_many_modules, of_nothing, of_one_component, of_zero_bytes, without_limit
from stepfast.torch.anatomy import Report, from_json, predict
from stepfast.torch.anatomy.moduletree import module_rows
from stepfast.torch.anatomy.report import ModuleMemory


@pytest.mark.parametrize("edge", [without_limit, of_one_component, of_nothing, of_zero_bytes, of_many_modules])
def test_report_is_read_as_it_was_written(predicted: Report, edge: Any) -> None:
    assert from_json(predicted.to_json()) == predicted
    assert from_json(edge(predicted).to_json()) == edge(predicted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda document: document.pop("format"), "it has no format", id="no format"),
        pytest.param(lambda document: document.update(format=2), "of another release", id="another format"),
        pytest.param(lambda document: document.pop("title"), "it is not whole: .*'title'", id="a field is missing"),
        pytest.param(lambda document: document["memory"].update(colour=1), "memory.colour is no field", id="unknown"),
        pytest.param(
            lambda document: document["memory"]["curve"][2].update(seconds="soon"),
            r"memory.curve\[2\].seconds is not what it should be",
            id="another type",
        ),
        pytest.param(
            lambda document: document["time"].update(step_seconds=float("nan")), "time.step_seconds", id="nan"
        ),
        pytest.param(
            lambda document: document["memory"].update(peak_bytes=-5),
            "memory.peak_bytes is not",
            id="less than nothing",
        ),
        pytest.param(
            lambda document: document["memory"]["peak_components"].update(weights=-5),
            "memory.peak_components.weights is not",
            id="a component of less than nothing",
        ),
        pytest.param(
            lambda document: document["time"].update(step_seconds=-1.0), "time.step_seconds is not", id="time runs back"
        ),
        pytest.param(lambda document: document.update(replicas=0), "replicas is not", id="not even one replica"),
        pytest.param(lambda document: document.update(parameters=True), "parameters is not", id="a truth for a number"),
        pytest.param(lambda document: document.update(memory=None), "memory is not", id="nothing for a part"),
    ],
)
def test_what_is_no_report_is_refused_with_the_place(predicted: Report, change: Any, words: str) -> None:
    document = json.loads(predicted.to_json())
    change(document)
    with pytest.raises(ValueError, match=words):
        from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no anatomy report"):
        from_json(text)


def test_weights_gradients_and_optimizer_states_belong_to_their_parameters_module() -> None:
    class Tied(nn.Module):
        """The last layer's weight is the first one's."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64, bias=False)
            self.between = nn.BatchNorm1d(64)
            self.last = nn.Linear(64, 64, bias=False)
            self.last.weight = self.first.weight

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.last(self.between(self.first(batch))).square().mean()  # type: ignore[no-any-return]

    report = predict(Tied, torch.optim.Adam, lambda: torch.randn(8, 64), device="cpu")
    parts = {module.name: module.components for module in report.memory.modules}
    weight = 64 * 64 * 4
    assert parts["first"]["weights"] == parts["first"]["gradients"] == weight
    assert parts["first"]["optimizer"] == 2 * weight + 4
    assert parts["between"]["weights"] == 2 * 64 * 4
    assert parts["between"]["buffers"] == 2 * 64 * 4 + 8
    assert "weights" not in parts.get("last", {})


def test_roof_is_the_devices(predicted: Report) -> None:
    roof = predicted.time.roof
    assert roof is not None
    assert (roof.contraction_flops, roof.other_flops, roof.bandwidth) == (1e12, 1e12, 1e11)


def modules(**sizes: int) -> list[ModuleMemory]:
    return [
        ModuleMemory(name=name.replace("_", "."), kind="Linear", components={"weights": size})
        for name, size in sizes.items()
    ]


def test_neighbouring_layers_of_one_shape_are_one_row() -> None:
    rows = module_rows(modules(net_0_q=10, net_0_k=10, net_1_q=10, net_1_k=10, net_2_q=10, net_2_v=10, head=40))
    found = [(row.depth, row.name, row.total_bytes) for row in rows]
    assert (1, "0-1", 40) in found
    assert (2, "q", 20) in found
    assert (2, "k", 20) in found
    assert (1, "2", 20) in found
    assert (0, "head", 40) in found


def test_each_level_of_the_tree_adds_up_to_the_row_above_it(predicted: Report) -> None:
    rows = module_rows(predicted.memory.modules, most=60)
    assert sum(row.total_bytes for row in rows if row.depth == 0) == predicted.memory.peak_bytes
    for at, row in enumerate(rows):
        below = []
        for later in rows[at + 1 :]:
            if later.depth <= row.depth:
                break
            if later.depth == row.depth + 1:
                below.append(later.total_bytes)
        assert not below or sum(below) == row.total_bytes, row.name


def test_small_modules_are_counted_together() -> None:
    rows = module_rows(modules(large=1000, **{f"small{index}": 2 for index in range(5)}))
    assert [(row.name, row.kind, row.total_bytes) for row in rows] == [
        ("large", "Linear", 1000),
        ("(others)", "5 modules", 10),
    ]


def test_thousands_of_equal_layers_make_few_rows(predicted: Report) -> None:
    rows = module_rows(of_many_modules(predicted).memory.modules)
    assert len(rows) < 10
    assert sum(row.total_bytes for row in rows if row.depth == 0) == of_many_modules(predicted).memory.peak_bytes


def test_nothing_makes_no_rows() -> None:
    assert module_rows([]) == ()
    assert module_rows(modules(empty=0)) == ()
