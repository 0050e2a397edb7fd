"""What values do to the objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from testchart import chart

Render = Callable[..., list[dict[str, Any]]]
GIBI = 2**30


def container(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    return chart.pod_templates(objects)[component]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("memory", "argument", "limit_bytes", "request_bytes"),
    [
        pytest.param({}, "auto", None, GIBI, id="auto"),
        pytest.param({"limit": "64Gi"}, str(64 * GIBI), 65 * GIBI, 65 * GIBI, id="text"),
        pytest.param({"limit": "1.5G", "overhead": "512Mi"}, "1500000000", 1943 * 2**20, 1943 * 2**20, id="fraction"),
        pytest.param({"limit": 68719476736}, str(64 * GIBI), 65 * GIBI, 65 * GIBI, id="number"),
    ],
)
def test_the_agents_container_holds_the_memory_tier(
    memory: dict[str, Any], argument: str, limit_bytes: int | None, request_bytes: int, render: Render
) -> None:
    agent = container(render({"sidecar": {"memory": memory}}), "sidecar")
    assert f"--memory-limit={argument}" in agent["args"]
    limits, requests = agent["resources"].get("limits", {}), agent["resources"]["requests"]
    assert _bytes(limits.get("memory")) == limit_bytes
    assert _bytes(requests["memory"]) == request_bytes
    assert requests["cpu"] == "200m"


def test_what_resources_say_of_the_agents_memory_wins(render: Render) -> None:
    values = {"sidecar": {"resources": {"limits": {"memory": "8Gi"}}}}
    assert container(render(values), "sidecar")["resources"] == {
        "limits": {"memory": "8Gi"},
        "requests": {"cpu": "200m", "memory": "1Gi"},
    }


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        pytest.param({}, "stepfast/sidecar:0.1.0", id="default"),
        pytest.param({"image": {"registry": "a.example/b/"}}, "a.example/b/stepfast/sidecar:0.1.0", id="registry"),
        pytest.param({"image": {"tag": "2"}}, "stepfast/sidecar:2", id="tag"),
        pytest.param({"sidecar": {"image": {"tag": "3"}}, "image": {"tag": "2"}}, "stepfast/sidecar:3", id="own tag"),
        pytest.param(
            {"sidecar": {"image": {"repository": "localhost/agent", "digest": f"sha256:{'a' * 64}", "tag": "3"}}},
            f"localhost/agent@sha256:{'a' * 64}",
            id="digest",
        ),
    ],
)
def test_images_are_named_by_registry_repository_and_digest_or_tag(
    image: dict[str, Any], reference: str, render: Render
) -> None:
    assert container(render(image), "sidecar")["image"] == reference


def test_workload_identity_is_said_to_both(render: Render) -> None:
    objects = render(chart.VALUES["workload-identity"])
    for account in chart.of_kind(objects, "ServiceAccount"):
        assert account["metadata"]["annotations"] == {
            "azure.workload.identity/client-id": chart.CLIENT_ID,
            "azure.workload.identity/tenant-id": chart.CLIENT_ID,
        }
    for template in chart.pod_templates(objects).values():
        assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        assert "AZURE_CLIENT_ID" not in _environment(template), "the webhook's to set"


def test_a_managed_identity_is_named_in_the_environment(render: Render) -> None:
    for template in chart.pod_templates(render(chart.VALUES["managed-identity"])).values():
        assert _environment(template)["AZURE_CLIENT_ID"] == chart.CLIENT_ID
        assert "azure.workload.identity/use" not in template["metadata"]["labels"]


def test_credentials_reach_both_through_the_kubelet(render: Render) -> None:
    objects = render(chart.VALUES["secret"])
    for component in ("operator", "sidecar"):
        assert container(objects, component)["envFrom"] == [{"secretRef": {"name": "azurite"}}]
    for component in ("operator", "sidecar"):
        assert "envFrom" not in container(render({}), component)


def test_storage_is_said_to_both(render: Render) -> None:
    objects = render(chart.VALUES["everything"])
    for component in ("operator", "sidecar"):
        assert [word for word in container(objects, component)["args"] if "storage" in word] == [
            f"--storage-root={chart.URI}",
            "--allow-storage=abfss://shared@other.dfs.core.windows.net/a%20b#c",
        ]


def test_a_volume_of_checkpoints_is_mounted_in_both(render: Render) -> None:
    for template in chart.pod_templates(render(chart.VALUES["file-storage"])).values():
        mounts = {mount["name"]: mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert mounts["storage"] == "/checkpoints"
        assert {"name": "storage", "nfs": {"server": "nas", "path": "/exports/checkpoints"}} in template["spec"][
            "volumes"
        ]


def test_spares_have_a_priority_below_all_others(render: Render) -> None:
    objects = render({})
    (made,) = chart.of_kind(objects, "PriorityClass")
    assert f"--spare-priority-class={made['metadata']['name']}" in container(objects, "operator")["args"]
    assert (made["value"], made["preemptionPolicy"]) == (-10, "Never")


def test_one_operator_at_a_time(render: Render) -> None:
    (deployment,) = chart.of_kind(render({}), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_the_operator_leaves_a_dead_node_soon(render: Render) -> None:
    """Kubernetes gives a pod that says nothing about these taints 300 s."""
    spec = chart.pod_templates(render({}))["operator"]["spec"]
    assert {taint["key"]: (taint["effect"], taint["tolerationSeconds"]) for taint in spec["tolerations"]} == {
        "node.kubernetes.io/not-ready": ("NoExecute", 10),
        "node.kubernetes.io/unreachable": ("NoExecute", 10),
    }
    assert all(taint["operator"] == "Exists" for taint in spec["tolerations"])


def test_the_operators_tolerations_can_be_replaced(render: Render) -> None:
    mine = [{"key": "CriticalAddonsOnly", "operator": "Exists"}]
    spec = chart.pod_templates(render({"operator": {"tolerations": mine}}))["operator"]["spec"]
    assert spec["tolerations"] == mine
    assert "tolerations" not in chart.pod_templates(render({"operator": {"tolerations": []}}))["operator"]["spec"]


def test_the_agent_runs_where_trainers_may(render: Render) -> None:
    spec = chart.pod_templates(render({}))["sidecar"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}


def test_the_agent_has_time_to_flush(render: Render) -> None:
    spec = chart.pod_templates(render({"sidecar": {"flushTimeoutSeconds": 300}}))["sidecar"]["spec"]
    assert "--flush-timeout=300" in spec["containers"][0]["args"]
    assert spec["terminationGracePeriodSeconds"] > 300


def test_the_agent_looks_for_eviction_notices_unless_it_is_told_not_to(render: Render) -> None:
    def asked(values: dict[str, Any]) -> list[str]:
        words = container(render(values), "sidecar")["args"]
        return [word for word in words if word.startswith("--eviction-notices")]

    assert asked({}) == ["--eviction-notices=http://169.254.169.254"]
    assert asked({"sidecar": {"evictionNotices": {"enabled": False}}}) == []


def test_other_pods_mounts_do_not_stay_with_the_agent(render: Render) -> None:
    """A private copy of what is mounted below the kubelet's folder would keep disks busy after their unmount."""
    (pods,) = [one for one in container(render({}), "sidecar")["volumeMounts"] if one["name"] == "pods"]
    assert pods["mountPropagation"] == "HostToContainer"


