"""Reads and writes the API's documents (camelCase JSON or YAML) as frozen dataclasses. Pure.

The dataclass is the schema. Field names become camelCase, `_time` fields are RFC 3339 on the outside and
seconds since the epoch inside, and a field's metadata adds what a type cannot say: `parse` (a function of
value and path), `least` (a number's lower bound), `name` (where camelCase is not it). Must not know what a
document is about.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from stepfast.errors import SpecError

# A decoder's values have whatever type the document gives them until they are checked.
JSON: TypeAlias = Any
Parse: TypeAlias = Callable[[JSON, str], object]
T = TypeVar("T")


def encode(value: object) -> JSON:
    """The value as JSON-able data; what is None or empty is left out of objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], document: JSON, path: str, *, ignore_unknown: bool = False) -> T:
    """Reads an object as that dataclass. Raises SpecError naming the field's path."""
    if not isinstance(document, Mapping):
        raise SpecError(path, f"expected an object, not {_word(document)}")
    known = {_outside(field): field for field in fields(cast("Any", kind))}
    hints = _hints(cast("Any", kind))
    if not ignore_unknown:
        _refuse_unknown(document, known, path)
    values = {}
    for name, field in known.items():
        where = f"{path}.{name}" if path else name
        if document.get(name) is None:
            if field.default is MISSING and field.default_factory is MISSING:
                raise SpecError(where, "is required")
            continue
        values[field.name] = _decode_field(field, hints[field.name], document[name], where, ignore_unknown)
    return kind(**values)


def time_text(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 with microseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _outside(field: Field[Any]) -> str:
    return str(field.metadata.get("name") or camel(field.name))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _encode_fields(value: Any) -> dict[str, JSON]:
    document = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if inner is None or inner in ((), {}):
            continue
        document[_outside(field)] = time_text(inner) if field.name.endswith("_time") else encode(inner)
    return document


def _refuse_unknown(document: Mapping[str, JSON], known: Mapping[str, object], path: str) -> None:
    for name in document:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
            raise SpecError(f"{path}.{name}" if path else str(name), f"unknown field; {hint}")


def _decode_field(field: Field[Any], hint: Any, value: JSON, path: str, ignore_unknown: bool) -> object:
    parse = cast("Parse | None", field.metadata.get("parse"))
    if parse is not None:
        return parse(value, path)
    if field.name.endswith("_time"):
        return _time(value, path)
    got = _decode_value(hint, value, path, ignore_unknown)
    least = field.metadata.get("least")
    if least is not None and isinstance(got, int | float) and got < least:
        raise SpecError(path, f"{value!r} is less than {least}")
    return got


def _decode_value(hint: Any, value: JSON, path: str, ignore_unknown: bool) -> object:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not type(None))
        return _decode_value(inner, value, path, ignore_unknown)
    if origin is tuple:
        items = _sequence(value, path)
        item_hint = get_args(hint)[0]
        return tuple(
            _decode_value(item_hint, item, f"{path}[{index}]", ignore_unknown) for index, item in enumerate(items)
        )
    if origin is not None:
        if not isinstance(value, Mapping):
            raise SpecError(path, f"expected an object, not {_word(value)}")
        item_hint = get_args(hint)[1]
        return {
            str(key): _decode_value(item_hint, item, f"{path}.{key}", ignore_unknown) for key, item in value.items()
        }
    if is_dataclass(hint):
        return decode(cast("type[object]", hint), value, path, ignore_unknown=ignore_unknown)
    return _scalar(hint, value, path)


def _scalar(hint: type, value: JSON, path: str) -> object:
    if issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            near = difflib.get_close_matches(str(value), list(hint), n=1)
            hint_text = f" (did you mean {near[0]}?)" if near else ""
            raise SpecError(path, f"{value!r} is none of {', '.join(hint)}{hint_text}") from None
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise SpecError(path, f"expected {words.get(hint, hint.__name__)}, not {_word(value)}")


def _sequence(value: JSON, path: str) -> Sequence[JSON]:
    if not isinstance(value, list | tuple):
        raise SpecError(path, f"expected a list, not {_word(value)}")
    return value


def _time(value: JSON, path: str) -> float:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise SpecError(path, f"{value!r} is no RFC 3339 time") from None


def _word(value: JSON) -> str:
    return f"{value!r}"
