"""What a manifest says about failures: rules, how many restarts, which nodes the gang keeps off. Pure.

What follows from it is in `policies`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RuleAction(StrEnum):
    """What a failure rule does."""

    FAIL_JOB = "FailJob"
    RESTART_JOB = "RestartJob"
    RESTART_IGNORING_MAX = "RestartJobAndIgnoreMaxRestarts"


class ExitCodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"


class RestartStrategy(StrEnum):
    """What follows the death of a rank. IN_PLACE: first torchrun starts the ranks anew inside the pods that live."""

    RECREATE = "Recreate"
    IN_PLACE = "InPlace"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnExitCodes:
    operator: ExitCodeOperator
    values: tuple[int, ...]

    def matches(self, exit_code: int) -> bool:
        return (exit_code in self.values) == (self.operator is ExitCodeOperator.IN)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCondition:
    """A condition of a pod or a node, by type and status."""

    type: str
    status: str = "True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What to do about failures of one kind: exactly one of the `on_…` says which. `exclude_node`: the next attempts
    keep off the node that it happened on.
    """

    name: str
    action: RuleAction
    exclude_node: bool = False
    on_exit_codes: OnExitCodes | None = None
    on_pod_conditions: tuple[OnCondition, ...] = ()
    on_node_conditions: tuple[OnCondition, ...] = ()
    on_reasons: tuple[str, ...] = ()

    @property
    def kinds(self) -> int:
        """How many of the `on_…` are given."""
        lists = (self.on_pod_conditions, self.on_node_conditions, self.on_reasons)
        return (self.on_exit_codes is not None) + sum(map(bool, lists))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    base_seconds: float = field(default=1.0, metadata={"least": 0})
    max_seconds: float = field(default=300.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    max_restarts: int = field(default=10, metadata={"least": 0})
    max_restarts_without_progress: int = field(default=3, metadata={"least": 0})
    restart_strategy: RestartStrategy = RestartStrategy.RECREATE
    max_in_place_restarts: int = field(default=3, metadata={"least": 0})  # within one attempt
    backoff: Backoff = Backoff()
    pod_deletion_grace_seconds: float = field(default=30.0, metadata={"least": 0})
    flush_timeout_seconds: float = field(default=120.0, metadata={"least": 0})
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExclusionPolicy:
    """When the gang keeps off a node: after so many failures there within `ttl_seconds`, for as long."""

    max_failures_per_node: int = field(default=2, metadata={"least": 1})
    ttl_seconds: float = field(default=86400.0, metadata={"least": 1})
    max_excluded_nodes: int = field(default=8, metadata={"least": 0})  # at a time; 0: none ever is
