"""`import stepfast` costs nothing: no third-party package, a few milliseconds. And the SDK's public names."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import stepfast
import stepfast.errors
import stepfast.torch


def fresh(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )


def test_import_takes_no_third_party_package() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import stepfast; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = {name.partition(".")[0] for name in json.loads(fresh(code).stdout)}

    assert loaded - {"stepfast"} <= sys.stdlib_module_names


def test_import_takes_less_than_fifty_milliseconds() -> None:
    def once() -> float:
        lines = [line.split("|") for line in fresh("import stepfast", "-X", "importtime").stderr.splitlines()]
        return sum(int(line[1]) for line in lines if len(line) == 3 and line[2].strip() == "stepfast") / 1000

    assert 0.0 < min(once() for _ in range(5)) < 50.0  # the others met a busy machine


def test_numpys_generator_is_not_imported_for_a_script_that_draws_nothing_from_it(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, torch; from stepfast.torch import Checkpointer; "
        f"made = dict(storage_uri={tmp_path.as_uri()!r}, interval=None, state={{'a': torch.ones(3)}}); "
        "checkpointer = Checkpointer(**made); checkpointer.save(1); checkpointer.close(); "
        "assert Checkpointer(**made).restore() == 1; print('numpy.random' in sys.modules)"
    )

    assert fresh(code).stdout.split() == ["False"]


def test_names_of_the_package_are_there_when_asked_for() -> None:
    assert {name: getattr(stepfast, name) for name in stepfast.__all__} == {
        "Tier": stepfast.torch.Tier,
        "__version__": importlib.metadata.version("stepfast"),
    }
    with pytest.raises(AttributeError, match="no attribute 'Teir'"):
        _ = stepfast.Teir


def test_public_names_are_these() -> None:
    assert sorted(stepfast.torch.__all__) == [
        "Checkpointer",
        "CommittedStep",
        "GlobalBatchSampler",
        "Interval",
        "Saved",
        "Settling",
        "Tier",
        "every",
    ]
    assert all(hasattr(stepfast.torch, name) for name in stepfast.torch.__all__)
    errors = {name for name, value in vars(stepfast.errors).items() if isinstance(value, type)}
    assert errors == {
        "StepfastError", "CheckpointError", "CheckpointNotFound", "CheckpointDamaged", "CheckpointUnsafe",
        "CheckpointMismatch", "StateUnsupported", "StorageError", "ObjectNotFound", "StorageForbidden", "StorageFull",
        "StorageUnavailable", "AgentError", "ProtocolError", "ProtocolMismatch", "AgentUnavailable", "AnatomyError",
        "AnatomyOptionError",
        "MemoryBudgetTooSmall", "GangError", "SpecError", "UploadLost", "StepOutOfOrder", "CheckpointerOpen",
        "ObjectsUndefined", "ReferenceMissing",
    }  # fmt: skip
