"""Certificates and kubeconfigs of the cluster.

As in many clusters, the authority has no keyUsage, and the certificates name no authority key. A client that verifies
strictly, which is the default of Python 3.13, refuses them.
"""

from __future__ import annotations

import base64
import datetime
from ipaddress import ip_address
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Name of the file, and user and group in Kubernetes.
USERS = {
    "admin": ("admin", "system:masters"),
    "kubelet-client": ("kubelet-client", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "kubelet": ("system:node:node1", "system:nodes"),
    "apiserver": ("kube-apiserver", ""),
}
_DAY = datetime.timedelta(days=1)


def make_certificates(folder: Path, port: int, names: list[str]) -> None:
    """Write the authority, the certificates and a kubeconfig of every user. `names` are those of the node."""
    folder.mkdir()
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster-ca")])
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    root = _builder(issuer, issuer, authority).add_extension(constraints, critical=True)
    _write(folder / "ca", authority, root.sign(authority, hashes.SHA256()))
    for file, (user, group) in USERS.items():
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        attributes += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(x509.Name(attributes), issuer, key).add_extension(usages, critical=False)
        if file in ("apiserver", "kubelet"):
            alternatives = x509.SubjectAlternativeName([_general(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        _write(folder / file, key, builder.sign(authority, hashes.SHA256()))
        (folder / f"{file}.kubeconfig").write_text(_kubeconfig(folder, file, port))
    accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "accounts.key").write_bytes(_pem(accounts))


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 30 * _DAY)
    )


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)


def _write(file: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    file.with_suffix(".key").write_bytes(_pem(key))
    file.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _kubeconfig(folder: Path, user: str, port: int) -> str:
    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": encoded("ca.crt")}
    account = {"client-certificate-data": encoded(f"{user}.crt"), "client-key-data": encoded(f"{user}.key")}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": user, "user": account}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
            "current-context": "cluster",
        }
    )
