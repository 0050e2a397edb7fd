"""`stepfast report` of jobs on this machine: what it reads, what it says where something cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lives import BEGIN, UID, save, saves_of_training, training
from stepfast.histories import append_rows
from stepfast.step import JobKey, run_id
from stepfast.storage import open_store
from stepfast_operator.backends.statefolder import Launch, StateFolder
from stepfast_operator.record import CheckpointStatus, Status

JOB = JobKey(namespace="team", name="gpt")

Stepfast = Callable[..., Any]


def saved(status: Status, *, uri: str | None = None) -> StateFolder:
    """The folder of the job, below the working folder; its checkpoints are where `uri` says."""
    state = StateFolder(Path.cwd() / ".stepfast" / "jobs", JOB)
    state.path.mkdir(parents=True)
    state.write(UID, replace(status, checkpoint=replace(status.checkpoint, latest_persisted_uri=uri)))
    return state


def drawn(page: str) -> Any:
    """What the page's timeline is drawn from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_shows_saves_and_launches_beside_the_status(stepfast: Stepfast, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/checkpoints/team/gpt"
    state = saved(training(), uri=uri)
    state.write_launch(1, Launch(run=run_id(UID, 1), launched_time=BEGIN + 3, nodes=1))
    with closing(open_store(uri)) as store:
        append_rows(store, "", [save(1, 7, -100, uid="earlier"), *saves_of_training()])
    result = stepfast("report", "gpt")
    assert result.exit_code == 0, result.output
    assert result.stderr == "gpt.html: written; open it in a browser\n"
    page = (tmp_path / "gpt.html").read_text()
    life = drawn(page)
    assert [each["attempt"] for each in life["attempts"]] == [1, 2, 3]
    assert life["attempts"][0]["begin"] == 3
    assert len(life["saves"]) == len(saves_of_training())
    assert [[phase for phase, _, _ in each["phases"]] for each in life["recoveries"]] == 2 * [
        ["detect", "flush", "schedule", "restore", "resume"]
    ]
    assert "1 save of earlier jobs of this name left out" in page
    assert "On one machine" in page
    assert "attempt 2 failed: RankFailed (rank 3, exit code 1)" in page


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        pytest.param(
            None, "saves are not shown: where they are is known with the first commit", id="nothing-committed"
        ),
        pytest.param(
            "nowhere://root/team/gpt",
            "saves are not shown, because nowhere://root/team/gpt cannot be read from here: ",
            id="no-such-storage",
        ),
    ],
)
def test_storage_that_cannot_be_read_is_said_and_the_rest_is_shown(
    stepfast: Stepfast, tmp_path: Path, uri: str | None, said: str
) -> None:
    saved(training(), uri=uri)
    assert stepfast("report", "gpt").exit_code == 0
    page = (tmp_path / "gpt.html").read_text()
    assert said in page
    assert drawn(page)["saves"] == []
    assert len(drawn(page)["recoveries"]) == 2


def test_page_goes_where_it_is_asked_for_and_replaces_nothing_unasked(stepfast: Stepfast, tmp_path: Path) -> None:
    saved(Status(checkpoint=CheckpointStatus()))
    target = tmp_path / "pages" / "life.html"
    assert stepfast("report", "gpt", "-o", str(target)).exit_code == 0
    written = target.read_text()
    refused = stepfast("report", "gpt", "-o", str(target))
    assert refused.exit_code == 2
    assert f"{target} exists already" in refused.stderr
    assert target.read_text() == written
    assert stepfast("report", "gpt", "-o", str(target), "--force").exit_code == 0


def test_unknown_job_leaves_no_file(stepfast: Stepfast, tmp_path: Path) -> None:
    result = stepfast("report", "gtp")
    assert result.exit_code == 2
    assert "there is no job gtp on this machine" in result.stderr
    assert list(tmp_path.glob("*.html")) == []
