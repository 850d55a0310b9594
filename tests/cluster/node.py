"""The node of the cluster: containerd, kubelet, proxy and a name server, beside the control plane.

It runs in namespaces of its own for processes, mounts and the network, which `run.py` creates. So whatever it starts,
mounts and configures there ends with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from control_plane import BINARY, ClusterError, ControlPlane, Programs

ADDRESS = "10.244.0.1"
NAME_SERVER = "10.96.0.10"
CONTAINERD = Path("/run/containerd/containerd.sock")
# Debian's folder of network plugins, and the usual one of others.
PLUGINS = [folder for folder in map(Path, ("/usr/lib/cni", "/opt/cni/bin")) if (folder / "bridge").exists()]
_NETWORK = f"""
ip link set lo up
ip link add pods0 type bridge
ip address add {ADDRESS}/24 dev pods0
ip link set pods0 up
ip route add 10.96.0.0/16 dev pods0
ip address add {NAME_SERVER}/32 dev lo
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
"""
# Folders of the machine that the programs write to.
_HIDDEN = ("/run", "/var/lib", "/var/log", "/etc/cni")


@dataclass(frozen=True)
class Node:
    """The running node and its control plane."""

    programs: Programs
    control_plane: ControlPlane

    def containers(self, *arguments: str) -> str:
        """Return the output of `ctr`, containerd's command, in the kubelet's namespace."""
        command = ["ctr", "--address", str(CONTAINERD), "--namespace", "k8s.io", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def running_node(folder: Path, cgroup: str) -> Iterator[Node]:
    """Run a node in the namespaces of this process. `cgroup` is the name of the cgroup of its pods."""
    for each in filter(os.path.isdir, _HIDDEN):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", each], check=True)
    subprocess.run(["sh", "-ec", _NETWORK], check=True)
    with Programs(folder) as programs:
        control_plane = ControlPlane(
            programs, [2379, 2380, 6443], ADDRESS, ["node1", "kubernetes.default.svc", "10.96.0.1"]
        )
        node = Node(programs, control_plane)
        programs.start("containerd", ["containerd", "--config", _containerd_settings(folder)])
        control_plane.start()
        at = control_plane.certificates
        _start_controllers(programs, at)
        _wait(CONTAINERD.exists, "containerd has no socket", programs)
        command = [
            BINARY,
            "kubelet",
            "--config",
            _kubelet_settings(folder, at, cgroup),
            "--root-dir",
            folder / "kubelet",
        ]
        command += ["--kubeconfig", at / "kubelet.kubeconfig", "--hostname-override", "node1", "--node-ip", ADDRESS]
        programs.start("kubelet", command)
        options = ["--hostname-override=node1", "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0"]
        programs.start("proxy", [BINARY, "kube-proxy", "--kubeconfig", at / "proxy.kubeconfig", *options])
        names = [sys.executable, Path(__file__).parent / "name_server.py", NAME_SERVER, at, "6443"]
        programs.start("name_server", names)
        _wait(lambda: _is_ready(control_plane), "the node is not ready", programs)
        yield node


def _start_controllers(programs: Programs, at: Path) -> None:
    options = ["--leader-elect=false", "--bind-address=127.0.0.1"]
    accounts = [f"--service-account-private-key-file={at}/accounts.key", f"--root-ca-file={at}/ca.crt"]
    network = ["--cluster-cidr=10.244.0.0/16", "--allocate-node-cidrs", "--service-cluster-ip-range=10.96.0.0/16"]
    command = [BINARY, "kube-controller-manager", "--kubeconfig", at / "controllers.kubeconfig", *options]
    programs.start("controllers", [*command, "--use-service-account-credentials", *accounts, *network])
    programs.start("scheduler", [BINARY, "kube-scheduler", "--kubeconfig", at / "scheduler.kubeconfig", *options])


def _containerd_settings(folder: Path) -> Path:
    file, networks = folder / "containerd.toml", folder / "networks"
    networks.mkdir()
    (networks / "pods.conflist").write_text(
        '{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,'
        ' "hairpinMode": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]],'
        ' "routes": [{"dst": "0.0.0.0/0"}]}}]}'
    )
    # Without CAP_SYS_RESOURCE, which containers of root may lack, no process can lower its oom_score_adj.
    file.write_text(
        f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLUGINS[0]}"
conf_dir = "{networks}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
    )
    return file


def _kubelet_settings(folder: Path, at: Path, cgroup: str) -> Path:
    file = folder / "kubelet.yaml"
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": f"{at}/ca.crt"}},
        "tlsCertFile": f"{at}/kubelet.crt",
        "tlsPrivateKeyFile": f"{at}/kubelet.key",
        "address": ADDRESS,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [NAME_SERVER],
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "podLogsDir": f"{folder}/pod-logs",
    }
    file.write_text(yaml.safe_dump(settings))
    return file


def _is_ready(control_plane: ControlPlane) -> bool:
    path = '{.items[0].status.conditions[?(@.type=="Ready")].status}'
    command = [BINARY, "kubectl", "--kubeconfig", control_plane.kubeconfig, "get", "nodes", "-o", f"jsonpath={path}"]
    return subprocess.run(command, capture_output=True, text=True).stdout == "True"


def _wait(condition: object, problem: str, programs: Programs) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 300
    while not condition():
        programs.check()
        if time.monotonic() > deadline:
            raise ClusterError(f"{problem}:\n{programs.end_of_log('kubelet')}")
        time.sleep(0.2)


def missing() -> list[str]:
    """Return what this machine lacks for a node, in words."""
    found = []
    if sys.platform != "linux":
        found.append("Linux: containers need its kernel")
    elif os.geteuid() != 0:
        found.append("root: it creates namespaces, mounts and cgroups (sudo make test-cluster)")
    found += [
        f"{program}: install Debian's package {package}, or set KUBECONFIG and IMAGE to use a cluster that runs"
        for program, package in (
            ("containerd", "containerd"),
            ("runc", "runc"),
            ("iptables", "iptables"),
            ("ip", "iproute2"),
            ("mmdebstrap", "mmdebstrap"),
        )
        if shutil.which(program) is None
    ]
    if not PLUGINS:
        found.append("network plugins: install Debian's package containernetworking-plugins")
    if not BINARY.exists() and shutil.which("go") is None:
        found.append("Go 1.24 or newer: it builds Kubernetes' programs, once")
    return found
