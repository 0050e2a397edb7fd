"""The operator as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from testcluster.controlplane import KubernetesClient
from testoperator.world import STORAGE

ROOTS = ("tests/cluster", "trainer-sdk/src", "sidecar/src", "operator/src")
PROJECT = Path(__file__).resolve().parents[3]
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProcess:
    process: subprocess.Popen[bytes]
    log: Path
    metrics_port: int
    health_port: int

    def scrape(self) -> str:
        return _get(self.metrics_port, "/metrics")[1]

    def health(self, path: str = "/healthz") -> tuple[int, str]:
        """What a probe is answered; 0 while nobody does."""
        try:
            return _get(self.health_port, path)
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_SECONDS)


def _get(port: int, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.status, answer.read().decode()


@contextmanager
def operator_process(
    folder: Path,
    kubeconfig: Path,
    *,
    namespace: str,
    watch: Sequence[str] = (),
    mode: str = "",
    identity: str = "one",
    metrics_port: int | None = None,
    storages: Sequence[str] = STORAGE.allowed,
) -> Iterator[OperatorProcess]:
    """Runs until the context ends. `namespace` is where its Lease lies; without a port it gets one that is free.
    `storages`: what jobs may name.
    """
    metrics_port, health_port = metrics_port or _free_port(), _free_port()
    module = ["testoperator.lives", mode] if mode else ["stepfast_operator"]
    options = [f"--metrics-port={metrics_port}", f"--health-port={health_port}"]
    options += [f"--watch-namespace={name}" for name in watch]
    options += [f"--allow-storage={uri}" for uri in storages]
    environment: Mapping[str, str] = {
        **os.environ, "PYTHONPATH": os.pathsep.join(str(PROJECT / root) for root in ROOTS),
        "KUBECONFIG": str(kubeconfig), "POD_NAME": identity, "POD_NAMESPACE": namespace,
    }  # fmt: skip
    log = folder / f"operator-{identity}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *options], env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield OperatorProcess(process=process, log=log, metrics_port=metrics_port, health_port=health_port)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kubeconfig_of(client: KubernetesClient, namespace: str, account: str, folder: Path) -> Path:
    """With the identity of a service account."""
    document = yaml.safe_load(client.kubeconfig.read_text())
    token = client.kubectl("create", "token", account, "-n", namespace).strip()
    for user in document["users"]:
        user["user"] = {"token": token}
    path = folder / f"{namespace}-{account}.kubeconfig"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path
