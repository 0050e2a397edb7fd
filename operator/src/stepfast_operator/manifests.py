"""The objects that a gang consists of in the cluster, as JSON: its pods and its headless Service. Pure.

The user's template comes first; what Stepfast needs is laid over it and cannot be taken away: the name, the restart
policy, the volume with the agent's socket, torchrun's and Stepfast's own variables.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfast.errors import SpecError
from stepfast.step import JobKey
from stepfast_operator import labels
from stepfast_operator.actions import LaunchGang
from stepfast_operator.document import JSON
from stepfast_operator.failurepolicy import RestartStrategy
from stepfast_operator.podtemplate import PREFERRED, REQUIRED
from stepfast_operator.spec import TrainingSpec, settings_text

API_VERSION = "stepfast.dev/v1alpha1"
RENDEZVOUS_PORT = 29400
_DRIVER = "csi.stepfast.dev"
_VOLUME = "stepfast"
_HEARTBEATS = 1_000_000  # missed ones, every 5 s: two months
_MOUNT = "/run/stepfast"
_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915")
_SPOT = "kubernetes.azure.com/scalesetpriority"
_HOSTNAME = "kubernetes.io/hostname"
_LAUNCHER = "stepfast.launcher"
_TERMINATION_LOG = "/dev/termination-log"
# What the restricted Pod Security Standard asks for, beside a user that is not root: that the image says.
_POD_SECURITY = {"seccompProfile": {"type": "RuntimeDefault"}}
_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The TrainingJob."""

    job: JobKey
    uid: str

    def reference(self) -> JSON:
        """With it, what is made goes when the job goes."""
        return {
            "apiVersion": API_VERSION,
            "kind": "TrainingJob",
            "name": self.job.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def processes_per_node(spec: TrainingSpec) -> int:
    """`numProcPerNode`; auto is one per GPU that a node's pod asks for, one without. Raises SpecError."""
    if spec.trainer.num_proc_per_node is not None:
        return spec.trainer.num_proc_per_node
    return max(1, gpus_per_node(spec))


def gpus_per_node(spec: TrainingSpec, kinds: Sequence[str] = _GPUS) -> int:
    """How many GPUs of these kinds a node's pod asks for. Raises SpecError."""
    limits = resources_of(spec).get("limits") or {}
    return sum(_count(name, limits.get(name)) for name in kinds)


def resources_of(spec: TrainingSpec) -> Mapping[str, JSON]:
    """What the trainer's container asks for, by `limits` and `requests`."""
    return _resources(_trainer_of(spec.template.spec), spec)


def tolerations_of(spec: TrainingSpec) -> list[JSON]:
    """The taints that the pods tolerate: as the template says, and that of spot nodes where they may run there."""
    spot = {"key": _SPOT, "operator": "Equal", "value": "spot", "effect": "NoSchedule"}
    return [*copy.deepcopy(spec.template.spec.get("tolerations") or ()), *([spot] if spec.spot.tolerate else ())]


def _count(name: str, amount: JSON) -> int:
    try:
        return int(amount or 0)
    except (TypeError, ValueError):
        message = f"{amount!r} is no number of GPUs: write a whole one, or set numProcPerNode"
        raise SpecError(f"spec.trainer.resourcesPerNode.limits.{name}", message) from None


def _resources(container: JSON, spec: TrainingSpec) -> Mapping[str, JSON]:
    """What the trainer's container gets: the trainer's `resourcesPerNode`, else the template's."""
    return spec.trainer.resources_per_node or container.get("resources") or {}


def _trainer_of(template: Mapping[str, JSON]) -> JSON:
    """The trainer's container in the template."""
    return next((one for one in template.get("containers") or () if one["name"] == labels.CONTAINER), {})


def service_of(owner: Owner) -> JSON:
    """The headless Service by which the pods find each other, ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": owner.job.name,
            "namespace": owner.job.namespace,
            "labels": {labels.JOB: owner.job.name, labels.MANAGED_BY: labels.OPERATOR},
            "ownerReferences": [owner.reference()],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.JOB_UID: owner.uid},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }


def pod_of(
    owner: Owner, spec: TrainingSpec, launch: LaunchGang, index: int, *, storage_uri: str, preferred_node: str | None
) -> JSON:
    """The pod of that node index. `preferred_node` is where its predecessor ran: its slots are there."""
    template: dict[str, JSON] = copy.deepcopy(dict(spec.template.spec))
    job = owner.job
    others = _without(template.get("containers") or (), labels.CONTAINER)
    variables = environment(owner, spec, launch, index, storage_uri=storage_uri)
    pod: dict[str, JSON] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **template,
        "securityContext": {**_POD_SECURITY, **(template.get("securityContext") or {})},
        "restartPolicy": "Never",
        "hostname": hostname(launch.attempt, index),
        "subdomain": job.name,
        "containers": [_container(_trainer_of(template), spec, variables), *others],
        "volumes": [*_without(template.get("volumes") or (), _VOLUME), _volume(spec, job, launch.run)],
        "affinity": _affinity(template.get("affinity") or {}, owner, preferred_node, launch.avoided_nodes),
    }
    marks = {labels.ATTEMPT: str(launch.attempt), labels.NODE_INDEX: str(index)}
    name = labels.pod_name(job.name, launch.attempt, index)
    return _pod_document(owner, spec, name, pod, marks=marks, notes={labels.RUN: launch.run}, off=launch.avoided_nodes)


def _pod_document(
    owner: Owner,
    spec: TrainingSpec,
    name: str,
    pod: JSON,
    *,
    marks: Mapping[str, str],
    notes: Mapping[str, str],
    off: Sequence[str],
) -> JSON:
    """A pod of the job with that spec; `marks` are labels and `notes` annotations beside those of all its pods. `off`:
    the nodes that its affinity keeps it off, which are noted to be read again.
    """
    job, metadata = owner.job, spec.template.metadata
    tolerations = tolerations_of(spec)
    annotations = {key: text for key, text in metadata.annotations.items() if key != labels.AVOIDED_NODES} | {**notes}
    if off:
        annotations[labels.AVOIDED_NODES] = ",".join(off)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {
                **metadata.labels,
                labels.JOB: job.name,
                labels.JOB_UID: owner.uid,
                **marks,
                labels.MANAGED_BY: labels.OPERATOR,
            },
            "annotations": annotations,
            "ownerReferences": [owner.reference()],
        },
        "spec": {**pod, "tolerations": tolerations} if tolerations else pod,
    }


def spare_of(
    owner: Owner, spec: TrainingSpec, number: int, avoided_nodes: Sequence[str], *, priority_class: str = ""
) -> JSON:
    """A pod that wants the place of one more of the gang's, and does nothing there. `priority_class`, in place of the
    template's: it waits for a place all the time, and must not have the one of a gang that is about to start again.
    """
    template: dict[str, JSON] = copy.deepcopy(dict(spec.template.spec))
    others = _without(template.get("containers") or (), labels.CONTAINER)
    pod: dict[str, JSON] = {
        **template,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**_POD_SECURITY, **(template.get("securityContext") or {})},
        "terminationGracePeriodSeconds": 0,
        "restartPolicy": "Always",
        "containers": [_idle(_container(_trainer_of(template), spec, {})), *map(_idle, others)],
        "affinity": _affinity(template.get("affinity") or {}, owner, None, avoided_nodes),
    }
    pod.pop("initContainers", None)
    if priority_class:
        pod["priorityClassName"] = priority_class
        for told_by_the_class in ("priority", "preemptionPolicy"):
            pod.pop(told_by_the_class, None)
    name = labels.spare_name(owner.job.name, number)
    return _pod_document(owner, spec, name, pod, marks={labels.SPARE: str(number)}, notes={}, off=avoided_nodes)


def _idle(container: JSON) -> JSON:
    """What the scheduler sees of a container, and what admission rules ask for."""
    kept = ("name", "image", "imagePullPolicy", "resources", "securityContext")
    return {**{key: container[key] for key in kept if key in container}, "command": ["sleep", "infinity"]}


def hostname(attempt: int, index: int) -> str:
    """Padded with zeros: c10d numbers nodes in the order of their addresses, and ranks are to keep their nodes."""
    return f"a{attempt}-n{index:05d}"


def _rendezvous_configuration(*, is_host: bool) -> str:
    """`is_host` is said rather than guessed: a name that is not published yet would make node 0 wait for itself.

    No launcher counts another as dead because its heartbeats look old, as they do (torch compares times of two nodes)
    when a clock is off by more than 15 s: it would wait in vain for minutes when the gang ends. Who is dead the
    operator knows.
    """
    return f"is_host={'true' if is_host else 'false'},keep_alive_max_attempt={_HEARTBEATS}"


def environment(
    owner: Owner, spec: TrainingSpec, launch: LaunchGang, index: int, *, storage_uri: str
) -> dict[str, str]:
    """torchrun's own variables and ours."""
    policy, processes = spec.failure_policy, processes_per_node(spec)
    in_place = policy.max_in_place_restarts if policy.restart_strategy is RestartStrategy.IN_PLACE else 0
    # Short names, which the pod's search domains complete: whatever the cluster's domain is called.
    first, own = (f"{hostname(launch.attempt, node)}.{owner.job.name}" for node in (0, index))
    variables = {
        "PET_NNODES": str(launch.nodes),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_NODE_RANK": str(index),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": launch.run,
        "PET_RDZV_CONF": _rendezvous_configuration(is_host=index == 0),
        "PET_LOCAL_ADDR": own,
        "PET_MAX_RESTARTS": str(in_place),
        "PET_MONITOR_INTERVAL": "0.1",
        "PET_LOG_DIR": "/tmp/stepfast",  # in the pod, whose last words it keeps
        "PET_TEE": "2",
        "PET_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
        "STEPFAST_SOCKET": f"{_MOUNT}/agent.sock",
        "STEPFAST_JOB": str(owner.job),
        "STEPFAST_RUN": launch.run,
        "STEPFAST_ATTEMPT": str(launch.attempt),
        "STEPFAST_RESUME_STEP": str(launch.resume_step),
        "STEPFAST_STORAGE_URI": storage_uri,
        "STEPFAST_MEMORY_BUFFER_SIZE": str(spec.checkpoint.memory.size_limit or 0),
        "STEPFAST_SETTINGS": settings_text(
            spec,
            node=index,
            ranks_per_agent=processes,
            planned_time=launch.planned_time,
            interruptions=launch.interruptions,
            trained_seconds=launch.trained_seconds,
        ),
        "STEPFAST_TERMINATION_LOG": _TERMINATION_LOG,
    }
    if spec.checkpoint.secret_ref is not None:
        # Nobody but the gang and its agents may read that storage: the ranks agree on the newest step themselves.
        del variables["STEPFAST_RESUME_STEP"]
    return variables


def _container(template: JSON, spec: TrainingSpec, variables: Mapping[str, str]) -> JSON:
    trainer = spec.trainer
    container: dict[str, JSON] = {
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **template,
        "securityContext": _security(template.get("securityContext") or {}),
        "terminationMessagePath": _TERMINATION_LOG,
        "name": labels.CONTAINER,
        "command": command_of(trainer.command, trainer.args),
        "env": _environment(template.get("env") or (), spec, variables),
        "volumeMounts": [
            *_without(template.get("volumeMounts") or (), _VOLUME),
            {"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True},
        ],
    }
    container.pop("args", None)
    if trainer.image is not None:
        container["image"] = trainer.image
    if trainer.working_dir is not None:
        container["workingDir"] = trainer.working_dir
    resources = _resources(template, spec)
    if resources:
        container["resources"] = {kind: dict(amounts or {}) for kind, amounts in resources.items()}
    if spec.checkpoint.secret_ref is not None:
        secret = {"secretRef": {"name": spec.checkpoint.secret_ref.name}}
        container["envFrom"] = [*(template.get("envFrom") or ()), secret]
    return container


def _security(template: Mapping[str, JSON]) -> JSON:
    """The template's, with our defaults for what it leaves open. The API server takes no ban on privileges beside
    what grants all of them.
    """
    granted = (template.get("capabilities") or {}).get("add") or ()
    defaults = dict(_SECURITY)
    if template.get("privileged") or not {"SYS_ADMIN", "CAP_SYS_ADMIN"}.isdisjoint(granted):
        del defaults["allowPrivilegeEscalation"]
    return {**defaults, **template}


def command_of(command: Sequence[str], args: Sequence[str]) -> list[str]:
    """What the container runs: torchrun is replaced by our launcher, which reads the same options and tells why a
    rank failed.
    """
    words = [*command, *args]
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return ["python3", "-m", _LAUNCHER, *words[1:]]
    if program.startswith("python") and words[1:3] in (["-m", "torch.distributed.run"], ["-m", _LAUNCHER]):
        return [words[0], "-m", _LAUNCHER, *words[3:]]
    return words


def _environment(template: Sequence[JSON], spec: TrainingSpec, variables: Mapping[str, str]) -> list[JSON]:
    """Later ones win: the template's, the trainer's, ours. Ours stand first, since `$(NAME)` is expanded out of what
    stands before it.
    """
    merged: dict[str, JSON] = {one["name"]: one for one in template}
    for variable in spec.trainer.env:
        value = {"value": variable.value} if variable.value_from is None else {"valueFrom": dict(variable.value_from)}
        merged.pop(variable.name, None)
        merged[variable.name] = {"name": variable.name, **value}
    ours = [{"name": name, "value": value} for name, value in variables.items()]
    return [*ours, *(one for name, one in merged.items() if name not in variables)]


def _volume(spec: TrainingSpec, job: JobKey, run: str) -> JSON:
    """The agent's socket for this pod alone. The kubelet hands the secret to the agent of the pod's node; the trainer's
    container has it in its environment (`_container`), the operator not at all.
    """
    attributes = {"job": job.name, "run": run}
    if spec.checkpoint.memory.mirrors:
        attributes["mirrors"] = str(spec.checkpoint.memory.mirrors)
    driver: dict[str, JSON] = {"driver": _DRIVER, "volumeAttributes": attributes}
    if spec.checkpoint.secret_ref is not None:
        driver["nodePublishSecretRef"] = {"name": spec.checkpoint.secret_ref.name}
    return {"name": _VOLUME, "csi": driver}


def _affinity(template: JSON, owner: Owner, preferred_node: str | None, avoided_nodes: Sequence[str]) -> JSON:
    """A node holds one pod of a gang, as its name says, and rather that which it held before."""
    affinity = copy.deepcopy(dict(template))
    apart = affinity["podAntiAffinity"] = affinity.get("podAntiAffinity") or {}
    apart[REQUIRED] = [
        *(apart.get(REQUIRED) or ()),
        {"labelSelector": {"matchLabels": {labels.JOB_UID: owner.uid}}, "topologyKey": _HOSTNAME},
    ]
    near = affinity.get("nodeAffinity") or {}
    if preferred_node is not None and preferred_node not in avoided_nodes:
        term = {"matchFields": [_named("In", preferred_node)]}
        near[PREFERRED] = [*(near.get(PREFERRED) or ()), {"weight": 100, "preference": term}]
    if avoided_nodes:
        off = [_named("NotIn", name) for name in avoided_nodes]
        near[REQUIRED] = {"nodeSelectorTerms": _narrowed((near.get(REQUIRED) or {}).get("nodeSelectorTerms"), off)}
    if near:
        affinity["nodeAffinity"] = near
    return affinity


def _named(operator: str, name: str) -> JSON:
    """By the node's name: its label kubernetes.io/hostname may be another. The API takes one name at a time."""
    return {"key": "metadata.name", "operator": operator, "values": [name]}


def _narrowed(terms: Sequence[JSON] | None, fields: Sequence[JSON]) -> list[JSON]:
    """Terms of which one has to hold, each with these requirements, too. One that is empty chooses nothing, and is to
    go on choosing nothing.
    """
    if not terms:
        return [{"matchFields": list(fields)}]
    return [{**term, "matchFields": [*(term.get("matchFields") or ()), *fields]} if term else term for term in terms]


def _without(named: Sequence[JSON], name: str) -> list[JSON]:
    return [one for one in named if one.get("name") != name]
