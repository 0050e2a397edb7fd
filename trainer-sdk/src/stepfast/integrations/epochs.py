"""Where in its epoch a training stood, for loops that go on with `skip_first_batches`: the order of the data is drawn
again from the generators as they were when the epoch began, and these go on from where they were at the save when the
first batch is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepfast.torch.rng import get_rng_state, set_rng_state

_SEEDS = ("initial_seed", "epoch", "seed")  # of Accelerate's SeedableRandomSampler, of torch's DistributedSampler


class Epochs:
    """Of the dataloaders that Accelerate has prepared, by their order."""

    def __init__(self) -> None:
        self._began: dict[int, dict[str, Any]] = {}  # the generators at the beginning of a loader's epoch, by identity
        self._went_on: dict[int, int] = {}  # the iteration that a loader went on within, until it begins another
        self._handles: list[Any] = []

    def watch(self, loader: Any) -> None:
        """Notes the generators whenever the loader begins an epoch."""
        begin = getattr(loader, "begin", None)
        if begin is None:
            return

        def begin_noted() -> None:
            if self._is_epoch_over(loader):
                loader.iteration += 1
            self._went_on.pop(id(loader), None)
            self._began[id(loader)] = {"torch": torch.get_rng_state(), "sampler": _sampler_state(loader)}
            begin()

        loader.begin = begin_noted

    def state(self, loaders: Sequence[Any], active: Any) -> dict[str, Any]:
        """Where each of them stands; `active`: the one that is being iterated over, or what was made of it."""
        is_at_end = active is None or bool(active.end_of_dataloader)
        states, began = [], None
        for loader in loaders:
            is_active = active is not None and active.dataset is loader.dataset
            state: dict[str, Any] = {"iteration": getattr(loader, "iteration", 0), "is_active": is_active}
            state["sampler"] = _sampler_state(loader)
            if active is None and self._is_epoch_over(loader):
                state["iteration"] += 1
            elif is_active and is_at_end:
                state["iteration"] = getattr(active, "iteration", 0) + 1
            elif is_active and (noted := self._began.get(id(loader))) is not None:
                began, state["sampler"] = noted["torch"], noted["sampler"]
                state["iteration"] = getattr(active, "iteration", 0)
            states.append(state)
        return {"loaders": states, "began": began, "rng": get_rng_state()}

    def restore(self, state: dict[str, Any], loaders: Sequence[Any], models: Sequence[Any]) -> None:
        """Puts the loaders where they were. Within an epoch the generators are those of its beginning, until a model
        is trained for the first time.
        """
        self._forget()
        began = state["began"]
        for loader, own in zip(loaders, state["loaders"], strict=False):
            if hasattr(loader, "iteration"):
                loader.iteration = own["iteration"]
            _set_sampler_state(loader, own["sampler"])
            if began is not None and own.get("is_active", True):  # older states do not say which was
                self._began[id(loader)] = {"torch": began, "sampler": own["sampler"]}
                self._went_on[id(loader)] = own["iteration"]
        if began is None:
            return
        torch.set_rng_state(began.cpu())
        self._handles = [model.register_forward_pre_hook(self._going_on(state["rng"])) for model in models]

    def _is_epoch_over(self, loader: Any) -> bool:
        """Whether the epoch that the loader went on within is over: the rest of it was another loader's, made of this
        one, and nobody has told this one.
        """
        known = self._went_on.get(id(loader))
        return known is not None and known == getattr(loader, "iteration", None) and not self._handles

    def _going_on(self, rng: dict[str, Any]) -> Callable[..., None]:
        def go_on(model: Any, _: Any) -> None:
            if model.training:
                self._forget()
                set_rng_state(rng)

        return go_on

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _samplers(loader: Any) -> Iterator[Any]:
    """Those that the loader's order comes from: they lie in each other."""
    left = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    while left:
        sampler = left.pop()
        if sampler is not None:
            yield sampler
            left += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]


def _sampler_state(loader: Any) -> dict[str, Any]:
    """What the loader's order is drawn from, where it has something of its own."""
    state: dict[str, Any] = {}
    for sampler in _samplers(loader):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state()
        state |= {name: value for name in _SEEDS if type(value := getattr(sampler, name, None)) is int}
    return state


def _set_sampler_state(loader: Any, state: dict[str, Any]) -> None:
    for sampler in _samplers(loader):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and "generator" in state:
            generator.set_state(state["generator"].cpu())
        for name in _SEEDS:
            if name in state and hasattr(sampler, name):
                setattr(sampler, name, state[name])


__all__ = ["Epochs"]
