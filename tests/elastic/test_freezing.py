"""When layers are frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from stepfast.torch.elastic_pipeline import (
    Evidence,
    FreezingRule,
    GradientNormRule,
    GradualUnfreezing,
    GuardedRule,
    LateFreezing,
    LayerEvidence,
    MomentRule,
)


def evidence(frozen: int, norms: Sequence[float], metric: float | None = None) -> Evidence:
    active = tuple(LayerEvidence(gradient_norm=norm) for norm in norms)
    return Evidence(epoch=0, frozen=frozen, active=active, metric=metric)


def moments(frozen: int, signals: Sequence[float], noise: float = 0.05) -> Evidence:
    active = tuple(LayerEvidence(gradient_norm=1.0, signal=signal, noise=noise) for signal in signals)
    return Evidence(epoch=0, frozen=frozen, active=active)


@pytest.mark.parametrize(
    ("alpha", "frozen", "norms", "expected"),
    [
        pytest.param(1 / 3, 0, [3, 2, 1, 4, 5, 6], 2, id="a third of the rest, the smallest is no earlier"),
        pytest.param(1 / 3, 0, [3, 1, 2, 4, 5, 6], 1, id="the smallest is earlier"),
        pytest.param(1 / 3, 0, [1, 2, 3, 4, 5, 6], 0, id="the first is the smallest"),
        pytest.param(1 / 3, 3, [9, 9, 1, 9, 9, 9], 5, id="counted from the boundary"),
        pytest.param(1 / 2, 4, [9, 1], 5, id="half of two"),
        pytest.param(1 / 3, 4, [9, 1], 4, id="less than one layer"),
        pytest.param(1.0, 0, [9, 9, 1], 2, id="never the last"),
    ],
)
def test_gradient_norm_rule_is_pipetransformers(
    alpha: float, frozen: int, norms: Sequence[float], expected: int
) -> None:
    assert GradientNormRule(alpha).frozen_layers(evidence(frozen, norms)) == expected


@pytest.mark.parametrize(
    ("frozen", "signals", "expected"),
    [
        pytest.param(0, [0.05, 0.06, 0.5, 0.5, 0.5, 0.5], 2, id="those whose gradients are noise"),
        pytest.param(0, [0.05, 0.5, 0.05, 0.05, 0.05, 0.05], 1, id="only from the first on"),
        pytest.param(0, [0.05] * 6, 2, id="a third at most"),
        pytest.param(2, [0.5] * 4, 2, id="none more"),
        pytest.param(3, [0.05, 0.05, 0.05], 4, id="counted from the boundary"),
    ],
)
def test_moment_rule_freezes_what_has_become_noise(frozen: int, signals: Sequence[float], expected: int) -> None:
    assert MomentRule().frozen_layers(moments(frozen, signals)) == expected


def test_the_last_layer_trains_always() -> None:
    assert MomentRule(alpha=1.0).frozen_layers(moments(0, [0.05] * 3)) == 2


def test_moment_rule_says_that_it_needs_moments() -> None:
    with pytest.raises(ValueError, match="needs an optimizer with Adam's moments"):
        MomentRule().frozen_layers(evidence(0, [1.0, 1.0]))


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(ValueError, match="0 < alpha <= 1"):
        GradientNormRule(alpha)
    with pytest.raises(ValueError, match="0 < alpha <= 1"):
        MomentRule(alpha)


class Always:
    """Freezes so many layers."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def first_frozen(self, layers: int) -> int:
        return 0

    def frozen_layers(self, evidence: Evidence) -> int:
        return max(self.layers, evidence.frozen)

    def state_dict(self) -> dict[str, int]:
        return {"layers": self.layers}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.layers = state["layers"]


def followed(rule: FreezingRule, metrics: Sequence[float], frozen: int = 0) -> list[int]:
    """How many layers of six are frozen after each answer."""
    answers = []
    for metric in metrics:
        frozen = rule.frozen_layers(evidence(frozen, [1.0] * (6 - frozen), metric))
        answers.append(frozen)
    return answers


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5], [0, 0, 0, 0, 0], id="while it gains nothing is frozen"),
        pytest.param([1, 1, 1, 2, 3, 4], [0, 0, 4, 4, 4, 4], id="gains go on with frozen layers"),
        pytest.param([1, 1, 1, 1, 1, 2, 3], [0, 0, 4, 4, 0, 0, 0], id="no gain: all train, they gain, and go on so"),
        pytest.param([1] * 12, [0, 0, 4, 4, 0, 0, 4, 4, 4, 4, 0, 0], id="converged: doubted less often"),
        pytest.param([3, 1, 2, 2, 1, 4], [0, 0, 4, 4, 0, 0], id="a fall"),
        pytest.param([math.nan, 1, 2, 2, 2], [0, 0, 0, 0, 4], id="no number at first"),
    ],
)
def test_guarded_rule_undoes_freezing_that_costs(metrics: Sequence[float], expected: Sequence[int]) -> None:
    assert followed(GuardedRule(Always(4)), metrics) == expected


