"""A gang's pods and Service: what the user's template says, and what stands whatever it says."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousParameters

from stepfast.errors import SpecError
from stepfast.step import JobKey
from stepfast_operator import labels, manifests
from stepfast_operator.actions import LaunchGang
from stepfast_operator.document import JSON, decode
from stepfast_operator.manifests import Owner
from stepfast_operator.spec import TrainingSpec

OWNER = Owner(job=JobKey(namespace="ml", name="gpt"), uid="0b0e")
LAUNCH = LaunchGang(
    attempt=12, run="0b0e-12", resume_step=500, nodes=1, planned_time=1000.0, interruptions=11, trained_seconds=86_400.0
)
STORAGE = "abfss://data@account.dfs.core.windows.net/root"
VOLUME = {
    "name": "stepfast",
    "csi": {"driver": "csi.stepfast.dev", "volumeAttributes": {"job": "gpt", "run": "0b0e-12"}},
}
MOUNT = {"name": "stepfast", "mountPath": "/run/stepfast", "readOnly": True}
APART = {"labelSelector": {"matchLabels": {labels.JOB_UID: "0b0e"}}, "topologyKey": "kubernetes.io/hostname"}


def spec_of(*, trainer: Mapping[str, Any] | None = None, **fields: Any) -> TrainingSpec:
    train = {"image": "registry/gpt:1", "command": ["torchrun"], "args": ["train.py"], **(trainer or {})}
    return decode(TrainingSpec, {"trainer": train, **fields}, "spec")


def pod_of(spec: TrainingSpec, index: int = 1, preferred: str | None = None, launch: LaunchGang = LAUNCH) -> JSON:
    pod = manifests.pod_of(OWNER, spec, launch, index, storage_uri=STORAGE, preferred_node=preferred)
    assert json.loads(json.dumps(pod)) == pod, "plain JSON"
    return pod


def templated(template: Mapping[str, Any], **fields: Any) -> JSON:
    """The pod's spec with that `template.spec`."""
    return pod_of(spec_of(template={"spec": template}, **fields))["spec"]


def ours(pod_spec: JSON) -> JSON:
    """The trainer's container."""
    [container] = [one for one in pod_spec["containers"] if one["name"] == "node"]
    return container


def values(container: JSON) -> dict[str, str]:
    return {one["name"]: one.get("value") for one in container["env"]}


def test_pod_without_a_template() -> None:
    pod = pod_of(spec_of(trainer={"numNodes": 2, "numProcPerNode": 4}))
    assert pod["metadata"] == {
        "name": "gpt-12-1",
        "namespace": "ml",
        "labels": {
            labels.JOB: "gpt", labels.JOB_UID: "0b0e", labels.ATTEMPT: "12", labels.NODE_INDEX: "1",
            labels.MANAGED_BY: labels.OPERATOR,
        },
        "annotations": {labels.RUN: "0b0e-12"},
        "ownerReferences": [{
            "apiVersion": "stepfast.dev/v1alpha1", "kind": "TrainingJob", "name": "gpt", "uid": "0b0e",
            "controller": True, "blockOwnerDeletion": True,
        }],
    }  # fmt: skip
    spec = pod["spec"]
    assert (spec["restartPolicy"], spec["hostname"], spec["subdomain"]) == ("Never", "a12-n00001", "gpt")
    assert spec["volumes"] == [VOLUME]
    assert spec["automountServiceAccountToken"] is False
    [container] = spec["containers"]
    assert (container["name"], container["image"]) == ("node", "registry/gpt:1")
    assert container["command"] == ["python3", "-m", "stepfast.launcher", "train.py"]
    assert "args" not in container
    assert container["volumeMounts"] == [MOUNT]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_variables_in_the_pod() -> None:
    spec = spec_of(trainer={"numNodes": 3, "numProcPerNode": 4})
    container = ours(pod_of(spec, launch=replace(LAUNCH, nodes=2))["spec"])
    variables = values(container)
    settings = json.loads(variables.pop("STEPFAST_SETTINGS"))
    assert (settings["node"], settings["ranksPerAgent"]) == (1, 4)
    assert (settings["plannedTime"], settings["interruptions"], settings["trainedSeconds"]) == (1000.0, 11, 86_400.0)
    expected = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "a12-n00000.gpt:29400", "PET_RDZV_ID": "0b0e-12", "PET_LOCAL_ADDR": "a12-n00001.gpt",
        "PET_MAX_RESTARTS": "0", "STEPFAST_SOCKET": "/run/stepfast/agent.sock", "STEPFAST_JOB": "ml/gpt",
        "STEPFAST_RUN": "0b0e-12", "STEPFAST_ATTEMPT": "12", "STEPFAST_RESUME_STEP": "500",
        "STEPFAST_STORAGE_URI": STORAGE, "STEPFAST_MEMORY_BUFFER_SIZE": "0",
        "STEPFAST_TERMINATION_LOG": "/dev/termination-log",
    }  # fmt: skip
    assert {name: variables[name] for name in expected} == expected


