"""A real API server accepts the chart's objects, and serves the router's watches within the chart's Role.

etcd and the API server run without a node. There are no controllers and no pods, so the tests write for them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="make test-api-server installs it", exc_type=ImportError)
pytestmark = pytest.mark.cluster

from api import WATCHED, Api, RefusedError, delete_pod, run_pod  # noqa: E402
from chart import named, of_kind, pod_templates, profile, render  # noqa: E402
from control_plane import BINARY, ControlPlane, Programs  # noqa: E402
from kube import Namespace, Object, new_namespace  # noqa: E402
from test_chart import RELEASES  # noqa: E402
from waiting import until  # noqa: E402

from benchmarks.ports import free_ports  # noqa: E402
from indexer import Indexer  # noqa: E402
from router.fleet.fleet import Fleet  # noqa: E402
from router.fleet.kubernetes import ClusterAccess  # noqa: E402
from router.fleet.source_watch import follow_kubernetes  # noqa: E402
from router.settings import FleetSettings, load_settings  # noqa: E402

# Go modules with the definitions of custom resources, and the folders of them.
CRDS = {
    "sigs.k8s.io/gateway-api@v1.4.1": "config/crd/standard",
    "sigs.k8s.io/gateway-api-inference-extension@v1.2.1": "config/crd/bases",
    "sigs.k8s.io/lws@v0.7.0": "config/crd/bases",
    "github.com/kedacore/keda/v2@v2.18.1": "config/crd/bases",
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": "example/prometheus-operator-crd",
}
# The pods of these profiles lock memory for RDMA, which `restricted` and `baseline` refuse.
PRIVILEGED = {"prefill-decode", "wide-ep"}


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    if not BINARY.exists():
        pytest.skip("Kubernetes' programs are not built: `make test-cluster` builds them")
    with tempfile.TemporaryDirectory(prefix="kvrouter-api-") as folder, Programs(Path(folder)) as programs:
        started = ControlPlane(programs, free_ports(3), "127.0.0.1", [])
        started.start()
        yield started


def definitions() -> Iterator[Path]:
    """Yield the files of the custom resources' definitions."""
    for module, path in CRDS.items():
        download = ["go", "mod", "download", "-json", module]
        found = json.loads(subprocess.run(download, check=True, capture_output=True, text=True).stdout)
        for file in Path(found["Dir"], path).glob("*.yaml"):
            if "kind: CustomResourceDefinition" in file.read_text():
                yield file


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane) -> Iterator[Namespace]:
    """A namespace with Pod Security `restricted`, with all that the chart's objects may name."""
    with new_namespace(str(control_plane.kubeconfig), "inference") as namespace:
        namespace.kubectl("create", *[option for file in definitions() for option in ("-f", str(file))])
        namespace.apply(
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1},
            {
                "apiVersion": "node.k8s.io/v1",
                "kind": "RuntimeClass",
                "metadata": {"name": "nvidia"},
                "handler": "nvidia",
            },
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}},
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "models"}},
        )
        yield namespace


@pytest.fixture(scope="module")
def watched(control_plane: ControlPlane) -> Iterator[Namespace]:
    with new_namespace(str(control_plane.kubeconfig), WATCHED) as namespace:
        namespace.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
        yield namespace


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane, namespace: Namespace) -> Api:  # noqa: ARG001
    return Api(control_plane)


@pytest.mark.parametrize("name", RELEASES)
def test_every_object_is_accepted_strictly(api: Api, name: str) -> None:
    objects = render(RELEASES[name])
    assert objects
    for found in objects:
        api.dry_run(found)


def test_unknown_field_is_refused(api: Api) -> None:
    deployment = of_kind(render(profile("demo")), "Deployment")[0]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(RefusedError, match=r"unknown field .*terminationGracePeriod"):
        api.dry_run(deployment)


