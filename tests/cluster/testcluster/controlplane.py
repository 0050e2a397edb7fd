"""etcd, the API server with its audit log, controllers, scheduler and CoreDNS, as processes of the host.

An `ApiServer` alone (etcd and the API server) needs no root and no Debian packages.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.credentials import ADMIN, CONTROLLERS, DNS, PROXY, SCHEDULER, Credentials, Identity
from testcluster.waiting import CommandFailed, wait_until

READY_SECONDS = 120.0
# Bodies only of what a test must know all about: who made and who deleted which pod, and when it had ended.
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: RequestResponse
  verbs: [create, delete, deletecollection]
  resources: [{group: "", resources: [pods]}]
- level: RequestResponse
  verbs: [patch, update]
  resources: [{group: "", resources: [pods/status]}]
- level: Metadata
"""
# Who asked for what, and no bodies: those of ten thousand pods would be the machine's main work.
REQUESTS_ALONE = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
DNS_CONFIGURATION = """\
.:53 {{
  bind {bridge}
  errors
  ready {loopback}:8181
  cache 1
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig}
    ttl 1
  }}
}}
"""


class KubernetesClient:
    """kubectl and helm against one cluster."""

    def __init__(self, kubeconfig: Path, binaries: Binaries) -> None:
        self.kubeconfig = kubeconfig
        self.binaries = binaries

    def kubectl(self, *args: str, stdin: str | None = None, timeout_seconds: float = 120.0) -> str:
        """Its standard output.

        Raises:
            CommandFailed: with what it wrote on standard error.
        """
        return self._run("kubectl", args, stdin, timeout_seconds)

    def apply(self, *documents: dict[str, Any]) -> str:
        return self.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, documents)))

    def get(self, *args: str) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        document: dict[str, Any] = json.loads(self.kubectl("get", *args, "-o", "json"))
        return document

    def helm(self, *args: str, stdin: str | None = None, timeout_seconds: float = 300.0) -> str:
        """As `kubectl`; helm keeps nothing outside of the cluster's own folder."""
        return self._run("helm", args, stdin, timeout_seconds)

    def _run(self, program: str, args: Sequence[str], stdin: str | None, timeout_seconds: float) -> str:
        home = self.kubeconfig.parent
        result = subprocess.run(
            [str(self.binaries.path(program)), *args], input=stdin, capture_output=True, text=True, check=False,
            timeout=timeout_seconds,
            env={"KUBECONFIG": str(self.kubeconfig), "HOME": str(home), "PATH": "/usr/bin:/bin",
                 "HELM_CACHE_HOME": str(home / "helm"), "HELM_CONFIG_HOME": str(home / "helm"),
                 "HELM_DATA_HOME": str(home / "helm")},
        )  # fmt: skip
        if result.returncode:
            raise CommandFailed(f"{program} {' '.join(args)}: {result.stderr.strip()}")
        return result.stdout


