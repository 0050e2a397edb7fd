"""A cluster's keys, certificates, tokens and kubeconfigs, made anew for every cluster.

Every component has an identity of its own, as in production, so that node authorization and NodeRestriction decide
what a node may do, and the audit log tells who did what.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVICE_ADDRESS = "10.96.0.1"  # of the Service `kubernetes`, the first of the Services' range
API_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a token stands for. `groups` are comma-separated, as in a token file."""

    user: str
    groups: str = ""


ADMIN = Identity(user="admin", groups="system:masters")
CONTROLLERS = Identity(user="system:kube-controller-manager")
SCHEDULER = Identity(user="system:kube-scheduler")
PROXY = Identity(user="system:kube-proxy")
DNS = Identity(user="coredns", groups="system:masters")


def node_identity(name: str) -> Identity:
    return Identity(user=f"system:node:{name}", groups="system:nodes")


class Credentials:
    """The files of one cluster, in a folder of their own."""

    def __init__(self, folder: Path, *, address: str) -> None:
        self.folder = folder
        self._server = f"https://{address}:6443"
        self._address = address
        self.authority = folder / "ca.crt"
        self.tokens = folder / "tokens.csv"

    def make(self, identities: Sequence[Identity]) -> None:
        """Writes everything: what `path` names, the token file, and a kubeconfig for each identity."""
        self.folder.mkdir(mode=0o700)
        authority = _Authority()
        self.authority.write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
        self._write_pair("api", *authority.server("kube-apiserver", self._address))
        # What the API server shows a kubelet for logs and exec.
        self._write_pair("api-to-kubelet", *authority.client("kube-apiserver-kubelet-client", "system:masters"))
        accounts = ec.generate_private_key(ec.SECP256R1())
        self._write_key("accounts.key", accounts)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.path("accounts.pub").write_bytes(accounts.public_key().public_bytes(serialization.Encoding.PEM, form))
        rows = []
        for identity in identities:
            token = secrets.token_hex(16)
            rows.append(f'{token},{identity.user},{identity.user},"{identity.groups}"\n')
            self._write_kubeconfig(identity, token)
        self.tokens.write_text("".join(rows))

    def path(self, name: str) -> Path:
        """`api.crt`, `api.key`, `api-to-kubelet.crt`, `api-to-kubelet.key`, `accounts.key`, `accounts.pub`."""
        return self.folder / name

    def kubeconfig(self, identity: Identity) -> Path:
        return self.folder / f"{identity.user.replace(':', '-')}.kubeconfig"

    def _write_pair(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.path(f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._write_key(f"{name}.key", key)

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        pem = serialization.PrivateFormat.TraditionalOpenSSL
        self.path(name).write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption()))
        self.path(name).chmod(0o600)

    def _write_kubeconfig(self, identity: Identity, token: str) -> None:
        cluster = {"server": self._server, "certificate-authority": str(self.authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": identity.user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": identity.user}}],
            "current-context": "test",
        }
        self.kubeconfig(identity).write_text(json.dumps(document, indent=1))
        self.kubeconfig(identity).chmod(0o600)


class _Authority:
    """Signs what the API server shows to clients and to kubelets."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("stepfast-test")
        usage = _usage(is_authority=True)
        self.certificate = self._signed(_builder(self._name, self._name, self._key, usage, is_authority=True))

    def server(self, user: str, address: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        addresses = [ipaddress.ip_address(text) for text in (address, SERVICE_ADDRESS, "127.0.0.1")]
        names = [*map(x509.DNSName, API_NAMES), *map(x509.IPAddress, addresses)]
        return self._issued(_name(user), x509.SubjectAlternativeName(names), ExtendedKeyUsageOID.SERVER_AUTH)

    def client(self, user: str, group: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        return self._issued(_name(user, group), None, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issued(
        self, subject: x509.Name, names: x509.SubjectAlternativeName | None, purpose: x509.ObjectIdentifier
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._name, key, _usage(is_authority=False), is_authority=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return self._signed(builder), key

    def _signed(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        # Python's TLS, strict since 3.13, wants to know which key signed.
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(signer, critical=False).sign(self._key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, usage: x509.KeyUsage, *, is_authority: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(usage, critical=True)
    )


def _name(user: str, group: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    return x509.Name([*attributes, *([x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else [])])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, key_encipherment=False,
        content_commitment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