@pytest.mark.parametrize("name", RELEASES)
def test_pod_security_admits_every_pod_but_those_that_lock_memory(api: Api, name: str) -> None:
    """A Deployment whose pods would be refused is accepted with a warning, so a bare Pod of each template is tried."""
    refused = []
    for template in pod_templates(render(RELEASES[name])):
        spec = template["spec"] | {"serviceAccountName": "default", "restartPolicy": "Always"}
        metadata = {"name": "bare", "labels": template["metadata"].get("labels", {})}
        try:
            api.dry_run({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        except RefusedError as error:
            refused.append(str(error))
    assert bool(refused) == (name in PRIVILEGED), refused
    assert all("violates PodSecurity" in each and "IPC_LOCK" in each for each in refused)


class Watcher:
    """The discovery of a router with the chart's settings, account and Role, in this process."""

    def __init__(self, namespace: Namespace, control_plane: ControlPlane, folder: Path, values: Object) -> None:
        objects = render(values, namespace=namespace.name)
        for kind in ("ServiceAccount", "Role", "RoleBinding"):
            namespace.apply(*of_kind(objects, kind))
        [account] = of_kind(objects, "ServiceAccount")
        name = account["metadata"]["name"]
        (folder / "token").write_text(namespace.kubectl("create", "token", name))
        self._user = f"system:serviceaccount:{namespace.name}:{name}"
        self._audit_log = control_plane.audit_log
        self._begin = self._audit_log.stat().st_size
        text = named(objects, "ConfigMap", "rel-kvrouter-config")["data"]["config.yaml"]
        self._settings = load_settings(None, yaml.safe_load(text)).kubernetes
        authority = control_plane.certificates / "ca.crt"
        url = f"https://127.0.0.1:{control_plane.port}"
        self._access = ClusterAccess(url, namespace.name, folder / "token", authority)

    def assert_no_refusals(self) -> None:
        """Fail if the API server refused a request of the account, or received none."""
        text = self._audit_log.read_bytes()[self._begin :]
        entries = [entry for entry in map(json.loads, text.splitlines()) if entry["user"]["username"] == self._user]
        codes = {entry["responseStatus"]["code"] for entry in entries}
        assert codes == {200}

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Fleet]:
        """Follow the cluster, with a fleet whose workers receive no request."""
        indexer = Indexer()
        indexer.start()
        async with aiohttp.ClientSession() as session:
            fleet = Fleet([], FleetSettings(), indexer)
            following = asyncio.create_task(follow_kubernetes(self._settings, self._access, session, fleet))
            try:
                yield fleet
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await asyncio.to_thread(indexer.stop)


def addresses(fleet: Fleet) -> set[str]:
    return {worker.url.removeprefix("http://").partition(":")[0] for worker in fleet.workers}


def test_watch_follows_pods_within_the_role(
    watched: Namespace, control_plane: ControlPlane, api: Api, tmp_path: Path
) -> None:
    """Also after a restart of the API server, which refuses everything until it has read its roles."""
    watcher = Watcher(watched, control_plane, tmp_path, profile("demo"))

    async def follow() -> None:
        run_pod(api, "worker-1", "127.0.1.1")
        async with watcher.following() as fleet:
            await until(lambda: addresses(fleet) == {"127.0.1.1"})
            await asyncio.to_thread(run_pod, api, "worker-2", "127.0.1.2")
            await until(lambda: addresses(fleet) == {"127.0.1.1", "127.0.1.2"})
            await asyncio.to_thread(delete_pod, api, "worker-1")
            await until(lambda: addresses(fleet) == {"127.0.1.2"})
            watcher.assert_no_refusals()
            control_plane.stop_api_server()
            await asyncio.sleep(5)
            assert addresses(fleet) == {"127.0.1.2"}, "workers are kept while the API server is away"
            await asyncio.to_thread(control_plane.start_api_server)
            await asyncio.to_thread(run_pod, api, "worker-3", "127.0.1.3")
            await until(lambda: addresses(fleet) == {"127.0.1.2", "127.0.1.3"})

    asyncio.run(follow())


def test_watch_follows_endpoint_slices_within_the_role(
    watched: Namespace, control_plane: ControlPlane, tmp_path: Path
) -> None:
    values = profile("demo") | {"discovery": {"mode": "service", "service": "vllm"}}
    watcher = Watcher(watched, control_plane, tmp_path, values)

    def endpoints(*found: str) -> None:
        metadata = {"name": "vllm-1", "labels": {"kubernetes.io/service-name": "vllm"}}
        points = [{"addresses": [address], "conditions": {"ready": True}} for address in found]
        ports = [{"name": "http", "port": 8000, "protocol": "TCP"}]
        kind = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4"}
        watched.apply(kind | {"metadata": metadata, "endpoints": points, "ports": ports})

    async def follow() -> None:
        endpoints("10.1.0.1", "10.1.0.2")
        async with watcher.following() as fleet:
            await until(lambda: addresses(fleet) == {"10.1.0.1", "10.1.0.2"})
            await asyncio.to_thread(endpoints, "10.1.0.2", "10.1.0.3")
            await until(lambda: addresses(fleet) == {"10.1.0.2", "10.1.0.3"})

    asyncio.run(follow())
    watcher.assert_no_refusals()
