"""`stepfast checkpoints` on Azure Blob Storage: what differs there is where an object ends, and what a folder is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Invoke = Callable[..., Any]


@pytest.fixture
def azure_job(azurite: Any, any_storage_job: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job without steps yet in a container of its own."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string())
    return any_storage_job(f"abfs://{azurite.new_container()}/root")


def test_every_command_works_on_a_job_that_was_rolled_back(azure_job: Any, invoke: Invoke, tmp_path: Path) -> None:
    first = azure_job.train(1, 2, 3)
    azure_job.train(2, restore=1)

    assert f"did you mean {azure_job.uri}?" in invoke("list", azure_job.root).err
    assert [row["state"] for row in invoke("list", azure_job.uri, "--all", "--json").document] == [
        "committed",
        "committed",
        "superseded",
        "superseded",
    ]
    assert invoke("verify", azure_job.uri).code == 0
    assert invoke("reinstate", azure_job.uri, 2).code == 2
    assert invoke("reinstate", azure_job.uri, 3).code == 0
    assert azure_job.restored() == (3, first)
    assert invoke("export", azure_job.uri, tmp_path / "a.pt", "--step", 3).code == 0
    assert torch.load(tmp_path / "a.pt")["model"]["run"] == first
    assert invoke("rm", azure_job.uri, "--superseded", "--yes").code == 0
    assert invoke("rm", azure_job.uri, 1, 2, "--yes").code == 0
    assert [row["step"] for row in invoke("list", azure_job.uri, "--all", "--json").document] == [3]
