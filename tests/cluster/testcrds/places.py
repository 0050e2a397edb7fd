"""The places of a schema: what stands there in a document, and what must not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[3] / "crds"
NAMES = ("trainingjobs", "checkpointnodes")


def schema_of(name: str) -> dict[str, Any]:
    (version,) = yaml.safe_load((FOLDER / f"{name}.stepfast.dev.yaml").read_text())["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def places(value: Any, schema: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """Path, schema and value of everything in a document that the schema knows."""
    yield path, schema, value
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from places(item, schema["items"], (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if inner is not None:
                yield from places(item, inner, (*path, name))


def marks(schema: Any, path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """The places that a document may have; those of one `mark` writes in the same way."""
    yield mark(path)
    for name, inner in schema.get("properties", {}).items():
        yield from marks(inner, (*path, name))
    if "items" in schema:
        yield from marks(schema["items"], (*path, 0))


def mark(path: tuple[str | int, ...]) -> str:
    words = ".".join("[]" if isinstance(step, int) else step for step in path)
    for free in ("limits", "requests", "labels", "annotations", "template.spec"):  # names there are the user's own
        words = words[: words.index(free) + len(free)] if f"{free}." in words else words
    return words


def put(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of the document with that value at that place."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


def mistakes(document: Any, schema: Any, root: str) -> Iterator[tuple[str, Any, str]]:
    """At each place of a good document what must not stand there: name, bad document, words of the message."""
    for path, inner, value in places(document, schema):
        here = root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        for name, bad, words in (*_bad_values(inner, here), *_bad_objects(inner, value, here)):
            yield f"{here} {name}", put(document, path, bad), words


def _bad_values(schema: Any, here: str) -> Iterator[tuple[str, Any, str]]:
    kind = schema.get("type")
    if "enum" in schema:
        yield "unknown word", "Bogus", f'{here}: Unsupported value: "Bogus"'
    elif kind == "string":
        yield "as a number", 7, f"{here} in body must be of type string"
    if kind in ("integer", "number", "boolean", "array", "object"):
        yield "as text", "text", f"{here} in body must be of type {kind}"
    if kind in ("integer", "number") and "minimum" in schema:
        yield "too small", schema["minimum"] - 1, f"{here} in body should be greater than or equal to"
    if kind in ("integer", "number") and "maximum" in schema:
        yield "too great", schema["maximum"] + 1, f"{here} in body should be less than or equal to"


def _bad_objects(schema: Any, value: Any, here: str) -> Iterator[tuple[str, Any, str]]:
    for name in schema.get("required", ()):
        yield f"without {name}", {key: item for key, item in value.items() if key != name}, f"{here}.{name}: Required"
    if "properties" in schema and "type" in schema:
        yield "with a stranger", {**value, "bogus": 1}, f'unknown field "{here}.bogus"'


def messages(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, f"{rule['message']} {rule.get('messageExpression', '')}"
    for name, inner in schema.get("properties", {}).items():
        yield from messages(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from messages(schema[keyword], f"{path}[]")
