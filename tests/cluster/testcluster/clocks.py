"""Clocks of nodes that are off, for the processes that preload a small library (`clock.c`): what such a process reads
of the real-time clock is shifted by what a file of its node says, and changes with it within a second, as when somebody
sets a machine's clock. Debian's libfaketime would not do: it breaks Python's `time.sleep`.

Linux has no namespace for the real-time clock. So the kernel itself (times of files), and with it kubelet, containerd
and kube-proxy, which are Go's and ask no C library, go on with the machine's clock. CLOCK_MONOTONIC is true.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from testcluster.kubenode import Node
from testcluster.unavailable import Unavailable
from testcluster.waiting import run_or_raise

CLAIM = "clock"
_SOURCE = Path(__file__).with_name("clock.c")
_LIBRARY = "clock.so"


def build_library(folder: Path) -> Path:
    """Raises Unavailable where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise Unavailable("clocks cannot be skewed without a C compiler: apt-get install gcc libc6-dev")
    run_or_raise(compiler, "-shared", "-fPIC", "-O2", "-o", f"{folder / _LIBRARY}", f"{_SOURCE}")
    return folder / _LIBRARY


class NodeClocks:
    """Of nodes, in a folder that each of them has for itself."""

    def __init__(self, folder: str, library: Path) -> None:
        self.folder, self._library = folder, library

    def prepare(self, node: Node) -> None:
        """Its processes may be started; its clock is right."""
        node.run("mkdir", "-p", self.folder)
        node.run("cp", str(self._library), self.folder)
        self.skew(node, 0)

    def skew(self, node: Node, seconds: int) -> None:
        """Puts its clock so far ahead, or behind."""
        # Replaced as a whole: nobody reads half of it.
        new, file = f"{self.folder}/new", f"{self.folder}/offset"
        node.run("sh", "-c", f"echo {seconds:+d} > {new} && mv {new} {file}")

    def environment(self, folder: str | None = None) -> list[dict[str, str]]:
        """Of a container that has that clock. `folder`: where it sees the node's, if it is elsewhere."""
        seen = folder or self.folder
        variables = {
            "LD_PRELOAD": f"{seen}/{_LIBRARY}",
            "CLOCK_OFFSET_FILE": f"{seen}/offset",
        }
        return [{"name": name, "value": value} for name, value in variables.items()]

    def pod_parts(self) -> dict[str, Any]:
        """What a pod of a namespace gains that has CLAIM for the folder, as `torch_pod_parts` gives it."""
        claim = {"claimName": CLAIM, "readOnly": True}
        return {
            "volumes": [{"name": CLAIM, "persistentVolumeClaim": claim}],
            "volumeMounts": [{"name": CLAIM, "mountPath": f"/{CLAIM}", "readOnly": True}],
            "env": self.environment(f"/{CLAIM}"),
        }
