"""Tests on file systems that are really full are skipped where nobody may mount, but never in CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [
        pytest.param("true", pytest.fail.Exception, id="ci"),
        pytest.param("", pytest.skip.Exception, id="elsewhere"),
    ],
)
def test_missing_right_to_mount_is_a_failure_in_ci_alone(
    ci: str,
    outcome: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_module: Callable[[str], Any],
) -> None:
    refuses = tmp_path / "mount"
    refuses.write_text("#!/bin/sh\necho must be superuser >&2\nexit 32\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="must be superuser"):
        load_module("faults").Mounts(tmp_path)("size=1m")
