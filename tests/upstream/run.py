"""Runs the frameworks' own checkpoint tests, as they are and with Stepfast in the place of their store.

    python tests/upstream/run.py accelerate                          its source distribution has its tests
    python tests/upstream/run.py torch --source ~/pytorch            a checkout, of about the release that is installed
    python tests/upstream/run.py lightning --source ~/lightning
    python tests/upstream/run.py deepspeed --source ~/DeepSpeed

Prints what the table in docs/integrations.md says of that framework, and each test that passes without Stepfast and not
with it. Fails for such a test, where none passes, and where no save went through Stepfast. Nothing of the frameworks is
in this repository.

Not Transformers yet: its source distribution leaves the Trainer's tests out. What they ask of a Trainer that resumes is
asked in tests/integrations/test_transformers.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Which tests of a framework go through its store on a CPU. `needs`: packages for them alone; `environment`: what
    they are told by it; `prepared`: a module of stand_ins that they want with Stepfast and without.
    """

    folder: str
    files: tuple[str, ...]
    needs: tuple[str, ...] = ()
    left_out: str = ""  # as pytest's -k would choose them
    environment: Mapping[str, str] = field(default_factory=dict)
    prepared: str = ""


SUITES = {
    "torch": Suite(
        folder="test/distributed/checkpoint",
        files=(
            "test_file_system_checkpoint_cpu.py", "test_save_load_api.py", "test_dtensor_checkpoint.py",
            "test_dtensor_resharding.py", "test_tp_checkpoint.py", "test_planner.py", "test_compatibility.py",
        ),
        needs=("expecttest==0.3.0", "pytest==8.3.5"),  # its conftest.py is older than pytest 9
    ),
    "accelerate": Suite(folder="tests", files=("test_state_checkpointing.py",), needs=("parameterized==0.9.0",)),
    "lightning": Suite(
        folder="tests/tests_pytorch",
        files=(
            "plugins/test_checkpoint_io_plugin.py", "checkpointing/test_checkpoint_callback_frequency.py",
            "checkpointing/test_model_checkpoint.py", "checkpointing/test_torch_saving.py",
            "checkpointing/test_trainer_checkpoint.py", "models/test_restore.py",
        ),
        needs=("jsonargparse==4.53.0", "tensorboardX==2.6.4"),
        # These count the calls of torch.save, or of TorchCheckpointIO's own method.
        left_out="test_default_checkpoint_freq or test_top_k or test_trainer_save_checkpoint_storage_options or "
        "test_model_checkpoint_no_extraneous_invocations",
        prepared="newer_lightning",
    ),
    "deepspeed": Suite(
        folder="tests",
        # Universal and reshaped checkpoints are made of files, by tools of their own: those of an exported tag.
        files=tuple(
            f"unit/checkpoint/test_{name}.py"
            for name in ("latest_checkpoint", "tag_validation", "shared_weights", "lr_scheduler", "other_optimizer",
                         "zero_optimizer")
        ),
        needs=("pytest==8.3.5",),  # newer ones do not see DeepSpeed's distributed fixtures
        # These want a checkpoint's optimizer to be refused on another number of ranks, which it is not.
        left_out="test_elastic_checkpoint_change_dp and (True-True-True or True-True-False or True-False-True or "
        "True-False-False)",
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DS_DISABLE_REUSE_DIST_ENV": "1"},
        prepared="older_deepspeed",
    ),
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(SUITES))
    parser.add_argument("--source", type=Path, help="the framework's source; without: from the package index")
    options = parser.parse_args()
    suite = SUITES[options.framework]
    with tempfile.TemporaryDirectory(prefix="stepfast-upstream-") as scratch:
        source = options.source or _download(options.framework, Path(scratch))
        packages = _install(suite.needs, Path(scratch, "packages"))
        theirs = _run(suite, source, Path(scratch, "theirs.xml"), packages)
        saves = Path(scratch, "saves")
        ours = _run(
            suite, source, Path(scratch, "ours.xml"), packages, stand_in=f"for_{options.framework}", saves=saves
        )
        saved = saves.stat().st_size if saves.exists() else 0
    print(f"{options.framework} {version(options.framework)}: {', '.join(suite.files)}")
    print(f"with its own store: {_counts(theirs)}; with ours: {_counts(ours)}, in {saved} saves")
    lost = sorted(name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed")
    for name in lost:
        print(f"passes without Stepfast alone: {name} ({ours.get(name, 'did not run')})")
    sys.exit(bool(lost) or saved == 0 or "passed" not in ours.values())


def _download(framework: str, folder: Path) -> Path:
    """The source distribution, unpacked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest",
               str(folder), f"{framework}=={version(framework)}"]  # fmt: skip
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def _install(needs: tuple[str, ...], folder: Path) -> Path:
    if needs:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *needs]
        subprocess.run(command, check=True)
    return folder


def _run(
    suite: Suite, source: Path, report: Path, packages: Path, *, stand_in: str = "", saves: Path | None = None
) -> dict[str, str]:
    """Each test's outcome: passed, failed or skipped. `saves`: a file that gets a byte for each save of ours."""
    folder = source / suite.folder
    paths = [
        str(HERE / "stand_ins"),
        str(packages),
        str(ROOT / "trainer-sdk" / "src"),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {
        **os.environ, **suite.environment, "PYTHONPATH": os.pathsep.join(paths),
        "UPSTREAM_MODULES": " ".join(filter(None, (suite.prepared, stand_in))),
        **({} if saves is None else {"UPSTREAM_SAVES": str(saves)}),
    }  # fmt: skip
    # Nothing of this repository's settings.
    alone = ["-c", os.devnull, "--rootdir", str(source), "-p", "no:cacheprovider"]
    selected = [*(["-k", f"not ({suite.left_out})"] if suite.left_out else []), *suite.files]
    command = [sys.executable, "-m", "pytest", "-q", *alone, f"--junitxml={report}", *selected]
    subprocess.run(command, cwd=folder, env=environment, check=False, timeout=SECONDS)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def _counts(outcomes: dict[str, str]) -> str:
    counted = Counter(outcomes.values())
    return ", ".join(f"{counted[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counted[kind])


if __name__ == "__main__":
    main()
