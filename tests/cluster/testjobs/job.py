"""One TrainingJob in a real cluster, as its user and as bad luck see it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from stepfast.layout import HISTORIES
from stepfast.step import attempt_of
from stepfast.storage import open_store
from testcluster.cluster import Cluster
from testcluster.jobnamespace import torch_pod_parts
from testcluster.waiting import wait_until

STEPS = 400
SAVE_EVERY = 10
SECONDS = 300.0
POLL_SECONDS = 0.7
_ENDED = re.compile(r"rank (\d+) ends after step (\d+) with ([0-9a-f]{64})")
# Of a pod's processes the rank is the one that runs the script itself; the brackets keep this shell out of it.
_RANK = """
for folder in /proc/[0-9]*; do
  if tr "\\0" " " < $folder/cmdline | grep -q "[p]ython3 -u"; then kill -{signal} ${{folder#/proc/}}; fi
done"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A namespace with all that jobs need, and the image that they run."""

    cluster: Cluster
    namespace: str
    image: str
    storage_uri: str

    def submit(
        self,
        name: str,
        *arguments: str,
        script: str = "trainer.py",
        nodes: int = 2,
        processes: int = 1,
        labels: Mapping[str, str] | None = None,
        parts: Sequence[Mapping[str, Any]] = (),
        **spec: Any,
    ) -> Job:
        """Applies a TrainingJob of that script of tests/cluster; `spec` is laid over its own, `labels` its pods get.
        `parts`: what its pods have beside torch's, as `torch_pod_parts` gives it.
        """
        torch, *more = torch_pod_parts(), *parts
        volumes, mounts, environment = (
            [*torch[name], *(one for part in more for one in part[name])] for name in ("volumes", "volumeMounts", "env")
        )
        container = {
            "name": "node",
            "imagePullPolicy": "Never",
            "volumeMounts": [*mounts, {"name": "trainer", "mountPath": "/trainer"}],
        }
        template = {
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [*volumes, {"name": "trainer", "configMap": {"name": "trainer"}}],
        }
        trainer = {
            "image": self.image,
            "command": ["torchrun"],
            "args": [f"/trainer/{script}", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), *arguments],
            "env": environment,
            "numNodes": nodes,
            "numProcPerNode": processes,
            **spec.pop("trainer", {}),
        }
        checkpoint = {"persistent": {"intervalSeconds": 0}, **spec.pop("checkpoint", {})}
        manifest = {
            "apiVersion": "stepfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "trainer": trainer,
                "template": {"metadata": {"labels": dict(labels or {})}, "spec": template},
                "checkpoint": checkpoint,
                **spec,
            },
        }
        self.cluster.apply(manifest)
        return self.job(name)

    def job(self, name: str) -> Job:
        """One that was applied already."""
        return Job(cluster=self.cluster, namespace=self.namespace, name=name, storage_uri=self.storage_uri)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A TrainingJob that was applied."""

    cluster: Cluster
    namespace: str
    name: str
    storage_uri: str

    # ---- what its user sees

    def document(self) -> dict[str, Any]:
        return self.cluster.get("trainingjob", self.name, "-n", self.namespace)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.document().get("status", {})
        return status

    def wait(self, what: str, is_so: Callable[[dict[str, Any]], object], *, seconds: float = SECONDS) -> dict[str, Any]:
        """Until its status is so; returns it."""
        last: dict[str, Any] = {}

        def look() -> bool:
            last.clear()
            last.update(self.status())
            return bool(is_so(last))

        try:
            wait_until(f"{self.name}: {what}", look, seconds=seconds, every_seconds=POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; status: {json.dumps(last)}; events: {self.story()}") from error
        return last

    def wait_for_commit(self, step: int, *, attempt: int = 1) -> dict[str, Any]:
        """Until that step, or a later one, is committed and this attempt trains."""
        return self.wait(
            f"step {step} is committed in attempt {attempt}",
            lambda status: (
                status.get("attempt") == attempt
                and status["checkpoint"].get("latestPersistedStep", 0) >= step
                and "firstStepTime" in status.get("current", {})
            ),
        )

    def wait_for_end(self, *, seconds: float = SECONDS) -> dict[str, Any]:
        """Until it is over; it has to be Complete."""
        status = self.wait("it is over", lambda status: "terminalState" in status, seconds=seconds)
        assert status["terminalState"] == "Complete", (status, self.story())
        return status

    def story(self) -> list[str]:
        """Its Events, oldest first: `reason: message`."""
        chosen = f"involvedObject.name={self.name},involvedObject.kind=TrainingJob"
        events = self.cluster.get("events", "-n", self.namespace, "--field-selector", chosen)["items"]
        events.sort(key=lambda event: event["eventTime"])
        return [f"{event['reason']}: {event['message']}" for event in events]

    def digests(self) -> Mapping[int, str]:
        """What each rank ended with, as the pods of the last attempt printed it."""
        found: dict[int, str] = {}
        attempt = self.status()["attempt"]
        for pod in self.pods(attempt):
            log = self.cluster.kubectl("logs", "-n", self.namespace, pod["metadata"]["name"], "-c", "node")
            found |= {int(rank): digest for rank, step, digest in _ENDED.findall(log) if int(step) == STEPS}
        return found

    def stored(self) -> set[str]:
        """The names in its folder of the storage."""
        with closing(open_store(self.storage_uri)) as store:
            return {entry.name for entry in store.list(self._folder)}

    def commits(self) -> dict[int, list[int]]:
        """The steps that were ever committed, by attempt; its history outlives what retention removes."""
        with closing(open_store(self.storage_uri)) as store:
            rows = csv.DictReader(io.StringIO(store.read(f"{self._folder}/{HISTORIES}").decode()))
        found: dict[int, list[int]] = {}
        for row in rows:
            if row["outcome"] == "Committed":
                found.setdefault(attempt_of(row["run"]), []).append(int(row["global_step"]))
        return found

    @property
    def _folder(self) -> str:
        return f"{self.namespace}/{self.name}"

    def wait_for_mirrors(self, step: int) -> None:
        """Until each of its nodes says that another holds that step of it in memory, or a later one."""

        def are_held() -> bool:
            found = [job for node in self.cluster.get("checkpointnodes")["items"] for job in node["status"]["jobs"]]
            ours = [job for job in found if (job["namespace"], job["name"]) == (self.namespace, self.name)]
            return len(ours) > 1 and all(job.get("mirroredStep", 0) >= step for job in ours)

        wait_until(f"{self.name}: step {step} is mirrored", are_held, seconds=SECONDS)

    # ---- its pods

    def pods(self, attempt: int) -> list[dict[str, Any]]:
        chosen = f"stepfast.dev/job={self.name},stepfast.dev/attempt={attempt}"
        items: list[dict[str, Any]] = self.cluster.get("pods", "-n", self.namespace, "-l", chosen)["items"]
        return items

    def node_of(self, index: int, *, attempt: int = 1) -> str:
        """The node that this pod of the gang runs on."""
        pod = self.cluster.get("pod", f"{self.name}-{attempt}-{index}", "-n", self.namespace)
        return str(pod["spec"]["nodeName"])

    # ---- bad luck

    def signal_rank(self, signal: str, *, index: int = 1, attempt: int = 1) -> None:
        """Sends a signal to the rank in that pod."""
        pod = f"{self.name}-{attempt}-{index}"
        self.cluster.kubectl(
            "exec", "-n", self.namespace, pod, "-c", "node", "--", "sh", "-c", _RANK.format(signal=signal)
        )

    def signal_rank_on(self, node: str, signal: str) -> None:
        """Sends a signal to the ranks on that node, of whatever job: from the node, without the API server."""
        self.cluster.nodes[node].run("sh", "-c", _RANK.format(signal=signal))

    def delete_pod(self, *, index: int = 1, attempt: int = 1) -> None:
        self.cluster.kubectl("delete", "pod", f"{self.name}-{attempt}-{index}", "-n", self.namespace, "--wait=false")

    def evict_pod(self, *, index: int = 1, attempt: int = 1) -> None:
        """As a node drain or a preemption does: through the eviction API."""
        name = f"{self.name}-{attempt}-{index}"
        eviction = {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace},
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    def patch(self, spec: Mapping[str, Any]) -> None:
        self.cluster.kubectl(
            "patch", "trainingjob", self.name, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec})
        )
