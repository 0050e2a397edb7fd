"""A prediction that a manifest carries is read strictly: every mistake names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION, Footprint, footprint_from_json

WHOLE = Footprint(
    title="BERT-large", device="v100-16gb", device_memory_bytes=16 << 30, occupied_bytes=9, reserved_bytes=7,
    context_bytes=2, peak_bytes=6, components={"weights": 4, "activations": 2}, checkpoint_bytes=3, world_size=8,
)  # fmt: skip
LEAST = Footprint(
    title="é", device="cpu", occupied_bytes=1, reserved_bytes=1, context_bytes=0, peak_bytes=1, components={},
    checkpoint_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize("footprint", [WHOLE, LEAST], ids=["whole", "least"])
def test_what_is_written_is_read(footprint: Footprint) -> None:
    text = footprint.to_json()
    assert footprint_from_json(text) == footprint
    assert "\n" not in text
    assert json.loads(text)["format"] == 1


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "other format": ({"format": 2}, ": is a prediction of another release of Stepfast: its format is not 1"),
    "no format": ({"format": None}, ": is a prediction of another release"),
    "unknown field": ({"peakBites": 1}, ".'peakBites': unknown field; known here: checkpointBytes, components"),
    "missing": ({"peakBytes": None}, ".peakBytes: is required"),
    "negative": ({"peakBytes": -1}, ".peakBytes: expected a whole number of at least 0, not -1"),
    "fraction": ({"peakBytes": 1.5}, ".peakBytes: expected a whole number"),
    "truth": ({"checkpointBytes": True}, ".checkpointBytes: expected a whole number"),
    "no title": ({"title": ""}, ".title: expected text of at most 200 printable characters, not ''"),
    "device as a number": ({"device": 3}, ".device: expected text of at most 200 printable characters, not 3"),
    "device that moves the cursor": ({"device": "t4\x1b[2J"}, ".device: expected text of at most"),
    "long title": (
        {"title": "a" * 201}, f".title: expected text of at most 200 printable characters, not '{'a' * 39}…"
    ),
    "many components": ({"components": {str(number): 1 for number in range(33)}},
        ".components: expected an object of at most 32 sizes, not {"),
    "component of two lines": ({"components": {"a\nb": 1}}, ".components: 'a\\nb' is no component's name"),
    "long component": ({"components": {"a" * 201: 1}}, f".components: '{'a' * 39}… is no component's name"),
    "more than there is": ({"peakBytes": 1 << 61}, ".peakBytes: expected a whole number"),
    "long unknown field": ({"a" * 201: 1}, f".'{'a' * 39}…: unknown field"),
    "no rank": ({"worldSize": 0}, ".worldSize: expected a whole number of at least 1, not 0"),
    "components as a list": ({"components": [1]}, ".components: expected an object of at most 32 sizes, not [1]"),
    "component as text": ({"components": {"weights": "4"}}, ".components.weights: expected a whole number"),
    "sum": ({"occupiedBytes": 10}, ".occupiedBytes: 10 is not reservedBytes + contextBytes, which are 9"),
    "peak": ({"peakBytes": 8}, ".peakBytes: 8 is more than reservedBytes"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_names_its_field(change: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(WHOLE.to_json()), **change})
    with pytest.raises(SpecError) as caught:
        footprint_from_json(text)
    assert str(caught.value).startswith(f"metadata.annotations[{ANNOTATION}]{words}")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 10_000, "{}", "1" * 5000, '{"format": 1}' + " " * 20_000])
def test_text_that_is_no_prediction_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(SpecError, match=r"is no JSON|is no prediction"):
        footprint_from_json(text)
