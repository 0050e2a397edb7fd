"""What a rank holds of the model and of its optimizer's state, layer by layer.

A parameter stays the same object for ever, so that optimizers, schedulers and the caller's own references live through
every change of shape: where its layer is not held, it is empty. The state of frozen parameters rests in host memory,
out of the optimizer's sight, until they train again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepfast.torch.elastic_pipeline.layers import Layer

State = dict[str, Any]  # an optimizer's of one parameter: tensors and numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A parameter or buffer of a layer, and what it looks like where the layer is held."""

    name: str  # in the model
    tensor: torch.Tensor
    shape: torch.Size


class Residence:
    """This rank's share of a model. All layers are held at first, wherever the caller put them.

    Raises:
        ValueError: the optimizer has parameters that are not the model's, or a state already.
    """

    def __init__(self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.layers = layers
        self.device = device
        self.held: frozenset[int] = frozenset(range(len(layers)))
        self._optimizer = optimizer
        self._tensors = [list(_tensors_of(layer)) for layer in layers]
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._trained = {id(parameter) for group in self._groups for parameter in group}
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._resting: dict[int, State] = {}  # by the parameter's identity
        known = {id(item.tensor) for items in self._tensors for item in items}
        if self._trained - known:
            raise ValueError("the optimizer has parameters that are not the model's")
        if optimizer.state:
            raise ValueError("the optimizer has a state already: give a new one, and restore it with the pipeline")

    # ------------------------------------------------------------ what there is

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's parameters and buffers by their names in the model; empty ones where it is not held."""
        return {item.name: item.tensor for item in self._tensors[layer]}

    def looks(self, layer: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of a layer's tensors where it is held."""
        return {item.name: (item.shape, item.tensor.dtype) for item in self._tensors[layer]}

    def buffers(self, layer: int) -> list[torch.Tensor]:
        """A layer's buffers."""
        return [item.tensor for item in self._tensors[layer] if not isinstance(item.tensor, nn.Parameter)]

    def trained(self, layer: int) -> dict[str, nn.Parameter]:
        """A layer's parameters that the optimizer has, frozen at the moment or not, by their names in the model."""
        return {
            item.name: item.tensor
            for item in self._tensors[layer]
            if isinstance(item.tensor, nn.Parameter) and id(item.tensor) in self._trained
        }

    def state(self, layer: int) -> dict[str, State]:
        """What this rank has of the optimizer's state of a layer, by the parameters' names; its own tensors."""
        found = {}
        for name, parameter in self.trained(layer).items():
            state = self._optimizer.state.get(parameter) or self._resting.get(id(parameter))
            if state:
                found[name] = state
        return found

    def state_tensors(self, layer: int) -> Iterator[torch.Tensor]:
        """The tensors of a layer's optimizer state, in order."""
        for state in self.state(layer).values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    # ------------------------------------------------------------ changes

    def hold(self, layers: Collection[int]) -> None:
        """Makes room for the layers that are not held yet, with no values in it, on this rank's device."""
        for layer in set(layers) - self.held:
            for item in self._tensors[layer]:
                item.tensor.data = torch.empty(item.shape, dtype=item.tensor.dtype, device=self.device)
        for layer in self.held.intersection(layers):
            for item in self._tensors[layer]:
                if item.tensor.device != self.device:
                    item.tensor.data = item.tensor.detach().to(self.device)
        self.held = self.held.union(layers)

    def release(self, layers: Collection[int]) -> None:
        """Lets the weights of all other layers go."""
        for layer in self.held.difference(layers):
            for item in self._tensors[layer]:
                item.tensor.grad = None
                item.tensor.data = torch.empty(0, dtype=item.tensor.dtype, device=self.device)
        self.held = self.held.intersection(layers)

    def put_state(self, layer: int, states: Mapping[str, State]) -> None:
        """Takes over the optimizer's state of a layer, in the place of what was there."""
        for name, parameter in self.trained(layer).items():
            self._optimizer.state.pop(parameter, None)
            self._resting.pop(id(parameter), None)
            if name in states:
                self._optimizer.state[parameter] = states[name]

    def train(self, active: Collection[int], frozen: int, *, keeps_frozen_state: bool) -> None:
        """From now on the optimizer has the `active` layers, all of them held; the first `frozen` rest.

        States of layers that are neither are dropped; those of frozen ones too, unless this rank keeps them.
        """
        wanted: set[int] = set()
        for layer in range(len(self.layers)):
            is_active = layer in active
            for parameter in self.trained(layer).values():
                parameter.requires_grad_(layer >= frozen)
                if is_active:
                    wanted.add(id(parameter))
                    self._wake(parameter)
                else:
                    parameter.grad = None
                    self._rest(parameter, is_kept=keeps_frozen_state and layer < frozen)
            self.layers[layer].module.train(layer >= frozen)
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in wanted]

    def _wake(self, parameter: nn.Parameter) -> None:
        state = self._resting.pop(id(parameter), None)
        if state is not None:
            self._optimizer.state[parameter] = state
        state = self._optimizer.state.get(parameter)
        if state is not None:
            group = self._group_of[id(parameter)]
            for key, value in state.items():
                # As torch's Optimizer.load_state_dict: steps are counted on the host, but by these.
                if isinstance(value, torch.Tensor) and (key != "step" or group.get("fused") or group.get("capturable")):
                    state[key] = value.to(self.device)

    def _rest(self, parameter: nn.Parameter, *, is_kept: bool) -> None:
        state = self._optimizer.state.pop(parameter, None) or self._resting.pop(id(parameter), None)
        if state is not None and is_kept:
            self._resting[id(parameter)] = {
                key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()
            }


def _tensors_of(layer: Layer) -> Iterator[_Tensor]:
    for own, tensor in (*layer.module.named_parameters(), *layer.module.named_buffers()):
        yield _Tensor(layer.names[own], tensor, tensor.shape)
