"""Models, batches and optimizers that a command line names: importable functions, or a configuration of Transformers.

Nothing is downloaded: a configuration is a file, a folder that holds one, or a kind of model with its defaults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from stepfast.errors import AnatomyOptionError
from stepfast.torch.anatomy.batches import BatchFunction
from stepfast.torch.anatomy.training import ModelFunction, OptimizerFunction

# In the order in which a kind of model is taken for what it is trained for first.
_TASKS = {
    "image-classification": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}
_SEQUENCE_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """`batch` is None where only the caller can know what the model is trained on."""

    name: str
    model: ModelFunction
    batch: BatchFunction | None


def model_source(
    text: str,
    *,
    task: str | None = None,
    sequence_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> ModelSource:
    """From `package.module:factory`, or a configuration of Transformers: a config.json, its folder, or as `gpt2`.

    `task`: which head a configuration gets (default: the architecture that it names, else what its kind is trained
    for). `sequence_length`: tokens of a batch's sequences. `dtype`: of a batch's pictures. Raises AnatomyOptionError.
    """
    if ":" in text and not Path(text).exists():
        if task is not None or sequence_length is not None:
            raise AnatomyOptionError(f"--model {text}: --task and --sequence-length are for configurations")
        return ModelSource(name=text.partition(":")[2], model=imported(text, "--model"), batch=None)
    if find_spec("transformers") is None:
        raise AnatomyOptionError(
            f"--model {text}: a configuration needs Transformers: pip install transformers. Or name a function that "
            "makes the model, as package.module:function"
        )
    configuration = _configuration(text)
    make = _maker(configuration, task)
    return ModelSource(
        name=Path(text).stem if Path(text).is_file() else Path(text).name,
        model=make,
        batch=_batch(configuration, make, sequence_length, dtype),
    )


def imported(text: str, option: str) -> Callable[..., Any]:
    """The function that `package.module:name` names; modules of the current folder count. Raises AnatomyOptionError."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise AnatomyOptionError(f"{option} {text}: not of the form package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(module_name)
    except ImportError as error:
        raise AnatomyOptionError(f"{option} {text}: {module_name} cannot be imported: {error}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise AnatomyOptionError(f"{option} {text}: {module_name} has no {name}") from error
    if not callable(found):
        raise AnatomyOptionError(f"{option} {text}: that is a {type(found).__name__}, no function")
    return found


def optimizer_source(text: str) -> OptimizerFunction:
    """`adamw`, `adam`, `sgd`, `sgd-momentum`, `adafactor`, `adamw8bit`, or `package.module:function`."""
    known: dict[str, OptimizerFunction] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
        "adamw8bit": _adamw8bit,
    }
    if text in known:
        return known[text]
    if ":" not in text:
        raise AnatomyOptionError(f"--optimizer {text}: none of {', '.join(known)}, nor package.module:function")
    return imported(text, "--optimizer")


def _adamw8bit(parameters: Any) -> torch.optim.Optimizer:
    if find_spec("bitsandbytes") is None:
        raise AnatomyOptionError("--optimizer adamw8bit is that of bitsandbytes: pip install bitsandbytes")
    optimizer: torch.optim.Optimizer = import_module("bitsandbytes").optim.AdamW8bit(parameters)
    return optimizer


def _configuration(text: str) -> Any:
    from transformers import AutoConfig

    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise AnatomyOptionError(f"--model {text}: {path} is no configuration: {error}") from error
        if not isinstance(values, Mapping) or "model_type" not in values:
            raise AnatomyOptionError(
                f"--model {text}: {path} has no model_type, so it is no configuration of Transformers"
            )
        values = dict(values)
        kind = values.pop("model_type")
    else:
        kind, values = text, {}
    try:
        configuration = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise AnatomyOptionError(
            f"--model {text}: no file, and no kind of model that Transformers knows (as bert, gpt2, vit, t5). Names of "
            "the hub would have to be downloaded: save the configuration and name its file"
        ) from error
    if configuration.is_encoder_decoder and getattr(configuration, "decoder_start_token_id", None) is None:
        # A kind's defaults leave open what every published configuration says; no training begins without it.
        configuration.decoder_start_token_id = configuration.pad_token_id or 0
    return configuration


def _maker(configuration: Any, task: str | None) -> ModelFunction:
    import transformers

    if task is not None and task not in _TASKS:
        raise AnatomyOptionError(f"--task {task}: none of {', '.join(_TASKS)}")
    named = None if task else next(iter(configuration.architectures or ()), None)
    if named is not None:
        architecture = getattr(transformers, named, None)
        if architecture is None:
            raise AnatomyOptionError(
                f"the configuration is of {named}, which this release of Transformers does not know"
            )
        return lambda: architecture(configuration)
    mappings = ((name, getattr(transformers, auto)) for name, auto in _TASKS.items())
    for name, auto in mappings:
        if task in (None, name) and type(configuration) in auto._model_mapping:
            return lambda auto=auto: auto.from_config(configuration)  # type: ignore[misc] # it binds the loop's
    raise AnatomyOptionError(
        f"no head for {task or 'training'} is known for {configuration.model_type}: say another --task "
        f"({', '.join(_TASKS)}), or name functions with --model and --batch"
    )


def _batch(configuration: Any, make: ModelFunction, sequence_length: int | None, dtype: torch.dtype) -> BatchFunction:
    """What a model of Transformers is trained on, by what it takes and what it is for."""
    with torch.device("meta"):
        model = make()
    kind = type(model).__name__
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if sequence_length is not None:
            raise AnatomyOptionError(f"--sequence-length {sequence_length}: {kind} takes pictures, no sequences")
        return _pictures(configuration, dtype)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise AnatomyOptionError(f"{kind} takes {model.main_input_name}: say what a batch is with --batch")
    longest = _longest(configuration)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise AnatomyOptionError(f"--sequence-length {sequence_length}: {kind} takes {longest} at most")
    length = sequence_length or min(_SEQUENCE_LENGTH, longest or _SEQUENCE_LENGTH)
    words = configuration.get_text_config().vocab_size

    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, words, (batch_size, length))
        if "SequenceClassification" in kind:
            return {"input_ids": tokens, "labels": torch.randint(0, configuration.num_labels, (batch_size,))}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _longest(configuration: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(configuration, name, None)
        if isinstance(value, int):
            return value
    return None


def _pictures(configuration: Any, dtype: torch.dtype) -> BatchFunction:
    side = getattr(configuration, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else side
    channels = getattr(configuration, "num_channels", 3)

    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(batch_size, channels, height, width, dtype=dtype),
            "labels": torch.randint(0, configuration.num_labels, (batch_size,)),
        }

    return batch
