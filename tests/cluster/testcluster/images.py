"""Images without a registry: made here, kept in the cache by what they are made of, loaded from archives.

Builds see no network: what pip installs comes from a folder of wheels that is filled beforehand, so that the project's
Dockerfiles are used as they are.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testcluster.binaries import cache_folder, locked
from testcluster.unavailable import Unavailable
from testcluster.waiting import CommandFailed, run_or_raise

REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent
PAUSE = "localhost/pause:1"
BASE = "docker.io/library/python:3.11-slim-bookworm"
# What the stand-in for the base image is made of. Its Python is Debian's, in the same version.
BASE_RECIPE = (
    "mmdebstrap", "--variant=essential", "--include=python3,python3-venv,ca-certificates,libstdc++6",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")),
    '--customize-hook=ln -s python3 "$1/usr/bin/python"', "bookworm",
)  # fmt: skip
SOURCES = ("Dockerfile", "constraints.txt", "trainer-sdk", "sidecar", "operator", "examples")
REQUIREMENTS = ("trainer-sdk[storage,azure]", "operator[cluster]", "sidecar[azure,cluster]")
NOT_SOURCES = ("__pycache__", ".stepfast")
KEEP_VERSIONS = 3
BUILD_SECONDS = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectImages:
    """The names of the project's images, tagged by what they are made of, and the archives that hold them."""

    operator: str
    sidecar: str
    trainer: str
    archives: tuple[Path, ...]