@pytest.mark.parametrize(("index", "is_host"), [(0, "is_host=true"), (1, "is_host=false")])
def test_node_0_alone_hosts_the_rendezvous(index: int, is_host: str) -> None:
    container = ours(pod_of(spec_of(trainer={"numNodes": 2}), index)["spec"])
    assert is_host in str(values(container)["PET_RDZV_CONF"]).split(",")


def test_launcher_whose_clock_is_off_by_hours_is_no_dead_one_to_the_others() -> None:
    """Torch counts heartbeats by the nodes' clocks, and a launcher in vain at the exit barrier those that it counts."""
    container = ours(pod_of(spec_of(trainer={"numNodes": 2}), 0)["spec"])
    configuration = dict(one.split("=") for one in str(values(container)["PET_RDZV_CONF"]).split(","))
    parameters = RendezvousParameters("c10d", "here", "run", 2, 2, local_addr=None, **configuration)
    interval = parameters.get_as_int("keep_alive_interval", 5)
    assert interval is not None
    assert interval * int(configuration["keep_alive_max_attempt"]) > 24 * 3600


def test_variables_win_in_order_template_trainer_stepfast() -> None:
    inner = {"name": "node", "env": [
        {"name": "KEPT", "value": "template"}, {"name": "BOTH", "value": "template"},
        {"name": "STEPFAST_RUN", "value": "another"}, {"name": "PET_NNODES", "value": "99"},
        {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ]}  # fmt: skip
    secret = {"secretKeyRef": {"name": "wandb", "key": "token"}}
    env = [{"name": "BOTH", "value": "trainer"}, {"name": "TOKEN", "valueFrom": secret}]
    container = ours(templated({"containers": [inner]}, trainer={"env": env}))
    entries = {one["name"]: one for one in container["env"]}
    assert len(entries) == len(container["env"]), "each name once"
    assert entries["KEPT"]["value"] == "template"
    assert entries["BOTH"]["value"] == "trainer"
    assert entries["TOKEN"] == {"name": "TOKEN", "valueFrom": secret}
    assert entries["NODE_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert (entries["STEPFAST_RUN"], entries["PET_NNODES"]) == (
        {"name": "STEPFAST_RUN", "value": "0b0e-12"},
        {"name": "PET_NNODES", "value": "1"},
    )


def test_variable_that_another_one_refers_to_comes_before_it() -> None:
    """Kubernetes expands `$(NAME)` out of what stands before it alone."""
    env = [{"name": "RANK_LOG", "value": "/logs/$(STEPFAST_RUN)"}, {"name": "B", "value": "$(A)"}]
    inner = {"name": "node", "env": [{"name": "A", "value": "1"}]}
    names = [one["name"] for one in ours(templated({"containers": [inner]}, trainer={"env": env}))["env"]]
    assert names.index("A") < names.index("B")
    assert names.index("STEPFAST_RUN") < names.index("RANK_LOG")


def test_template_keeps_its_containers_volumes_and_all_that_is_the_users() -> None:
    sidecar = {"name": "logs", "image": "fluent-bit"}
    inner = {
        "name": "node", "image": "other", "imagePullPolicy": "Always", "args": ["ignored"],
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}, "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"limits": {"cpu": "1"}},
    }  # fmt: skip
    template = {
        "serviceAccountName": "trainer", "automountServiceAccountToken": True, "priorityClassName": "high",
        "schedulerName": "volcano", "nodeSelector": {"pool": "a100"}, "initContainers": [{"name": "fetch"}],
        "containers": [sidecar, inner], "volumes": [{"name": "data", "emptyDir": {}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "terminationGracePeriodSeconds": 120,
    }  # fmt: skip
    spec = templated(template)
    unchanged = set(template) - {"containers", "volumes"}
    assert {name: spec[name] for name in unchanged} == {name: template[name] for name in unchanged}
    assert spec["volumes"] == [{"name": "data", "emptyDir": {}}, VOLUME]
    assert [one["name"] for one in spec["containers"]] == ["node", "logs"], "kubectl logs shows the trainer's"
    assert spec["containers"][1] == sidecar
    container = ours(spec)
    assert (container["image"], container["imagePullPolicy"]) == ("registry/gpt:1", "Always")
    assert container["lifecycle"] == inner["lifecycle"]
    assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}, MOUNT]
    assert container["resources"] == {"limits": {"cpu": "1"}}
    assert "args" not in container