class ApiServer(KubernetesClient):
    """etcd and the API server, in one claim; controllers and the scheduler, for those who start them."""

    def __init__(
        self,
        claim: Claim,
        binaries: Binaries,
        *,
        address: str | None = None,
        audit_policy: str = AUDIT_POLICY,
        environment: Mapping[str, str] | None = None,
        is_in_memory: bool = False,
    ) -> None:
        """`address`: where the API server listens; the claim's loopback address unless pods are to reach it.
        `environment`: what the API server has in its, beside ours. `is_in_memory`: etcd's data and the audit log are on
        no disk.
        """
        self.claim = claim
        self._data = claim.make_memory_folder() if is_in_memory else claim.folder
        self._audit_policy, self._environment = audit_policy, environment
        self.address = address or claim.addresses.loopback
        self.credentials = Credentials(claim.folder / "credentials", address=self.address)
        super().__init__(self.credentials.kubeconfig(ADMIN), binaries)

    @property
    def audit_log(self) -> Path:
        return self._data / "logs" / "audit.jsonl"

    def audit(self) -> Iterator[dict[str, Any]]:
        """Every request that the API server has answered, as audit.k8s.io/v1 Events, in the order of their answers."""
        # What follows the last line's end is being written: its request has no answer yet.
        for line in self.audit_log.read_text().split("\n")[:-1]:
            yield json.loads(line)

    def start(self, identities: Sequence[Identity] = ()) -> None:
        """Returns when requests are answered."""
        self.credentials.make([ADMIN, *identities])
        self.audit_log.parent.mkdir(exist_ok=True)
        self._start_etcd()
        self._start_api_server()
        wait_until("the API server is ready", self._is_ready, seconds=READY_SECONDS)

    def stop_api_server(self) -> None:
        """At once. etcd has what it had written."""
        self.claim.kill("kube-apiserver")

    def restart_api_server(self) -> None:
        """Starts it once more, after its end. Returns when requests are answered."""
        self._start_api_server()
        wait_until("the API server is ready again", self._is_ready, seconds=READY_SECONDS)

    @contextmanager
    def without_api_server(self) -> Iterator[None]:
        """It is not there while the context lasts."""
        self.stop_api_server()
        try:
            yield
        finally:
            self.restart_api_server()

    @contextmanager
    def without_etcd(self) -> Iterator[None]:
        """It has ended in order while the context lasts, and then starts with its data; the API server stays, and
        answers with errors meanwhile.
        """
        self.claim.kill("etcd", number=signal.SIGTERM)
        try:
            yield
        finally:
            self._start_etcd()
            wait_until("the API server is ready again", self._is_ready, seconds=READY_SECONDS)

    def _is_ready(self) -> bool:
        if not self.claim.is_alive("kube-apiserver"):
            raise RuntimeError(f"the API server ended: {self.claim.log('kube-apiserver').read_text()[-3000:]}")
        return self.kubectl("get", "--raw", "/readyz") == "ok"

    def _start_etcd(self) -> None:
        client, peer = (f"http://{self.claim.addresses.loopback}:{port}" for port in (2379, 2380))
        self.claim.spawn("etcd", [
            self.binaries.path("etcd"), "--data-dir", self._data / "etcd", "--log-level", "warn",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--unsafe-no-fsync",  # nothing here is kept
        ])  # fmt: skip

    def _start_api_server(self) -> None:
        policy = self.claim.folder / "audit-policy.yaml"
        policy.write_text(self._audit_policy)
        path = self.credentials.path
        self.claim.spawn("kube-apiserver", [
            self.binaries.path("kube-apiserver"),
            f"--etcd-servers=http://{self.claim.addresses.loopback}:2379",
            f"--bind-address={self.address}", f"--advertise-address={self.address}", "--secure-port=6443",
            f"--tls-cert-file={path('api.crt')}", f"--tls-private-key-file={path('api.key')}",
            f"--client-ca-file={self.credentials.authority}", f"--token-auth-file={self.credentials.tokens}",
            f"--kubelet-client-certificate={path('api-to-kubelet.crt')}",
            f"--kubelet-client-key={path('api-to-kubelet.key')}", "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={path('accounts.pub')}",
            f"--service-account-signing-key-file={path('accounts.key')}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true",
            f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}",
            # A test that reads the log after an answer finds its request there.
            "--audit-log-mode=blocking-strict",
            "--audit-log-maxsize=100000",  # MB: by default a hundred are kept, and who reads on reads another file
        ], environment=self._environment)  # fmt: skip

    def start_scheduler(self, *options: str) -> None:
        """Its identity, SCHEDULER, was given to `start`."""
        kubeconfig = self.credentials.kubeconfig(SCHEDULER)
        self.claim.spawn("kube-scheduler", [
            self.binaries.path("kube-scheduler"), "--kubeconfig", kubeconfig, "--leader-elect=false",
            "--secure-port=0", f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}",
            *options,
        ])  # fmt: skip

    def start_controllers(self, *options: str) -> None:
        """Their identity, CONTROLLERS, was given to `start`."""
        self.claim.spawn("kube-controller-manager", [
            self.binaries.path("kube-controller-manager"), "--kubeconfig", self.credentials.kubeconfig(CONTROLLERS),
            "--service-account-private-key-file", self.credentials.path("accounts.key"),
            "--root-ca-file", self.credentials.authority, "--use-service-account-credentials",
            "--leader-elect=false", "--secure-port=0", "--allocate-node-cidrs=false", *options,
        ])  # fmt: skip


class ControlPlane(ApiServer):
    """All of it, on the bridge that nodes and pods reach."""

    def __init__(self, claim: Claim, binaries: Binaries, *, node_grace_seconds: int) -> None:
        super().__init__(claim, binaries, address=claim.addresses.bridge)
        self._node_grace_seconds = node_grace_seconds

    def start(self, identities: Sequence[Identity] = ()) -> None:
        super().start([CONTROLLERS, SCHEDULER, PROXY, DNS, *identities])
        grace = f"--node-monitor-grace-period={self._node_grace_seconds}s"
        self.start_controllers(grace, "--node-monitor-period=1s")
        self.start_scheduler()
        self._start_dns()

    def _start_dns(self) -> None:
        corefile = self.claim.folder / "Corefile"
        addresses = self.claim.addresses
        corefile.write_text(DNS_CONFIGURATION.format(
            bridge=addresses.bridge, loopback=addresses.loopback, kubeconfig=self.credentials.kubeconfig(DNS),
        ))  # fmt: skip
        self.claim.spawn("coredns", [self.binaries.path("coredns"), "-conf", corefile])