def project_images(repository: Path = REPOSITORY) -> ProjectImages:
    """Builds them from this checkout, unless the cache has these very sources.

    The trainer's image has no torch: that comes from the machine's environment (`jobnamespace.py`).

    Raises:
        Unavailable: a program is missing.
        CommandFailed: a build failed; the message has its output.
    """
    sources = _fingerprint(repository / name for name in SOURCES)
    operator = Build(context=repository, name="localhost/stepfast-operator", sources=sources, target="operator")
    sidecar = Build(context=repository, name="localhost/stepfast-sidecar", sources=sources, target="sidecar")
    trainer = Build(
        context=repository, name="localhost/stepfast-examples", sources=sources, file="examples/Dockerfile",
        arguments={"EXTRAS": "storage", "PACKAGES": ""},
    )  # fmt: skip
    wheels = _wheels(repository)
    builds = (operator, sidecar, trainer)
    return ProjectImages(
        operator=operator.reference, sidecar=sidecar.reference, trainer=trainer.reference,
        archives=tuple(build.archive(wheels) for build in builds),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One image of a Dockerfile. `sources` stands for all that it is made of, the base image aside."""

    context: Path
    name: str
    sources: str
    file: str = "Dockerfile"
    target: str | None = None
    arguments: Mapping[str, str] | None = None

    @property
    def tag(self) -> str:
        return hashlib.sha256(
            f"{BASE_RECIPE}{self.sources}{self.file}{self.target}{self.arguments}".encode()
        ).hexdigest()[:16]

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tag}"

    def archive(self, wheels: Path | None = None) -> Path:
        """The image as a Docker archive, made unless the cache has it. pip sees the wheels of that folder alone."""
        archive = _archives() / f"{self.name.rpartition('/')[2]}-{self.tag}.tar"
        # One at a time: they share their layers, and the machine.
        with locked(cache_folder() / "buildah.lock"):
            if not archive.exists():
                _buildah_base()
                self._build(wheels)
                _push(self.reference, archive)
                _forget_old(self.name)
            os.utime(archive)
        return archive

    def _build(self, wheels: Path | None) -> None:
        options = ["--layers", "--file", str(self.context / self.file), "--tag", self.reference]
        options += ["--target", self.target] if self.target else []
        for name, value in (self.arguments or {}).items():
            options += ["--build-arg", f"{name}={value}"]
        with tempfile.TemporaryDirectory() as folder:
            configuration = Path(folder, "pip.conf")
            configuration.write_text("[global]\nno-index = true\nfind-links = /wheels-of-the-machine\n")
            options += ["--volume", f"{configuration}:/etc/pip.conf:ro"]
            options += ["--volume", f"{wheels or folder}:/wheels-of-the-machine:ro"]
            _buildah("build", "--pull=never", "--network=none", *options, str(self.context))


def pause() -> Path:
    """The image that holds a pod's namespaces, and has busybox's programs for tests. A Docker archive."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("the pause image needs a static busybox: apt-get install busybox-static")
    content = Path(busybox).read_bytes()
    archive = _archives() / f"pause-{hashlib.sha256(content).hexdigest()[:16]}.tar"
    if not archive.exists():
        layer = _tar({"bin/busybox": content})
        # Process 1 ends on a signal only when it says so.
        script = "trap 'exit 0' TERM INT; /bin/busybox sleep 2147483647 & wait"
        configuration = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/bin/busybox", "sh", "-c", script]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
        staging = archive.with_suffix(f".{os.getpid()}")
        staging.write_bytes(_tar({
            "layer.tar": layer,
            "config.json": json.dumps(configuration).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }))  # fmt: skip
        staging.rename(archive)
    os.utime(archive)
    return archive


def _buildah_base() -> None:
    """The stand-in for the base image, in buildah's store."""
    recipe = hashlib.sha256(repr(BASE_RECIPE).encode()).hexdigest()[:16]
    done = _store() / f"base-{recipe}"
    if done.exists():
        return
    _need("mmdebstrap", "buildah")
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        print("tests/cluster: making the base image (minutes the first time)", file=sys.stderr, flush=True)
        run_or_raise(*BASE_RECIPE, f"{folder}/root.tar", timeout_seconds=BUILD_SECONDS)
        Path(folder, "Dockerfile").write_text('FROM scratch\nADD root.tar /\nCMD ["python3"]\n')
        _buildah("build", "--tag", BASE, folder)
    done.touch()


def _push(reference: str, archive: Path) -> None:
    staging = archive.with_suffix(f".{os.getpid()}")
    staging.unlink(missing_ok=True)
    _buildah("push", "--quiet", reference, f"docker-archive:{staging}:{reference}")
    staging.rename(archive)


def _buildah(*args: str) -> None:
    """One command of buildah's, in a mount namespace of its own: whatever ends it, no mount is left."""
    _need("buildah")
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot", "STORAGE_OPTS": ""}
        command = ["unshare", "--mount", "buildah", "--root", str(_store()), "--runroot", state, *args]
        run_or_raise(*command, timeout_seconds=BUILD_SECONDS, environment=environment)


def _store() -> Path:
    folder = cache_folder() / "buildah"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _wheels(repository: Path) -> Path:
    """A folder with every distribution that the images install, in the versions of constraints.txt."""
    projects = [requirement.partition("[")[0] for requirement in REQUIREMENTS]
    key = _fingerprint([repository / "constraints.txt", *(repository / name / "pyproject.toml" for name in projects)])
    folder = cache_folder() / f"wheels-{key}"
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            if sys.version_info[:2] != (3, 11):
                raise Unavailable(f"the base image's Python is 3.11, wheels for {sys.version} would not do there")
            staging = folder.with_name(f"{folder.name}.{os.getpid()}")
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(staging)]
            command += ["--constraint", str(repository / "constraints.txt"), "hatchling", "editables"]
            run_or_raise(*command, *(f"{repository}/{name}" for name in REQUIREMENTS), timeout_seconds=BUILD_SECONDS)
            for own in staging.glob("stepfast*"):  # the image builds its own
                own.unlink()
            staging.rename(folder)
    return folder


def _fingerprint(paths: Iterator[Path] | list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not set(NOT_SOURCES) & set(file.parts) and ".egg-info" not in str(file):
                digest.update(f"{file.relative_to(path.parent)}\0{file.stat().st_mode}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old(name: str) -> None:
    """All but the versions of an image that were used last, and the layers that only the forgotten ones had.

    A few are kept for checkouts that take turns, and because another session may be loading one right now.
    """
    short = name.rpartition("/")[2]
    archives = [path for path in _archives().glob(f"{short}-*.tar") if path.stem.rpartition("-")[0] == short]
    old = sorted(archives, key=lambda path: path.stat().st_mtime)[:-KEEP_VERSIONS]
    for path in old:
        with suppress(CommandFailed):  # the store may have been cleared by hand
            _buildah("rmi", "--force", f"{name}:{path.stem.rpartition('-')[2]}")
        path.unlink()
    if old:
        _buildah("rmi", "--prune", "--force")


def _archives() -> Path:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise Unavailable(f"images are built with {' and '.join(missing)}: apt-get install {' '.join(missing)}")


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