def test_template_itself_is_left_as_it_is() -> None:
    template = {"containers": [{"name": "node", "env": []}], "affinity": {"nodeAffinity": {}}, "volumes": []}
    spec = spec_of(template={"spec": template})
    before = json.dumps(spec.template.spec)
    pod_of(spec, preferred="node-a")
    assert json.dumps(spec.template.spec) == before


def test_image_and_folder_of_the_template_stand_where_the_trainer_says_nothing() -> None:
    inner = {"name": "node", "image": "from-template", "workingDir": "/w"}
    spec = decode(
        TrainingSpec,
        {"trainer": {"command": ["torchrun", "a.py"]}, "template": {"spec": {"containers": [inner]}}},
        "spec",
    )
    container = ours(pod_of(spec)["spec"])
    assert (container["image"], container["workingDir"]) == ("from-template", "/w")


def test_labels_and_annotations_are_merged_and_ours_stand() -> None:
    mine = {"team": "nlp", labels.JOB_UID: "stolen", labels.ATTEMPT: "99", labels.MANAGED_BY: "helm"}
    metadata = {"labels": mine, "annotations": {"note": "x", labels.RUN: "another"}}
    pod = pod_of(spec_of(template={"metadata": metadata}))["metadata"]
    assert pod["labels"]["team"] == "nlp"
    assert (pod["labels"][labels.JOB_UID], pod["labels"][labels.ATTEMPT]) == ("0b0e", "12")
    assert pod["labels"][labels.MANAGED_BY] == labels.OPERATOR
    assert pod["annotations"] == {"note": "x", labels.RUN: "0b0e-12"}


def test_affinity_is_added_to_and_not_replaced() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["1"]}]}
    mine = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": zone}],
        },
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]},
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 2, "podAffinityTerm": {}}],
        },
    }
    affinity = pod_of(spec_of(template={"spec": {"affinity": mine}}), preferred="node-a")["spec"]["affinity"]
    apart = affinity["podAntiAffinity"]
    assert apart["requiredDuringSchedulingIgnoredDuringExecution"] == [{"topologyKey": "rack"}, APART]
    assert apart["preferredDuringSchedulingIgnoredDuringExecution"] == [{"weight": 2, "podAffinityTerm": {}}]
    assert affinity["podAffinity"] == mine["podAffinity"]
    near = affinity["nodeAffinity"]
    assert near["requiredDuringSchedulingIgnoredDuringExecution"] == {"nodeSelectorTerms": [zone]}
    own, added = near["preferredDuringSchedulingIgnoredDuringExecution"]
    assert own == {"weight": 1, "preference": zone}
    # By the node's name: its label kubernetes.io/hostname may be another one.
    name = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
    assert added == {"weight": 100, "preference": {"matchFields": [name]}}


