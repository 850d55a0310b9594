"""etcd and the API server of the cluster as processes. They need no root and no other program."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from certificates import make_certificates

PROGRAMS = Path.home() / ".cache/kvrouter/cluster"
BINARY = PROGRAMS / "cluster"
_AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
"""


class ClusterError(Exception):
    """A program of the cluster that did not start. The message has the end of its log."""


class Programs:
    """Programs of the cluster in a folder, which end with it, the last one first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "logs").mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in reversed(list(self._running)):
            self.kill(name)

    def start(self, name: str, command: Sequence[str | Path]) -> None:
        """Start a program whose output is written to a log."""
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill a program, and wait for its end."""
        program = self._running.pop(name)
        program.kill()
        program.wait(10)

    def check(self) -> None:
        """Raise ClusterError if a program has ended."""
        for name, program in self._running.items():
            if program.poll() is not None:
                raise ClusterError(f"{name} ended:\n{self.end_of_log(name)}")

    def end_of_log(self, name: str) -> str:
        """Return the last lines of a program's log."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")[-3000:]


class ControlPlane:
    """etcd and an API server that answers `kubectl` with `kubeconfig`."""

    def __init__(self, programs: Programs, ports: Sequence[int], address: str, names: Sequence[str]) -> None:
        """`address` is the one that the API server gives to pods, `names` are further names of the node."""
        self._programs = programs
        self._etcd_port, self._peer_port, self.port = ports
        self._address = address
        self.certificates = programs.folder / "certificates"
        self.kubeconfig = self.certificates / "admin.kubeconfig"
        self.audit_log = programs.folder / "logs" / "audit.log"
        (programs.folder / "audit.yaml").write_text(_AUDIT)
        make_certificates(self.certificates, self.port, ["localhost", "127.0.0.1", address, *names])

    def start(self) -> None:
        """Start both, and wait until the API server is ready. Raises ClusterError."""
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        etcd = ["--data-dir", str(self._programs.folder / "etcd"), "--log-level", "warn", "--unsafe-no-fsync"]
        etcd += ["--listen-client-urls", client, "--advertise-client-urls", client]
        etcd += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._programs.start("etcd", [BINARY, "etcd", *etcd, "--initial-cluster", f"default={peer}"])
        self.start_api_server()

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready. Raises ClusterError."""
        at = self.certificates
        options = {
            "etcd-servers": f"http://127.0.0.1:{self._etcd_port}",
            "bind-address": "127.0.0.1" if self._address == "127.0.0.1" else "0.0.0.0",
            "advertise-address": "10.244.0.1",
            "secure-port": self.port,
            "tls-cert-file": at / "apiserver.crt",
            "tls-private-key-file": at / "apiserver.key",
            "client-ca-file": at / "ca.crt",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": at / "accounts.key",
            "service-account-signing-key-file": at / "accounts.key",
            "service-cluster-ip-range": "10.96.0.0/16",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "kubelet-client-certificate": at / "kubelet-client.crt",
            "kubelet-client-key": at / "kubelet-client.key",
            "kubelet-certificate-authority": at / "ca.crt",
            "kubelet-preferred-address-types": "InternalIP",
            "allow-privileged": "true",
            "audit-policy-file": self._programs.folder / "audit.yaml",
            "audit-log-path": self.audit_log,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._programs.start("apiserver", [BINARY, "kube-apiserver", *arguments])
        self._wait_until_ready()

    def stop_api_server(self) -> None:
        """Kill the API server."""
        self._programs.kill("apiserver")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 300  # A busy machine takes minutes.
        while not self._is_ready():
            self._programs.check()
            if time.monotonic() > deadline:
                raise ClusterError(f"the API server is not ready:\n{self._programs.end_of_log('apiserver')}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        command = [BINARY, "kubectl", "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz"]
        return subprocess.run(command, capture_output=True).returncode == 0
