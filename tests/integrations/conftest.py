"""The installed DeepSpeed beside the tests, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Oracle:
    """Answers for the installed DeepSpeed; see `deepspeedoracle.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def refusal(self, configuration: Mapping[str, Any], *, world_size: int = 1) -> str | None:
        """Why `DeepSpeedConfig` does not take this, or why it would rather not; None when it does, without a word."""
        answer = self._ask({"take": configuration, "world": world_size})
        deprecated = [said for said in answer["warnings"] if "deprecated" in said]
        return answer["error"] or (deprecated[0] if deprecated else None)

    def description(self) -> dict[str, Any]:
        return self._ask({"describe": True})

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"DeepSpeed's process ended with {self._process.wait(10)}"
        return json.loads(answer)


@pytest.fixture(scope="session")
def deepspeed() -> Iterator[Oracle]:
    with subprocess.Popen(
        [sys.executable, HERE / "deepspeedoracle.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    ) as process:
        try:
            yield Oracle(process)
        finally:
            process.terminate()