@pytest.mark.parametrize("empty", [None, {}, {"podAntiAffinity": None, "nodeAffinity": None}], ids=repr)
def test_affinity_that_says_nothing(empty: Any) -> None:
    affinity = pod_of(spec_of(template={"spec": {"affinity": empty}}), preferred="node-a")["spec"]["affinity"]
    assert affinity["podAntiAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}
    assert len(affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]) == 1


NOT_A, NOT_B = ({"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("node-a", "node-b"))


def required_terms(template: JSON, *avoided: str, preferred: str | None = None) -> tuple[JSON, JSON]:
    """The terms of which a node must meet one, and what is preferred."""
    launch = replace(LAUNCH, avoided_nodes=avoided)
    pod = pod_of(spec_of(template={"spec": {"affinity": template}}), launch=launch, preferred=preferred)
    near = pod["spec"]["affinity"].get("nodeAffinity", {})
    required = near.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return required.get("nodeSelectorTerms"), near.get("preferredDuringSchedulingIgnoredDuringExecution")


def test_nodes_to_avoid_are_kept_off_by_their_names_whatever_else_is_asked_for() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["1"]}]}
    mine = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone, {}]}}}
    assert required_terms({}, "node-a", "node-b") == ([{"matchFields": [NOT_A, NOT_B]}], None)
    # Each of the alternatives is narrowed; one that is empty chooses nothing, and goes on choosing nothing.
    assert required_terms(mine, "node-a") == ([{**zone, "matchFields": [NOT_A]}, {}], None)
    assert required_terms(mine) == ([zone, {}], None)


def test_nodes_to_avoid_are_noted_to_be_read_again_and_nobody_else_notes_any() -> None:
    spec = spec_of(template={"metadata": {"annotations": {"note": "x", labels.AVOIDED_NODES: "mine"}}})
    notes = {"note": "x", labels.RUN: "0b0e-12"}
    launch = replace(LAUNCH, avoided_nodes=("node-a", "node-b"))
    assert pod_of(spec)["metadata"]["annotations"] == notes
    assert pod_of(spec, launch=launch)["metadata"]["annotations"] == {**notes, labels.AVOIDED_NODES: "node-a,node-b"}
    spare = manifests.spare_of(OWNER, spec, 1, ["node-a"])
    assert spare["metadata"]["annotations"] == {"note": "x", labels.AVOIDED_NODES: "node-a"}


def test_node_to_avoid_is_not_preferred_for_what_its_memory_holds() -> None:
    terms, preferred = required_terms({}, "node-a", preferred="node-a")
    assert (terms, preferred) == ([{"matchFields": [NOT_A]}], None)


def test_first_attempt_prefers_no_node() -> None:
    assert set(pod_of(spec_of())["spec"]["affinity"]) == {"podAntiAffinity"}


