"""A node: a network namespace, and in it process, mount, host name and IPC namespaces with containerd, the kubelet and
kube-proxy. Its first process is an init; killing that is what pulling the plug is to a machine.

Knows the control plane only by kubeconfigs.
"""

from __future__ import annotations

import json
import os
import select
from pathlib import Path

from testcluster.claim import CONTROL_GROUPS, Claim
from testcluster.controlplane import ControlPlane
from testcluster.credentials import PROXY, node_identity
from testcluster.waiting import run_or_raise, wait_until

PLACES = range(1, 10)
END_SECONDS, START_SECONDS = 30.0, 60.0
_LAST_WORDS = 1500  # characters of a log
# The kubelet sets these for the whole machine. On a test's machine it must not: it finds what it wants in place.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip
CONTAINERD = """\
version = 2
root = "{folder}/disk/containerd"
state = "/run/containerd"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  # Without CAP_SYS_RESOURCE nobody may lower a score, and every sandbox would fail.
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/network"
"""
# /run, /dev/shm: memory, so what is there ends with the node. disk/: survives it, as a machine's disk does.
INIT = """\
set -eu
hostname {name}
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777,size={shared_memory} tmpfs /dev/shm
while read -r target; do
  mkdir -p "$target" "{folder}/disk$target"
  mount --bind "{folder}/disk$target" "$target"
done <<END
{directories}
END
{kernel_settings}
containerd --config {folder}/containerd.toml > {logs}-containerd.log 2>&1 &
{binaries}/kube-proxy --kubeconfig {proxy} --proxy-mode nftables --cluster-cidr {all_pods} \\
  --hostname-override {name} --conntrack-max-per-core 0 --healthz-bind-address 127.0.0.1 > {logs}-kube-proxy.log 2>&1 &
# Nothing is scheduled to a node that lacks the images.
until [ -e {folder}/images-are-here ]; do sleep 0.1; done
# As its systemd unit does, again when it fails: containerd listens before it can be asked, and the kubelet asks once.
until {binaries}/kubelet --config {folder}/kubelet.json --kubeconfig {kubelet} --hostname-override {name} \\
  --node-ip {address}; do sleep 0.5; done > {logs}-kubelet.log 2>&1 &
# As an init does: reap what is orphaned. When one of the three ends, the machine is broken, and shall look it.
status=0
wait -n -p ended || status=$?
echo "process $ended ended with status $status"
"""


class NodeDown(Exception):
    """There is no machine to ask."""


DIRECTORIES = ("/var/lib/kubelet", "/var/lib/cni", "/var/lib/stepfast", "/var/log/pods", "/var/log/containers")


