"""A prediction is written into a manifest's file, and nothing else of it changes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from stepfast.cli.manifestfile import annotate
from stepfast.errors import SpecError
from stepfast.footprint import ANNOTATION, Footprint, footprint_from_json

FOOTPRINT = Footprint(
    title="it's {a} # model: é", device="t4", occupied_bytes=9, reserved_bytes=7, context_bytes=2, peak_bytes=6,
    components={"weights": 4}, checkpoint_bytes=3,
)  # fmt: skip
OTHER = Footprint(
    title="before", device="cpu", occupied_bytes=1, reserved_bytes=1, context_bytes=0, peak_bytes=1, components={},
    checkpoint_bytes=0,
)  # fmt: skip
HEAD = "apiVersion: stepfast.dev/v1alpha1\nkind: TrainingJob\n"
SPEC = (
    "spec:\n    trainer:\n        args:\n          - a     # one\n"
    "        env: [{name: A,\n               value: '1'}]\n"
)
QUOTED = "'" + FOOTPRINT.to_json().replace("'", "''") + "'"

# Metadata before and after, {} standing for the annotation.
PLACES: dict[str, tuple[str, str]] = {
    "no annotations": (
        "metadata:\n  name: gpt   # ours\n  # of the team\n  namespace: team\n",
        "metadata:\n  name: gpt   # ours\n  annotations:\n    {}\n  # of the team\n  namespace: team\n",
    ),
    "annotations": (
        "metadata:\n    annotations:\n        # a note\n        note: |\n"
        "          two\n          lines\n    name: gpt\n",
        "metadata:\n    annotations:\n        # a note\n        {}\n        note: |\n          two\n          lines\n"
        "    name: gpt\n",
    ),
    "empty annotations": (
        "metadata:\n  name: gpt\n  annotations:\n  labels: {a: b}\n",
        "metadata:\n  name: gpt\n  annotations: {{{}}}\n  labels: {{a: b}}\n",
    ),
    "annotations of nothing": ("metadata:\n  name: gpt\n  annotations: {}  # none\n",
        "metadata:\n  name: gpt\n  annotations: {{{}}}  # none\n"),
    "null annotations": ("metadata:\n  annotations: ~\n  name: gpt\n",
        "metadata:\n  annotations: {{{}}}\n  name: gpt\n"),
    "on one line": ("metadata: {name: gpt, labels: {a: b}}  # short\n",
        "metadata: {{name: gpt, annotations: {{{}}}, labels: {{a: b}}}}  # short\n"),
    "annotations on one line": ("metadata: {name: gpt, annotations: {a: b}}\n",
        "metadata: {{name: gpt, annotations: {{{}, a: b}}}}\n"),
    "line ends of Windows": (
        "metadata:\r\n  name: gpt\r\n", "metadata:\r\n  name: gpt\r\n  annotations:\r\n    {}\r\n"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PLACES.values(), ids=PLACES)
def test_nothing_else_of_the_file_changes(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(f"# head\n\n---\n{HEAD}{before}{SPEC}...\n".encode())
    assert annotate(path, FOOTPRINT) == "gpt"
    expected = after.format(f"{ANNOTATION}: {QUOTED}")
    assert path.read_bytes().decode() == f"# head\n\n---\n{HEAD}{expected}{SPEC}...\n"
    (document,) = yaml.safe_load_all(path.read_text())
    assert footprint_from_json(document["metadata"]["annotations"][ANNOTATION]) == FOOTPRINT


OLD: dict[str, str] = {
    "quoted": f"metadata:\n  name: gpt\n  annotations:\n    {ANNOTATION}: '{OTHER.to_json()}'  # then\n    a: b\n",
    "folded": f"metadata:\n  annotations:\n    {ANNOTATION}: >-\n      {OTHER.to_json()}\n\n    a: b\n  name: gpt\n",
    "literal, last": f"metadata:\n  name: gpt\n  annotations:\n    a: b\n"
    f"    {ANNOTATION}: |\n      {OTHER.to_json()}\n",
    "on one line": f"metadata: {{name: gpt, annotations: {{'{ANNOTATION}': '{OTHER.to_json()}', a: b}}}}\n",
    "nothing": f"metadata:\n  name: gpt\n  annotations:\n    {ANNOTATION}:\n    a: b\n",
}


@pytest.mark.parametrize("metadata", OLD.values(), ids=OLD)
def test_earlier_prediction_is_replaced(tmp_path: Path, metadata: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(HEAD + metadata + SPEC)
    annotate(path, FOOTPRINT)
    text = path.read_text()
    assert text.endswith(SPEC)
    assert text.count(ANNOTATION) == 1
    assert yaml.safe_load(text)["metadata"]["annotations"] == {ANNOTATION: FOOTPRINT.to_json(), "a": "b"}
    annotate(path, FOOTPRINT)
    assert path.read_text() == text, "the same prediction changed the file"


def test_file_without_a_last_line_end_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{HEAD}{SPEC}metadata:\n  name: gpt")
    annotate(path, FOOTPRINT)
    assert yaml.safe_load(path.read_text())["metadata"] == {
        "name": "gpt", "annotations": {ANNOTATION: FOOTPRINT.to_json()}
    }  # fmt: skip


def two() -> str:
    return "\n---\n".join(
        ["apiVersion: v1\nkind: Namespace\nmetadata: {name: team}"]
        + [f"{HEAD}metadata:\n  name: {name}\n{SPEC}" for name in ("one", "two")]
    )


def test_one_of_several_jobs_is_annotated(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(two())
    path.chmod(0o640)
    assert annotate(path, FOOTPRINT, "two") == "two"
    annotated = [ANNOTATION in document["metadata"].get("annotations", {}) for document in
                 yaml.safe_load_all(path.read_text())]  # fmt: skip
    assert annotated == [False, False, True]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path], "something was left behind"


SHARED = f"{HEAD}metadata: &m\n  name: gpt\nspec:\n  template:\n    metadata: *m\n"
REFUSED: dict[str, tuple[str, str | None, str]] = {
    "no job": ("kind: Pod\nmetadata: {name: a}\n", None, "holds no TrainingJob"),
    "another's job": (
        "apiVersion: sagemaker.aws.com/v1\nkind: TrainingJob\nmetadata: {name: a}\n",
        None,
        "holds no Tr",
    ),
    "nothing": ("", None, "holds no TrainingJob"),
    "a list": ("[1]\n", None, "holds no TrainingJob"),
    "no name": (f"{HEAD}metadata: {{}}\n", None, "holds one without metadata.name: say which"),
    "several": (two(), None, "holds one, two: say which TrainingJob the prediction is of"),
    "another name": (two(), "three", "holds no TrainingJob three; there are: one, two"),
    "twice that name": (two().replace("two", "one"), "one", "holds several of TrainingJob one"),
    "no YAML": ("a: {{ .Values.a }}\n", None, "is not YAML"),
    "annotations as text": (
        f"{HEAD}metadata:\n  name: gpt\n  annotations: text\n",
        None,
        "metadata.annotations: expected an object",
    ),
    "shared metadata": (SHARED, None, "is written in a way that takes no annotation without rewriting it: add"),
}


@pytest.mark.parametrize(("text", "name", "words"), REFUSED.values(), ids=REFUSED)
def test_file_that_cannot_be_annotated_stays_as_it_was(tmp_path: Path, text: str, name: str | None, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        annotate(path, FOOTPRINT, name)
    assert words in str(caught.value)
    assert (path.read_text(), list(tmp_path.iterdir())) == (text, [path])


def test_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        annotate(tmp_path / "job.yaml", FOOTPRINT)
