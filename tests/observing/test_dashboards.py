"""The dashboards of the chart: what they are, and that each query of each panel has data of a real life.

A real Prometheus scrapes a real operator and a real agent: jobs that train, save, lose a rank and go on, fail for good,
do not start, and cannot write to their storage. Played are the kubelets alone, on a real API server without nodes.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prometheusserver import Prometheus, free_port, running_prometheus
from scrapes import ROOT, RULES, scraped_series, series_in
from stepfast.nodeclient import NodeClient
from stepfast.step import JobKey
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import State, Status
from testcluster.controlplane import KubernetesClient
from testcluster.fixtures import api_server
from testoperator.crds import install_crds
from testoperator.polling import until
from testoperator.process import operator_process
from testoperator.running import run_to_end
from testoperator.world import STORAGE, World

__all__ = ["api_server"]

FOLDER = ROOT / "charts" / "stepfast" / "dashboards"
DASHBOARDS: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
ANATOMY = {
    "anatomy_step_seconds": 0.25, "anatomy_samples_per_second": 16.0, "anatomy_memory_peak_bytes": 4096.0,
    "anatomy_memory_reserved_bytes": 8192.0,
}  # fmt: skip


def targets() -> Iterator[tuple[str, str, str]]:
    """Each query: its dashboard, its panel, itself."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield name, panel["title"], target["expr"]


