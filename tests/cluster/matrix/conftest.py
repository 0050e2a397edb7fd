"""What rows of the failure matrix share. Each test of this folder is one: it disturbs a job in the middle of training,
and its `account` checks how it ended. `make chaos-cluster` runs all and writes them into docs/chaos.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chaospage import Part, write_part
from testjobs.account import Account
from testjobs.job import Job, Team
from testjobs.matrix import Result, append_result, describe, read_results

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[2] / ".stepfast" / "chaos-cluster.jsonl"
_ROWS = pytest.StashKey[list[str]]()
_ACCOUNT = pytest.StashKey[Account]()


@pytest.fixture(autouse=True)
def _storage_access(storage_access: None) -> None:
    """Every account reads what its job has stored."""


@pytest.fixture
def job(request: pytest.FixtureRequest, team: Team) -> Iterator[Callable[..., Job]]:
    """Submits a job that is named after the test, and removes it afterwards; tells the story if the test fails."""
    submitted: list[Job] = []

    def submit(*arguments: str, **options: Any) -> Job:
        name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
        submitted.append(team.submit(name, *arguments, **options))
        return submitted[-1]

    yield submit
    for one in submitted:
        print("\n".join(one.story()))
        team.cluster.kubectl("delete", "trainingjob", one.name, "-n", team.namespace, "--timeout=120s")


@pytest.fixture
def account(request: pytest.FixtureRequest, undisturbed: Mapping[int, str]) -> Account:
    """Of the row's job. A row whose account recorded nothing is a violation in the table."""
    made = request.node.stash[_ACCOUNT] = Account(undisturbed=undisturbed)
    return made


# ---- `--chaos-page`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The rows that there are, before some are left out."""
    config.stash[_ROWS] = [_row_of(item) for item in items if item.path.is_relative_to(FOLDER)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    release = getattr(item, "funcargs", {}).get("release")
    if report.failed and call.when == "call" and release is not None:
        report.sections.append(("What operator and agents said last", release.last_words()))
    if item.config.option.chaos_page and (report.failed or (report.when == "call" and report.passed)):
        violation = str(call.excinfo.value) if report.failed and call.excinfo else ""
        account = item.stash.get(_ACCOUNT, None)
        append_result(RESULTS, Result.now(_row_of(item), account and account.findings, violation))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.chaos_page:
        text = describe(session.config.stash[_ROWS], read_results(RESULTS))
        write_part(session.config.option.chaos_page, Part.CLUSTER, text)


def _row_of(item: pytest.Item) -> str:
    return f"{item.path.relative_to(FOLDER)}::{item.name}"
