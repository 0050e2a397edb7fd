"""Which nodes a gang's pods may run on, by what both say of themselves, as the Kubernetes scheduler decides it. Pure.

Labels, names and taints are compared: what stays when pods come and go. What is free on a node, and which pods are
beside it, is the scheduler's alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfast_operator.document import JSON
from stepfast_operator.manifests import resources_of, tolerations_of
from stepfast_operator.podtemplate import REQUIRED
from stepfast_operator.podview import NodeView, Taint
from stepfast_operator.spec import TrainingSpec

_KEEPS_OFF = frozenset({"NoSchedule", "NoExecute"})  # PreferNoSchedule only advises
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")  # as many digits as 64 bits have


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What chooses the nodes of a gang's pods. `terms`: of the required node affinity, of which one must hold (None:
    there is none). `tolerations` are the pods', with those that admission adds.
    """

    selector: Mapping[str, JSON]
    terms: Sequence[JSON] | None
    tolerations: Sequence[JSON]

    def admits(self, node: NodeView) -> bool:
        """Whether the scheduler may ever put one of the pods there."""
        return self._is_chosen(node) and all(
            any(_tolerates(toleration, taint) for toleration in self.tolerations)
            for taint in node.taints
            if taint.effect in _KEEPS_OFF
        )

    def _is_chosen(self, node: NodeView) -> bool:
        if any(node.labels.get(key) != value for key, value in self.selector.items()):
            return False
        return self.terms is None or any(_term_holds(term, node) for term in self.terms)


def placement_of(spec: TrainingSpec) -> Placement:
    """The gang's, out of its pod template and of what is added to that."""
    template = spec.template.spec
    required = ((template.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED)
    return Placement(
        selector=template.get("nodeSelector") or {},
        terms=None if required is None else required.get("nodeSelectorTerms") or (),
        tolerations=[*tolerations_of(spec), *_admitted_tolerations(spec)],
    )


def _admitted_tolerations(spec: TrainingSpec) -> list[JSON]:
    """Of taints that are named as an extended resource that the pods ask for. Many managed clusters add them (the
    admission plugin ExtendedResourceToleration); elsewhere a node too many counts rather than one too few.
    """
    limits = resources_of(spec).get("limits") or {}
    return [{"key": name, "operator": "Exists"} for name in limits if "/" in name]


def _term_holds(term: JSON, node: NodeView) -> bool:
    """All of its requirements; a term without any chooses nothing."""
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not labels and not fields:
        return False
    is_of_labels = all(_requirement_holds(one, node.labels) for one in labels)
    return is_of_labels and all(_requirement_holds(one, {"metadata.name": node.name}) for one in fields)


def _requirement_holds(requirement: JSON, found: Mapping[str, str]) -> bool:
    """As labels.Requirement.Matches of apimachinery. An operator that is none chooses nothing: the API server refuses
    the pods.
    """
    value = found.get(str(requirement.get("key")))
    values: Sequence[JSON] = requirement.get("values") or ()
    match requirement.get("operator"):
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as order:
            if value is None or len(values) != 1 or not all(map(_INTEGER.fullmatch, (value, str(values[0])))):
                return False
            difference = int(value) - int(values[0])
            return difference > 0 if order == "Gt" else difference < 0
        case _:
            return False


def _tolerates(toleration: JSON, taint: Taint) -> bool:
    """As Toleration.ToleratesTaint of Kubernetes' core API: an empty effect is each of them, an empty key every key."""
    if toleration.get("effect") not in (None, "", taint.effect) or toleration.get("key") not in (None, "", taint.key):
        return False
    match toleration.get("operator"):
        case "Exists":
            return True
        case None | "" | "Equal":
            return (toleration.get("value") or "") == taint.value
        case _:
            return False
