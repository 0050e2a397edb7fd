"""Jobs with real steps, made by Checkpointers as training makes them, and the command line beside them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stepfast.admission import Interval
from stepfast.cli import checkpoints
from stepfast.environment import Environment
from stepfast.step import JobKey, OnBusy
from stepfast.storage import Store, open_store
from stepfast.torch import Checkpointer

JOB = JobKey(namespace="local", name="train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table below its head, split into cells."""
        return [line.split("  ") for line in self.out.splitlines()[1:]]

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@dataclass(slots=True)
class Job:
    """One job in a storage."""

    root: str
    runs: list[str] = field(default_factory=list)

    @property
    def uri(self) -> str:
        return f"{self.root}/{JOB}"

    @property
    def folder(self) -> Path:
        """Of a job in the file system."""
        return Path(self.root.removeprefix("file://")) / str(JOB)

    def step_folder(self, step: int) -> Path:
        return self.folder / f"global_step{step}"

    def open(self) -> Store:
        return open_store(self.uri)

    def train(
        self, *steps: int, restore: int | None = None, name: str = "state", objects: Mapping[str, Any] | None = None,
        **state: Any,
    ) -> str:  # fmt: skip
        """A training of its own run that saves these steps, of `objects` beside a model; returns the run."""
        run = f"{uuid.uuid4().hex[:8]}-{len(self.runs) + 1}"
        environment = Environment(
            job=JOB, run=run, rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, storage_uri=self.root,
            socket=None, resume_step=None, memory_bytes=0, interval=Interval(steps=1), persist_interval_seconds=0.0,
            max_to_keep=100, on_busy=OnBusy.WAIT, mtbf_seconds=3600.0,
        )  # fmt: skip
        values = {"weights": torch.arange(6.0).reshape(2, 3), "run": run, **state}
        with Checkpointer(environment=environment, name=name, model=values, **(objects or {})) as checkpointer:
            if restore is not None:
                checkpointer.restore(restore)
            values["run"] = run
            for step in steps:
                checkpointer.save(step).wait(timeout_seconds=60.0)
        self.runs.append(run)
        return run

    def restored(self) -> tuple[int, str]:
        """What the next training would go on from: the step, and the run that saved it."""
        environment = Environment(
            job=JOB, run=f"{uuid.uuid4().hex[:8]}-99", rank=0, local_rank=0, world_size=1, local_world_size=1, node=0,
            storage_uri=self.root, socket=None, resume_step=None, memory_bytes=0, interval=None,
            persist_interval_seconds=0.0, max_to_keep=100, on_busy=OnBusy.WAIT, mtbf_seconds=3600.0,
        )  # fmt: skip
        model = {"weights": torch.zeros(2, 3), "run": ""}
        checkpointer = Checkpointer(environment=environment, model=model)
        try:
            return checkpointer.restore(), str(model["run"])
        finally:
            checkpointer.__exit__(RuntimeError, RuntimeError(), None)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job without steps yet, in a folder of the test's own."""
    return Job((tmp_path / "storage").as_uri())


@pytest.fixture(params=["file", "memory"])
def any_job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """A job without steps yet, in the file system and in an object storage."""
    if request.param == "file":
        yield Job((tmp_path / "storage").as_uri())
        return
    import fsspec

    root = f"memory://cli-{uuid.uuid4().hex}"
    yield Job(root)
    fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.fixture
def any_storage_job() -> Callable[[str], Job]:
    """`any_storage_job(root)`: a job without steps yet in that storage."""
    return Job


@pytest.fixture
def invoke() -> Callable[..., Said]:
    """`invoke("list", uri, …)`: `stepfast checkpoints list …` in this process, piped."""
    app = typer.Typer()
    app.callback()(lambda: None)
    checkpoints.register(app)

    def call(*arguments: object, answer: str | None = None) -> Said:
        result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], input=answer)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(code=result.exit_code, out=result.stdout, err=result.stderr)

    return call