@pytest.mark.parametrize(
    ("pod_says", "container_says", "pod", "container"),
    [
        pytest.param({}, {}, {"seccompProfile": {"type": "RuntimeDefault"}},
                     {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, id="nothing"),
        pytest.param({"runAsNonRoot": True, "fsGroup": 7}, {"runAsUser": 8},
                     {"runAsNonRoot": True, "fsGroup": 7, "seccompProfile": {"type": "RuntimeDefault"}},
                     {"runAsUser": 8, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                     id="something else"),
        pytest.param({"seccompProfile": {"type": "Unconfined"}}, {"capabilities": {"add": ["IPC_LOCK"]}},
                     {"seccompProfile": {"type": "Unconfined"}},
                     {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}, id="the same"),
        pytest.param({}, {"privileged": True}, {"seccompProfile": {"type": "RuntimeDefault"}},
                     {"privileged": True, "capabilities": {"drop": ["ALL"]}}, id="privileged"),
        pytest.param({}, {"capabilities": {"add": ["SYS_ADMIN"]}}, {"seccompProfile": {"type": "RuntimeDefault"}},
                     {"capabilities": {"add": ["SYS_ADMIN"]}}, id="SYS_ADMIN"),
        pytest.param(None, None, {"seccompProfile": {"type": "RuntimeDefault"}},
                     {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, id="null"),
    ],
)  # fmt: skip
def test_restricted_defaults_fill_what_the_template_leaves_open(
    pod_says: Any, container_says: Any, pod: JSON, container: JSON
) -> None:
    """The API server refuses allowPrivilegeEscalation: false beside privileged and SYS_ADMIN: no default there."""
    inner = {"name": "node", "securityContext": container_says}
    spec = templated({"securityContext": pod_says, "containers": [inner]})
    assert spec["securityContext"] == pod
    assert ours(spec)["securityContext"] == container


def test_secret_goes_to_the_container_and_by_the_kubelet_to_the_agent() -> None:
    inner = {"name": "node", "envFrom": [{"configMapRef": {"name": "settings"}}]}
    spec = templated({"containers": [inner]}, checkpoint={"secretRef": {"name": "account"}})
    container = ours(spec)
    assert container["envFrom"] == [{"configMapRef": {"name": "settings"}}, {"secretRef": {"name": "account"}}]
    assert spec["volumes"] == [{**VOLUME, "csi": {**VOLUME["csi"], "nodePublishSecretRef": {"name": "account"}}}]
    # Nobody but the gang can read that storage: the ranks agree on the step themselves.
    assert "STEPFAST_RESUME_STEP" not in values(container)


def test_spot_is_tolerated_beside_what_the_template_tolerates() -> None:
    mine = {"key": "gpu", "operator": "Exists"}
    spot = {
        "key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"
    }  # fmt: skip
    assert templated({"tolerations": [mine]}, spot={"tolerate": True})["tolerations"] == [mine, spot]
    assert templated({"tolerations": [mine]})["tolerations"] == [mine]
    assert templated({"tolerations": None}, spot={"tolerate": True})["tolerations"] == [spot]


@pytest.mark.parametrize(
    ("policy", "restarts"),
    [({}, "0"), ({"restartStrategy": "InPlace"}, "3"), ({"restartStrategy": "InPlace", "maxInPlaceRestarts": 7}, "7"),
     ({"maxInPlaceRestarts": 7}, "0")],
)  # fmt: skip
def test_torchrun_restarts_in_place_only_where_the_policy_says_so(policy: JSON, restarts: str) -> None:
    assert values(ours(pod_of(spec_of(failurePolicy=policy))["spec"]))["PET_MAX_RESTARTS"] == restarts


@pytest.mark.parametrize(
    ("resources", "inner", "processes"),
    [
        pytest.param({}, {}, 1, id="none"),
        pytest.param({"limits": {"cpu": "8"}}, {}, 1, id="no GPU"),
        pytest.param({"limits": {"nvidia.com/gpu": 8}}, {}, 8, id="NVIDIA"),
        pytest.param({"limits": {"amd.com/gpu": "4"}}, {}, 4, id="AMD"),
        pytest.param({"limits": {"nvidia.com/gpu": "0"}}, {}, 1, id="zero"),
        pytest.param({}, {"limits": {"nvidia.com/gpu": 2}}, 2, id="the template's"),
        pytest.param({"limits": {"cpu": "1"}}, {"limits": {"nvidia.com/gpu": 2}}, 1, id="ours replace the template's"),
    ],
)
def test_auto_is_one_process_for_each_gpu(resources: JSON, inner: JSON, processes: int) -> None:
    container = {"name": "node", "resources": inner}
    spec = spec_of(
        trainer={"numProcPerNode": "auto", "resourcesPerNode": resources},
        template={"spec": {"containers": [container]}},
    )
    assert manifests.processes_per_node(spec) == processes
    assert values(ours(pod_of(spec)["spec"]))["PET_NPROC_PER_NODE"] == str(processes)
    counted = spec_of(trainer={"numProcPerNode": 5, "resourcesPerNode": resources})
    assert manifests.processes_per_node(counted) == 5


@pytest.mark.parametrize("amount", ["500m", "1.5"])
def test_part_of_a_gpu_is_refused_with_its_field(amount: str) -> None:
    spec = spec_of(trainer={"numProcPerNode": "auto", "resourcesPerNode": {"limits": {"nvidia.com/gpu": amount}}})
    with pytest.raises(SpecError, match=r"nvidia.com/gpu"):
        pod_of(spec)


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        (["torchrun", "--tee", "3"], ["t.py"], ["python3", "-m", "stepfast.launcher", "--tee", "3", "t.py"]),
        (["/opt/venv/bin/torchrun", "t.py"], [], ["python3", "-m", "stepfast.launcher", "t.py"]),
        (["python", "-m", "torch.distributed.run", "t.py"], [], ["python", "-m", "stepfast.launcher", "t.py"]),
        (["/v/python3.11", "-m", "stepfast.launcher"], ["t.py"], ["/v/python3.11", "-m", "stepfast.launcher", "t.py"]),
        (["python", "t.py"], ["-m", "torch.distributed.run"], ["python", "t.py", "-m", "torch.distributed.run"]),
        ([], ["bash", "-c", "x"], ["bash", "-c", "x"]),
    ],
)
def test_torchrun_is_replaced_by_the_launcher(command: list[str], args: list[str], expected: list[str]) -> None:
    assert manifests.command_of(command, args) == expected


@pytest.mark.parametrize(("attempt", "index"), [(1, 0), (99999, 99999), (10**9, 10**6)])
def test_hostnames_fit_and_sort_as_the_nodes_do(attempt: int, index: int) -> None:
    """c10d numbers nodes in the order of their addresses."""
    assert len(manifests.hostname(attempt, index)) <= 63
    if index < 99999:
        names = [manifests.hostname(attempt, number) for number in (index, index + 1, index + 10, index + 2000)]
        assert names == sorted(names)


def test_service_answers_for_pods_that_are_not_ready_and_for_this_jobs_alone() -> None:
    service = manifests.service_of(OWNER)
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("gpt", "ml")
    assert service["metadata"]["ownerReferences"] == [OWNER.reference()]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {labels.JOB_UID: "0b0e"}


# ---- whatever the template says

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=5)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
NAMED = st.fixed_dictionaries({"name": NAMES | st.just("stepfast")}, optional={"value": NAMES})
ENV = st.fixed_dictionaries(
    {"name": st.sampled_from(["STEPFAST_RUN", "STEPFAST_SOCKET", "PET_NNODES", "MINE"])}, optional={"value": NAMES}
)
CONTAINERS = st.fixed_dictionaries(
    {"name": st.sampled_from(["node", "logs"])},
    optional={
        "env": st.none() | st.lists(ENV, max_size=4),
        "command": st.lists(NAMES, max_size=2),
        "args": st.lists(NAMES, max_size=2),
        "volumeMounts": st.none() | st.lists(NAMED, max_size=3),
        "securityContext": st.none() | st.dictionaries(NAMES, st.booleans(), max_size=2),
        "terminationMessagePath": NAMES,
        "resources": st.none() | st.just({"limits": None}),
    },
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.none() | st.lists(CONTAINERS, max_size=3, unique_by=lambda one: one["name"]),
        "volumes": st.none() | st.lists(NAMED, max_size=3),
        "affinity": st.none() | st.fixed_dictionaries({}, optional={"podAntiAffinity": st.none() | st.just({})}),
        "tolerations": st.none() | st.lists(st.just({"operator": "Exists"}), max_size=1),
        "securityContext": st.none() | st.dictionaries(NAMES, st.booleans(), max_size=2),
        "restartPolicy": st.sampled_from(["Always", "OnFailure"]),
        "hostname": NAMES,
        "subdomain": NAMES,
        "nodeName": NAMES,
        "hostNetwork": st.booleans(),
    },
)


