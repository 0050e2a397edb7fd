"""Predictions that several tests read, and a real browser for the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anatomyreports import SMALL_GPU
from browser import running_browser
from families import FAMILIES
from nvmldouble import Driver
from reportbrowser import ReportBrowser
from stepfast.torch.anatomy import Report, predict


@pytest.fixture(scope="session")
def predicted() -> Report:
    """A small BERT on a small GPU: with a limit, a context, reserved memory, a roof."""
    family = FAMILIES["bert"]
    return predict(family.model, torch.optim.AdamW, family.batch, batch_size=4, device=SMALL_GPU, title="Small BERT")


@pytest.fixture(scope="session")
def predicted_on_cpu() -> Report:
    """A small ResNet on this machine: no limit, nothing reserved, times of kernels that ran."""
    family = FAMILIES["resnet"]
    return predict(family.model, torch.optim.AdamW, family.batch, batch_size=2, device="cpu")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportBrowser]:
    """Debian's Chromium; without one the test is skipped, and fails in CI."""
    folder: Path = tmp_path_factory.mktemp("pages")
    with running_browser(folder, ReportBrowser) as started:
        yield started


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two devices in place of this machine's."""
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made
