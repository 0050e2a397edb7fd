"""Makes docs/api.md out of the CRDs: `make reference`. A test holds that the page is current."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
CRDS = FOLDER.parent / "crds"
PAGE = FOLDER / "api.md"
INTRODUCTION = """\
# The API

Made from [crds/](../crds) by `make reference`. In a cluster `kubectl explain tj.spec.checkpoint` tells the same. The
full names are `trainingjobs.stepfast.dev` and `checkpointnodes.stepfast.dev`: AWS has a kind TrainingJob, too.

A list is written `field[]`. Times are RFC 3339. *Needed* fields must be given; all others may be left out.
"""
KUBERNETES_OWN = "valueFrom"  # whose fields everybody knows from a container's `env`
WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "object",
}


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name in ("trainingjobs", "checkpointnodes"):
        crd = yaml.safe_load((CRDS / f"{name}.stepfast.dev.yaml").read_text())
        parts.append("\n".join(_kind(crd["spec"])))
    return "\n".join(parts)


def _kind(crd: dict[str, Any]) -> Iterator[str]:
    (version,) = crd["versions"]
    schema, names = version["schema"]["openAPIV3Schema"], crd["names"]
    short = ", ".join(f"`{name}`" for name in names.get("shortNames", ()))
    yield f"## {names['kind']}\n"
    yield schema["description"] + "\n"
    yield (
        f"`apiVersion: {crd['group']}/{version['name']}` · {crd['scope']}"
        + (f" · short {short}" if short else "")
        + "\n"
    )
    for part in ("spec", "status"):
        yield from _part(part, schema["properties"][part])
    yield "### Columns\n"
    for column in version["additionalPrinterColumns"]:
        wide = " (with `-o wide`)" if column.get("priority") else ""
        text = column.get("description", "How old the object is.")
        yield f"- {column['name'].upper()}{wide}: {_escaped(text)}"
    yield ""
    rules = [*_rules({**schema, "properties": {}}, ""), *_rules(schema["properties"]["spec"], "spec")]
    if rules:
        yield "### What is refused\n"
        yield "Beside unknown fields, and what the tables say (types, bounds, closed sets):\n"
        yield from rules
        yield ""


def _part(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """A table of the plain fields, and one for each object with fields of its own."""
    yield f"### {name}\n"
    yield schema["description"] + "\n"
    groups = {key: inner for key, inner in schema["properties"].items() if _inside(inner).get("properties")}
    plain = {key: inner for key, inner in schema["properties"].items() if key not in groups}
    if plain:
        yield from _table({**schema, "properties": plain}, is_written=name == "spec")
    for key, inner in groups.items():
        mark = "[]" if "items" in inner else ""
        yield f"#### {name}.{key}{mark}\n"
        yield _escaped(inner["description"]) + "\n"
        yield from _table(_inside(inner), is_written=name == "spec")


def _table(schema: dict[str, Any], *, is_written: bool) -> Iterator[str]:
    """`is_written`: by users, who want to know what they may leave out."""
    yield "| field | type | default | |" if is_written else "| field | type | |"
    yield "|---|---|---|---|" if is_written else "|---|---|---|"
    for path, inner, is_needed in _rows(schema, ""):
        default = f" {'*needed*' if is_needed else _default(inner)} |" if is_written else ""
        yield f"| `{path}` | {_type(inner)} |{default} {_escaped(inner['description'])} |"
    yield ""


def _rows(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    shown = []
    for name, inner in schema["properties"].items():
        mark = "[]" if "items" in inner else ""
        path = f"{prefix}{name}{mark}"
        yield path, inner, name in schema.get("required", ())
        fields = _inside(inner).get("properties")
        if fields and name != KUBERNETES_OWN and fields not in shown:  # `earlierSaves` has those of `saves`
            shown.append(fields)
            yield from _rows(_inside(inner), f"{path}.")


def _inside(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a list its items."""
    inside: dict[str, Any] = schema.get("items", schema)
    return inside


def _type(schema: dict[str, Any]) -> str:
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        return "map" if "x-kubernetes-preserve-unknown-fields" in inner else f"map of {_type(inner)}"
    if "enum" in schema:
        return " · ".join(f"`{word}`" for word in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "whole number or text"
    if "type" not in schema:
        return "text or object"
    return "time" if schema.get("format") == "date-time" else WORDS[schema["type"]] + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return ""
    return f" ≥ {least}" if most is None else f" {least} … {most}"


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _rules(schema: dict[str, Any], path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        where = path + rule.get("fieldPath", "") if path else ""
        yield f"- {f'`{where}`: ' if where else ''}{_escaped(rule['message'])}"
    for name, inner in schema.get("properties", {}).items():
        yield from _rules(inner, f"{path}.{name}")
    for keyword, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if keyword in schema:
            yield from _rules(schema[keyword], path + mark)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    PAGE.write_text(reference())
