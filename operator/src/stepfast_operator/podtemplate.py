"""What a manifest says about the pods of a gang: variables, resources, the template that is merged. Pure.

What Kubernetes alone understands (`template.spec`, `valueFrom`) is kept as it is; its API server checks it when the
pods are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepfast.errors import SpecError
from stepfast_operator.document import JSON
from stepfast_operator.quantities import parse_amount

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ENV_FIELDS = frozenset({"name", "value", "valueFrom"})
_RESOURCE_FIELDS = ("limits", "requests")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"  # rules of an affinity that must hold
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# The lists in a pod's affinity that ours are added to.
_AFFINITIES = {"podAntiAffinity": REQUIRED, "nodeAffinity": PREFERRED}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """A variable of the trainer's container: with its value, or with where Kubernetes takes that from."""

    name: str
    value: str = ""
    value_from: Mapping[str, JSON] | None = None


def parse_env(value: JSON, path: str) -> tuple[EnvVar, ...]:
    """A container's `env`: a list of {name, value} or {name, valueFrom}. Raises SpecError."""
    if not isinstance(value, list | tuple):
        raise SpecError(path, f"expected a list of {{name, value}}, not {value!r}")
    return tuple(_variable(item, f"{path}[{index}]") for index, item in enumerate(value))


def _variable(item: JSON, path: str) -> EnvVar:
    if not isinstance(item, Mapping) or set(item) - _ENV_FIELDS or "name" not in item:
        raise SpecError(path, f"expected {{name, value}} or {{name, valueFrom}}, not {item!r}")
    name, source = str(item["name"]), item.get("valueFrom")
    if not _ENV_NAME.fullmatch(name):
        raise SpecError(f"{path}.name", f"{name!r} is no environment variable's name")
    if source is None:
        value = item.get("value")
        return EnvVar(name=name, value="" if value is None else str(value))
    if item.get("value"):
        raise SpecError(path, f"{name} has a value and a valueFrom: give one of them")
    return EnvVar(name=name, value_from=parse_object(source, f"{path}.valueFrom"))


def parse_object(value: JSON, path: str) -> Mapping[str, JSON]:
    """An object that is Kubernetes' to understand. Raises SpecError."""
    if not isinstance(value, Mapping):
        raise SpecError(path, f"expected an object, not {value!r}")
    return {str(key): item for key, item in value.items()}


def parse_resources(value: JSON, path: str) -> Mapping[str, Mapping[str, str]]:
    """A container's `resources`: quantities as text, by `limits` and `requests`. Raises SpecError."""
    resources = {}
    for kind, amounts in parse_object(value, path).items():
        if kind not in _RESOURCE_FIELDS:
            raise SpecError(f"{path}.{kind}", "unknown field; known here: limits, requests")
        where = f"{path}.{kind}"
        resources[kind] = {
            name: parse_amount(amount, f"{where}.{name}") for name, amount in parse_object(amounts, where).items()
        }
    return resources


def parse_pod_spec(value: JSON, path: str) -> Mapping[str, JSON]:
    """A pod's spec. What is merged with ours, or read before there is a pod, has the shape of a pod's; all else is the
    API server's to check. Raises SpecError.
    """
    spec = parse_object(value, path)
    for name in ("securityContext", "affinity"):
        _check_object(spec, name, path)
    for name, rules in _AFFINITIES.items():
        _check_list(_check_object(spec.get("affinity"), name, f"{path}.affinity"), rules, f"{path}.affinity.{name}")
    _check_placement(spec, path)
    _check_named(spec, "volumes", path)
    for index, container in enumerate(_check_named(spec, "containers", path)):
        where = f"{path}.containers[{index}]"
        for name in ("env", "volumeMounts"):
            _check_named(container, name, where)
        _check_list(container, "envFrom", where)
        for name in ("securityContext", "resources"):
            _check_object(container, name, where)
        _check_object(container.get("resources"), "limits", f"{where}.resources")
        capabilities = _check_object(container.get("securityContext"), "capabilities", f"{where}.securityContext")
        _check_list(capabilities, "add", f"{where}.securityContext.capabilities")
    return spec


def _check_placement(spec: Mapping[str, JSON], path: str) -> None:
    """What chooses the pods' nodes."""
    _check_object(spec, "nodeSelector", path)
    _check_objects(spec, "tolerations", path)
    where = f"{path}.affinity.nodeAffinity"
    required = _check_object((spec.get("affinity") or {}).get("nodeAffinity"), REQUIRED, where)
    where = f"{where}.{REQUIRED}"
    for index, term in enumerate(_check_objects(required, "nodeSelectorTerms", where)):
        of_term = f"{where}.nodeSelectorTerms[{index}]"
        for name in ("matchExpressions", "matchFields"):
            for number, requirement in enumerate(_check_objects(term, name, of_term)):
                _check_list(requirement, "values", f"{of_term}.{name}[{number}]")


def _check_object(holder: JSON, name: str, path: str) -> Mapping[str, JSON]:
    """The object in that field; an empty one where there is none."""
    value = (holder or {}).get(name)
    return {} if value is None else parse_object(value, f"{path}.{name}")


def _check_list(holder: JSON, name: str, path: str) -> Sequence[JSON]:
    value = (holder or {}).get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise SpecError(f"{path}.{name}", f"expected a list, not {value!r}")
    return value or ()


def _check_objects(holder: JSON, name: str, path: str) -> Sequence[Mapping[str, JSON]]:
    items = _check_list(holder, name, path)
    for index, item in enumerate(items):
        parse_object(item, f"{path}.{name}[{index}]")
    return items


def _check_named(holder: JSON, name: str, path: str) -> Sequence[Mapping[str, JSON]]:
    items = _check_list(holder, name, path)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            raise SpecError(f"{path}.{name}[{index}]", f"expected an object with a name, not {item!r}")
    return items


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """A PodTemplateSpec, merged under what is ours; the trainer's container in it is named `node`."""

    metadata: PodMetadata = field(default_factory=PodMetadata)
    spec: Mapping[str, JSON] = field(default_factory=dict, metadata={"parse": parse_pod_spec})
