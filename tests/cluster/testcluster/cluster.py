"""A whole cluster: control plane and nodes, up and down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import ControlPlane, KubernetesClient
from testcluster.credentials import node_identity
from testcluster.kubenode import PLACES, Node
from testcluster.unavailable import Unavailable
from testcluster.waiting import run_or_raise, wait_until

READY_SECONDS = 120.0
# Program → Debian package.
PROGRAMS = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "nft": "nftables", "iptables": "iptables",
    "conntrack": "conntrack", "ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}  # fmt: skip


class Cluster(KubernetesClient):
    """`nodes` machines and a control plane. `address` is the host as pods see it."""

    def __init__(self, claim: Claim, binaries: Binaries, *, node_grace_seconds: int = 20) -> None:
        """
        Args:
            node_grace_seconds: how long a node may be silent before it is NotReady.
        """
        self.claim = claim
        self.control_plane = ControlPlane(claim, binaries, node_grace_seconds=node_grace_seconds)
        self.address = claim.addresses.bridge
        self.nodes: dict[str, Node] = {}
        super().__init__(self.control_plane.kubeconfig, binaries)

    @classmethod
    def open(cls, number: int) -> Self:
        """One that runs already, such as one that was started by hand."""
        cluster = cls(Claim.open(number), Binaries.find())
        for folder in sorted(cluster.claim.folder.glob("node-*")):
            cluster._node(int(folder.name.removeprefix("node-")))
        return cluster

    def up(self, nodes: int = 2, *, images: Sequence[Path] = ()) -> None:
        """Returns when every node is Ready and holds the images of these archives."""
        check_machine()
        bridge = self.claim.bridge_name
        run_or_raise("ip", "link", "add", bridge, "address", self.claim.addresses.card(0), "type", "bridge")
        run_or_raise("ip", "address", "add", f"{self.address}/24", "dev", bridge)
        run_or_raise("ip", "link", "set", bridge, "up")
        # Every node that there may ever be has its token: the API server reads the file once.
        self.control_plane.start([node_identity(f"node-{index}") for index in PLACES])
        with ThreadPoolExecutor(max_workers=nodes) as pool:
            list(pool.map(lambda index: self.add_node(index, images=images), range(1, nodes + 1)))

    def add_node(self, index: int, *, images: Sequence[Path] = ()) -> Node:
        """One more machine; returns when it is Ready."""
        node = self._node(index)
        node.start()
        node.load(*images)
        node.admit()
        wait_until(f"{node.name} is Ready", node.is_ready, seconds=READY_SECONDS)
        return node

    def audit(self) -> Iterator[dict[str, Any]]:
        """As `ApiServer.audit`."""
        return self.control_plane.audit()

    def node_client(self, name: str) -> KubernetesClient:
        """With the identity of a node's kubelet: what it may do, whoever takes the node over may do."""
        return KubernetesClient(self.control_plane.credentials.kubeconfig(node_identity(name)), self.binaries)

    def load(self, *archives: Path) -> None:
        """Puts images on every node that runs."""
        running = [node for node in self.nodes.values() if node.is_running]
        with ThreadPoolExecutor(max_workers=len(running)) as pool:
            list(pool.map(lambda node: node.load(*archives), running))

    def down(self) -> None:
        """Ends everything, and leaves nothing behind."""
        self.claim.release()

    def logs(self) -> dict[str, str]:
        """The output of every process of the cluster, by name."""
        return {path.stem: path.read_text(errors="replace") for path in sorted((self.claim.folder / "logs").iterdir())}

    def keep_logs(self, folder: Path) -> None:
        """Copies them, the audit log among them, to where they outlive the cluster."""
        shutil.copytree(self.claim.folder / "logs", folder, dirs_exist_ok=True)

    def _node(self, index: int) -> Node:
        node = Node(self.control_plane, index)
        self.nodes[node.name] = node
        return node


def check_machine() -> None:
    """
    Raises:
        Unavailable: nodes cannot run here; all reasons at once.
    """
    reasons = []
    if os.getuid() != 0:
        reasons.append("nodes are namespaces and control groups, which root alone may make")
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where a user who is not root may not look
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    if missing:
        reasons.append(f"programs are missing: apt-get install {' '.join(sorted(missing))}")
    if reasons:
        raise Unavailable("; ".join(reasons))