class Node:
    """One machine of a cluster, in one of nine places."""

    def __init__(self, control_plane: ControlPlane, index: int, *, shared_memory: str = "4g") -> None:
        """
        Args:
            index: 1 to 9; the node's name is `node-<index>`.
            shared_memory: size of its /dev/shm, as mount takes it.
        """
        assert index in PLACES
        self.name = f"node-{index}"
        self.index = index
        self.address = control_plane.claim.addresses.node(index)
        self.folder = control_plane.claim.folder / self.name
        self._control_plane = control_plane
        self._claim: Claim = control_plane.claim
        self._namespace = f"{self._claim.node_prefix()}{self.name}"
        self._group = self._claim.control_group(self.name)
        self._shared_memory = shared_memory

    def start(self) -> None:
        """Boots it, for the first time or again after `kill`; its disk is as it was, its memory is new."""
        self.folder.mkdir(exist_ok=True)
        self._make_network()
        self._make_control_groups()
        self._write_configuration()
        self._socket.unlink(missing_ok=True)
        self._claim.spawn(self.name, [
            "nsenter", f"--net=/run/netns/{self._namespace}",
            "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
            "--propagation", "private", "bash", self.folder / "init.sh",
        ])  # fmt: skip

    def kill(self) -> None:
        """Loses the node at once: nothing on it says goodbye to anybody. Returns when all its processes are gone."""
        # The link first: dying sockets would tell their peers.
        _ip("link", "set", self._namespace, "down")
        first = self._first_process()
        self._claim.kill(self.name)
        if first is not None:
            try:
                if not select.select([first], [], [], END_SECONDS)[0]:
                    raise TimeoutError(f"{self.name} still has processes")
            finally:
                os.close(first)

    @property
    def is_running(self) -> bool:
        return self._claim.is_alive(self.name)

    def is_ready(self) -> bool:
        """As the API server has it."""
        found = self._control_plane.get("nodes", "--field-selector", f"metadata.name={self.name}")["items"]
        conditions = found[0]["status"].get("conditions", []) if found else []
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def load(self, *archives: Path) -> None:
        """Puts the images of OCI or Docker archives on the node, under the names that they have there."""

        def answers() -> bool:
            return self._socket.is_socket() and bool(self.containerd("version"))

        wait_until(f"{self.name}: containerd answers", answers, seconds=START_SECONDS)
        for archive in archives:
            self.containerd("images", "import", f"{archive}")

    def admit(self) -> None:
        """All images are here: the kubelet may register the node. It stays so over `kill` and `start`."""
        (self.folder / "images-are-here").touch()

    def run(self, *command: str) -> str:
        """What a command prints that runs on the node, as root.

        Raises:
            NodeDown: the node was killed, or has ended by itself.
        """
        first = self._running_process_id()
        inside = ["nsenter", "--target", str(first), "--mount", "--uts", "--ipc", "--pid", "--net", "--wd=/"]
        return run_or_raise(*inside, *command)

    @property
    def _socket(self) -> Path:
        return self.folder / "containerd.sock"

    def containerd(self, *words: str) -> str:
        """What `ctr` says to that about the kubelet's containers and images."""
        return self.run("ctr", "--address", str(self._socket), "--namespace", "k8s.io", *words)

    def container_process(self, container_id: str) -> int | None:
        """The first process of a running container, as the node numbers it. `container_id`: as in a pod's status."""
        identity = container_id.removeprefix("containerd://")
        rows = (line.split() for line in self.containerd("tasks", "list").splitlines()[1:])
        return next((int(row[1]) for row in rows if row and row[0] == identity), None)

    def proc(self) -> Path:
        """The node's own /proc, with the numbers that its processes have there. Raises NodeDown."""
        return Path(f"/proc/{self._running_process_id()}/root/proc")

    def _last_words(self) -> str:
        """The ends of its logs: where tests run unattended, the logs themselves are gone with the machine."""
        logs = sorted(self._claim.log(self.name).parent.glob(f"{self.name}*.log"))
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-_LAST_WORDS:]}" for log in logs)

    # ---- its first process

    def _first_process_id(self) -> int | None:
        try:
            parent = self._claim.pid(self.name)
        except ProcessLookupError:
            return None
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0]) if children else None

    def _running_process_id(self) -> int:
        first = self._first_process_id()
        if first is None:
            raise NodeDown(f"{self.name} does not run\n{self._last_words()}")
        return first

    def _first_process(self) -> int | None:
        pid = self._first_process_id()
        if pid is None:
            return None
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return None

    # ---- its surroundings

    def _make_network(self) -> None:
        """A boot begins with a clean namespace; its routes reach every place, taken or not."""
        if Path("/run/netns", self._namespace).exists():
            _ip("netns", "delete", self._namespace)
        # The namespace lives on while sockets in it retry what nobody answers, minutes after `kill`; its link must not.
        if Path("/sys/class/net", self._namespace).exists():
            _ip("link", "delete", self._namespace)
        addresses = self._claim.addresses
        _ip("netns", "add", self._namespace)
        inner = ("name", "eth0", "address", addresses.card(self.index), "netns", self._namespace)
        _ip("link", "add", self._namespace, "type", "veth", "peer", *inner)
        _ip("link", "set", self._namespace, "master", self._claim.bridge_name, "up")
        inside = ("-n", self._namespace)
        _ip(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "route", "add", "default", "via", addresses.bridge)
        for other in PLACES:
            if other != self.index:
                _ip(*inside, "route", "add", addresses.pods_of(other), "via", addresses.node(other))
        _ip("route", "replace", addresses.pods_of(self.index), "via", self.address)

    def _make_control_groups(self) -> None:
        hierarchies = [path for path in CONTROL_GROUPS.iterdir() if (path / "cgroup.procs").exists()]
        if (CONTROL_GROUPS / "cgroup.controllers").exists():
            hierarchies = [CONTROL_GROUPS]
        for hierarchy in hierarchies:
            group = hierarchy / self._group
            group.mkdir(exist_ok=True)
            if hierarchy == CONTROL_GROUPS:  # version 2: what children may use is given by the parent
                (hierarchy / "cgroup.subtree_control").write_text("+cpuset +cpu +io +memory +pids")
            for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts with none, and takes no process then
                if (hierarchy / name).exists() and (hierarchy / "cgroup.clone_children").exists():
                    (group / name).write_text((hierarchy / name).read_text())

    def _write_configuration(self) -> None:
        folder, claim, plane = self.folder, self._claim, self._control_plane
        (folder / "network").mkdir(exist_ok=True)
        (folder / "network" / "10-pods.conflist").write_text(json.dumps(self._network_configuration()))
        (folder / "kubelet.json").write_text(json.dumps(self._kubelet_configuration()))
        (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder))
        (folder / "resolv.conf").write_text(f"nameserver {claim.addresses.bridge}\n")
        (folder / "init.sh").write_text(INIT.format(
            name=self.name, folder=folder, logs=claim.log(self.name).with_suffix(""),
            shared_memory=self._shared_memory, directories="\n".join(DIRECTORIES),
            kernel_settings=self._kernel_settings(), binaries=plane.binaries.path("kubelet").parent,
            proxy=plane.credentials.kubeconfig(PROXY), all_pods=claim.addresses.all_pods, address=self.address,
            kubelet=plane.credentials.kubeconfig(node_identity(self.name)),
        ))  # fmt: skip

    def _kernel_settings(self) -> str:
        """Lines of the init that put a file of the node's in the place of each setting."""
        lines = []
        for name, value in KERNEL_SETTINGS.items():
            file = self.folder / "kernel" / name.replace("/", "-")
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{value}\n")
            lines.append(f"mount --bind {file} /proc/sys/{name}")
        return "\n".join(lines)

    def _network_configuration(self) -> dict[str, object]:
        addresses = {"type": "host-local", "ranges": [[{"subnet": self._claim.addresses.pods_of(self.index)}]],
                     "routes": [{"dst": "0.0.0.0/0"}]}  # fmt: skip
        bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": False, "ipam": addresses}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _kubelet_configuration(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            # As in production: a pod that reaches the kubelet's port gets nothing from it.
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True},
                               "x509": {"clientCAFile": str(self._control_plane.credentials.authority)}},
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.folder}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [self._claim.addresses.bridge],
            "clusterDomain": "cluster.local",
            "resolvConf": f"{self.folder}/resolv.conf",
            # The disk is the whole machine's, and images cannot be pulled again.
            "evictionHard": {"imagefs.available": "1%", "nodefs.available": "1%", "memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
        }  # fmt: skip


def _ip(*args: str) -> None:
    run_or_raise("ip", *args)
