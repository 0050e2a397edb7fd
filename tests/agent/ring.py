"""Agents of several nodes, each with an API server of its own, that mirror each other's steps."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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

    def add(
        self,
        *options: str,
        credentials: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Any:
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
            environment={**(environment or {}), "KUBECONFIG": str(kubeconfig)}, **settings,
        )  # fmt: skip
        self.agents.append(agent)
        self.apis.append(api)
        return agent

    def form(self, eventually: Callable[..., None], *members: int, run: str = RUN) -> None:
        """These agents, by their places, are a gang's nodes 0, 1, … from now on."""
        self.form_gangs(eventually, {(JOB, run): members})

    def form_gangs(self, eventually: Callable[..., None], gangs: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
        """The same of several gangs, by job and run: of each of their agents these are all gangs from now on."""
        for member in sorted({member for members in gangs.values() for member in members}):
            api = self.apis[member]
            eventually(lambda api=api: api.statuses, "its CheckpointNode is there")
            api.name_gangs(
                *(
                    self._place(job, run, members, members.index(member))
                    for (job, run), members in gangs.items()
                    if member in members
                )
            )

    def _place(self, job: str, run: str, members: tuple[int, ...], index: int) -> dict[str, Any]:
        """What a CheckpointNode says of the gang's node of that index."""
        others = [members[(index + turn) % len(members)] for turn in range(1, len(members))]
        namespace, _, name = job.partition("/")
        neighbours = [f"127.0.0.1:{self.ports[other]}" for other in others]
        return {"namespace": namespace, "name": name, "run": run, "node": index, "neighbours": neighbours}

    def flush(self, member: int, run: str = RUN) -> None:
        namespace, _, name = JOB.partition("/")
        self.apis[member].request({"namespace": namespace, "name": name, "run": run, "action": "Flush"})

    def status(self, member: int, run: str = RUN) -> dict[str, Any]:
        statuses = self.apis[member].statuses
        jobs = statuses[-1]["jobs"] if statuses else ()
        return next((dict(job) for job in jobs if job["run"] == run), {})
