"""When layers are frozen: rules, which look at what training did since they were last asked. Pure but for their memory.

A rule is asked at the end of each epoch. It is the same on all ranks, which give it the same evidence: what it decides
needs no further word. Its `state_dict` is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

    def first_frozen(self, layers: int) -> int:
        """How many of so many layers are frozen before the first step."""

    def frozen_layers(self, evidence: Evidence) -> int:
        """At least 0, and less than all layers: the last one trains always."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave."""


class _Stateless:
    """A rule that looks at the evidence alone, and begins with all layers."""

    def first_frozen(self, layers: int) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class GradientNormRule(_Stateless):
    """PipeTransformer's own (ICML 2021, section 3.2): up to the layer of the smallest gradient, at most α of the rest.

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


class GradualUnfreezing(_Stateless):
    """Begins with the first layers frozen, as they were trained before, and lets them go from the last to the first.

    What was learned before is not washed out by the noise of a new head, and the epochs in which few layers train are
    cheap. After ULMFiT (Howard and Ruder, ACL 2018, section 3.3), several layers at a time.

    share: of the layers that are frozen at first. epochs: after so many all layers train. then: asked from there on.
    """

    def __init__(self, share: float = 0.75, epochs: int = 5, *, then: FreezingRule | None = None) -> None:
        self._share = checked_share(share, "share")
        if epochs < 1:
            raise ValueError(f"epochs is at least 1, not {epochs}")
        self._epochs, self._then = epochs, then

    def first_frozen(self, layers: int) -> int:
        return min(int(self._share * layers), layers - 1)

    def frozen_layers(self, evidence: Evidence) -> int:
        left = self._epochs - (evidence.epoch + 1)
        if left > 0:
            return self.first_frozen(evidence.layers) * left // self._epochs
        if self._then is not None and left < 0:
            return self._then.frozen_layers(evidence)
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"then": self._then.state_dict() if self._then is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._then is not None and state["then"] is not None:
            self._then.load_state_dict(state["then"])


class LateFreezing:
    """Freezes the first layers when most of the training is over; all train again for good where the metric falls.

    The first layers settle first, and late steps move them little where the learning rate decays (as FreezeOut has it:
    Brock et al., 2017). When `begin` of the epochs are over, `share` of the layers are frozen, and the same share of
    those that still train each time that half of what was left is over.

    epochs: of the training. tolerance: by how much the metric may lie below its best from before, so many questions one
    after the other (`patience`) at most; where no metric is given, nothing thaws.
    """

    def __init__(
        self, epochs: int, *, begin: float = 0.7, share: float = 2 / 3, tolerance: float = 0.02, patience: int = 2
    ) -> None:
        if epochs < 1 or patience < 1:
            raise ValueError(f"epochs and patience are at least 1, not {epochs} and {patience}")
        if not 0 <= begin < 1 or tolerance < 0:
            raise ValueError(f"0 <= begin < 1, and tolerance is at least 0: not {begin} and {tolerance}")
        self._epochs, self._begin, self._share = epochs, begin, checked_share(share, "share")
        self._tolerance, self._patience = tolerance, patience
        self._best: float | None = None  # while all layers trained; where some never did, the first
        self._below = 0  # questions one after the other
        self._has_thawed = False

    def first_frozen(self, layers: int) -> int:
        return self._due(0, layers)

    def frozen_layers(self, evidence: Evidence) -> int:
        metric = evidence.metric
        if metric is not None and (self._best is None or not evidence.frozen):
            if not math.isnan(metric):
                self._best = metric if self._best is None else max(self._best, metric)
        elif metric is not None and self._best is not None:
            self._below = 0 if metric >= self._best - self._tolerance else self._below + 1
            self._has_thawed |= self._below >= self._patience
        return 0 if self._has_thawed else self._due(evidence.epoch + 1, evidence.layers)

    def _due(self, epochs: int, layers: int) -> int:
        """How many layers are frozen when so many epochs are over."""
        frozen, share_over = 0, self._begin
        while epochs >= share_over * self._epochs - 1e-9:  # but for what the floating point makes of it
            more = min(int(self._share * (layers - frozen)), layers - 1 - frozen)
            if not more:
                break
            frozen, share_over = frozen + more, (1 + share_over) / 2
        return frozen

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "below": self._below, "hasThawed": self._has_thawed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._below, self._has_thawed = state["best"], state["below"], state["hasThawed"]


class GuardedRule:
    """Another rule, which is asked where the validation metric does not gain, and whose freezing is undone if it costs.

    With all layers training, the rule is asked when the metric has made no gain for `patience` questions. When layers
    are frozen and it has made none for as long, all layers train again. If that brings a gain, it goes on so; if it
    brings none within `patience` questions, the layers are frozen again, since training has simply converged, and the
    next doubt takes twice as long.

    min_gain: by how much the best metric so far must be surpassed.
    """

    def __init__(self, rule: FreezingRule, *, patience: int = 2, min_gain: float = 0.0) -> None:
        if patience < 1 or min_gain < 0:
            raise ValueError(f"patience is at least 1, min_gain at least 0: not {patience} and {min_gain}")
        self._rule, self._patience, self._min_gain = rule, patience, min_gain
        self._best: float | None = None
        self._without_gain = 0
        self._doubt = patience  # questions without a gain until frozen layers are doubted
        self._trial: int | None = None  # while all layers train on trial: how many were frozen before

    def first_frozen(self, layers: int) -> int:
        return self._rule.first_frozen(layers)

    def frozen_layers(self, evidence: Evidence) -> int:
        if evidence.metric is None:
            raise ValueError("GuardedRule needs a validation metric: adapt(metric)")
        is_number = not math.isnan(evidence.metric)
        has_gained = is_number and (self._best is None or evidence.metric > self._best + self._min_gain)
        self._without_gain = 0 if has_gained else self._without_gain + 1
        if has_gained:
            self._best = evidence.metric
        if self._trial is not None:
            return self._judge_trial(evidence, has_gained=has_gained)
        if evidence.frozen and self._without_gain >= self._doubt:
            self._trial, self._without_gain = evidence.frozen, 0
            return 0
        if self._without_gain < (1 if evidence.frozen else self._patience):
            return evidence.frozen
        frozen = self._rule.frozen_layers(evidence)
        if not evidence.frozen:
            self._without_gain = 0  # from here on for what is frozen
        return frozen

    def _judge_trial(self, evidence: Evidence, *, has_gained: bool) -> int:
        before = self._trial
        assert before is not None
        if has_gained:
            self._trial, self._doubt = None, self._patience
        elif self._without_gain >= self._patience:
            self._trial, self._without_gain = None, 0
            self._doubt *= 2
            return before
        return evidence.frozen

    def state_dict(self) -> dict[str, Any]:
        return {
            "rule": self._rule.state_dict(), "best": self._best, "withoutGain": self._without_gain,
            "doubt": self._doubt, "trial": self._trial,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state["rule"])
        self._best, self._without_gain = state["best"], state["withoutGain"]
        self._doubt, self._trial = state["doubt"], state["trial"]


def checked_share(value: float, name: str = "alpha") -> float:
    """Raises ValueError."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} is a share of the layers: 0 < {name} <= 1, not {value}")
    return value
