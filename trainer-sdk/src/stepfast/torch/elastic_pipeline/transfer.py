"""Layers on their way between ranks: weights, buffers and the optimizer's state, as `moves` says.

Tensors travel over the gang's own group, on whose devices they lie; what they look like, and the numbers among the
state, over the static message group before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.residence import Residence, State
from stepfast.torch.elastic_pipeline.shape import Move, Shape, moves


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What is saved of a layer: parameters and buffers, and the optimizer's state of each, by names in the model."""

    tensors: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looks:
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


def reshape(residence: Residence, before: Shape, after: Shape, *, rank: int, messages: Messages) -> None:
    """Moves what the new shape holds elsewhere; every rank of the gang calls it alike."""
    residence.hold(after.held_by(rank))
    weights = moves(before, before.held_by, after, after.held_by)
    states = moves(before, before.optimized_by, after, after.optimized_by)
    _take(residence, after, weights, states, rank=rank, messages=messages)


def spread(residence: Residence, after: Shape, *, rank: int) -> None:
    """Gives all ranks rank 0's weights, and leaves each with those of its layers; every rank calls it alike."""
    for layer in range(after.layers):
        is_held = layer in after.held_by(rank)
        residence.hold({layer})
        for tensor in residence.tensors(layer).values():
            dist.broadcast(tensor.data, src=0)
        if not is_held:
            residence.release(residence.held - {layer})
    residence.train(after.active_of(rank), after.frozen, keeps_frozen_state=rank == 0)


def gather_layers(
    residence: Residence, given: Mapping[int, LayerState], shape: Shape, *, rank: int, messages: Messages
) -> None:
    """Takes that shape with weights and states of which each rank was given some layers'; every rank calls it alike.

    Raises ValueError, on all ranks, where nobody was given a layer, or one that is not the model's.
    """
    said = messages.all((sorted(given), _misfit(residence, given)))
    problems = [text for _, text in said if text]
    missing = sorted(set(range(shape.layers)).difference(*(layers for layers, _ in said)))
    if missing:
        problems.append(f"nobody has layers {missing} of {shape.layers}")
    if problems:
        raise ValueError(problems[0])
    has = [frozenset(layers) for layers, _ in said]
    residence.hold({*given, *shape.held_by(rank)})
    for layer, item in given.items():
        for name, tensor in residence.tensors(layer).items():
            tensor.data.copy_(item.tensors[name])
        residence.put_state(layer, {name: dict(state) for name, state in item.states.items()})
    weights = moves(shape, has.__getitem__, shape, shape.held_by)
    states = moves(shape, has.__getitem__, shape, shape.optimized_by)
    _take(residence, shape, weights, states, rank=rank, messages=messages)


def collect_weights(residence: Residence, shape: Shape, *, rank: int) -> dict[str, torch.Tensor]:
    """All layers' parameters and buffers by name, in host memory, on rank 0; nothing elsewhere. Every rank calls it."""
    found: dict[str, torch.Tensor] = {}
    for layer in range(shape.layers):
        owner = shape.ranks_of_replica(0)[shape.device_of(layer)]
        is_mine = rank == owner
        for name, (size, dtype) in residence.looks(layer).items():
            tensor = residence.tensors(layer)[name].data if is_mine else None
            if owner != 0 and tensor is not None:
                dist.send(tensor.contiguous(), dst=0)
            elif owner != 0 and rank == 0:
                tensor = torch.empty(size, dtype=dtype, device=residence.device)
                dist.recv(tensor, src=owner)
            if rank == 0 and tensor is not None:
                found[name] = tensor.detach().to("cpu", copy=True)
    return found


def _misfit(residence: Residence, given: Mapping[int, LayerState]) -> str:
    for layer, item in given.items():
        if not 0 <= layer < len(residence.layers):
            return f"there is no layer {layer}: the model has {len(residence.layers)}"
        known = residence.looks(layer)
        for name, (shape, dtype) in known.items():
            tensor = item.tensors.get(name)
            if tensor is None or (tensor.shape, tensor.dtype) != (shape, dtype):
                found = "nothing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
                return f"{name} is {tuple(shape)} of {dtype}, and {found} was saved"
        if extra := sorted(item.tensors.keys() - known.keys()):
            return f"{extra[0]} was saved, which layer {layer} does not have"
    return ""


def _take(
    residence: Residence, shape: Shape, weights: Sequence[Move], states: Sequence[Move], *, rank: int,
    messages: Messages,
) -> None:  # fmt: skip
    """Carries out the moves, and leaves the rank with what the shape gives it; room for the weights is there."""
    _move_weights(residence, weights, rank)
    arrived = _move_states(residence, states, rank, messages)
    residence.release(shape.held_by(rank))
    for layer, state in arrived.items():
        residence.put_state(layer, state)
    residence.train(shape.active_of(rank), shape.frozen, keeps_frozen_state=rank == 0)


def _move_weights(residence: Residence, travels: Sequence[Move], rank: int) -> None:
    with _Post(rank) as post:
        for move in travels:
            if rank in (move.source, move.target):
                for tensor in residence.tensors(move.layer).values():
                    post.carry(tensor.data, move)


def _move_states(
    residence: Residence, travels: Sequence[Move], rank: int, messages: Messages
) -> dict[int, dict[str, State]]:
    """What arrived here, by layer."""
    sent = {move.layer for move in travels if move.source == rank}
    said = messages.all({layer: _described(residence.state(layer)) for layer in sent})
    arrived: dict[int, dict[str, State]] = {}
    returning = []  # tensors that live on the host but travelled on the device
    with _Post(rank) as post:
        for move in travels:
            if rank == move.source:
                for tensor in residence.state_tensors(move.layer):
                    post.carry(tensor.to(residence.device), move)
            elif rank == move.target:
                layer = arrived[move.layer] = said[move.source][move.layer]
                for state in layer.values():
                    for key, looks in state.items():
                        if isinstance(looks, _Looks):
                            state[key] = torch.empty(looks.shape, dtype=looks.dtype, device=residence.device)
                            post.carry(state[key], move)
                            if looks.is_on_host:
                                returning.append((state, key))
    for state, key in returning:
        state[key] = state[key].cpu()
    return arrived


def _described(states: dict[str, State]) -> dict[str, State]:
    return {
        name: {
            key: _Looks(shape=tuple(value.shape), dtype=value.dtype, is_on_host=value.is_cpu)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in state.items()
        }
        for name, state in states.items()
    }


class _Post:
    """Tensors between this rank and others; all have arrived when it ends."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._operations: list[dist.P2POp] = []
        self._unpacking: list[tuple[torch.Tensor, torch.Tensor]] = []  # what arrived in order, and where it goes

    def carry(self, tensor: torch.Tensor, move: Move) -> None:
        if not tensor.numel():
            return
        if move.source == self._rank:
            self._operations.append(dist.P2POp(dist.isend, tensor.contiguous(), move.target))
            return
        if not tensor.is_contiguous():
            self._unpacking.append((torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor))
            tensor = self._unpacking[-1][0]
        self._operations.append(dist.P2POp(dist.irecv, tensor, move.source))

    def __enter__(self) -> _Post:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None and self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
            for arrived, tensor in self._unpacking:
                tensor.copy_(arrived)
