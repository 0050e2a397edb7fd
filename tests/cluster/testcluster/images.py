"""Images without a registry: made here, kept in the cache by what they are made of, loaded from archives."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

from testcluster.binaries import cache_folder
from testcluster.unavailable import Unavailable

PAUSE = "localhost/pause:1"


def pause() -> Path:
    """The image that holds a pod's namespaces: a static busybox that sleeps. A Docker archive."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("the pause image needs a static busybox: apt-get install busybox-static")
    content = Path(busybox).read_bytes()
    archive = cache_folder() / f"pause-{hashlib.sha256(content).hexdigest()[:16]}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        layer = _tar({"bin/busybox": content})
        # `sleep infinity` as process 1 ends on a signal only when it is told to.
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
    return archive


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
