"""Steps in the memory of a second node: real agents, each with an API server of its own, and what is lost with one."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stepfast import catalog
from stepfast.layout import data_path
from stepfast.slot import CONTROL_BYTES
from stepfast.step import Tier

JOB, RUN = "default/train", "uid1-1"
AGENTS = "agents.stepfast.dev"


class Authority:
    """Signs certificates, each in a folder as a Secret of Kubernetes is mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("the agents' authority", self._key, None)

    def issue(self, name: str = AGENTS) -> Path:
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        pem = serialization.Encoding.PEM
        (folder / "tls.crt").write_bytes(self._sign(name, key, name).public_bytes(pem))
        (folder / "tls.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        (folder / "ca.crt").write_bytes(self._certificate.public_bytes(pem))
        return folder

    def _sign(self, subject: str, key: ec.EllipticCurvePrivateKey, dns: str | None) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the agents' authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=dns is None, path_length=None), critical=True)
        )
        if dns is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


@dataclass(kw_only=True)
class Ring:
    """Agents on nodes of their own; which of them are a gang is said in their CheckpointNodes, as the operator does."""

    start: Callable[..., Any]
    new_api: Callable[[str], Any]
    folder: Path
    authority: Authority
    agents: list[Any] = field(default_factory=list)
    apis: list[Any] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def add(self, *options: str, credentials: Path | None = None, **settings: Any) -> Any:
        name = f"node-{'abc'[len(self.agents)]}"
        api = self.new_api(name)
        kubeconfig = self.folder / f"kubeconfig-{name}"
        kubeconfig.write_text(api.kubeconfig())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.ports.append(free.getsockname()[1])
        agent = self.start(
            "--checkpoint-node", "--node", name, "--mirror-host", "127.0.0.1", "--mirror-port", str(self.ports[-1]),
            "--mirror-credentials", str(credentials or self.authority.issue()), *options,
            environment={"KUBECONFIG": str(kubeconfig)}, **settings,
        )  # fmt: skip
        self.agents.append(agent)
        self.apis.append(api)
        return agent

    def form(self, eventually: Callable[..., None], *members: int, run: str = RUN) -> None:
        """These agents, by their places, are a gang's nodes 0, 1, … from now on."""
        for index, member in enumerate(members):
            api = self.apis[member]
            eventually(lambda api=api: api.statuses, "its CheckpointNode is there")
            others = [members[(index + turn) % len(members)] for turn in range(1, len(members))]
            namespace, _, name = JOB.partition("/")
            neighbours = [f"127.0.0.1:{self.ports[other]}" for other in others]
            api.name_gangs({"namespace": namespace, "name": name, "run": run, "node": index, "neighbours": neighbours})

    def flush(self, member: int, run: str = RUN) -> None:
        namespace, _, name = JOB.partition("/")
        self.apis[member].request({"namespace": namespace, "name": name, "run": run, "action": "Flush"})

    def status(self, member: int, run: str = RUN) -> dict[str, Any]:
        statuses = self.apis[member].statuses
        jobs = statuses[-1]["jobs"] if statuses else ()
        return next((dict(job) for job in jobs if job["run"] == run), {})


@pytest.fixture
def ring(new_agent: Callable[..., Any], tmp_path: Path, new_api: Callable[[str], Any]) -> Iterator[Ring]:
    authority = tmp_path / "authority"
    authority.mkdir()
    yield Ring(start=new_agent, new_api=new_api, folder=tmp_path, authority=Authority(authority))


def gang_of_two(ring: Ring, eventually: Callable[..., None]) -> list[Any]:
    """A gang of two nodes with a rank each, which has begun."""
    agents = [ring.add(), ring.add()]
    ring.form(eventually, 0, 1)
    return [agent.join(rank=node, world_size=2, node=node, run=RUN) for node, agent in enumerate(agents)]


def path_of(step: int, rank: int, run: str = RUN) -> str:
    return data_path(step, run, "state", rank, 2)


def mirror_of(ring: Ring, member: int, step: int) -> bool:
    """Whether that agent says it holds the step of its only neighbour."""
    return [mirror["step"] for mirror in ring.status(member).get("mirrors", ())] == [step]


def read(fetched: tuple[Any, int]) -> tuple[bytes, str]:
    message, descriptor = fetched
    try:
        return os.pread(descriptor, message.size_bytes, message.offset), message.tier
    finally:
        os.close(descriptor)


def mirror_files(agent: Any) -> list[Path]:
    return sorted(agent.memory_dir.glob("*/*/mirrors/*/*/*"))


def committed(agent: Any) -> list[int]:
    return [found.step for found in catalog.committed_steps(agent.store(), JOB)]


def test_newest_step_of_each_node_is_held_by_the_next_and_no_older_one(
    ring: Ring, ranks: Any, eventually: Callable[..., None]
) -> None:
    peers = gang_of_two(ring, eventually)
    for step in (1, 2, 3):
        for peer in peers:
            peer.save(step)
        peers[0].wait_committed(step)
        eventually(lambda s=step: mirror_of(ring, 0, s) and mirror_of(ring, 1, s), "both hold the other's step")
        eventually(lambda: [len(mirror_files(agent)) for agent in ring.agents] == [1, 1], "the older one is let go")
    (file,) = mirror_files(ring.agents[1])
    assert file.read_bytes()[CONTROL_BYTES:][: ranks.RankFile(rank=0, step=3).size_bytes] == (
        ranks.RankFile(rank=0, step=3).bytes()
    )
    eventually(lambda: ring.status(0).get("mirroredStep") == 3, "it is told how far the mirror is")