def test_every_mount_has_its_volume_and_every_volume_a_mount(objects: list[dict[str, Any]]) -> None:
    for template in chart.pod_templates(objects).values():
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        volumes = template["spec"]["volumes"]
        assert sorted(mount["name"] for mount in mounts) == sorted(volume["name"] for volume in volumes)


def test_selectors_match_the_pods(objects: list[dict[str, Any]]) -> None:
    for component, template in chart.pod_templates(objects).items():
        labels = template["metadata"]["labels"].items()
        selectors = [
            one["spec"].get("selector", {}).get("matchLabels")
            or one["spec"].get("selector")
            or one["spec"]["podSelector"]["matchLabels"]
            for one in chart.of_kind(
                objects, "Deployment", "DaemonSet", "Service", "NetworkPolicy", "PodMonitor", "ServiceMonitor"
            )
            if one["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        assert len(selectors) >= (2 if component == "operator" else 1)
        assert all(selector.items() <= labels for selector in selectors)


def test_probes_and_scrapes_name_ports_that_are_there(objects: list[dict[str, Any]]) -> None:
    for component in ("operator", "sidecar"):
        one = container(objects, component)
        ports = {port["name"] for port in one["ports"]}
        assert {one["livenessProbe"]["httpGet"]["port"], one["readinessProbe"]["httpGet"]["port"]} <= ports
        assert "metrics" in ports
    for service in chart.of_kind(objects, "Service"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["metrics"]


def test_monitoring_is_made_by_choice_alone(render: Render) -> None:
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap")
    assert chart.of_kind(render({}), *kinds) == []


def test_scraped_labels_of_jobs_are_not_those_of_our_pods(render: Render) -> None:
    objects = render({"metrics": {"monitors": {"enabled": True}}})
    (service,), (pods,) = chart.of_kind(objects, "ServiceMonitor"), chart.of_kind(objects, "PodMonitor")
    assert [endpoint["honorLabels"] for endpoint in service["spec"]["endpoints"]] == [True]
    assert [endpoint["honorLabels"] for endpoint in pods["spec"]["podMetricsEndpoints"]] == [True]
    assert [each["targetLabel"] for each in pods["spec"]["podMetricsEndpoints"][0]["relabelings"]] == ["node"]


def test_alerts_are_those_of_the_file_with_links_and_labels(render: Render) -> None:
    (rule,) = chart.of_kind(render(chart.VALUES["everything"]), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    written = yaml.safe_load((chart.CHART / "alerts" / "stepfast.yaml").read_text())["groups"]
    groups = rule["spec"]["groups"]
    assert [group["name"] for group in groups] == [group["name"] for group in written]
    rules = [alert for group in groups for alert in group["rules"]]
    for alert, source in zip(rules, [alert for group in written for alert in group["rules"]], strict=True):
        assert alert["labels"] == {**source["labels"], "team": "training"}
        runbook = f"https://docs.example/observing#{source['alert'].lower()}"
        assert alert["annotations"] == {**source["annotations"], "runbook_url": runbook}
        assert {name: alert.get(name) for name in ("alert", "expr", "for")} == {
            name: source.get(name) for name in ("alert", "expr", "for")
        }


def test_dashboards_are_config_maps_that_grafanas_sidecar_finds(render: Render) -> None:
    maps = chart.of_kind(render(chart.VALUES["everything"]), "ConfigMap")
    files = {f"stepfast-{path.name}": path.read_text() for path in (chart.CHART / "dashboards").glob("*.json")}
    assert {name: text for one in maps for name, text in one["data"].items()} == {
        name: text.rstrip("\n") for name, text in files.items()
    }
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Training"}
        assert one["metadata"]["namespace"] == "team-a"


def test_notes_say_what_comes_next(api_server: Any, tmp_path: Any) -> None:
    file = chart.write_values(tmp_path, chart.with_storage(chart.VALUES["workload-identity"]))
    notes = api_server.helm(
        "install", "stepfast", str(chart.CHART), "-n", "notes", "-f", str(file), "--dry-run=server"
    ).partition("NOTES:")[2]
    assert "kubectl -n notes rollout status deployment/stepfast-operator daemonset/stepfast-sidecar" in notes
    assert "system:serviceaccount:notes:stepfast-sidecar" in notes
    assert chart.CLIENT_ID in notes


def _environment(template: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in template["spec"]["containers"][0]["env"]}


def _bytes(quantity: str | None) -> int | None:
    if quantity is None:
        return None
    units = {"Gi": GIBI, "Mi": 2**20}
    return int(quantity[:-2]) * units[quantity[-2:]]