@given(template=TEMPLATES, others=st.dictionaries(NAMES, ANY_JSON, max_size=3))
def test_whatever_the_template_says_what_is_ours_stands(template: dict[str, Any], others: dict[str, Any]) -> None:
    pod = pod_of(spec_of(template={"spec": {**others, **template}}), preferred="node-a")
    plain = pod_of(spec_of(), preferred="node-a")
    spec = pod["spec"]
    assert pod["metadata"] == plain["metadata"]
    assert (spec["restartPolicy"], spec["hostname"], spec["subdomain"]) == ("Never", "a12-n00001", "gpt")
    assert [one for one in spec["volumes"] if one["name"] == "stepfast"] == [VOLUME]
    assert spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][-1] == APART
    container, own = ours(spec), ours(plain["spec"])
    assert container["command"] == own["command"]
    assert "args" not in container
    assert [one for one in container["volumeMounts"] if one["name"] == "stepfast"] == [MOUNT]
    assert values(container).items() >= values(own).items()
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names))
    # The launcher writes there, and the kubelet reads it.
    assert container.get("terminationMessagePath", "/dev/termination-log") == "/dev/termination-log"
    kept: Sequence[str] = [name for name in others if name not in plain["spec"]]
    assert {name: spec[name] for name in kept if name not in template} == {
        name: others[name] for name in kept if name not in template
    }


