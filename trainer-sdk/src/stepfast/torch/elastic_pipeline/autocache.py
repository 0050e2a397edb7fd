"""Whether, and from where, a rank takes what the frozen layers give: computed, or from the cache.

Whether it pays is measured once for each number of frozen layers, and part of the checkpoint. Samples that are random
(augmentation), and frozen layers that draw random numbers, are never cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from stepfast.torch.elastic_pipeline.cache import RECORD_BYTES, ActivationCache, Memory, Prefix, SamplesAreRandom
from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.layers import Layer
from stepfast.torch.elastic_pipeline.samples import Samples, fingerprint
from stepfast.torch.elastic_pipeline.values import Value, leaves, mapped
from stepfast.torch.rng import rng_state_kept

_ROUNDS = 2  # that are timed; the better one counts

Ask = Callable[[int], Memory | None]  # bytes that are wanted → memory of the node, maybe less; None: there is none


class AutoCache:
    """One rank's use of the cache.

    policy: True and False: whatever it gives; None: where it pays. memory: asked once, by every rank alike.
    """

    def __init__(
        self, layers: Sequence[Layer], samples: Samples, messages: Messages, *, policy: bool | None, memory: Ask,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._layers, self._samples, self._messages, self._device = layers, samples, messages, device
        self._policy, self._ask_for_memory = policy, memory
        self._memory: Memory | None = None
        self._has_asked = False
        self._cache: ActivationCache | None = None
        self._cached_layers = 0  # of which the cache's rows are, when it was begun last
        self._generation = 0
        self._frozen = 0
        self._is_begun = True
        self.pays: Mapping[int, bool] = {}
        """What was decided, by the number of frozen layers."""

    def freeze(self, frozen: int) -> None:
        """So many layers are frozen from now on; every rank calls it alike. What is cached is extended, or void."""
        self._generation += 1
        self._frozen, self._is_begun = frozen, frozen == 0

    def is_used(self, numbers: Sequence[int], inputs: Value | None) -> bool:
        """Whether first devices are given activations in this step; every rank asks alike, ahead of each step.

        numbers, inputs: this rank's samples, if it is a first device. Decided with the first step after a change.
        """
        if not self._is_begun:
            self._is_begun = True
            if self.pays.get(self._frozen, self._policy is not False) and not self._samples.is_random:
                self._begin(inputs)
                self.pays = {**self.pays, self._frozen: self._decide(numbers, inputs)}
            else:
                self.pays = {**self.pays, self._frozen: False}
        return self._frozen > 0 and self.pays[self._frozen]

    def activations(self, numbers: Sequence[int], inputs: Value) -> Value:
        """What the frozen layers give of these samples, on the host.

        Raises RuntimeError where a sample turns out to be random.
        """
        assert self._cache is not None
        try:
            return self._cache.lookup(numbers, inputs)
        except SamplesAreRandom as error:
            raise RuntimeError(
                f"{error}, by other means than the process' random generators: give cache=False, or draw from those"
            ) from error

    # ------------------------------------------------------------ decisions

    def _begin(self, inputs: Value | None) -> None:
        """Memory for all samples, as far as there is any; and a new generation where this is a first device."""
        if not self._has_asked:
            self._has_asked = True
            row_bytes = 0.0 if inputs is None else float(self._row_bytes())
            wanted = int(self._messages.largest([row_bytes])[0]) * self._samples.size
            self._memory = self._ask_for_memory(wanted) if wanted else None
        if inputs is None or self._memory is None:
            return
        if self._cache is None:
            self._cache = ActivationCache(self._memory, self._samples.size)
        known = self._cached_layers
        self._cache.begin(
            self._generation, self._run(0, self._frozen), self._samples.inputs,
            extend=self._run(known, self._frozen) if 0 < known < self._frozen else None,
        )  # fmt: skip
        self._cached_layers = self._frozen

    def _decide(self, numbers: Sequence[int], inputs: Value | None) -> bool:
        computing = reading = obstacle = 0.0
        if inputs is not None:
            if self._cache is None or not self._cache.covered or self._draws(inputs):
                obstacle = 1.0
            elif self._policy is None and self._frozen not in self.pays:
                cache, frozen = self._cache, self._run(0, self._frozen)
                computing = _seconds(lambda: frozen(inputs))
                reading = _seconds(lambda: cache.read_for_timing(numbers, inputs))
        computing, reading, obstacle = self._messages.largest([computing, reading, obstacle])
        if obstacle:
            return False
        return self.pays.get(self._frozen, self._policy is True or reading < computing)

    def _run(self, begin: int, end: int) -> Prefix:
        modules = [layer.module for layer in self._layers[begin:end]]

        @torch.no_grad()
        def run(value: Value) -> Value:
            value = mapped(value, lambda tensor: tensor.to(self._device))
            for module in modules:
                value = module(value)
            return value

        return run

    def _row_bytes(self) -> int:
        """Of a sample's activation, with its record."""
        given = self._run(0, self._frozen)(self._samples.inputs([0]))
        return RECORD_BYTES + sum(tensor[0].nbytes for tensor in leaves(given))

    def _draws(self, inputs: Value) -> bool:
        """Whether the frozen layers draw random numbers: what they give is not to be kept then."""
        with rng_state_kept():
            before = fingerprint()
            self._run(0, self._frozen)(inputs)
            return fingerprint() != before


def _seconds(work: Callable[[], object]) -> float:
    """Of the best of some rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
