"""A real Prometheus on this machine, from Debian's package: it scrapes what it is told, and answers queries."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from eventual import wait_until

DEADLINE_SECONDS = 60.0


def program(name: str) -> str:
    """`prometheus` or `promtool`. Without it the test is skipped, and fails in CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"NOT TESTED HERE: alerts and dashboards on a real Prometheus; no {name}. "
        if os.environ.get("CI"):
            pytest.fail(f"{reason}CI runs everything: install Debian's package prometheus")
        pytest.skip(f"{reason}Debian's package prometheus has it")
    return found


class Prometheus:
    """One that runs. Times are seconds since the epoch."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def query(self, expr: str, time: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query: `metric` and `value`. Raises ValueError with its words when it is wrong."""
        when = {} if time is None else {"time": f"{time:.3f}"}
        result: list[dict[str, Any]] = self._ask("query", query=expr, **when)["result"]
        return result

    def firing(self) -> list[dict[str, Any]]:
        """The alerts that fire: `labels`, `annotations`."""
        return [alert for alert in self._ask("alerts")["alerts"] if alert["state"] == "firing"]

    def up(self) -> dict[str, str]:
        """How the last scrape of each target went, by its job: its error, empty where there was none."""
        targets = self._ask("targets")["activeTargets"]
        return {
            each["labels"]["job"]: each["lastError"] if each["health"] == "up" else each["health"] for each in targets
        }

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def _ask(self, path: str, **values: str) -> Any:
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(values)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as refused:
            raise ValueError(f"{values}: {json.loads(refused.read())['error']}") from refused


@contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, Mapping[str, Any]], rules: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """Scrapes each target (by its job: `port`, `labels`) once a second until the block ends, and evaluates the rules as
    often.
    """
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"] if rules is not None else [],
        "scrape_configs": [
            {
                "job_name": job,
                "honor_labels": True,  # as the chart's monitors have it
                "static_configs": [{"targets": [f"127.0.0.1:{target['port']}"], "labels": target["labels"]}],
            }
            for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules or {"groups": []}))
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(port)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            return server.is_ready()

        wait_until(answers, "Prometheus answers", DEADLINE_SECONDS)
        yield server
    finally:
        process.kill()
        process.wait()


def promtool(*words: str, folder: Path) -> str:
    """What it says. Raises AssertionError with that when it finds fault."""
    done = subprocess.run(
        [program("promtool"), *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