def test_guarded_rule_goes_on_from_its_state() -> None:
    metrics = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    expected = followed(GuardedRule(Always(4)), metrics)
    for split in range(len(metrics)):
        first, second = GuardedRule(Always(4)), GuardedRule(Always(1))
        answers = followed(first, metrics[:split])
        second.load_state_dict(first.state_dict())
        answers += followed(second, metrics[split:], frozen=answers[-1] if answers else 0)
        assert answers == expected


def test_gradual_unfreezing_lets_layers_go_from_the_last_to_the_first() -> None:
    rule = GradualUnfreezing(0.75, epochs=4, then=Always(3))
    assert rule.first_frozen(14) == 10
    frozen = [rule.first_frozen(14)]
    for epoch in range(6):
        active = tuple(LayerEvidence(gradient_norm=1.0) for _ in range(14 - frozen[-1]))
        frozen.append(rule.frozen_layers(Evidence(epoch=epoch, frozen=frozen[-1], active=active)))
    assert frozen == [10, 7, 5, 2, 0, 3, 3]


def late(rule: FreezingRule, metrics: Sequence[float | None], first_epoch: int = 0, frozen: int = 0) -> list[int]:
    """How many of fourteen layers are frozen after each epoch."""
    answers = []
    for epoch, metric in enumerate(metrics, first_epoch):
        active = tuple(LayerEvidence(gradient_norm=1.0) for _ in range(14 - frozen))
        frozen = rule.frozen_layers(Evidence(epoch=epoch, frozen=frozen, active=active, metric=metric))
        answers.append(frozen)
    return answers


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        pytest.param([0.5] * 10, [0] * 6 + [9, 9, 12, 13], id="each time that half is over"),
        pytest.param([None] * 12, [0] * 6 + [9, 9, 12, 13, 13, 13], id="no metric, and more epochs than were said"),
        pytest.param([0.5, 0.8, *[0.7] * 8], [0] * 6 + [9, 9, 0, 0], id="a fall that lasts"),
        pytest.param([0.8] * 7 + [0.7, 0.8, 0.7], [0] * 6 + [9, 9, 12, 13], id="falls that do not"),
        pytest.param([0.8] * 7 + [math.nan] * 3, [0] * 6 + [9, 9, 0, 0], id="a training that diverges"),
        pytest.param([math.nan] * 2 + [0.8] * 5 + [0.7] * 3, [0] * 6 + [9, 9, 0, 0], id="no number at first"),
        pytest.param([0.8] * 7 + [0.785] * 3, [0] * 6 + [9, 9, 12, 13], id="a fall within the tolerance"),
    ],
)
def test_late_freezing(metrics: Sequence[float | None], expected: Sequence[int]) -> None:
    assert late(LateFreezing(10), metrics) == expected


def test_late_freezing_goes_on_from_its_state() -> None:
    metrics = [0.5, 0.8, *[0.7] * 8]
    expected = late(LateFreezing(10), metrics)
    for split in range(len(metrics)):
        first, second = LateFreezing(10), LateFreezing(10)
        answers = late(first, metrics[:split])
        second.load_state_dict(first.state_dict())
        assert answers + late(second, metrics[split:], split, answers[-1] if answers else 0) == expected


def test_late_freezing_that_begins_at_once_thaws_where_the_metric_falls() -> None:
    assert late(LateFreezing(10, begin=0.0), [0.8, 0.7, 0.7, 0.7], frozen=9) == [9, 9, 0, 0]


def test_late_freezing_may_begin_at_once_and_leaves_the_last_layer() -> None:
    assert LateFreezing(10, begin=0.0, share=1.0).first_frozen(14) == 13
    assert LateFreezing(10).first_frozen(14) == 0
    assert LateFreezing(1, begin=0.0).first_frozen(1) == 0


@pytest.mark.parametrize("options", [{"begin": 1.0}, {"begin": -0.1}, {"tolerance": -1.0}, {"patience": 0}])
def test_late_freezing_refuses_what_makes_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least"):
        LateFreezing(10, **options)
    with pytest.raises(ValueError, match="epochs"):
        LateFreezing(0)


def test_guarded_rule_says_that_it_needs_a_metric() -> None:
    with pytest.raises(ValueError, match="validation metric"):
        GuardedRule(Always(1)).frozen_layers(evidence(0, [1.0, 1.0]))


def test_guarded_rule_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="patience"):
        GuardedRule(Always(1), patience=0)
