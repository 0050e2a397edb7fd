"""Installs the foreign peers into a folder of their own, so that this project's environment stays what it is.

What cannot be installed is written down with its reason, for the tables. Run by `make bench`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(".stepfast/bench/peers")
_REPORT = "installed.json"

_PACKAGES: dict[str, Sequence[str]] = {
    "dlrover": ("dlrover==0.6.1", "psutil==7.2.2", "deprecated==1.3.1", "wrapt==2.5.2", "pynvml==13.0.1",
                "nvidia-ml-py==13.615.71"),
    "torchsnapshot": ("torchsnapshot==0.1.0", "aiofiles==25.1.0", "nest-asyncio==1.6.0", "psutil==7.2.2",
                      "importlib-metadata==8.7.0", "zipp==4.1.2"),
    "nvrx": ("nvidia-resiliency-ext==0.7.0", "psutil==7.2.2"),
    "obstore": ("obstore==0.12.1",),
}  # fmt: skip
"""Each peer with those of its dependencies that its checkpoints need and this project does not have."""

_PLATFORMS: dict[str, Sequence[str]] = {
    # Built for one Python alone, which is not this one's; what is used of it is pure Python.
    "nvrx": ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--only-binary", ":all:"),
}


def install(folder: Path = FOLDER) -> dict[str, str]:
    """Fills the folder; for each peer the reason why it is missing, or an empty text."""
    reasons = {}
    for peer, packages in _PACKAGES.items():
        command = [_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder), "--no-deps"]
        done = subprocess.run(
            [*command, *_PLATFORMS.get(peer, ()), *packages], capture_output=True, text=True, check=False
        )
        reasons[peer] = "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _REPORT).write_text(json.dumps(reasons))
    return reasons


def missing_reason(peer: str, folder: Path = FOLDER) -> str:
    """Why that peer is not there; an empty text when it is."""
    try:
        reasons: dict[str, str] = json.loads((folder / _REPORT).read_text())
    except FileNotFoundError:
        return "not installed: python -m benchmarks.peers.install"
    return reasons.get(peer, "")


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else shutil.which("uv") or "uv"


if __name__ == "__main__":
    for name, why in install().items():
        print(f"{name}: {why or 'installed'}")
