"""When layers are frozen: rules, which look at what training did since they were last asked. Pure but for their memory.

A rule is asked at the end of each epoch. It is the same on all ranks, which give it the same evidence: what it decides
needs no further word. Its `state_dict` is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEvidence:
    """What the gradients of an active layer looked like."""

    gradient_norm: float  # 2-norm over all parameters, root of the mean square over the steps since the last question
    signal: float | None = None  # Σm̂² / Σv̂ of Adam's moments over its parameters; None: the optimizer has none
    noise: float | None = None  # what `signal` is for gradients without any mean: (1 - β₁) / (1 + β₁)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known when a rule is asked."""

    epoch: int  # that has ended, from 0
    frozen: int  # layers, from the first
    active: tuple[LayerEvidence, ...]  # the others, in order
    metric: float | None = None  # of validation after this epoch: higher is better; None: nobody gave one

    @property
    def layers(self) -> int:
        return self.frozen + len(self.active)


class FreezingRule(Protocol):
    """How many layers, from the first, are frozen from now on; fewer than before unfreezes the others."""

    def frozen_layers(self, evidence: Evidence) -> int:
        """At least 0, and less than all layers: the last one trains always."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave."""


class _Stateless:
    """A rule that looks at the evidence alone."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class GradientNormRule(_Stateless):
    """PipeTransformer's own (ICML 2021, section 3.2): up to the layer whose gradient is smallest, at most α of the rest.

    L_T = min(L_{T-1} + α (L - L_{T-1}), argmin over ℓ ≥ L_{T-1} of ‖g_ℓ‖), layers counted from 0, and L_0 = 0.
    """

    def __init__(self, alpha: float = 1 / 3) -> None:
        self._alpha = checked_share(alpha)

    def frozen_layers(self, evidence: Evidence) -> int:
        norms = [layer.gradient_norm for layer in evidence.active]
        smallest = evidence.frozen + min(range(len(norms)), key=norms.__getitem__)
        return min(evidence.frozen + int(self._alpha * len(norms)), smallest)


class MomentRule(_Stateless):
    """Freezes the layers whose gradients have become noise by Adam's own moments, at most α of the rest at a time.

    A layer's signal Σm̂²/Σv̂ is (1 - β₁)/(1 + β₁), the variance of an exponential mean of independent draws, when its
    gradients have no mean, and 1 when they are always the same. Those from the first on that lie below `threshold`
    times that floor are frozen.
    """

    def __init__(self, alpha: float = 1 / 3, threshold: float = 1.3) -> None:
        self._alpha = checked_share(alpha)
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, not {threshold}")
        self._threshold = threshold

    def frozen_layers(self, evidence: Evidence) -> int:
        frozen = evidence.frozen
        most = min(frozen + int(self._alpha * len(evidence.active)), evidence.layers - 1)
        for layer in evidence.active:
            if layer.signal is None or layer.noise is None:
                raise ValueError("MomentRule needs an optimizer with Adam's moments (exp_avg, exp_avg_sq)")
            if frozen >= most or layer.signal >= self._threshold * layer.noise:
                break
            frozen += 1
        return frozen


def checked_share(alpha: float) -> float:
    """Raises ValueError."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is the share of the active layers to freeze at most: 0 < alpha <= 1, not {alpha}")
    return alpha
