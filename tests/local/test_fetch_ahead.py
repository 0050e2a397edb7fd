"""What a gang will restore is on its node before the ranks ask: it is fetched while they import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eventual import wait_until
from stepfast.launcher import announce
from stepfast.layout import step_folder

if TYPE_CHECKING:
    from conftest import Azurite
    from faults import Proxy


class Cloud:
    """A storage that tells what was asked of it."""

    def __init__(self, azurite: Azurite, proxy: Proxy) -> None:
        self.uri = f"abfs://{azurite.new_container()}/jobs"
        options = {"connection_string": azurite.connection_string(proxy.port)}
        self.environment = {"STEPFAST_STORAGE_OPTIONS": json.dumps(options)}
        self.proxy = proxy

    def reads(self, of: str) -> list[str]:
        """The requests so far that read an object of that kind."""
        return [line for line in self.proxy.requests if line.startswith("GET ") and of in line]


@pytest.fixture
def cloud(azurite: Azurite, proxy: Proxy) -> Cloud:
    return Cloud(azurite, proxy)


@pytest.fixture
def node(cloud: Cloud, start_node: Callable[..., Any], train: Callable[..., Any]) -> Any:
    """Its job's second attempt is about to begin; step 2 is committed, and in its memory."""
    node = start_node(cloud.uri, environment=cloud.environment)
    training = train(node)
    for _ in range(2):
        training.save().wait(timeout_seconds=90)
    training.checkpointer.close(timeout_seconds=90)
    node.run = f"{node.run.rpartition('-')[0]}-2"
    cloud.proxy.requests.clear()
    return node


def _forget(node: Any) -> None:
    node.terminate()
    node.forget_memory()
    node.start()


@pytest.mark.parametrize("resume_step", [2, None], ids=["fixed", "newest"])
def test_step_is_fetched_before_a_rank_asks_and_once_for_all_of_them(
    cloud: Cloud, node: Any, train: Callable[..., Any], bench: Any, resume_step: int | None
) -> None:
    _forget(node)
    announce(replace(node.environment_of(), resume_step=resume_step))
    wait_until(lambda: cloud.reads(".safetensors"), "the file is fetched")

    for _ in range(2):
        training = train(node)
        assert training.checkpointer.restore() == 2
        assert training.state["step"] == 2
        assert bool((training.state["weights"] == 2).all())
        training.checkpointer.close()
    (fetched,) = cloud.reads(".safetensors")
    assert step_folder(2) in fetched


def test_launcher_has_it_fetched_whatever_its_script_imports(
    cloud: Cloud, node: Any, bench: Any, tmp_path: Path
) -> None:
    _forget(node)
    script = tmp_path / "script.py"
    script.write_text("")
    options = ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=test"]
    subprocess.run(
        [sys.executable, "-m", "stepfast.launcher", *options, "--", str(script)],
        env={**node.rank_environment(), "STEPFAST_RESUME_STEP": "1"}, check=True,
    )  # fmt: skip
    wait_until(lambda: cloud.reads(".safetensors"), "the file is fetched")
    assert all(step_folder(1) in line for line in cloud.reads(".safetensors"))


def test_step_that_memory_holds_is_not_fetched(cloud: Cloud, node: Any, train: Callable[..., Any], bench: Any) -> None:
    announce(node.environment_of())
    wait_until(lambda: cloud.reads("part-"), "the agent knows what the step consists of")
    assert train(node).checkpointer.restore() == 2
    assert cloud.reads(".safetensors") == []


def test_fetch_that_failed_is_made_again_when_a_rank_asks(
    cloud: Cloud, node: Any, train: Callable[..., Any], bench: Any
) -> None:
    _forget(node)
    cloud.proxy.break_down("403", matching=".safetensors")
    announce(node.environment_of())
    wait_until(lambda: cloud.reads(".safetensors"), "the fetch fails")
    cloud.proxy.heal()
    assert train(node).checkpointer.restore() == 2


def test_storage_that_is_a_folder_needs_no_copies(
    start_node: Callable[..., Any], train: Callable[..., Any], bench: Any, tmp_path: Path
) -> None:
    node = start_node(tmp_path.as_uri())
    training = train(node)
    training.save().wait(timeout_seconds=90)
    training.checkpointer.close()
    _forget(node)
    announce(node.environment_of())
    assert train(node).checkpointer.restore() == 1
