"""Lightning's strategies, with every rank's share of each checkpoint in the job's steps."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepfast.integrations.lightningio import StepfastCheckpointIO, marks_of, rng_of, step_of
from stepfast.integrations.lightningnames import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from stepfast.integrations.pointers import has_pointer
from stepfast.torch.dcp import StepfastStorageReader, StepfastStorageWriter
from stepfast.torch.rng import get_rng_state

_MODEL, _OPTIMIZERS, _TRAINER = "model", "optimizers", "trainer"


class StepfastDDPStrategy(DDPStrategy):
    """DDP that saves each rank's random generators with rank 0's checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("checkpoint_io", StepfastCheckpointIO(every_rank=True))
        super().__init__(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


class _Sharded:
    """Before a strategy that divides the model over the ranks: each saves its shards, by torch.distributed.checkpoint;
    any number of ranks loads them.
    """

    checkpoint_io: StepfastCheckpointIO

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """The shards where they are: they are staged from there."""
        return get_model_state_dict(self.model)

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        """By the names of the model's parameters."""
        return get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """On every rank; returns when the rank's shards are in memory."""
        self.checkpoint_io.check_options(storage_options)
        tag = self.checkpoint_io.tag_of(self.broadcast(filepath))
        rest = {name: item for name, item in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        state = {
            _MODEL: checkpoint["state_dict"],
            _OPTIMIZERS: _by_number(checkpoint.get("optimizer_states", ())),
            _TRAINER: _packed(rest),
            rng_of(self.global_rank): _packed(get_rng_state()),
        }
        writer = StepfastStorageWriter(
            self.checkpoint_io.checkpoints, step=step_of(checkpoint), marks=marks_of(checkpoint)
        )
        save(state, checkpoint_id=tag, storage_writer=writer)
        self.checkpoint_io.saved_at(filepath, writer.saved, tag)

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What was saved at that path, into the model and, for fitting, into the optimizers; what Lightning itself goes
        on with is returned. A checkpoint of Lightning's own is read as such. Raises FileNotFoundError.
        """
        path = self.broadcast(checkpoint_path)
        if os.path.exists(path) and not has_pointer(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return loaded
        reader = StepfastStorageReader(
            self.checkpoint_io.checkpoints, step=self.checkpoint_io.find(path).step, weights_only=weights_only
        )
        own_rng = rng_of(self.global_rank)
        state: dict[str, Any] = {_MODEL: get_model_state_dict(self.model), _TRAINER: b""}
        if self.lightning_module.trainer.training:
            state[_OPTIMIZERS] = _by_number(self.optimizer_state(optimizer) for optimizer in self.optimizers)
        if own_rng in reader.read_metadata().state_dict_metadata:
            state[own_rng] = b""
        load(state, storage_reader=reader)
        options = StateDictOptions(strict=self.lightning_module.strict_loading)
        set_model_state_dict(self.model, state[_MODEL], options=options)
        for number, optimizer in enumerate(self.optimizers if _OPTIMIZERS in state else ()):
            set_optimizer_state_dict(self.model, optimizer, state[_OPTIMIZERS][str(number)])
        checkpoint: dict[str, Any] = _unpacked(state[_TRAINER], weights_only=bool(weights_only))
        rng = _unpacked(state[own_rng], weights_only=True) if own_rng in state else None
        self.checkpoint_io.loaded(checkpoint, rng)
        return checkpoint


class StepfastModelParallelStrategy(_Sharded, ModelParallelStrategy):
    """FSDP2 and tensor parallel, as the model's `configure_model` says. Arguments: Lightning's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_io = StepfastCheckpointIO(every_rank=True)


class StepfastFSDPStrategy(_Sharded, FSDPStrategy):
    """FSDP (torch's first one), saved by its shards. Arguments: Lightning's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"state_dict_type": "sharded", **kwargs})
        self.checkpoint_io = StepfastCheckpointIO(every_rank=True)


def _by_number(states: Any) -> dict[str, Any]:
    return {str(number): state for number, state in enumerate(states)}


def _packed(item: Any) -> bytes:
    """As one piece: torch.distributed.checkpoint would take a nest apart."""
    file = io.BytesIO()
    torch.save(item, file)
    return file.getvalue()


def _unpacked(content: bytes, *, weights_only: bool) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)


__all__ = ["StepfastDDPStrategy", "StepfastFSDPStrategy", "StepfastModelParallelStrategy"]