@given(template=st.dictionaries(st.sampled_from(sorted(
    {"containers", "volumes", "affinity", "tolerations", "securityContext"})), ANY_JSON, max_size=3))  # fmt: skip
def test_template_that_is_none_is_refused_and_breaks_nothing(template: dict[str, Any]) -> None:
    """A template's inside is the API server's to check, so that anything may be in it."""
    try:
        spec = spec_of(template={"spec": template}, spot={"tolerate": True})
    except SpecError as error:
        refused = str(error)
    else:
        refused = ""
        pod_of(spec, preferred="node-a")
    assert not refused or refused.startswith("spec.template.spec")


def test_pod_of_a_job_with_mirrors_says_so_to_its_agent() -> None:
    (volume,) = pod_of(spec_of(checkpoint={"memory": {"mirrors": 1}}))["spec"]["volumes"]
    assert volume["csi"]["volumeAttributes"] == {"job": "gpt", "run": "0b0e-12", "mirrors": "1"}


def test_spare_wants_the_place_of_a_pod_and_does_nothing_there() -> None:
    template = {
        "nodeSelector": {"pool": "gpu"}, "schedulerName": "other", "priorityClassName": "high",
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "initContainers": [{"name": "fetch", "image": "fetch"}],
        "containers": [
            {"name": "node", "ports": [{"containerPort": 1}]},
            {"name": "log", "image": "log:1", "args": ["-f"], "resources": {"requests": {"cpu": "1"}}},
        ],
    }  # fmt: skip
    spec = spec_of(
        trainer={"resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}}},
        template={"metadata": {"labels": {"team": "a"}}, "spec": template},
        spot={"tolerate": True},
    )
    spare, pod = (
        manifests.spare_of(OWNER, spec, 1, ["node-a"]),
        pod_of(spec, launch=replace(LAUNCH, avoided_nodes=("node-a",))),
    )
    assert spare["metadata"]["name"] == "gpt-spare-1"
    assert spare["metadata"]["ownerReferences"] == pod["metadata"]["ownerReferences"]
    assert spare["metadata"]["labels"] == {
        "team": "a", labels.JOB: "gpt", labels.JOB_UID: "0b0e", labels.SPARE: "1", labels.MANAGED_BY: labels.OPERATOR,
    }  # fmt: skip
    for what in ("nodeSelector", "schedulerName", "priorityClassName", "affinity", "tolerations", "securityContext"):
        assert spare["spec"][what] == pod["spec"][what], what
    assert [volume["name"] for volume in spare["spec"]["volumes"]] == ["data"], "no agent has to do with it"
    assert "initContainers" not in spare["spec"]
    assert [
        (one["name"], one["image"], one["command"], one["resources"]) for one in spare["spec"]["containers"]
    ] == [
        ("node", "registry/gpt:1", ["sleep", "infinity"], {"limits": {"nvidia.com/gpu": "8"}}),
        ("log", "log:1", ["sleep", "infinity"], {"requests": {"cpu": "1"}}),
    ]  # fmt: skip
    assert all("env" not in one and "args" not in one for one in spare["spec"]["containers"])


def test_spare_has_the_priority_that_it_is_given() -> None:
    spec = spec_of(template={"spec": {"priority": 9, "preemptionPolicy": "Never", "priorityClassName": "high"}})
    pod = manifests.spare_of(OWNER, spec, 1, (), priority_class="spares")["spec"]
    assert {key: value for key, value in pod.items() if "pri" in key.lower() or "preempt" in key} == {
        "priorityClassName": "spares"
    }
