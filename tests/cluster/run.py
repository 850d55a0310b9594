"""Run the tests of this folder on a Kubernetes cluster: python tests/cluster/run.py [ARGUMENTS OF PYTEST].

With KUBECONFIG and IMAGE, it is the cluster that they name, whose nodes stay untouched. Otherwise a cluster of one node
is made on this machine. It is removed at the end, also when the tests fail or this command is killed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from control_plane import BINARY, PROGRAMS, ClusterError
from images import IMAGE, archives, make_images
from node import CONTAINERD, missing, running_node

HERE = Path(__file__).parent
# The kubelet changes these of the machine itself.
_SYSCTLS = "vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops"
_SYSCTLS += " kernel/keys/root_maxkeys kernel/keys/root_maxbytes"
SYSCTL_FILES = [Path("/proc/sys") / name for name in _SYSCTLS.split()]
CGROUPS = Path("/sys/fs/cgroup")
# The weight of all pods together, which would otherwise have that of one process of the machine.
CPU_WEIGHTS = {"cpu.shares": "16384", "cpu.weight": "2000"}
HELM = "helm.sh/helm/v3/cmd/helm@v3.19.4"
_INSIDE = "--inside"  # The process in the namespaces: its folder and its cgroup follow.


def build_programs() -> None:
    """Build Helm and Kubernetes' programs, once, in about twelve minutes."""
    if not BINARY.exists():
        print("Building Helm and Kubernetes' programs, once: about twelve minutes", flush=True)
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"CGO_ENABLED": "0", "GOBIN": str(PROGRAMS)}
        source = HERE / "programs"
        [version] = re.findall(r"^\tk8s.io/kubernetes (v\S+)$", (source / "go.mod").read_text(), re.MULTILINE)
        flags = f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={version}"
        subprocess.run(["go", "install", "-trimpath", "-ldflags=-s -w", HELM], env=environment, check=True)
        build = ["go", "build", "-trimpath", flags, "-o", f"{PROGRAMS}/", ".", "./pause"]
        subprocess.run(build, cwd=source, env=environment, check=True)


def tests(arguments: list[str]) -> int:
    """Run the tests, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-m", "cluster", "-p", "no:randomly", "-n", "0", *arguments]
    return subprocess.run(command, cwd=HERE.parents[1]).returncode


@contextmanager
def restored_sysctls() -> Iterator[None]:
    """Write back the machine's settings that the kubelet changes."""
    values = {file: file.read_text() for file in SYSCTL_FILES if file.exists()}
    try:
        yield
    finally:
        for file, value in values.items():
            if file.read_text() != value:
                file.write_text(value)


@contextmanager
def cgroup() -> Iterator[str]:
    """Return the name of a new cgroup, in the unified hierarchy or in all of version 1, which is removed at the end."""
    name = f"kvrouter-{os.getpid()}"
    if (CGROUPS / "cgroup.controllers").exists():
        roots = [CGROUPS]
    else:
        roots = [each for each in CGROUPS.iterdir() if (each / "cgroup.procs").exists()]
    for root in roots:
        (root / name).mkdir()
        for file, weight in CPU_WEIGHTS.items():
            if (root / name / file).exists():
                (root / name / file).write_text(weight)
    try:
        yield name
    finally:
        deadline = time.monotonic() + 20
        while left := [each for root in roots for each in _groups_below(root / name)]:
            for each in left:
                # A process that was just killed still counts for a moment.
                try:
                    each.rmdir()
                except OSError:
                    time.sleep(0.1)
            if time.monotonic() > deadline:
                print(f"run: cgroups are left: {left}", file=sys.stderr)
                break


def _groups_below(root: Path) -> list[Path]:
    """Return the cgroups of a root, the innermost first."""
    return [Path(found) for found, _folders, _files in os.walk(root, topdown=False)]


def in_namespaces(arguments: list[str]) -> int:
    """Run the node and the tests in new namespaces, whose contents end with their first process."""
    with ExitStack() as stack:
        # A second cluster would take the first one's sysctls for those of the machine.
        fcntl.flock(stack.enter_context((PROGRAMS / "lock").open("w")), fcntl.LOCK_EX)
        stack.enter_context(restored_sysctls())
        name = stack.enter_context(cgroup())
        folder = Path(tempfile.mkdtemp(prefix="kvrouter-cluster-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # The process that is killed with this one ends the first process of the namespaces, and so all others.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["--mount-proc", sys.executable, __file__, _INSIDE, str(folder), name, *arguments]
        process = subprocess.Popen(command, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process.wait()


def inside(folder: Path, name: str, arguments: list[str]) -> int:
    """Run the node in the namespaces of this process, and the tests on it."""
    began = time.monotonic()
    with running_node(folder, name) as node:
        print(f"The node is ready after {time.monotonic() - began:.1f} s", flush=True)
        for image in archives():
            node.containers("images", "import", str(image))
        print(f"The images are there after {time.monotonic() - began:.1f} s", flush=True)
        os.environ |= {"KUBECONFIG": str(node.control_plane.kubeconfig), "IMAGE": IMAGE, "CLUSTER_FOLDER": str(folder)}
        os.environ |= {"CONTAINERD_ADDRESS": str(CONTAINERD)}
        return tests(arguments)


def main(arguments: list[str]) -> int:
    """Run the tests, and return the exit status."""
    if arguments[:1] == [_INSIDE]:
        return inside(Path(arguments[1]), arguments[2], arguments[3:])
    if os.environ.get("KUBECONFIG") and os.environ.get("IMAGE"):
        return tests(arguments)
    if lacking := missing():
        print("No cluster can be made here. Missing:\n- " + "\n- ".join(lacking), file=sys.stderr)
        return 1
    try:
        build_programs()
        make_images()
        return in_namespaces(arguments)
    except (ClusterError, subprocess.CalledProcessError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
