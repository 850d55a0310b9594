"""Workers from Kubernetes: the pods of a label selector, or the endpoints of a service, listed once and then watched.

A watch goes on from a resource version, which bookmarks keep fresh. When the API server has forgotten that version
(410 Gone) everything is listed again, as it is now and then in any case. While it cannot be reached the workers stay as
they were: whether they answer is for the fleet to find out, and so is whether a pod is ready.

Workers are called as their pods are. A pod labelled `kvrouter.io/role` prefill or decode has that role. Endpoints of a
service have no labels.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from random import uniform
from typing import Any, NamedTuple

import aiohttp
import msgspec
import structlog

from kvevents.endpoints import bracketed
from router.fleet.allowed_networks import is_never_allowed
from router.fleet.fleet import Fleet
from router.http.client import connection_problem
from router.settings import WORKER_NAME, KubernetesSettings, Role, WorkerSettings

log = structlog.get_logger()

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_TIMEOUT = 30.0
_FIRST_BACKOFF = 0.5
_LONGEST_BACKOFF = 30.0
_SHORT_WATCH = 1.0  # a watch that ends sooner is as good as one that failed
_LONGEST_LINE = 16 * 2**20
_GONE = 410
_ROLE_LABEL = "kvrouter.io/role"

Objects = dict[str, dict[str, Any]]


class KubernetesError(Exception):
    """The cluster is not reachable, not there, or answered with something that cannot be parsed."""


class Address(NamedTuple):
    """Where a worker listens; without a port, where the settings say. `name`: its pod's, where that is known."""

    host: str
    port: int | None = None
    role: Role | None = None
    name: str | None = None


