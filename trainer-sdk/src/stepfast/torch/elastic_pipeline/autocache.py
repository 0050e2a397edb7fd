"""Whether, and from where, a rank takes what the frozen layers give: computed, or from the cache.

Whether it pays is measured once for each number of frozen layers, and part of the checkpoint. Samples that are random
(augmentation), and frozen layers that draw random numbers, are never cached.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

import torch

from stepfast.lentfile import MAX_LENT_BYTES
from stepfast.torch.elastic_pipeline.cache import RECORD_BYTES, ActivationCache, Memory, Prefix, SamplesAreRandom
from stepfast.torch.elastic_pipeline.groups import Messages
from stepfast.torch.elastic_pipeline.layers import Layer
from stepfast.torch.elastic_pipeline.samples import Samples, fingerprint
from stepfast.torch.elastic_pipeline.timing import best_seconds
from stepfast.torch.elastic_pipeline.values import Value, leaves, mapped
from stepfast.torch.rng import rng_state_kept

log = logging.getLogger("stepfast")

_GENERATION_BITS = 62  # a record has eight bytes for it, and so have others' integers

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
        self._is_refuted = False  # a sample was another one than in its page
        self.covers: Mapping[int, int] = {}
        """What was decided, by the number of frozen layers: how many samples the cache is used for; 0: none."""

    def freeze(self, frozen: int) -> None:
        """So many layers are frozen from now on; every rank calls it alike. What is cached is extended, or void."""
        # Drawn, since other pipelines may have used the memory, and count from one as well.
        self._generation = self._messages.from_first(secrets.randbits(_GENERATION_BITS) + 1)
        if frozen < self._cached_layers:
            self._cached_layers = 0  # those between train again: what was cached will not be what they give
        self._frozen, self._is_begun = frozen, frozen == 0

    def restore(self, covers: Mapping[int, int]) -> None:
        """Takes up what was decided; the layers have other weights from now on."""
        self.covers, self._cached_layers = covers, 0

    def is_used(self, numbers: Sequence[int], inputs: Value | None, *, is_first: bool) -> bool:
        """Whether first devices are given activations in this step; every rank asks alike, ahead of each step.

        numbers, inputs: this rank's samples, if it is a first device and has any in this batch. Decided with the first
        step after a change.
        """
        if not self._is_begun:
            self._is_begun = True
            covered = 0
            if self.covers.get(self._frozen, self._policy is not False) and not self._samples.is_random:
                self._begin(is_first=is_first)
                covered = self._decide(numbers, inputs, is_first=is_first)
            if covered < self.covers.get(self._frozen, 0):
                log.warning(
                    "stepfast: there is room for the activations of %s samples, where there was for %s: results may "
                    "differ in their last bits", covered, self.covers[self._frozen],
                )  # fmt: skip
            self.covers = {**self.covers, self._frozen: covered}
        return self._frozen > 0 and self.covers[self._frozen] > 0

    def activations(self, numbers: Sequence[int], inputs: Value) -> Value:
        """What the frozen layers give of these samples, on the host.

        Raises RuntimeError where a sample turns out to be random, and the cache was asked for all the same.
        """
        assert self._cache is not None
        if self._is_refuted:
            return self._run(0, self._frozen)(inputs)
        try:
            return self._cache.lookup(numbers, inputs)
        except SamplesAreRandom as error:
            if not self._policy:
                self._is_refuted = True  # no other rank has to know before the next decision: it is given the same
                log.warning("stepfast: %s (or is padded to its batch): frozen layers are computed from now on", error)
                return self._run(0, self._frozen)(inputs)
            raise RuntimeError(
                f"{error}, by other means than the process' random generators: give cache=False, or draw from those"
            ) from error

    # ------------------------------------------------------------ decisions

    def _begin(self, *, is_first: bool) -> None:
        """Memory for all samples, as far as there is any; and a new generation where this is a first device."""
        if not self._has_asked:
            self._has_asked = True
            row_bytes = float(self._row_bytes()) if is_first else 0.0
            wanted = int(self._messages.largest([row_bytes])[0]) * self._samples.size
            self._memory = self._ask_for_memory(min(wanted, MAX_LENT_BYTES)) if wanted else None
        if not is_first or self._memory is None:
            return
        if self._cache is None:
            self._cache = ActivationCache(self._memory, self._samples.size)
        known = self._cached_layers
        self._cache.begin(
            self._generation, self._run(0, self._frozen), self._samples.inputs,
            extend=self._run(known, self._frozen) if 0 < known < self._frozen else None,
        )  # fmt: skip
        self._cached_layers = self._frozen

    def _decide(self, numbers: Sequence[int], inputs: Value | None, *, is_first: bool) -> int:
        """How many samples the cache is used for: as many as every node has room for, or none."""
        computing = reading = obstacle = 0.0
        room, cache = self.covers.get(self._frozen, self._samples.size), self._cache
        if is_first:
            is_void = cache is None or not cache.covered or self._is_refuted
            if is_void or (inputs is not None and self._draws(inputs)):
                obstacle = 1.0
            elif inputs is not None and self._policy is None and self._frozen not in self.covers:
                assert cache is not None  # else it is void
                frozen = self._run(0, self._frozen)
                computing = best_seconds(lambda: frozen(inputs))
                read = cache.numbers_for_timing(len(numbers))
                asked = self._samples.inputs(read)
                reading = best_seconds(lambda: self._look_up(cache, read, asked))
                obstacle = float(self._is_refuted)
            room = min(room, cache.covered if cache is not None else 0)
        computing, reading, obstacle, negated = self._messages.largest([computing, reading, obstacle, float(-room)])
        pays = self._frozen in self.covers or self._policy is True or reading < computing
        covered = int(-negated) if pays and not obstacle else 0
        if cache is not None:
            cache.cover(covered)
        return covered

    def _look_up(self, cache: ActivationCache, numbers: Sequence[int], inputs: Value) -> None:
        """As a step does, to the device."""
        try:
            mapped(cache.lookup(numbers, inputs), lambda tensor: tensor.to(self._device))
        except SamplesAreRandom:
            self._is_refuted = True

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
