"""Workers from Kubernetes, against an HTTP server that speaks the API's wire format."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from waiting import until

from indexer import Indexer
from router.fleet import kubernetes
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.build import FleetWatch
from router.fleet.fleet import Fleet
from router.fleet.kubernetes import ClusterAccess, KubernetesError
from router.fleet.source_watch import Address, follow_kubernetes, pod_addresses, service_addresses
from router.fleet.worker import Worker
from router.settings import FleetSettings, KubernetesSettings, Role

PODS = "/api/v1/namespaces/inference/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
NEVER_UP = FleetSettings(probe_interval=60, metrics_interval=60)


def pod(name: str, ip: str | None, version: int = 1, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "inference", "resourceVersion": str(version)} | more.pop("metadata", {})
    return {"metadata": metadata, "status": {"phase": "Running", "podIP": ip} | more}


class ApiServer:
    """The part of an API server that lists and watches pods. A test pushes the events of the watch."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.version = 1
        self.lists = 0
        self.watched_from: list[str] = []
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.fail_with: list[int] = []
        self.url = ""
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._runner: web.AppRunner | None = None

    def push(self, kind: str, found: dict[str, Any]) -> None:
        """Send an event on the open watch, or on the next one."""
        self.push_bytes(json.dumps({"type": kind, "object": found}).encode() + b"\n")

    def push_bytes(self, data: bytes) -> None:
        self._sent.put_nowait(data)

    def cut(self) -> None:
        """End the watch that is open."""
        self._sent.put_nowait(None)

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get(PODS, self._answer)
        app.router.add_get(SLICES, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls).start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.fail_with:
            code = self.fail_with.pop(0)
            return web.json_response({"kind": "Status", "status": "Failure", "code": code}, status=code)
        if "watch" not in request.query:
            self.lists += 1
            metadata = {"resourceVersion": str(self.version)}
            listed = web.json_response({"kind": "PodList", "metadata": metadata, "items": self.pods})
            listed.enable_compression(web.ContentCoding.gzip)  # as an API server compresses long lists
            return listed
        self.watched_from.append(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with suppress(ConnectionError):
            while (data := await self._sent.get()) is not None:
                await response.write(data)
        return response


@dataclass
class Cluster:
    """An API server, and a fleet with its workers."""

    api: ApiServer
    fleet: Fleet

    async def until_workers(self, *hosts: str) -> None:
        await until(lambda: {worker.url for worker in self.fleet.workers} == {f"http://{host}" for host in hosts})


async def no_model(worker: Worker, model: object) -> None:
    raise AssertionError(f"{worker.url} answered with {model}")


@asynccontextmanager
async def following(
    api: ApiServer, token_file: Path | None = None, ca_file: Path | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    indexer = Indexer()
    indexer.start()
    async with aiohttp.ClientSession() as session:
        fleet = Fleet([], NEVER_UP, indexer)
        watch = FleetWatch(fleet, NEVER_UP, indexer, session, AllowedNetworks([]), no_model)
        await watch.start()
        chosen = KubernetesSettings(**({"selector": "app=vllm"} | settings))
        access = ClusterAccess(api.url, "inference", token_file, ca_file)
        task = asyncio.create_task(follow_kubernetes(chosen, access, session, fleet))
        try:
            yield Cluster(api, fleet)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await watch.stop()
            await asyncio.to_thread(indexer.stop)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def cluster(api: ApiServer) -> AsyncIterator[Cluster]:
    """A fleet that follows the pod a at 127.0.0.2."""
    api.pods = [pod("a", "127.0.0.2")]
    async with following(api) as cluster:
        await cluster.until_workers("127.0.0.2:8000")
        yield cluster


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.kubernetes._FIRST_BACKOFF", 0.01)


async def test_workers_follow_listed_and_watched_pods(api: ApiServer) -> None:
    api.pods, api.version = [pod("a", "127.0.0.2")], 7
    async with following(api) as cluster:
        await cluster.until_workers("127.0.0.2:8000")
        api.push("ADDED", pod("b", "127.0.0.3", 8))
        await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")
        api.push("MODIFIED", pod("b", "127.0.0.4", 9))
        await cluster.until_workers("127.0.0.2:8000", "127.0.0.4:8000")
        api.push("DELETED", pod("a", "127.0.0.2", 10))
        await cluster.until_workers("127.0.0.4:8000")
        assert {worker.source for worker in cluster.fleet.workers} == {"kubernetes"}
    assert api.watched_from == ["7"]
    assert {query["labelSelector"] for query in api.queries} == {"app=vllm"}
    assert api.queries[1]["allowWatchBookmarks"] == "true"


async def test_worker_has_the_name_of_its_pod(api: ApiServer, cluster: Cluster) -> None:
    assert [worker.name for worker in cluster.fleet.workers] == ["a"]
    api.push("DELETED", pod("a", "127.0.0.2", 2))
    api.push("ADDED", pod("gpu-b", "127.0.0.2", 3))
    await until(lambda: [worker.name for worker in cluster.fleet.workers] == ["gpu-b"])


async def test_address_stays_when_another_pod_reuses_it(api: ApiServer, cluster: Cluster) -> None:
    api.push("ADDED", pod("b", "127.0.0.2", 2))
    api.push("DELETED", pod("a", "127.0.0.2", 3))
    api.push("ADDED", pod("c", "127.0.0.3", 4))
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")


async def test_watch_events_are_parsed_from_any_chunks(api: ApiServer) -> None:
    async with following(api) as cluster:
        lines = b"".join(
            json.dumps({"type": "ADDED", "object": pod(f"p{number}", f"127.0.0.{number}", number)}).encode() + b"\n"
            for number in (2, 3)
        )
        for place in range(0, len(lines), 50):
            api.push_bytes(lines[place : place + 50])
        await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")


async def test_interrupted_watch_continues_from_its_version(api: ApiServer, cluster: Cluster) -> None:
    api.push("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "90"}})
    api.push_bytes(b'{"type": "ADDED", "obj')
    api.cut()
    api.push("ADDED", pod("b", "127.0.0.3", 91))
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")
    assert api.watched_from == ["1", "90"]
    assert api.lists == 1


@pytest.mark.parametrize("how", ["as an event", "as a status"])
async def test_pods_are_listed_again_when_the_version_was_dropped(api: ApiServer, cluster: Cluster, how: str) -> None:
    api.pods, api.version = [pod("b", "127.0.0.3")], 50
    if how == "as an event":
        api.push("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
    else:
        api.fail_with = [410]
        api.cut()
    await cluster.until_workers("127.0.0.3:8000")
    await until(lambda: api.watched_from[-1:] == ["50"])


async def test_workers_stay_while_the_api_server_fails(api: ApiServer, cluster: Cluster) -> None:
    api.fail_with = [500, 403, 503]
    api.push_bytes(b"no json\n")
    api.cut()
    await until(lambda: not api.fail_with)
    await cluster.until_workers("127.0.0.2:8000")
    api.push("ADDED", pod("b", "127.0.0.3", 2))
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")


async def test_watch_continues_after_a_restart_of_the_api_server(api: ApiServer, cluster: Cluster) -> None:
    api.push("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "40"}})
    api.push("ADDED", pod("b", "127.0.0.3", 41))
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")
    await api.stop()  # closes connections, and refuses new ones
    await asyncio.sleep(0.1)
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")
    await api.start(int(api.url.rpartition(":")[2]))
    api.push("DELETED", pod("a", "127.0.0.2", 42))
    await cluster.until_workers("127.0.0.3:8000")
    assert api.lists == 1
    assert set(api.watched_from) == {"1", "41"}


async def test_list_is_retried_when_the_api_server_is_overloaded(api: ApiServer) -> None:
    api.pods, api.fail_with = [pod("a", "127.0.0.2")], [429, 429]
    async with following(api) as cluster:
        await cluster.until_workers("127.0.0.2:8000")
        assert not api.fail_with


async def test_api_server_certificate_is_verified_by_the_clusters_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    known, other = tmp_path / "ca.crt", tmp_path / "other.crt"
    authority.cert_pem.write_to_path(str(known))
    trustme.CA().cert_pem.write_to_path(str(other))
    api = ApiServer()
    api.pods = [pod("a", "127.0.0.2")]
    await api.start(tls=context)
    async with following(api, ca_file=other) as cluster:
        await asyncio.sleep(0.2)
        assert not cluster.fleet.workers
    async with following(api, ca_file=known) as cluster:
        await cluster.until_workers("127.0.0.2:8000")
    await api.stop()


async def test_authority_without_key_usage_is_trusted_under_strict_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 sets VERIFY_X509_STRICT in its default contexts."""
    usual = ssl.create_default_context

    def strict(*args: Any, **more: Any) -> ssl.SSLContext:
        context = usual(*args, **more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = certificate_of_an_old_cluster(tmp_path)
    context.load_cert_chain(certificate, key)
    monkeypatch.setattr(ssl, "create_default_context", strict)
    api = ApiServer()
    api.pods = [pod("a", "127.0.0.2")]
    await api.start(tls=context)
    async with following(api, ca_file=tmp_path / "ca.crt") as cluster:
        await cluster.until_workers("127.0.0.2:8000")
    await api.stop()


def certificate_of_an_old_cluster(folder: Path) -> tuple[Path, Path]:
    """Write ca.crt without keyUsage, and return the files of a certificate without an authority key identifier."""
    now = datetime.now(UTC)
    files = {name: folder / name for name in ("ca.crt", "server.crt", "server.key")}
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-apiserver")])

    def certificate(name: x509.Name, public: ec.EllipticCurvePublicKey, extension: Any) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        signed = builder.add_extension(extension, critical=True).sign(authority, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    files["ca.crt"].write_bytes(certificate(issuer, authority.public_key(), x509.BasicConstraints(True, None)))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    files["server.crt"].write_bytes(certificate(subject, key.public_key(), names))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files["server.key"].write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return files["server.crt"], files["server.key"]


async def test_silent_watch_is_opened_again(api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await until(lambda: len(api.watched_from) == 1)
    monkeypatch.setattr("router.fleet.kubernetes._SILENCE", 0.2)
    api.cut()
    await until(lambda: len(api.watched_from) > 3)
    monkeypatch.setattr("router.fleet.kubernetes._SILENCE", 60.0)
    for _ in range(30):  # each earlier watch of this server takes one
        api.push("ADDED", pod("b", "127.0.0.3", 2))
    await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000")
    assert api.lists == 1


async def test_pods_are_listed_at_once_if_the_version_was_dropped_in_an_outage(
    api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: len(api.watched_from) == 1)
    monkeypatch.setattr("router.fleet.kubernetes._SHORT_WATCH", 0.0)
    waits: list[float] = []

    def waited(failures: int) -> float:
        waits.append(failures)
        return 0.01

    monkeypatch.setattr("router.fleet.kubernetes._backoff", waited)
    api.pods, api.fail_with = [pod("b", "127.0.0.3")], [500, 500, 500, 500, 410]
    api.cut()
    await cluster.until_workers("127.0.0.3:8000")
    assert waits == [2, 3, 4]


async def test_pods_are_listed_again_after_resync_seconds(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "RESYNC_SECONDS", 0.2)
    async with following(api) as cluster:
        await until(lambda: api.lists == 1)
        api.pods = [pod("a", "127.0.0.2")]  # without an event
        await asyncio.sleep(0.25)
        api.cut()
        await cluster.until_workers("127.0.0.2:8000")


async def test_token_file_is_read_for_every_request(api: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with following(api, token):
        await until(lambda: api.watched_from)
        token.write_text("second")
        api.cut()
        await until(lambda: len(api.watched_from) == 2)
    assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_endpoints_of_a_service_become_workers(api: ApiServer) -> None:
    api.pods = [
        {
            "metadata": {"name": "vllm-1", "resourceVersion": "1"},
            "addressType": "IPv4",
            "ports": [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}],
            "endpoints": [
                {"addresses": ["127.0.0.2"], "conditions": {"ready": True}},
                {"addresses": ["127.0.0.3"], "conditions": {"ready": False, "terminating": False}},
                {"addresses": ["127.0.0.4"], "conditions": {"ready": False, "terminating": True}},
            ],
        },
        {
            "metadata": {"name": "vllm-2", "resourceVersion": "1"},
            "addressType": "IPv6",
            "ports": [{"port": 8100}],
            "endpoints": [{"addresses": ["fd00::1"]}],
        },
    ]
    async with following(api, service="vllm", selector="") as cluster:
        await cluster.until_workers("127.0.0.2:8000", "127.0.0.3:8000", "[fd00::1]:8100")
    assert {query["labelSelector"] for query in api.queries} == {"kubernetes.io/service-name=vllm"}


def test_pods_and_slices_without_a_usable_address_are_ignored() -> None:
    pods = [
        pod("starting", None, phase="Pending"),
        pod("done", "127.0.0.2", phase="Succeeded"),
        pod("ending", "127.0.0.3", metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"}),
        pod("not ready", "127.0.0.4", conditions=[{"type": "Ready", "status": "False"}]),
        {},
    ]
    assert pod_addresses(pods) == [Address("127.0.0.4")]
    assert service_addresses([{"addressType": "FQDN", "endpoints": [{"addresses": ["x.example"]}]}, {}], 8000) == []


def test_label_sets_the_role() -> None:
    pods = [
        pod(role, f"127.0.0.{number}", metadata={"labels": {"kvrouter.io/role": role}})
        for number, role in enumerate(("prefill", "decode", "both", "no such role"))
    ]
    assert [address.role for address in pod_addresses(pods)] == [Role.PREFILL, Role.DECODE, Role.BOTH, None]


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"llm-d.ai/role": "prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "decode"}, Role.DECODE),
        ({"llm-d.ai/role": "encode"}, Role.ENCODE),
        ({"llm-d.ai/role": "both"}, Role.BOTH),
        ({"llm-d.ai/role": "prefill-decode"}, Role.BOTH),
        ({"llm-d.ai/role": "encode-prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "encode-prefill-decode"}, Role.BOTH),
        ({"llm-d.ai/role": "no such role"}, None),
        ({"llm-d.ai/role": "prefill", "kvrouter.io/role": "decode"}, Role.DECODE),
        ({"llm-d.ai/role": "prefill", "kvrouter.io/role": "no such role"}, Role.PREFILL),
    ],
)
def test_label_of_llm_d_sets_the_role(labels: dict[str, str], role: Role | None) -> None:
    [address] = pod_addresses([pod("a", "127.0.0.2", metadata={"labels": labels})])
    assert address.role is role


@pytest.mark.parametrize("name", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ("8001", [("a", 8001)]),
        ("8000,8001", [("a:8000", 8000), ("a:8001", 8001)]),
        (" 8000 , 8000,", [("a", 8000)]),
        ("", []),
        ("0", [("a", None)]),
        ("65536", [("a", None)]),
        ("8000,http", [("a", None)]),
        (",".join(map(str, range(1, 400))), [("a", None)]),
    ],
)
def test_active_ports_are_workers_of_their_own(name: str, given: str, workers: list[tuple[str, int | None]]) -> None:
    found = pod_addresses([pod("a", "127.0.0.2", metadata={"annotations": {name: given}})])
    assert [(address.name, address.port) for address in found] == workers


async def test_changed_ports_add_and_remove_workers(api: ApiServer) -> None:
    def serving(version: int, ports: str) -> dict[str, Any]:
        return pod("a", "127.0.0.2", version, metadata={"annotations": {"llm-d.ai/active-ports": ports}})

    api.pods = [serving(1, "8000")]
    async with following(api) as cluster:
        await until(lambda: [w.settings.name for w in cluster.fleet.workers] == ["a"])
        api.push("MODIFIED", serving(2, "8000,8001"))
        await until(lambda: [w.settings.name for w in cluster.fleet.workers] == ["a:8000", "a:8001"])


def test_annotations_set_the_address_to_pull_from() -> None:
    given = [("10.1.0.1", "5710"), ("fd00::1", "65536"), ("no host", "57x"), (None, None)]
    names = ("kvrouter.io/pull-host", "kvrouter.io/pull-port")
    pods = [
        pod(
            f"p{number}",
            "127.0.0.2",
            metadata={"annotations": dict(zip(names, each, strict=True)) if each[0] else None},
        )
        for number, each in enumerate(given)
    ]
    found = [(address.pull_host, address.pull_port) for address in pod_addresses(pods)]
    assert found == [("10.1.0.1", 5710), ("fd00::1", None), (None, None), (None, None)]


async def test_annotations_reach_the_settings_of_a_worker(api: ApiServer) -> None:
    annotations = {"kvrouter.io/pull-host": "10.1.0.1", "kvrouter.io/pull-port": "6000"}
    api.pods = [pod("a", "127.0.0.2", metadata={"annotations": annotations})]
    async with following(api) as cluster:
        await until(lambda: [w.settings.pull_port for w in cluster.fleet.workers] == [6000])
        assert cluster.fleet.workers[0].settings.pull_host == "10.1.0.1"
        api.push("MODIFIED", pod("a", "127.0.0.2", 2))
        await until(lambda: [w.settings.pull_port for w in cluster.fleet.workers] == [None])


def test_labels_of_a_pod_are_those_of_its_worker() -> None:
    (address,) = pod_addresses([pod("a", "127.0.0.1", metadata={"labels": {"region": "eu"}})])
    assert address.labels == {"region": "eu"}


async def test_changed_label_reaches_the_worker(api: ApiServer) -> None:
    api.pods = [pod("a", "127.0.0.2", metadata={"labels": {"track": "stable"}})]
    async with following(api) as cluster:
        await until(lambda: [w.settings.labels for w in cluster.fleet.workers] == [{"track": "stable"}])
        api.push("MODIFIED", pod("a", "127.0.0.2", 2, metadata={"labels": {"track": "canary"}}))
        await until(lambda: [w.settings.labels for w in cluster.fleet.workers] == [{"track": "canary"}])


async def test_changed_label_changes_the_role_of_a_worker(api: ApiServer) -> None:
    api.pods = [pod("a", "127.0.0.2", metadata={"labels": {"kvrouter.io/role": "prefill"}})]
    async with following(api) as cluster:
        await until(lambda: [w.settings.role for w in cluster.fleet.workers] == [Role.PREFILL])
        api.push("MODIFIED", pod("a", "127.0.0.2", 2, metadata={"labels": {"kvrouter.io/role": "decode"}}))
        await until(lambda: [w.settings.role for w in cluster.fleet.workers] == [Role.DECODE])


def test_in_cluster_access_uses_the_service_account_and_is_refused_outside_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubernetesError, match="not in a pod"):
        ClusterAccess.in_cluster("")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setattr("router.fleet.kubernetes._ACCOUNT", tmp_path)
    with pytest.raises(KubernetesError, match="no service account"):
        ClusterAccess.in_cluster("")
    (tmp_path / "namespace").write_text("inference\n")
    (tmp_path / "token").write_text("secret")
    access = ClusterAccess.in_cluster("")
    assert (access.url, access.namespace) == ("https://[fd00::1]:6443", "inference")
    assert access.headers()["Authorization"] == "Bearer secret"
    assert ClusterAccess.in_cluster("models").namespace == "models"
