"""Kueue's real controller beside an API server: its CRDs, its webhooks, its own process on the host.

Of all that Kueue can look after it is given plain pods, whose webhooks see the namespaces that are labelled for it.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from testcluster.binaries import Binaries
from testcluster.controlplane import ApiServer
from testcluster.credentials import ADMIN
from testcluster.waiting import wait_until

MANAGED = "stepfast.dev/queued"  # the label of namespaces whose pods Kueue may gate
API = "kueue.x-k8s.io/v1beta2"
_PORT = 9443
_METRICS = "/etc/kueue/metrics/certs"
_WEBHOOKS = frozenset({"pod", "workload", "clusterqueue", "resourceflavor", "cohort"})
_CRDS = (
    "workloads",
    "clusterqueues",
    "localqueues",
    "resourceflavors",
    "workloadpriorityclasses",
    "cohorts",
    "admissionchecks",
    "topologies",
    "multikueueclusters",
    "multikueueconfigs",
    "provisioningrequestconfigs",
)


class Kueue:
    """The controller of one API server."""

    def __init__(self, api: ApiServer) -> None:
        self.api, self._binaries = api, Binaries.find_kueue()
        self._folder = self._binaries.path("kueue-config")

    def start(self) -> None:
        """Returns when its webhooks answer."""
        crds = [str(self._folder / "crd" / "bases" / f"kueue.x-k8s.io_{name}.yaml") for name in _CRDS]
        self.api.kubectl("apply", "--server-side", *(f"-f={path}" for path in crds))
        self.api.kubectl("wait", "--for=condition=Established", *(f"crd/{name}.kueue.x-k8s.io" for name in _CRDS))
        certificates = self._certificates()
        # Kueue reads the certificate of its metrics from there alone. In a mount namespace of its own nothing else sees
        # it; that takes root.
        mounted = f"mount -t tmpfs tmpfs /etc && mkdir -p /etc/kueue/metrics && ln -s {certificates} {_METRICS}"
        command = [
            self._binaries.path("kueue"), f"--config={self._configuration(certificates)}",
            f"--kubeconfig={self.api.credentials.kubeconfig(ADMIN)}", "--feature-gates=VisibilityOnDemand=false",
        ]  # fmt: skip
        self.api.claim.spawn(
            "kueue", ["unshare", "--mount", "sh", "-c", f'{mounted} && exec "$@"', "sh", *map(str, command)]
        )
        self.api.apply(*self._webhooks())
        flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}, "spec": {}}
        wait_until("Kueue's webhooks answer", lambda: self._is_alive() and self.api.apply(flavor), seconds=120)

    def stop(self) -> None:
        """Nobody's pods are asked about any more."""
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            self.api.kubectl("delete", kind, f"kueue-{kind}", "--ignore-not-found")
        if self.api.claim.is_alive("kueue"):
            self.api.claim.kill("kueue")

    def make_queue(self, namespace: str, name: str, *, cpu: str) -> None:
        """A queue that only this namespace uses, with so much processor time to give away; its workloads preempt those
        of lower priority. The classes of priority are `low` and `high`.
        """
        labels = {"metadata": {"labels": {MANAGED: "true"}}}
        self.api.kubectl("patch", "namespace", namespace, "--type=merge", "-p", json.dumps(labels))
        quota = {"name": "cpu", "nominalQuota": cpu}
        spec = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [
                {"coveredResources": ["cpu"], "flavors": [{"name": "default", "resources": [quota]}]}
            ],
        }  # fmt: skip
        self.api.apply(
            {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": f"{namespace}-{name}"}, "spec": spec},
            {
                "apiVersion": API, "kind": "LocalQueue", "metadata": {"namespace": namespace, "name": name},
                "spec": {"clusterQueue": f"{namespace}-{name}"},
            },
            *(
                {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": kind}, "value": value}
                for kind, value in (("low", 1), ("high", 1000))
            ),
        )  # fmt: skip

    def used(self, namespace: str, name: str) -> str:
        """How much processor time of that queue is given away."""
        queue = self.api.get("clusterqueue", f"{namespace}-{name}")
        usage = (queue.get("status") or {}).get("flavorsReservation") or ()
        return str(usage[0]["resources"][0].get("total", "0")) if usage else "0"

    def _is_alive(self) -> bool:
        if not self.api.claim.is_alive("kueue"):
            raise RuntimeError(f"Kueue ended: {self.api.claim.log('kueue').read_text()[-3000:]}")
        return True

    def _certificates(self) -> Path:
        """The API server's own: it serves Kueue's webhooks at the same address."""
        certificates = self.api.claim.folder / "kueue"
        certificates.mkdir(exist_ok=True)
        shutil.copy(self.api.credentials.path("api.crt"), certificates / "tls.crt")
        shutil.copy(self.api.credentials.path("api.key"), certificates / "tls.key")
        return certificates

    def _configuration(self, certificates: Path) -> Path:
        document = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"{self.api.address}:8081"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": self.api.address, "port": _PORT, "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "managedJobsNamespaceSelector": {"matchLabels": {MANAGED: "true"}},
            "integrations": {"frameworks": ["pod"]},
        }
        path = certificates / "config.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def _webhooks(self) -> list[dict[str, Any]]:
        """Those of its own kinds and of pods, at the address of the process in place of a Service's."""
        authority = base64.b64encode(self.api.credentials.authority.read_bytes()).decode()
        found = []
        for document in yaml.safe_load_all((self._folder / "webhook" / "manifests.yaml").read_text()):
            hooks = [hook for hook in document["webhooks"] if hook["name"].partition(".")[0][1:] in _WEBHOOKS]
            for hook in hooks:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": f"https://{self.api.address}:{_PORT}{path}", "caBundle": authority}
                if hook["name"] in ("mpod.kb.io", "vpod.kb.io"):
                    hook["namespaceSelector"] = {"matchLabels": {MANAGED: "true"}}
            document["metadata"]["name"] = f"kueue-{document['kind'].lower()}"
            found.append({**document, "webhooks": hooks})
        return found
