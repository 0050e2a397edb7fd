"""Twenty chaos trials, of which `make test` runs some; `make chaos` runs two hundred and writes the report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


trial = _load("trial")
campaign = _load("campaign")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kind", "seed"),
    campaign.plan(20, 7001),
    ids=[f"{kind}-{seed}" for kind, seed in campaign.plan(20, 7001)],
)
def test_training_survives_with_nothing_torn_mixed_or_lost(kind: str, seed: int, tmp_path: Path) -> None:
    outcome = trial.Trial(kind, seed, tmp_path).run()
    assert outcome.violations == [], (tmp_path / "run.log").read_text()[-6000:]