# ---- what they are


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_is_one_that_grafana_takes(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == f"stepfast-{name}"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    assert variables[0] == "datasource"
    text = json.dumps(panels)
    assert set(re.findall(r"\$\{?(\w+)", text)) <= {*variables, "__rate_interval", "__range"}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_panel_lies_on_another(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_every_metric_of_api_and_code_is_on_a_dashboard_or_in_an_alert() -> None:
    """But for those that another one tells better."""
    told_better = {
        "stepfast_checkpoint_committed_timestamp_seconds",  # its age is shown
        "stepfast_anatomy_flops_utilisation", "stepfast_anatomy_goodput_ratio",  # of one script, in its own report
        "stepfast_anatomy_device_memory_used_bytes", "stepfast_anatomy_device_utilisation",
    }  # fmt: skip
    shown = series_in([*(expr for _, _, expr in targets()), RULES.read_text()])
    known = scraped_series()
    assert shown <= known
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} >= families - told_better


# ---- on a real Prometheus


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Prometheus after it all, with the moment up to which things happened."""

    prometheus: Prometheus
    namespace: str
    moment: float
    firing: list[dict[str, Any]]


@pytest.fixture(scope="module")
def scene(
    api_server: KubernetesClient, load_module: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """What was scraped is kept by Prometheus; all else has ended."""
    install_crds(api_server)
    folder = tmp_path_factory.mktemp("scene")
    port, agent_port = free_port(), free_port()
    bench = load_module("node")
    node = bench.Node((folder / "storage").as_uri(), options=(*bench.PATIENCE, "--metrics-port", str(agent_port)))
    try:
        with running_prometheus(
            folder,
            {
                "operator": {"port": port, "labels": {"namespace": "stepfast-system"}},
                "agents": {"port": agent_port, "labels": {"namespace": "stepfast-system", "node": "n1"}},
            },
            at_once(yaml.safe_load(RULES.read_text())),
        ) as prometheus:
            story = Story(api_server, folder, bench=bench, node=node.start(), prometheus=prometheus, port=port)
            run_to_end(asyncio.wait_for(story.play(), 300))
            yield Scene(prometheus=prometheus, namespace=story.namespace, moment=story.moment, firing=story.firing)
    finally:
        node.stop()


def at_once(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules without the time that each alert waits for."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return rules


class Story:
    """What happens while Prometheus looks."""

    def __init__(
        self, api: KubernetesClient, folder: Path, *, bench: Any, node: Any, prometheus: Prometheus, port: int
    ) -> None:
        self._api, self._folder, self._bench, self._node = api, folder, bench, node
        self._prometheus, self._port = prometheus, port
        self._storage, self._blocked = folder / "storage", folder / "blocked"
        self._trainings: list[Any] = []
        self.namespace, self.moment = "", 0.0
        self.firing: list[dict[str, Any]] = []

    async def play(self) -> None:
        async with World.open(self._api.kubeconfig) as world:
            self.namespace = world.namespace
            await world.kubelets.make_node(0)
            await world.make_agent(0)
            await self._make_agent_that_is_not_ready(world)
            with operator_process(
                self._folder, self._api.kubeconfig, namespace=world.namespace, watch=[world.namespace],
                metrics_port=self._port, storages=[*STORAGE.allowed, self._storage.as_uri(), self._blocked.as_uri()],
            ):  # fmt: skip
                publishing = asyncio.create_task(self._publish(world))
                try:
                    await self._happen(world)
                finally:
                    for training in self._trainings:
                        await asyncio.to_thread(training.end)
                    publishing.cancel()
                    with suppress(asyncio.CancelledError):
                        await publishing

    async def _happen(self, world: World) -> None:
        await self._scraped("up == 1", 2)
        world.kubelets.slow_to_start.add("slow-1-0")
        await world.make_job("slow")
        doomed = await world.make_job("doomed", failurePolicy={"maxRestarts": 0, "backoff": {"baseSeconds": 0}})
        await world.kubelets.end("doomed-1-0", 9)
        await self._reaches(world, doomed, lambda status: status.state is State.FAILED)
        await self._lose_a_rank(world)
        await self._cannot_persist(world)
        await self._scraped('ALERTS{alertname="StepfastJobFailed", alertstate="firing"}', 3)
        await self._scraped(f'stepfast_job_persist_lag_steps{{namespace="{world.namespace}", name="job"}}', 2)
        await self._scraped("stepfast_checkpoint_persist_failures_total", 2)
        await self._scraped('ALERTS{alertname="StepfastPersistFailing", alertstate="firing"}', 1)
        self.moment, self.firing = time.time(), self._prometheus.firing()

    async def _lose_a_rank(self, world: World) -> None:
        """A job trains, saves, loses its rank, restores, and trains on."""
        job = await world.make_job("job", checkpoint=self._checkpoint())
        await world.kubelets.started("job-1-0")
        first = await self._train(job, 1)
        for _ in range(3):
            await asyncio.to_thread(lambda: first.save().wait(timeout_seconds=60))
        await asyncio.to_thread(first.save)  # not due yet: memory alone has it when its rank dies
        first.checkpointer.step(5)
        await self._reaches(world, job, lambda status: status.trainer_status.global_step == 5)
        await asyncio.to_thread(first.end)  # without goodbye: as a process that died
        await world.kubelets.end("job-1-0", 7)
        await self._reaches(world, job, lambda status: status.attempt == 2)
        await world.kubelets.started("job-2-0")
        second = await self._train(job, 2, resume_step=4)
        assert await asyncio.to_thread(second.checkpointer.restore) == 4
        second.step = 4
        await asyncio.to_thread(lambda: second.save().wait(timeout_seconds=60))
        await self._reaches(world, job, lambda status: bool(status.recoveries[-1].duration_seconds))
        for step in (6, 7):
            second.checkpointer.step(step, metrics=ANATOMY)
        await self._reaches(world, job, lambda status: status.trainer_status.global_step == 7)

    async def _cannot_persist(self, world: World) -> None:
        """Another one's storage is a file."""
        self._blocked.write_text("no folder")
        job = await world.make_job("stuck", checkpoint=self._checkpoint(self._blocked))
        await world.kubelets.started("stuck-1-0")
        training = await self._train(job, 1, storage=self._blocked)
        await asyncio.to_thread(training.save)
        await self._reaches(world, job, lambda status: status.checkpoint.persist_error is not None)

    def _checkpoint(self, storage: Path | None = None) -> dict[str, Any]:
        return {"storageUri": (storage or self._storage).as_uri(), "gracefulSuspendSeconds": 0}

    async def _train(
        self, job: ClusterJob, attempt: int, *, resume_step: int | None = None, storage: Path | None = None
    ) -> Any:
        """The only rank of that attempt, on the agent's node."""
        environment = replace(
            self._node.environment_of(), job=JobKey(namespace=self.namespace, name=job.job.name),
            run=f"{job.uid}-{attempt}", resume_step=resume_step, persist_interval_seconds=3600.0,
        )  # fmt: skip
        if storage is not None:
            environment = replace(environment, storage_uri=storage.as_uri())
        training = await asyncio.to_thread(self._bench.Training, self._node, environment)
        self._trainings.append(training)
        return training

    async def _publish(self, world: World) -> None:
        """What the agent would write into its CheckpointNode, were it in the cluster."""
        client = NodeClient(self._node.socket)
        while True:
            status = await asyncio.to_thread(client.status)
            await world.report(0, *status.jobs)
            await asyncio.sleep(0.2)

    async def _make_agent_that_is_not_ready(self, world: World) -> None:
        marks = {"app.kubernetes.io/name": "stepfast", "app.kubernetes.io/component": "sidecar"}
        spec = {"nodeName": world.kubelets.node(0), "containers": [{"name": "agent", "image": "i"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent-ill", "labels": marks}, "spec": spec}
        await world.kube.create(f"/api/v1/namespaces/{world.namespace}/pods", pod)

    async def _reaches(self, world: World, job: ClusterJob, is_so: Callable[[Status], bool]) -> None:
        async def holds() -> bool:
            return is_so(await world.status(job))

        await until(f"{job.job} is so", holds, seconds=90)

    async def _scraped(self, expr: str, times: int) -> None:
        """Until the series were there in so many scrapes or evaluations."""

        async def holds() -> bool:
            found = await asyncio.to_thread(self._prometheus.query, f"count_over_time(({expr})[2m:1s])")
            return bool(found) and all(float(each["value"][1]) >= times for each in found)

        await until(f"{expr} was scraped {times} times", holds, seconds=90)


def asked(expr: str, namespace: str, *, is_any: bool) -> str:
    """The query as Grafana asks it, of the job `job`."""
    values = {"namespace": ".*" if is_any else namespace, "name": "job", "__rate_interval": "2m", "__range": "5m"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expr)


@pytest.mark.parametrize(
    ("dashboard", "panel", "expr"),
    [pytest.param(*target, id=f"{target[0]}: {target[1]}: {target[2][:40]}") for target in targets()],
)
def test_query_has_data(scene: Scene, dashboard: str, panel: str, expr: str) -> None:
    found = scene.prometheus.query(asked(expr, scene.namespace, is_any=dashboard == "fleet"), scene.moment)
    numbers = [float(each["value"][1]) for each in found]
    assert any(not math.isnan(number) for number in numbers), (panel, numbers)


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_variables_have_values(scene: Scene, dashboard: str) -> None:
    for variable in DASHBOARDS[dashboard]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert found is not None
        series = scene.prometheus.query(asked(found[1], scene.namespace, is_any=False), scene.moment)
        assert {"namespace": scene.namespace, "name": "job"}[found[2]] in {each["metric"][found[2]] for each in series}


def test_labels_of_jobs_are_their_own(scene: Scene) -> None:
    """Not those of the pod that tells of them."""
    found = scene.prometheus.query('stepfast_job_state{state="Failed"}', scene.moment)
    assert [(each["metric"]["namespace"], each["metric"]["name"]) for each in found] == [(scene.namespace, "doomed")]


def test_what_was_lost_and_restored_is_told_as_it_was(scene: Scene) -> None:
    job = f'namespace="{scene.namespace}", name="job"'

    def value(expr: str) -> float:
        (found,) = scene.prometheus.query(expr, scene.moment)
        return float(found["value"][1])

    assert value(f"stepfast_job_restarts{{{job}}}") == 1
    assert value(f"stepfast_job_steps_lost{{{job}}}") == 1
    assert value(f"stepfast_job_step{{{job}}}") == 7
    assert value(f"stepfast_job_persist_lag_steps{{{job}}}") == 2
    assert 0 < value(f"stepfast_goodput_ratio{{{job}}}") < 1
    assert value("stepfast_steps_lost_total") == 1
    assert value('stepfast_recovery_duration_seconds_count{phase="schedule"}') == 1
    assert value("stepfast_checkpoint_commits_total") == 5
    assert value("sum(stepfast_checkpoint_restore_duration_seconds_count)") == 1


def test_alerts_fire_on_what_has_really_happened(scene: Scene) -> None:
    firing = {alert["labels"]["alertname"]: alert for alert in scene.firing}
    failed = firing["StepfastJobFailed"]
    assert (failed["labels"]["namespace"], failed["labels"]["name"]) == (scene.namespace, "doomed")
    summary = f"TrainingJob {scene.namespace}/doomed has failed for good."
    assert failed["annotations"]["summary"] == summary
    assert firing["StepfastJobNotRunning"]["labels"]["name"] == "slow"
    assert firing["StepfastPersistFailing"]["labels"]["name"] == "stuck"
    assert firing["StepfastAgentNotReady"]["annotations"]["summary"] == "1 nodes' agents are not ready."
    for quiet in (
        "StepfastOperatorDown",
        "StepfastOperatorWatchStale",
        "StepfastReconcileErrors",
        "StepfastAgentAbsent",
    ):
        assert quiet not in firing
