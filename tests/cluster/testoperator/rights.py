"""The operator's rights as the chart renders them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testchart import chart
from testcluster.controlplane import KubernetesClient

RIGHTS = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})
ACCOUNT = f"system:serviceaccount:{chart.NAMESPACE}:{chart.OPERATOR}"


def grant(api: KubernetesClient, folder: Path, values: Mapping[str, Any]) -> None:
    """These in place of those that were granted before, and nothing else of the chart."""
    documents = chart.render(api, folder, chart.with_storage(values))
    rights = [one for one in documents if one["kind"] in RIGHTS and one["metadata"]["name"].startswith(chart.OPERATOR)]
    api.kubectl("delete", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/component=operator")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.NAMESPACE}}
    api.apply(namespace, *rights)
