"""Models that a command line names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy import predict
from stepfast.torch.anatomy.modelsource import model_source, optimizer_source

LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TINY = {
    "bert": {"model_type": "bert", **LAYER},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "loss_type": "ForCausalLMLoss"},
    "vit": {"model_type": "vit", **LAYER, "image_size": 32},
    "t5": {"model_type": "t5", "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64, "d_kv": 16},
    "llama": {"model_type": "llama", **LAYER, "num_key_value_heads": 1, "vocab_size": 100},
}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_configuration_makes_its_model_and_a_batch_for_it(kind: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY[kind]), encoding="utf-8")
    source = model_source(str(file if place == "file" else tmp_path), sequence_length=None if kind == "vit" else 16)
    assert source.batch is not None
    report = predict(source.model, torch.optim.AdamW, source.batch, batch_size=3)
    assert report.memory.peak_components["activations"] > 0


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("vit", "ViTForImageClassification"),
        ("t5", "T5ForConditionalGeneration"),
        ("llama", "LlamaForCausalLM"),
    ],
)
def test_a_kind_of_model_is_what_it_is_trained_for_first(kind: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY[kind]), encoding="utf-8")
    assert type(model_source(str(tmp_path)).model()).__name__ == architecture


def test_the_architecture_that_a_configuration_names_is_made(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY["bert"], "architectures": ["BertForMaskedLM"]}), encoding="utf-8")
    assert type(model_source(str(file)).model()).__name__ == "BertForMaskedLM"
    assert (
        type(model_source(str(file), task="sequence-classification").model()).__name__
        == "BertForSequenceClassification"
    )


def test_functions_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tiny_models.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(2, 3)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/", *__import__("sys").path])
    source = model_source("my_tiny_models:net")
    assert source.batch is None
    assert isinstance(source.model(), torch.nn.Linear)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no_such_module:net", "no_such_module cannot be imported"),
        ("json:no_such_function", "json has no no_such_function"),
        ("sys:path", "that is a list, no function"),
        (":net", "not of the form package.module:function"),
        ("google-bert/bert-large-uncased", "would have to be downloaded"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(AnatomyError, match=says):
        model_source(text)


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "is no configuration"), ("{}", "has no model_type"), ("[]", "has no model_type")],
)
def test_what_is_no_configuration_is_refused_with_the_reason(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(AnatomyError, match=says):
        model_source(str(file))


def test_a_task_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["bert"]), encoding="utf-8")
    with pytest.raises(AnatomyError, match="none of image-classification, seq2seq-lm"):
        model_source(str(tmp_path), task="poetry")


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [("adamw", 8), ("adam", 8), ("sgd", 0), ("sgd-momentum", 4), ("adamw8bit", 2)],
)
def test_an_optimizer_by_name_keeps_the_documents_bytes(name: str, bytes_per_parameter: float) -> None:
    report = predict(
        lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))),
        optimizer_source(name),
        lambda: torch.randn(1, 256),
        loss_fn=lambda model, batch: model(batch).sum(),
    )
    # bitsandbytes keeps a scale in fp32 beside each block of 256 states.
    measured = report.memory.component_peaks.get("optimizer", 0) / report.parameters
    assert measured == pytest.approx(bytes_per_parameter, rel=0.02)


def test_an_optimizer_that_nobody_knows_is_refused() -> None:
    with pytest.raises(AnatomyError, match="none of adamw, adam"):
        optimizer_source("magic")
