"""The API server by HTTP: what kubectl does with a process for each object."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from functools import cache

from control_plane import ControlPlane
from kube import Object

# The namespace of the pods that routers discover. Dry runs of the same release are in another one.
WATCHED = "watched"


class RefusedError(Exception):
    """An object that the API server refuses. The message is the server's."""


class Api:
    """The API server, asked by HTTP for what kubectl would ask in a process an object."""

    def __init__(self, control_plane: ControlPlane) -> None:
        at = control_plane.certificates
        self._tls = ssl.create_default_context(cafile=at / "ca.crt")
        self._tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self._tls.load_cert_chain(at / "admin.crt", at / "admin.key")
        self._url = f"https://127.0.0.1:{control_plane.port}"

    def ask(self, path: str, body: Object | None = None, method: str | None = None) -> Object:
        """Return the answer to GET, or to POST of a body unless another method is named. Raises RefusedError."""
        data = json.dumps(body).encode() if body else None
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": kind}, method=method)
        try:
            with urllib.request.urlopen(asked, context=self._tls, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RefusedError(json.load(error)["message"]) from None

    @cache  # noqa: B019 - an instance lives as long as its process.
    def resources(self, version: str) -> dict[str, str]:
        """Return the path of each kind of an API version, for example `apps/v1`."""
        found = self.ask(self._root(version))["resources"]
        return {each["kind"]: each["name"] for each in found if "/" not in each["name"]}

    def dry_run(self, found: Object) -> None:
        """Create an object without storing it, and with no unknown field. Raises RefusedError."""
        version, metadata = found["apiVersion"], found["metadata"]
        path = f"{self._root(version)}/namespaces/{metadata.get('namespace', 'inference')}"
        self.ask(f"{path}/{self.resources(version)[found['kind']]}?dryRun=All&fieldValidation=Strict", found)

    @staticmethod
    def _root(version: str) -> str:
        return f"/apis/{version}" if "/" in version else f"/api/{version}"


def worker_pod(name: str) -> Object:
    """Return a worker's pod that no scheduler looks at, with the labels of the release `rel`."""
    labels = {"app.kubernetes.io/component": "worker", "app.kubernetes.io/instance": "rel"}
    labels |= {"app.kubernetes.io/name": "kvrouter", "kvrouter.io/role": "both"}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "schedulerName": "none",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "worker", "image": "worker", "securityContext": security}],
    }
    metadata = {"name": name, "namespace": WATCHED, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def run_pod(api: Api, name: str, address: str) -> None:
    """Write a worker's pod and the status that a kubelet would write."""
    pods = f"/api/v1/namespaces/{WATCHED}/pods"
    api.ask(pods, worker_pod(name))
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    api.ask(f"{pods}/{name}/status", {"status": status}, "PATCH")


def delete_pod(api: Api, name: str) -> None:
    """Delete a pod at once."""
    api.ask(f"/api/v1/namespaces/{WATCHED}/pods/{name}?gracePeriodSeconds=0", method="DELETE")
