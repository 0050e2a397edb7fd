"""Puts a prediction into a manifest's file, where it stands as an annotation of the TrainingJob.

Owned here: nothing else of the file changes, to the byte. So the annotation is written into the text, at the place that
YAML's parser names, rather than the document anew: whoever writes it anew loses comments, quotes or line breaks. What
comes of it is read back before it takes the file's place.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION, Footprint
from stepfast.storage.target import placed_file

_GROUP = "stepfast.dev/"
_KIND = "TrainingJob"


def annotate(path: Path, footprint: Footprint, name: str | None = None) -> str:
    """Writes the prediction into the TrainingJob of that name, in place of one that is there; without a name into the
    file's only one. Returns the job's name. Raises SpecError, StorageError; then the file is as it was.
    """
    text = _read(path)
    documents, roots = _parsed(path, text)
    index = _chosen(path, documents, name)
    annotations = documents[index]["metadata"].get("annotations")
    if annotations is not None and not isinstance(annotations, dict):
        raise SpecError(str(path), f"metadata.annotations: expected an object, not {annotations!r}")
    changed = _inserted(text, roots[index], footprint.to_json())
    _check(path, changed, documents, index, footprint)
    with placed_file(path, force=True) as temp:
        temp.write_bytes(changed.encode())
        shutil.copymode(path, temp)
    return str(documents[index]["metadata"]["name"])


def check(path: Path, name: str | None = None) -> None:
    """Raises SpecError where `annotate` would not find the TrainingJob."""
    documents, _ = _parsed(path, _read(path))
    _chosen(path, documents, name)


def _parsed(path: Path, text: str) -> tuple[list[Any], list[yaml.Node]]:
    """The documents, as values and as YAML's nodes, which know their places."""
    try:
        return list(yaml.safe_load_all(text)), list(yaml.compose_all(text, yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise SpecError(str(path), f"is not YAML: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # as it is: a text file's line ends would be translated
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is no text: {error.reason} at byte {error.start}") from error


def _chosen(path: Path, documents: list[Any], name: str | None) -> int:
    """Which document it is."""
    jobs = {index: _name_of(document) for index, document in enumerate(documents) if _is_job(document)}
    found = [index for index, job in jobs.items() if job is not None and name in (None, job)]
    if len(found) == 1:
        return found[0]
    if not jobs:
        raise SpecError(str(path), f"holds no {_KIND} ({_GROUP}…): nothing of it takes a prediction")
    names = ", ".join(job or "one without metadata.name" for job in jobs.values())
    if name is None:
        raise SpecError(str(path), f"holds {names}: say which {_KIND} the prediction is of")
    count = "several of" if found else "no"
    raise SpecError(str(path), f"holds {count} {_KIND} {name}; there are: {names}")


def _is_job(document: Any) -> bool:
    if not isinstance(document, dict):
        return False
    return document.get("kind") == _KIND and str(document.get("apiVersion")).startswith(_GROUP)


def _name_of(document: dict[str, Any]) -> str | None:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None


def _inserted(text: str, root: yaml.Node, value: str) -> str:
    """The text with the annotation in it, at its place or behind the job's name."""
    quoted = "'" + value.replace("'", "''") + "'"
    line_end = "\r\n" if "\r\n" in text else "\n"
    metadata = _entry(root, "metadata")[1]
    found = dict(_entries(metadata))
    if "annotations" not in found:
        return _after_name(text, metadata, quoted, line_end)
    annotations = found["annotations"][1]
    if not isinstance(annotations, yaml.MappingNode):  # nothing: an object is what may stand there
        return _replaced(text, annotations, f"{{{ANNOTATION}: {quoted}}}")
    entries = dict(_entries(annotations))
    if ANNOTATION in entries:
        return _replaced(text, entries[ANNOTATION][1], quoted)
    if not entries:
        return _replaced(text, annotations, f"{{{ANNOTATION}: {quoted}}}")
    first, _ = next(iter(entries.values()))
    separator = ", " if annotations.flow_style else line_end + " " * first.start_mark.column
    at = first.start_mark.index
    return f"{text[:at]}{ANNOTATION}: {quoted}{separator}{text[at:]}"


def _after_name(text: str, metadata: yaml.MappingNode, quoted: str, line_end: str) -> str:
    """With annotations, of which there were none."""
    key, name = _entry(metadata, "name")
    if metadata.flow_style:
        at = name.end_mark.index
        return f"{text[:at]}, annotations: {{{ANNOTATION}: {quoted}}}{text[at:]}"
    indent = " " * key.start_mark.column
    lines = f"{indent}annotations:{line_end}{indent}  {ANNOTATION}: {quoted}{line_end}"
    at = text.find("\n", name.end_mark.index) + 1
    # The line of the name is the text's last, without an end.
    return f"{text[:at]}{lines}{text[at:]}" if at else f"{text}{line_end}{lines.removesuffix(line_end)}"


def _replaced(text: str, node: yaml.Node, new: str) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    if text[begin - 1] == ":":  # in the place of nothing
        new = f" {new}"
    elif text[begin:end].endswith("\n"):  # of a scalar in lines of its own
        new += "\r\n" if text[begin:end].endswith("\r\n") else "\n"
    return text[:begin] + new + text[end:]


def _entries(mapping: yaml.Node) -> Iterator[tuple[str, tuple[yaml.Node, yaml.Node]]]:
    for key, value in mapping.value:
        yield key.value, (key, value)


def _entry(mapping: yaml.Node, name: str) -> tuple[yaml.Node, Any]:
    return dict(_entries(mapping))[name]


def _check(path: Path, changed: str, documents: list[Any], index: int, footprint: Footprint) -> None:
    """Raises SpecError unless the changed text says what it said before, and the prediction."""
    expected = copy.deepcopy(documents)
    # A copy of its own: an object that others refer to, by YAML's aliases, is not to be annotated for them, too.
    metadata = expected[index]["metadata"] = dict(expected[index]["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: footprint.to_json()}
    try:
        is_whole = list(yaml.safe_load_all(changed)) == expected
    except yaml.YAMLError:
        is_whole = False
    if not is_whole:
        raise SpecError(
            str(path),
            f"is written in a way that takes no annotation without rewriting it: add to the job's metadata\n"
            f"annotations:\n  {ANNOTATION}: '{footprint.to_json()}'",
        )
