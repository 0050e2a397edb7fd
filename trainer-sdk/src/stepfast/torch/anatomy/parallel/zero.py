"""ZeRO on one rank: DeepSpeed's own engine, which runs on fake tensors with a few doors held open.

What it would ask of the machine or of other ranks at its start (an operator to compile for shared memory, whether all
ranks have the same modules) has no answer in an imagined world, and no part in its memory.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from stepfast.errors import AnatomyError
from stepfast.torch.anatomy.batches import tensors_in
from stepfast.torch.anatomy.replacing import environment, replaced
from stepfast.torch.anatomy.timeline import Component
from stepfast.torch.anatomy.training import Holding

_RANK = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu"}

Label = Callable[[Component, Iterable[torch.Tensor]], None]


class ZeroTrainee:
    """A DeepSpeed engine: it has its own ways to go backward, to step and to keep gradients."""

    def __init__(self, engine: Any, label: Label) -> None:
        self.module: nn.Module = engine
        self._engine = engine
        zero = engine.optimizer
        if hasattr(zero, "setup_buckets"):  # stages 1 and 2 make them in each backward pass, and let them go with it
            setup = zero.setup_buckets

            def labelled() -> None:
                setup()
                label(Component.COMMUNICATION, _buckets(zero))

            zero.setup_buckets = labelled

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # it counts the batches that make a step

    def update(self) -> None:
        self._engine.step()

    def release(self) -> None:
        """The engine's step has done so."""

    def holdings(self) -> Iterator[Holding]:
        zero = self._engine.optimizer
        inner = getattr(zero, "optimizer", zero)
        masters = [
            *(getattr(zero, "single_partition_of_fp32_groups", None) or ()),
            *(getattr(zero, "fp32_partitioned_groups_flat", None) or ()),
        ]
        yield Holding(Component.WEIGHTS, self._weights())
        yield Holding(Component.WEIGHTS, getattr(zero, "bit16_groups_flat", None) or ())
        yield Holding(Component.BUFFERS, self._engine.module.buffers())
        # ZeRO's paper counts the weights in fp32 that the optimizer works on among its states.
        yield Holding(Component.OPTIMIZER, masters)
        yield Holding(Component.OPTIMIZER, (each for state in inner.state.values() for each in tensors_in(state)))
        yield Holding(Component.GRADIENTS, self._gradients(zero, masters))
        yield Holding(Component.COMMUNICATION, _buckets(zero))

    def _weights(self) -> Iterator[torch.Tensor]:
        for parameter in self._engine.module.parameters():
            yield parameter
            shard = getattr(parameter, "ds_tensor", None)  # stage 3: this rank's part
            if shard is not None:
                yield shard

    def _gradients(self, zero: Any, masters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from (each.grad for each in masters if each.grad is not None)
        yield from (each.grad for each in self._engine.module.parameters() if each.grad is not None)
        for name in ("averaged_gradients", "grad_partitions_flat_buffer"):
            yield from tensors_in(getattr(zero, name, None))


def _buckets(zero: Any) -> list[torch.Tensor]:
    """What gradients wait in until they are reduced."""
    return [each for bucket in getattr(zero, "ipg_buckets", {}).values() for each in tensors_in(bucket.buffer)]


@contextmanager
def deepspeed_at_home() -> Iterator[Any]:
    """DeepSpeed, imported, in an imagined world. Raises AnatomyError where it is not installed."""
    if find_spec("deepspeed") is None:
        raise AnatomyError("ZeRO's prediction runs DeepSpeed's own engine: pip install deepspeed")
    is_new, log = "deepspeed" not in sys.modules, logging.getLogger("DeepSpeed")
    level = log.level
    with environment(_RANK), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = import_module("deepspeed")
        backend = import_module("deepspeed.comm.torch")
        coordinator = import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        agreement = import_module("deepspeed.runtime.zero.utils")
        accelerator: Any = import_module("deepspeed.accelerator.real_accelerator")
    if is_new:
        accelerator.ds_accelerator = None  # who imports it next chooses by the machine
    try:
        log.setLevel(logging.WARNING)
        with (
            environment(_RANK),
            replaced(accelerator, "ds_accelerator", None),
            replaced(backend, "build_shm_op", lambda: None),
            replaced(coordinator, "assert_ints_same_as_other_ranks", lambda ints: None),
            replaced(agreement, "assert_ints_same_as_other_ranks", lambda ints: None),
            # Stage 3 puts a function of its own in its place, and leaves it there.
            replaced(nn.functional, "linear", nn.functional.linear),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield deepspeed
    finally:
        log.setLevel(level)
        _forget_world()


def zero_trainee(
    deepspeed: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    configuration: Mapping[str, Any],
    label: Label,
) -> ZeroTrainee:
    """The model in an engine with this configuration."""
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **configuration},
        dist_init_required=False,
    )
    return ZeroTrainee(engine, label)


def _forget_world() -> None:
    """DeepSpeed keeps the world that it saw, and groups of it."""
    deepspeed = import_module("deepspeed")
    if deepspeed.comm.comm.cdb is not None:
        deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None
