"""`stepfast anatomy report`: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner, Result

from stepfast.cli import anatomy
from stepfast.errors import SpecError
from stepfast.torch.anatomy import Report, from_json, html_report, predict


@pytest.fixture(scope="module")
def prediction() -> Report:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()  # type: ignore[no-any-return]

    return predict(
        lambda: nn.Linear(64, 64), torch.optim.AdamW, lambda: torch.randn(8, 64), loss_fn=loss, title="One layer"
    )


@pytest.fixture
def file(tmp_path: Path, prediction: Report) -> Path:
    written = tmp_path / "report.json"
    written.write_text(prediction.to_json(), encoding="utf-8")
    return written


@pytest.fixture
def call() -> Callable[..., Result]:
    app = typer.Typer()
    anatomy.register(app)

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, ["anatomy", "report", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_tables_go_to_standard_output(call: Any, file: Path) -> None:
    done = call(file)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("One layer\npredicted for a100-80gb; ")
    assert "\nMemory\nIt fits: " in done.stdout


def test_json_is_the_report(call: Any, file: Path, prediction: Report) -> None:
    assert from_json(call(file, "--json").stdout) == prediction


def test_page_is_written_and_nothing_else_is_printed(call: Any, file: Path, tmp_path: Path, prediction: Report) -> None:
    page = tmp_path / "page.html"
    done = call(file, "--html", page)
    assert (done.exit_code, done.stdout) == (0, "")
    assert str(page) in done.stderr
    assert page.read_text(encoding="utf-8") == html_report(from_json(prediction.to_json()))


def test_file_in_the_way_is_replaced_by_force_alone(call: Any, file: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    done = call(file, "--html", page)
    assert done.exit_code == 2
    assert "exists already" in done.stderr
    assert page.read_text() == "mine"
    assert call(file, "--html", page, "--force").exit_code == 0
    assert page.read_text() != "mine"


@pytest.mark.parametrize("option", ["out", "html"])
def test_file_that_appears_meanwhile_is_told_with_its_option(prediction: Report, tmp_path: Path, option: str) -> None:
    target = tmp_path / "report"
    target.write_text("theirs")
    files: dict[str, Any] = {"html": None, option: target}
    with pytest.raises(SpecError, match=f"^--{option}: .* exists already"):
        anatomy.show(prediction, as_json=False, force=False, **files)
    assert target.read_text() == "theirs"


def test_folder_that_is_not_there_is_not_made(call: Any, file: Path, tmp_path: Path) -> None:
    done = call(file, "--html", tmp_path / "pages" / "report.html")
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "cannot be read: No such file", id="no file"),
        pytest.param(b"\xff\xfe", "is no text", id="no text"),
        pytest.param(b"{}", "no anatomy report: it has no format", id="no report"),
        pytest.param(b"<html>", "no anatomy report: Expecting value", id="no JSON"),
    ],
)
def test_file_that_is_no_report_is_told_and_ends_with_status_2(
    call: Any, tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "other.json"
    if content is not None:
        file.write_bytes(content)
    done = call(file, "--html", tmp_path / "page.html")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"stepfast: FILE: {file}")
    assert words in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_installed_command_has_it(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepfast.cli", "anatomy", "report", str(file), "--json"],
        env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "One layer"
