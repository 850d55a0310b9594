"""kubectl and Helm on the cluster of KUBECONFIG, and load from a pod there."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from control_plane import BINARY, PROGRAMS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/kvrouter"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
Object = dict[str, Any]


def eventually(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Wait until a condition holds. Fails the test after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.3)


@dataclass(frozen=True)
class Namespace:
    """A namespace of a cluster, with the commands to work in it."""

    name: str
    kubeconfig: str

    def program(self, name: str) -> list[str]:
        """Return the command `kubectl` or `helm`: the one that was built with the cluster's programs, else on PATH."""
        built = {"kubectl": [str(BINARY), "kubectl"], "helm": [str(PROGRAMS / "helm")]}[name]
        return [*(built if Path(built[0]).exists() else [name]), "--kubeconfig", self.kubeconfig]

    def kubectl(self, *arguments: str, data: str = "", seconds: float = 500) -> str:
        """Return kubectl's output. `data` is its input. Fails the test if it fails."""
        return self._run([*self.program("kubectl"), "--namespace", self.name, *arguments], data, seconds)

    def helm(self, *arguments: str, seconds: float = 500) -> str:
        """Return Helm's output. Fails the test if it fails."""
        return self._run([*self.program("helm"), "--namespace", self.name, *arguments], "", seconds)

    def shell(self, command: str) -> str:
        """Return the output of a shell command, whose kubectl and helm are those of `program`."""
        functions = [f'{name}() {{ {shlex.join(self.program(name))} "$@"; }}; ' for name in ("kubectl", "helm")]
        return self._run(["bash", "-ec", "".join(functions) + command], "", 300)

    def _run(self, command: list[str], data: str, seconds: float) -> str:
        done = subprocess.run(command, input=data, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.stderr}{done.stdout}"
        return done.stdout

    def get(self, *arguments: str) -> list[Object]:
        """Return objects, for example `get("pods", "-l", "app=x")`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))["items"]

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self.kubectl("apply", "-f", "-", data=yaml.safe_dump_all(objects))

    def pods(self, component: str) -> list[str]:
        """Return the names of the pods of a component that are not being deleted."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component={component}")
        return [each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]]

    def wait_for_rollout(self, *names: str) -> None:
        """Wait until the pods of deployments are of the latest version, and their predecessors have ended."""
        for name in names:
            self.kubectl("rollout", "status", name, "--timeout=480s")
        eventually(lambda: not self.deleted_pods(), "the replaced pods have ended")

    def deleted_pods(self) -> list[str]:
        """Return the names of the pods that are being deleted."""
        found = self.get("pods")
        return [each["metadata"]["name"] for each in found if "deletionTimestamp" in each["metadata"]]


@contextmanager
def new_namespace(kubeconfig: str, name: str, labels: dict[str, str] | None = None) -> Iterator[Namespace]:
    """Create a namespace, and delete it with all that is in it."""
    namespace = Namespace(name, kubeconfig)
    metadata = {"name": name, "labels": RESTRICTED if labels is None else labels}
    namespace.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        yield namespace
    finally:
        namespace.kubectl("delete", "namespace", name, "--wait=false")


@dataclass
class Report:
    """Requests of a load, and those without a complete answer."""

    sent: int = 0
    failures: list[Object] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return len(self.failures)


@dataclass
class Load:
    """A pod that sends requests at a steady rate until `stop`."""

    namespace: Namespace
    pod: str

    def _lines(self) -> list[Object]:
        text = self.namespace.kubectl("logs", self.pod)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def answered(self) -> int:
        """Return the number of complete answers so far."""
        lines = self._lines()
        return lines[-1]["answered"] if lines else 0

    def wait_for_answers(self, number: int) -> None:
        """Wait until `number` more requests are answered."""
        before = self.answered()
        eventually(lambda: self.answered() >= before + number, f"{number} more answers")

    def stop(self) -> Report:
        """End the load, wait for the answers of what was sent, and return the counts."""
        self.namespace.kubectl("exec", self.pod, "--", "touch", "/tmp/stop")
        eventually(lambda: "failures" in (self._lines() or [{}])[-1], "the last answers", 420)
        last = self._lines()[-1]
        return Report(last["sent"], last["failures"])


@contextmanager
def steady_load(
    namespace: Namespace, image: str, service: str, *, rate: float = 10, tokens: int = 6, model: str = "simulated"
) -> Iterator[Load]:
    """Send chats to a service from a pod of the image, half of them streamed, half on a connection of their own."""
    script = (Path(__file__).parent / "load.py").read_text()
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load"}, "data": {"load.py": script}}
    url = f"http://{service}.{namespace.name}.svc"
    command = ["python", "-u", "/load/load.py", url, f"--rate={rate}", f"--tokens={tokens}", f"--model={model}"]
    container = {
        "name": "load",
        "image": image,
        "command": command,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "script", "mountPath": "/load"}],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "load"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": "load"}}],
        },
    }
    namespace.apply(settings, pod)
    load = Load(namespace, "load")
    try:
        namespace.kubectl("wait", "--for=condition=Ready", "pod/load", "--timeout=300s")
        eventually(lambda: load.answered() >= 10, "the first answers")
        yield load
    finally:
        namespace.kubectl("delete", "pod", "load", "--now")
