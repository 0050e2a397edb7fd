"""The command line, on a machine that knows no cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stepfast_operator.local import command


@pytest.fixture
def stepfast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
