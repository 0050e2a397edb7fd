"""Runs the frameworks' own checkpoint tests, as they are and with Stepfast in the place of their store.

    python tests/upstream/run.py accelerate                          its source distribution has its tests
    python tests/upstream/run.py torch --source ~/pytorch            a checkout, of about the release that is installed

Prints a row of the table in docs/integrations.md, and each test that passes without Stepfast and not with it. Nothing
of the frameworks is in this repository.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Which tests of a framework go through its store on a CPU. `needs`: packages for them alone."""

    folder: str
    files: tuple[str, ...]
    needs: tuple[str, ...] = ()
    left_out: str = ""  # pytest's -k


SUITES = {
    "torch": Suite(
        folder="test/distributed/checkpoint",
        files=(
            "test_file_system_checkpoint_cpu.py", "test_save_load_api.py", "test_dtensor_checkpoint.py",
            "test_dtensor_resharding.py", "test_tp_checkpoint.py", "test_planner.py", "test_compatibility.py",
        ),
        needs=("expecttest==0.3.0",),
    ),
    "accelerate": Suite(folder="tests", files=("test_state_checkpointing.py",), needs=("parameterized==0.9.0",)),
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
        theirs = _run(suite, source, Path(scratch, "theirs.xml"), packages, stand_in="")
        ours = _run(suite, source, Path(scratch, "ours.xml"), packages, stand_in=options.framework)
    cells = [
        f"{options.framework} {version(options.framework)}",
        ", ".join(suite.files),
        _counts(theirs),
        _counts(ours),
    ]
    print(f"| {' | '.join(cells)} |")
    lost = sorted(name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed")
    for name in lost:
        print(f"passes without Stepfast alone: {name} ({ours.get(name, 'did not run')})")
    sys.exit(bool(lost))


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


def _run(suite: Suite, source: Path, report: Path, packages: Path, *, stand_in: str) -> dict[str, str]:
    """Each test's outcome: passed, failed or skipped."""
    folder = source / suite.folder
    paths = [str(packages), str(ROOT / "trainer-sdk" / "src"), os.environ.get("PYTHONPATH", "")]
    if stand_in:
        paths.insert(0, str(HERE / "stand_ins"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "UPSTREAM_STAND_IN": stand_in}
    alone = [
        "-c",
        os.devnull,
        "--rootdir",
        str(source),
        "-p",
        "no:cacheprovider",
    ]  # nothing of this repository's settings
    selected = [*(["-k", suite.left_out] if suite.left_out else []), *suite.files]
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
