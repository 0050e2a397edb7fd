"""Who may say what through a pod's socket (I10). Pure: the kubelet's word in, a refusal or nothing out.

What is trusted is what the kubelet says when it has a volume published: the pod's namespace, name and uid, the job and
run of the volume's attributes, the secret that the pod's manifest names. A hello is a claim that has to fit it. Which
job of its own namespace a pod works for is the namespace's business: whoever may create pods there may read it all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stepfast.errors import SpecError, StepfastError
from stepfast.messages import Hello, Launching
from stepfast.step import JobKey, is_run
from stepfast.storage.rules import StorageRules

_POD_INFO = "csi.storage.k8s.io"
_VOLUME_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")

CREDENTIAL_NAMES = (
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)  # fmt: skip
"""What of a secret goes into its persister's environment. A closed list: PATH, PYTHONPATH or AWS_CONFIG_FILE of a
tenant's choice would run the tenant's code as the agent."""

# The agent's own identity, and what would find it: nothing of it is there beside a tenant's credentials.
_IDENTITY_PREFIXES = ("AZURE_", "AWS_", "GOOGLE_", "IDENTITY_", "MSI_", "IMDS_", "STEPFAST_STORAGE_", "KUBERNETES_")
_NO_IDENTITY = {
    "AZURE_STORAGE_ANON": "true",  # adlfs without credentials asks nobody for the machine's
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class VolumeRefused(StepfastError):
    """The kubelet asks for a volume that no pod may have; the message names the pod and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume of a pod, as the kubelet asked for it. `target_path` is the folder that becomes the pod's volume."""

    id: str
    target_path: str
    job: JobKey
    run: str
    pod: str
    pod_uid: str
    service_account: str
    mirrors: bool = False  # whether another node of the gang is to hold the job's steps, too
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def owner(self) -> str:
        return f"pod {self.job.namespace}/{self.pod}"


def volume_of(
    *, id: str, target_path: str, context: Mapping[str, str], secrets: Mapping[str, str], pods_folder: str,
    takes_mirrors: bool = False,
) -> Volume:  # fmt: skip
    """The volume that a kubelet asks for. Raises VolumeRefused."""
    info = {key: context.get(f"{_POD_INFO}/{key}", "") for key in ("pod.name", "pod.namespace", "pod.uid")}
    owner = f"pod {info['pod.namespace']}/{info['pod.name']}"
    missing = [key for key, value in info.items() if not value]
    if missing:
        raise VolumeRefused(f"{owner}: the kubelet says no {', '.join(missing)}: CSIDriver.spec.podInfoOnMount is off")
    if context.get(f"{_POD_INFO}/ephemeral") != "true":
        raise VolumeRefused(f"{owner}: the volume is not ephemeral: write it inline, as `csi:` in the pod's `volumes`")
    check_target(id, target_path, pods_folder, owner=owner, pod_uid=info["pod.uid"])
    try:
        job = JobKey(namespace=info["pod.namespace"], name=context.get("job", ""))
    except SpecError as error:
        raise VolumeRefused(f"{owner}: volumeAttributes.job: {error}") from error
    run = context.get("run", "")
    if not is_run(run):
        raise VolumeRefused(f"{owner}: volumeAttributes.run: {run!r} is no run")
    mirrors = context.get("mirrors", "0") != "0"
    if mirrors and not takes_mirrors:
        raise VolumeRefused(
            f"{owner}: the job asks for mirrors (checkpoint.memory.mirrors), and this node's agent takes none: install "
            "it with sidecar.mirrors.enabled, or leave them out"
        )
    credentials = {name: secrets[name] for name in CREDENTIAL_NAMES if secrets.get(name)}
    if secrets and not credentials:
        raise VolumeRefused(f"{owner}: its secret holds no credentials; known are {', '.join(CREDENTIAL_NAMES)}")
    if any("\0" in value for value in credentials.values()):
        raise VolumeRefused(f"{owner}: its secret holds a zero byte")
    return Volume(
        id=id, target_path=target_path, job=job, run=run, pod=info["pod.name"], pod_uid=info["pod.uid"],
        service_account=context.get(f"{_POD_INFO}/serviceAccount.name", ""), mirrors=mirrors, credentials=credentials,
    )  # fmt: skip


def check_target(id: str, target_path: str, pods_folder: str, *, owner: str, pod_uid: str | None = None) -> None:
    """Raises VolumeRefused for a path that is no CSI volume of that pod (of any pod) in the kubelet's folder.

    A pod's uid is not known before it exists, so a path with it proves that the kubelet itself wrote the pod's
    description, and not the manifest's author into the volume's attributes.
    """
    if not _VOLUME_ID.fullmatch(id) or ".." in id:
        raise VolumeRefused(f"{owner}: {id!r} is no volume's id")
    parts = target_path.removeprefix(f"{pods_folder}/").split("/")
    fits = (
        target_path.startswith(f"{pods_folder}/")
        and len(parts) == 5
        and parts[1:3] == ["volumes", "kubernetes.io~csi"]
        and parts[4] == "mount"
        and parts[3] not in ("", ".", "..")
        and _UID.fullmatch(parts[0]) is not None
        and pod_uid in (None, parts[0])
    )
    if not fits:
        raise VolumeRefused(f"{owner}: {target_path!r} is no CSI volume of it in {pods_folder}")


def check_alone(volume: Volume, known: Iterable[Volume]) -> None:
    """Raises VolumeRefused when the volume's pod has another one on this node.

    A pod's manifest is its author's, and may name any number of volumes and of jobs in its own namespace. Each would
    take a job's share of the node's memory, a persister and a place in the node's status, and lift the limit on a
    pod's connections once more.
    """
    for other in known:
        if other.pod_uid == volume.pod_uid and other.id != volume.id:
            raise VolumeRefused(
                f"{volume.owner}: it has the volume {other.id} for {other.job} already, and a pod has one: "
                "name csi.stepfast.dev once in its `volumes`"
            )


def refusal(hello: Hello | Launching, volume: Volume, rules: StorageRules) -> str | None:
    """Why this hello may not come through the volume's socket; None when it may."""
    if hello.job != str(volume.job):
        return f"{volume.owner} works for the job {volume.job}, not for {hello.job}"
    if launch_of(hello.run, volume.run) is None:
        return f"{volume.owner} is of the run {volume.run}, not of {hello.run}"
    reason = rules.refusal(hello.storage_uri, has_credentials=bool(volume.credentials))
    return f"{volume.owner}: {reason}" if reason is not None else None


def launch_of(run: str, volume_run: str) -> int | None:
    """Which launch of torchrun within the pod the run is: 0, or n for `<run>.<n>`; None when it is of another run."""
    if run == volume_run:
        return 0
    number = run.removeprefix(f"{volume_run}.")
    if number == run or not number.isascii() or not number.isdigit() or number.startswith("0") or len(number) > 9:
        return None
    return int(number)


def persister_environment(base: Mapping[str, str], credentials: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's persister: with credentials of its own it knows nothing of the agent's identity."""
    if not credentials:
        return dict(base)
    rest = {name: value for name, value in base.items() if not name.startswith(_IDENTITY_PREFIXES)}
    return {**rest, **_NO_IDENTITY, **credentials}
