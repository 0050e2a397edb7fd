"""The installed DeepSpeed in a process of its own, which answers questions: one line of JSON each.

A process, because importing DeepSpeed changes the logging and torch of the one that it is imported into.
`{"take": configuration, "world": n}`: whether it takes that. `{"describe": true}`: the keys that it reads.
"""

# ruff: noqa: E402 - what DeepSpeed writes while it is imported must not get among the answers

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed writes to standard output, too

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import config, lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig, "timers.throughput": DeepSpeedThroughputTimerConfig,
    "hybrid_engine": config.HybridEngineConfig, "compile": CompileConfig, "weight_quantization": WeightQuantConfig,
    "tensor_parallel": TPTrainingConfig, "": DeepSpeedMonitorConfig,
}  # fmt: skip
# Blocks that no model reads, with what makes DeepSpeed look at all of their keys.
PLAIN: dict[str, Any] = {
    "torch_autocast": {"dtype": "fp16", "lower_precision_safe_modules": []}, "data_types": {},
    "activation_checkpointing": {}, "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}}, "checkpoint": {"writer": {}, "parallel_write": {}}, "aio": {},
    "flops_profiler": {}, "timers": {"throughput": {}}, "train_batch_size": 4,
}  # fmt: skip


class Warnings(logging.Handler):
    """What DeepSpeed warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Names:
    """What `keys()` of a Recording gives: asking whether a key is among them is asking for the key."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __contains__(self, key: object) -> bool:
        return key in self.recording

    def __iter__(self) -> Iterator[Any]:
        return iter(self.recording)


class Recording(dict[str, Any]):
    """A block that notes which keys it is asked for."""

    asked: set[str]

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return Names(self)


def recorded(values: dict[str, Any], path: str, found: dict[str, Recording]) -> Recording:
    inner = {
        key: recorded(value, f"{path}.{key}".lstrip("."), found) if isinstance(value, dict) else value
        for key, value in values.items()
    }
    recording = Recording(inner)
    recording.asked = set()
    found[path] = recording
    return recording


def described_model(model: type[DeepSpeedConfigModel], path: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    names, old = set(), set()
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        is_old = isinstance(extra, dict) and bool(extra.get("deprecated"))
        spelled = {name, field.alias} - {None}
        (old if is_old else names).update(spelled)
        for inner in models_in(field.annotation):
            for spelling in spelled:
                yield from described_model(inner, f"{path}.{spelling}".lstrip("."))
    yield path, {"names": sorted(names), "old": sorted(old)}


def models_in(annotation: Any) -> list[type[DeepSpeedConfigModel]]:
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return [model for part in typing.get_args(annotation) for model in models_in(part)]
    is_model = isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel)
    return [annotation] if is_model else []


def classes_of(module: types.ModuleType, base: type) -> list[str]:
    return sorted(name for name, value in vars(module).items() if is_public_class(name, value, base))


def is_public_class(name: str, value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")


def described() -> dict[str, Any]:
    found: dict[str, Recording] = {}
    pretend(1)
    config.DeepSpeedConfig(recorded(PLAIN, "", found))
    return {
        "release": deepspeed.__version__,
        "models": dict(row for path, model in MODELS.items() for row in described_model(model, path)),
        "plain": {path: sorted(recording.asked) for path, recording in found.items()},
        "initialize": inspect.getsource(deepspeed.initialize),
        "removed": [
            *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
            *(f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS),
        ],
        "optimizers": config.DEEPSPEED_OPTIMIZERS,
        "torch_optimizers": classes_of(torch.optim, torch.optim.Optimizer),
        "schedulers": {
            name: [parameter.name for parameter in inspect.signature(getattr(lr_schedules, name)).parameters.values()]
            for name in lr_schedules.VALID_LR_SCHEDULES
        },
        "torch_schedulers": classes_of(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
    }


def pretend(world_size: int) -> None:
    """There are no other ranks; the configuration only asks how many there would be."""
    config.dist.get_rank, config.dist.get_world_size = lambda: 0, lambda *_: world_size


def taken(question: dict[str, Any], warnings: Warnings) -> dict[str, Any]:
    pretend(question["world"])
    warnings.said.clear()
    try:
        use(config.DeepSpeedConfig(question["take"]))
    except Exception as error:  # noqa: BLE001 - DeepSpeed refuses by whatever its code runs into
        return {"error": f"{type(error).__name__}: {error}", "warnings": []}
    return {"error": None, "warnings": list(warnings.said)}


def use(taken: Any) -> None:
    """What an engine does with an optimizer and a schedule before it has a model."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    name = taken.optimizer_name
    if name is not None:
        assert name in config.DEEPSPEED_OPTIMIZERS or inspect.isclass(getattr(torch.optim, name, None)), name
        assert "max_grad_norm" not in (taken.optimizer_params or {}), "max_grad_norm is no parameter"
    name = taken.scheduler_name
    if name is not None:
        module = lr_schedules if hasattr(lr_schedules, name) else torch.optim.lr_scheduler
        getattr(module, name)(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **taken.scheduler_params)


def main() -> None:
    warnings = Warnings()
    logger.handlers = [warnings]
    for line in sys.stdin:
        question = json.loads(line)
        answer = described() if "describe" in question else taken(question, warnings)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


main()
