"""What one rank takes, predicted: the annotation by which a manifest carries it, and its JSON. Pure: no torch.

`stepfast.torch.anatomy` predicts it; the operator compares it with what there is, before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfast.errors import SpecError

ANNOTATION = "stepfast.dev/anatomy"
FORMAT = 1
CPU = "cpu"  # the device of ranks that have none of their own

# The JSON's fields, by those of a Footprint. All are there in what is written; the optional ones may be left out.
_TEXTS = {"title": "title", "device": "device"}
_SIZES = {
    "occupied_bytes": "occupiedBytes",
    "reserved_bytes": "reservedBytes",
    "context_bytes": "contextBytes",
    "peak_bytes": "peakBytes",
    "checkpoint_bytes": "checkpointBytes",
}
_OPTIONAL = {"device_memory_bytes": "deviceMemoryBytes", "world_size": "worldSize"}
_COMPONENTS = "components"
# Whoever may write the job writes this, and it is told again in conditions, Events and terminals.
_MOST_CHARACTERS = 16 * 1024
_LONGEST_NAME = 200
_MOST_COMPONENTS = 32
_LARGEST = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank takes of its device, and what a save of it takes. Sizes are bytes.

    `occupied_bytes`: what the allocator has reserved (`reserved_bytes`) and CUDA's own (`context_bytes`), as nvidia-smi
    shows them. `peak_bytes`: allocated at the worst moment, by component in `components`. `device_memory_bytes`: what
    the device has that was predicted for (None: unknown). `checkpoint_bytes`: what one rank
    stages of weights, buffers and optimizer states. `world_size`: the number of ranks that this holds for (None: any).
    """

    title: str
    device: str
    device_memory_bytes: int | None = None
    occupied_bytes: int
    reserved_bytes: int
    context_bytes: int
    peak_bytes: int
    components: Mapping[str, int]
    checkpoint_bytes: int
    world_size: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU

    def to_json(self) -> str:
        """In one line, as the annotation's value."""
        document: dict[str, object] = {"format": FORMAT}
        document |= {name: getattr(self, field) for field, name in (_TEXTS | _SIZES | _OPTIONAL).items()}
        document[_COMPONENTS] = dict(self.components)
        return json.dumps({name: value for name, value in document.items() if value is not None})


def footprint_from_json(text: str, field: str = f"metadata.annotations[{ANNOTATION}]") -> Footprint:
    """Reads what `Footprint.to_json` wrote. Raises SpecError, with what is wrong; `field` is where the text stands."""
    if len(text) > _MOST_CHARACTERS:
        raise SpecError(field, f"is no prediction: {len(text)} characters are more than {_MOST_CHARACTERS}")
    document = _document(text, field)
    values: dict[str, Any] = {key: _text(document, name, field) for key, name in _TEXTS.items()}
    values |= {key: _size(document, name, field) for key, name in _SIZES.items()}
    values |= {
        key: _size(document, name, field, least=1) for key, name in _OPTIONAL.items() if document.get(name) is not None
    }
    return _checked(Footprint(components=_components(document, field), **values), field)


def _document(text: str, field: str) -> dict[str, Any]:
    """The JSON's object, without its format, which is ours."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(field, f"is no JSON: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise SpecError(field, f"is no prediction: expected an object with format: {FORMAT}")
    if document.pop("format") != FORMAT:
        raise SpecError(field, f"is a prediction of another release of Stepfast: its format is not {FORMAT}")
    known = {*_TEXTS.values(), *_SIZES.values(), *_OPTIONAL.values(), _COMPONENTS}
    unknown = sorted(set(document) - known)
    if unknown:
        raise SpecError(f"{field}.{_shown(unknown[0])}", f"unknown field; known here: {', '.join(sorted(known))}")
    return document


def _components(document: Mapping[str, Any], field: str) -> Mapping[str, int]:
    components, where = _needed(document, _COMPONENTS, field), f"{field}.{_COMPONENTS}"
    if not isinstance(components, dict) or len(components) > _MOST_COMPONENTS:
        raise SpecError(where, f"expected an object of at most {_MOST_COMPONENTS} sizes, not {_shown(components)}")
    wrong = next((name for name in components if not _is_word(name)), None)
    if wrong is not None:
        raise SpecError(where, f"{_shown(wrong)} is no component's name: at most {_LONGEST_NAME} printable characters")
    return {name: _size(components, name, where) for name in components}


def _checked(footprint: Footprint, field: str) -> Footprint:
    """Raises SpecError where the figures contradict each other: a verdict would be made of the wrong one."""
    parts = footprint.reserved_bytes + footprint.context_bytes
    if footprint.occupied_bytes != parts:
        name = _SIZES["occupied_bytes"]
        raise SpecError(
            f"{field}.{name}", f"{footprint.occupied_bytes} is not reservedBytes + contextBytes, which are {parts}"
        )
    if footprint.peak_bytes > footprint.reserved_bytes:
        name = _SIZES["peak_bytes"]
        raise SpecError(f"{field}.{name}", f"{footprint.peak_bytes} is more than reservedBytes")
    return footprint


def _needed(document: Mapping[str, Any], name: str, field: str) -> Any:
    if document.get(name) is None:
        raise SpecError(f"{field}.{name}", "is required")
    return document[name]


def _text(document: Mapping[str, Any], name: str, field: str) -> str:
    value = _needed(document, name, field)
    if not isinstance(value, str) or not _is_word(value):
        what = f"expected text of at most {_LONGEST_NAME} printable characters"
        raise SpecError(f"{field}.{name}", f"{what}, not {_shown(value)}")
    return value


def _is_word(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and text.isprintable()


def _shown(value: object) -> str:
    """As much of what is wrong as one needs to find it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _size(document: Mapping[str, Any], name: str, field: str, *, least: int = 0) -> int:
    value = _needed(document, name, field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise SpecError(f"{field}.{name}", f"expected a whole number of at least {least}, not {_shown(value)}")
    return value
