"""The page's text, without a browser: it is one file, strict, and holds the report."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from anatomyreports import HOSTILE, hostile
from stepfast.torch.anatomy import Report, from_json, html_report


class Page(HTMLParser):
    """What an HTML parser finds: tags with their attributes, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.texts:
            self.texts[self.cdata_elem][-1] += data


def test_page_carries_the_whole_report(predicted: Report) -> None:
    data, _ = Page(html_report(predicted)).texts["script"]
    assert from_json(json.dumps({"format": 1, **json.loads(data)})) == predicted


def test_page_refers_to_nothing_outside_and_lets_only_its_own_script_run(predicted: Report) -> None:
    page = Page(html_report(predicted))
    assert not {"link", "img", "iframe", "base", "object", "embed"} & {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if {"src", "href", "style"} & attributes.keys()]
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes) or ""
    assert policy.startswith("default-src 'none'; ")
    for text in (page.texts["script"][1], page.texts["style"][0]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy


def test_no_text_of_a_report_becomes_markup(predicted: Report) -> None:
    plain, attacked = Page(html_report(predicted)), Page(html_report(hostile(predicted)))
    assert {tag for tag, _ in attacked.tags} - {tag for tag, _ in plain.tags} == set()
    assert len(attacked.texts["script"]) == len(plain.texts["script"]) == 2
    assert attacked.texts["script"][1] == plain.texts["script"][1]
    assert json.loads(attacked.texts["script"][0])["title"] == HOSTILE
    known = {"class", "id", "role", "tabindex", "scope"}
    for _, attributes in attacked.tags:
        assert not [name for name in known & attributes.keys() if "hacked" in (attributes[name] or "")]
        assert not [name for name in attributes if name.startswith("on")]


def test_pages_parts_are_packed_with_the_distribution(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "trainer-sdk"
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = folder / "src"
    parts = [file for place in ("page", "torch/anatomy/page") for file in (source / "stepfast" / place).glob("*.*")]
    assert {"base.css", "base.js", "page.css", "page.html"} <= {file.name for file in parts}
    assert {str(file.relative_to(source)) for file in parts} <= packed


@pytest.mark.parametrize("name", ["stepfast.torch.anatomy", "stepfast.cli"])
def test_anatomy_is_imported_without_rich_and_nvml(name: str) -> None:
    program = f"import sys\nfor missing in ('rich', 'typer', 'pynvml'): sys.modules[missing] = None\nimport {name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
