"""`stepfast run -f` of a manifest that carries a prediction, against the memory of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from nvmldouble import Driver
from stepfast.footprint import ANNOTATION, Footprint
from stepfast_operator.backends.machinememory import limits_of, machine_memory

MIB = 1 << 20
EXABYTE = 1 << 60
AGENT_LOG = ".stepfast/jobs/*/agent.log"
SCRIPT = """
from pathlib import Path
Path("has-run").touch()
"""


def job(peak_bytes: int, checkpoint_bytes: int = 0, **policy: Any) -> str:
    footprint = Footprint(
        title="small", device="cpu", occupied_bytes=peak_bytes, reserved_bytes=peak_bytes, context_bytes=0,
        peak_bytes=peak_bytes, components={"activations": peak_bytes}, checkpoint_bytes=checkpoint_bytes,
    )  # fmt: skip
    return json.dumps(
        {
            "apiVersion": "stepfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "train", "annotations": {ANNOTATION: footprint.to_json()}},
            "spec": {
                "trainer": {"command": ["torchrun", "--", "train.py"], "numProcPerNode": 2},
                "memoryPolicy": policy,
                "checkpoint": {"memory": {"sizeLimit": "64Mi"}},
            },
        }
    )


@pytest.fixture
def run(runs: Any, tmp_path: Path) -> Any:
    """Writes script and manifest, and runs them on a machine without GPUs; the exit status."""

    def start(manifest: str) -> int:
        (tmp_path / "train.py").write_text(SCRIPT)
        (tmp_path / "job.yaml").write_text(manifest)
        status: int = runs.finish(runs.start("-f", "job.yaml", CUDA_VISIBLE_DEVICES=""))
        return status

    return start


def condition(runs: Any) -> dict[str, str]:
    (found,) = [one for one in runs.summary["conditions"] if one["type"] == "FitsMemory"]
    return dict(found)


def test_job_that_fits_runs_and_says_so(runs: Any, run: Any, tmp_path: Path) -> None:
    assert run(job(MIB, checkpoint_bytes=MIB)) == 0, runs.log[-4000:]
    assert (tmp_path / "has-run").exists()
    assert list(tmp_path.glob(AGENT_LOG))
    told = condition(runs)
    assert (told["status"], told["reason"]) == ("True", "Fits")
    assert told["message"].startswith(
        "one rank takes 1.0 MiB (activations 1.0 MiB); the 2 ranks of a node take 2.0 MiB"
    )
    assert "this machine has" in told["message"]
    assert "checkpoints" not in told["message"]
    assert "fit its memory" not in runs.log


def test_job_that_does_not_fit_is_warned_of_and_runs(runs: Any, run: Any, tmp_path: Path) -> None:
    assert run(job(EXABYTE, checkpoint_bytes=20 * MIB)) == 0, runs.log[-4000:]
    assert (tmp_path / "has-run").exists()
    told = condition(runs)
    assert (told["status"], told["reason"]) == ("False", "NodeTooSmall")
    assert "checkpoint.memory.sizeLimit is 64.0 MiB, 56.0 MiB less: one slot a rank" in told["message"]
    log = runs.log
    assert log.count("stepfast: the job does not fit its memory: one rank takes") == 1
    assert log.index("does not fit its memory") < log.index("launched"), "said too late"


def test_job_that_does_not_fit_is_refused_by_choice_and_runs_once_the_manifest_is_mended(
    runs: Any, run: Any, tmp_path: Path
) -> None:
    assert run(job(EXABYTE, action="Refuse")) == 1
    assert not (tmp_path / "has-run").exists()
    assert not list(tmp_path.glob(AGENT_LOG)), "an agent was started"
    assert "launched" not in runs.log
    assert "stepfast: failed: DoesNotFitMemory: one rank takes" in runs.log
    assert (runs.summary["state"], condition(runs)["status"]) == ("Failed", "False")
    assert condition(runs)["message"].endswith("nothing is started (memoryPolicy.action: Refuse)")
    assert runs.processes() == []

    assert run(job(MIB, action="Refuse")) == 0, runs.log[-4000:]
    assert (runs.summary["state"], condition(runs)["status"]) == ("Complete", "True")


def test_prediction_that_cannot_be_read_stops_nothing(runs: Any, run: Any) -> None:
    manifest = json.loads(job(MIB, action="Refuse"))
    manifest["metadata"]["annotations"][ANNOTATION] = "{}"
    assert run(json.dumps(manifest)) == 0, runs.log[-4000:]
    assert (condition(runs)["status"], condition(runs)["reason"]) == ("Unknown", "PredictionUnreadable")
    assert "stepfast: the job may not fit its memory: metadata.annotations[" in runs.log


def test_gpus_of_this_machine_are_asked_for_when_the_ranks_have_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    found = machine_memory(7, has_gpus=True)
    assert (found.name, found.device_bytes, found.slot_bytes) == ("this machine", 16 << 30, 7)
    assert found.memory_bytes is not None
    assert 0 < found.memory_bytes <= psutil.virtual_memory().total
    assert machine_memory(7, has_gpus=False).device_bytes is None


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_driver_that_does_not_answer_says_nothing(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    driver = Driver()
    driver.refused[refused] = pynvml.NVML_ERROR_UNKNOWN
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert machine_memory(7, has_gpus=True).device_bytes is None


def test_limits_of_all_control_groups_above_a_process_count(tmp_path: Path) -> None:
    for folder, text in {".": "9", "a": "max\n", "a/b": "7\n", "a/b/c": "8\n", "memory": "", "memory/x": "5"}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(text)
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text("5\n")
    assert list(limits_of("0::/a/b/c\n", tmp_path)) == [8, 7, 9]
    assert list(limits_of("0::/gone/b\n", tmp_path)) == [9]
    assert list(limits_of("7:cpu:/a\n6:memory:/x\n0::/\n", tmp_path)) == [5, 9]