class _GoneError(Exception):
    """The API server no longer knows the resource version: list again."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The API server and who asks. The token is read for every request, because it is replaced now and then."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, namespace: str) -> ClusterAccess:
        """That of the pod this runs in. Raises KubernetesError outside of a cluster."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise KubernetesError("kubernetes: this is no pod of a cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            own = namespace or (_ACCOUNT / "namespace").read_text().strip()
        except OSError as error:
            raise KubernetesError(f"kubernetes: no service account: {error}") from error
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        return cls(url, own, _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def headers(self) -> dict[str, str]:
        """Who asks."""
        token = {"Authorization": f"Bearer {self.token_file.read_text().strip()}"} if self.token_file else {}
        return {"Accept": "application/json"} | token

    def tls(self) -> ssl.SSLContext | bool:
        """Whom to trust."""
        return ssl.create_default_context(cafile=self.ca_file) if self.ca_file else True


class ResourceWatch:
    """Keeps a copy of the objects of one kind, and tells `on_change` of all of them whenever one changes."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        access: ClusterAccess,
        path: str,
        selector: str,
        resync_seconds: float,
        on_change: Callable[[Iterable[dict[str, Any]]], Awaitable[None]],
    ) -> None:
        self._session = session
        self._access = access
        self._url = access.url + path
        self._selector = selector
        self._resync_seconds = resync_seconds
        self._on_change = on_change
        self._tls = access.tls()
        self._objects: Objects = {}
        self._version: str | None = None  # None: everything has to be listed
        self._listed_at = 0.0

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        while True:
            try:
                if self._version is None or time.monotonic() - self._listed_at >= self._resync_seconds:
                    await self.list()
                began = time.monotonic()
                await self._watch(self._version or "")
                failures = failures + 1 if time.monotonic() - began < _SHORT_WATCH else 0
            except _GoneError:
                log.info("kubernetes forgot where the watch was, listing again", url=self._url)
                self._version = None
                failures += 1
            except (KubernetesError, aiohttp.ClientError, TimeoutError, OSError) as error:
                failures += 1
                log.warning("kubernetes cannot be asked", url=self._url, reason=connection_problem(error))
            if failures > 1:  # after a first one at once
                await asyncio.sleep(_backoff(failures))

    async def list(self) -> None:
        """List everything once. Raises KubernetesError, aiohttp.ClientError, OSError."""
        async with self._get(aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT)) as response:
            await _check_status(response)
            answer = _decoded(await response.read())
        try:
            objects = {_name(found): found for found in answer.get("items") or []}
            version = str(answer["metadata"]["resourceVersion"])
        except (KeyError, TypeError) as error:
            raise KubernetesError(f"a list without {error}") from error
        self._objects, self._version, self._listed_at = objects, version, time.monotonic()
        await self._on_change(self._objects.values())

    async def _watch(self, version: str) -> None:
        """Follow the changes since a version, until the server ends the watch. Raises _GoneError."""
        seconds = max(int(self._resync_seconds), 1)
        timeout = aiohttp.ClientTimeout(total=seconds + _REQUEST_TIMEOUT, sock_connect=_REQUEST_TIMEOUT)
        more = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        async with self._get(timeout, **more) as response:
            await _check_status(response)
            async for line in _lines(response.content):
                await self._apply(_decoded(line))

    async def _apply(self, event: dict[str, Any]) -> None:
        found = event.get("object") or {}
        kind = event.get("type")
        if kind == "ERROR":
            if found.get("code") == _GONE:
                raise _GoneError
            raise KubernetesError(f"the watch failed: {found.get('message')}")
        try:
            version, name = str(found["metadata"]["resourceVersion"]), _name(found)
        except (KeyError, TypeError) as error:
            raise KubernetesError(f"an event without {error}") from error
        self._version = version
        if kind == "DELETED":
            self._objects.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._objects[name] = found
        else:
            return  # a bookmark
        await self._on_change(self._objects.values())

    def _get(self, timeout: aiohttp.ClientTimeout, **more: str) -> Any:
        query = {"labelSelector": self._selector} | more
        return self._session.get(
            self._url, params=query, headers=self._access.headers(), ssl=self._tls, timeout=timeout
        )


async def follow_kubernetes(
    settings: KubernetesSettings, access: ClusterAccess, session: aiohttp.ClientSession, fleet: Fleet
) -> None:
    """Give the fleet the workers that the cluster has, until cancelled."""

    async def give(objects: Iterable[dict[str, Any]]) -> None:
        workers = _workers(settings, objects)
        if workers != fleet.assigned("kubernetes"):
            fleet.assign("kubernetes", workers)

    await _watch_of(settings, access, session, give).run()


async def workers_of_cluster(
    settings: KubernetesSettings, access: ClusterAccess, session: aiohttp.ClientSession
) -> list[WorkerSettings]:
    """The workers that the cluster has now. Raises KubernetesError."""
    found: list[WorkerSettings] = []

    async def take(objects: Iterable[dict[str, Any]]) -> None:
        found.extend(_workers(settings, objects))

    watch = _watch_of(settings, access, session, take)
    try:
        await watch.list()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise KubernetesError(f"kubernetes: {access.url} {connection_problem(error)}") from error
    return found


def _watch_of(
    settings: KubernetesSettings,
    access: ClusterAccess,
    session: aiohttp.ClientSession,
    on_change: Callable[[Iterable[dict[str, Any]]], Awaitable[None]],
) -> ResourceWatch:
    """A watch of what the settings look for."""
    if settings.service:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{access.namespace}/endpointslices"
        selector = f"kubernetes.io/service-name={settings.service}"
    else:
        path, selector = f"/api/v1/namespaces/{access.namespace}/pods", settings.selector
    return ResourceWatch(session, access, path, selector, settings.resync, on_change)


def _workers(settings: KubernetesSettings, objects: Iterable[dict[str, Any]]) -> list[WorkerSettings]:
    addresses = service_addresses(objects, settings.port) if settings.service else pod_addresses(objects)
    found = {(address.host, address.port or settings.port): address for address in addresses}
    return [
        WorkerSettings.model_validate(
            {
                "url": f"http://{bracketed(host)}:{port}",
                "name": address.name,
                "role": None if address.role is Role.BOTH else address.role,
            }
        )
        for (host, port), address in sorted(found.items())
    ]


def _usable(host: Any, port: Any = 1) -> bool:
    """Whether that is an address that a worker can have. One that makes no sense costs that worker alone."""
    try:
        usable = not is_never_allowed(ip_address(host)) and 0 < int(port) < 65536
    except (ValueError, TypeError):
        usable = False
    if not usable:
        log.warning("kubernetes tells of a worker at no address of one", host=host, port=port)
    return usable


def pod_addresses(pods: Iterable[dict[str, Any]]) -> list[Address]:
    """Where the pods are that run, ready or not, and are not about to end."""
    found: list[Address] = []
    for pod in pods:
        status, metadata = pod.get("status") or {}, pod.get("metadata") or {}
        ending = metadata.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed")
        if status.get("podIP") and not ending and _usable(status["podIP"]):
            role = _role((metadata.get("labels") or {}).get(_ROLE_LABEL))
            found.append(Address(status["podIP"], role=role, name=_worker_name(metadata.get("name"))))
    return found


def _role(label: str | None) -> Role | None:
    return Role(label) if label in list(Role) else None


def service_addresses(slices: Iterable[dict[str, Any]], port: int) -> list[Address]:
    """Where the endpoints of a service are that are not about to end: at this port, or else at their first."""
    found: list[Address] = []
    for each in slices:
        if each.get("addressType") not in ("IPv4", "IPv6"):
            continue
        ports = [known["port"] for known in each.get("ports") or [] if known.get("port")]
        chosen = port if port in ports or not ports else ports[0]
        for endpoint in each.get("endpoints") or []:
            if not (endpoint.get("conditions") or {}).get("terminating"):
                addresses = endpoint.get("addresses") or []
                pod = endpoint.get("targetRef") or {}
                name = _worker_name(pod.get("name")) if pod.get("kind") == "Pod" else None
                found += [Address(address, chosen, name=name) for address in addresses if _usable(address, chosen)]
    return found


def _worker_name(given: Any) -> str | None:
    """A pod's name, if a worker can have it: as those of all pods can."""
    return given if isinstance(given, str) and WORKER_NAME.fullmatch(given) else None


def _backoff(failures: int) -> float:
    return min(_FIRST_BACKOFF * 2.0 ** min(failures - 2, 16), _LONGEST_BACKOFF) * uniform(0.5, 1.0)


def _name(found: dict[str, Any]) -> str:
    # A bookmark has no name.
    return str(found["metadata"].get("name", ""))


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise KubernetesError(f"no JSON: {error}") from error


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == _GONE:
        raise _GoneError
    if response.status != 200:
        raise KubernetesError(f"status {response.status}: {(await response.text())[:200]}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream. What follows the last is cut off and worth nothing."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _LONGEST_LINE:
            raise KubernetesError(f"a line of more than {_LONGEST_LINE} bytes")
