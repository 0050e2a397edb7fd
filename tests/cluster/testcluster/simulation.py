"""A cluster of thousands of nodes on one machine: a real control plane, and KWOK, which plays the kubelets.

Real are etcd, the API server, the scheduler, and of the controllers those without which jobs neither come nor go
(namespaces, service accounts, nodes' life cycle, garbage). Left out is what in a real cluster is other machines' work
and says nothing of an operator: the nodes' leases, endpoints. Needs no root.
"""

from __future__ import annotations

import json
from pathlib import Path

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.controlplane import REQUESTS_ALONE, ApiServer
from testcluster.credentials import CONTROLLERS, SCHEDULER, Identity

_KWOK = Identity(user="kwok", groups="system:masters")
_CONTROLLERS = (
    "garbage-collector-controller", "namespace-controller", "node-lifecycle-controller", "serviceaccount-controller"
)  # fmt: skip
_SILENT_NODES = "--node-monitor-grace-period=24h"  # they renew no leases
# The components' own limits are for clusters in which each has a machine.
# Two fifths of the API server's work would be collecting garbage, with a heap that has room.
_API_SERVER = {"GOGC": "300"}
_UNHURRIED = ("--kube-api-qps=2000", "--kube-api-burst=2000")
_CONFIGURATION = {
    "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
    "kind": "KwokConfiguration",
    "metadata": {"name": "kwok"},
    "options": {"manageAllNodes": True, "podPlayStageParallelism": 16, "nodePlayStageParallelism": 16},
}
_PODS_PER_NODE = "110"
# Pods of one gang keep away from each other: weighing a thousand nodes for each would be the machine's main work.
_NODES_TO_SCORE_PER_CENT = 5


class SimulatedCluster(ApiServer):
    """Its nodes are whatever Nodes somebody makes (`node_document`)."""

    def __init__(self, claim: Claim, binaries: Binaries) -> None:
        # A cluster's etcd has a disk of its own.
        super().__init__(claim, binaries, audit_policy=REQUESTS_ALONE, environment=_API_SERVER, is_in_memory=True)

    def up(self) -> None:
        """Returns when requests are answered."""
        self.start([CONTROLLERS, SCHEDULER, _KWOK])
        self.start_controllers(f"--controllers={','.join(_CONTROLLERS)}", _SILENT_NODES, *_UNHURRIED)
        self.start_scheduler(f"--config={self._scheduler_configuration()}")
        configuration = self.claim.folder / "kwok.json"
        configuration.write_text(json.dumps(_CONFIGURATION))
        self.claim.spawn("kwok", [
            self.binaries.path("kwok"), "--kubeconfig", self.credentials.kubeconfig(_KWOK), "--config", configuration,
            "--config", self.binaries.path("kwok-stages.yaml"), "--server-address=",
            "--node-lease-duration-seconds=0",
        ])  # fmt: skip

    def _scheduler_configuration(self) -> Path:
        path = self.claim.folder / "scheduler.json"
        path.write_text(json.dumps({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.credentials.kubeconfig(SCHEDULER)), "qps": 2000, "burst": 2000},
            "leaderElection": {"leaderElect": False},
            "percentageOfNodesToScore": _NODES_TO_SCORE_PER_CENT,
        }))  # fmt: skip
        return path

    def down(self) -> None:
        """Ends everything, and leaves nothing behind."""
        self.claim.release()


def node_document(name: str) -> dict[str, object]:
    """A node as its kubelet registers it; KWOK makes it Ready."""
    resources = {"cpu": "96", "memory": "1Ti", "pods": _PODS_PER_NODE, "nvidia.com/gpu": "80"}
    marks = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": marks},
        "status": {"capacity": resources, "allocatable": resources},
    }
