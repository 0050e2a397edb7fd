"""What a manifest says about the pods of a gang: variables, resources, the template that is merged. Pure.

What Kubernetes alone understands (`template.spec`, `valueFrom`) is kept as it is; its API server checks it when the
pods are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepfast.errors import SpecError
from stepfast_operator.document import JSON
from stepfast_operator.quantities import parse_amount

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ENV_FIELDS = frozenset({"name", "value", "valueFrom"})
_RESOURCE_FIELDS = ("limits", "requests")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """A PodTemplateSpec, merged under what is ours; the trainer's container in it is named `node`."""

    metadata: PodMetadata = field(default_factory=PodMetadata)
    spec: Mapping[str, JSON] = field(default_factory=dict, metadata={"parse": parse_object})
