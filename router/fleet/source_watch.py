"""The sources whose workers change while the router runs: the settings file, and Kubernetes.

In Kubernetes, workers are the pods of a label selector or the endpoints of a service. Their names are those of their
pods. A pod's labels are those of its worker, and `kvrouter.io/role` or `llm-d.ai/role` sets its role. With the
annotation `llm-d.ai/active-ports`, a pod is one worker for each port. Its annotations
`kvrouter.io/pull-host` and `kvrouter.io/pull-port` are the address of its tier `p2p`. Endpoints of a service have none.
Pods that are not ready are workers too: the prober detects when they answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

import aiohttp
import structlog

from kvevents.endpoints import bracketed
from router.fleet.allowed_networks import is_never_allowed
from router.fleet.fleet import Fleet
from router.fleet.kubernetes import ClusterAccess, KubernetesError, ResourceWatch
from router.http.client import connection_problem
from router.settings import (
    PULL_HOST,
    WORKER_NAME,
    ConfigError,
    KubernetesSettings,
    Role,
    Settings,
    SettingsFile,
    WorkerSettings,
)

log = structlog.get_logger()

_FILE_CHECK_INTERVAL = 1.0
_ROLE_LABEL = "kvrouter.io/role"
_LLM_D_ROLE = "llm-d.ai/role"
# The roles of llm-d that have another name here. A worker that also encodes does so for its own requests.
_LLM_D_ROLES: Final = {
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
    "encode-prefill": Role.PREFILL,
}
# The ports that a pod serves now: llm-d's annotation, and its older name.
_ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
_MOST_PORTS: Final = 256
_PULL_HOST = "kvrouter.io/pull-host"
_PULL_PORT = "kvrouter.io/pull-port"
_PORT: Final = re.compile("[0-9]{1,5}")


class Address(NamedTuple):
    """The address of a worker.

    - `port`: its port; None: the port of the settings.
    - `role`: the role of its pod's label, if any.
    - `pull_host`, `pull_port`: where its pod's annotations say that its tier `p2p` listens, if they do.
    - `labels`: the labels of its pod.
    """

    host: str
    port: int | None = None
    role: Role | None = None
    name: str | None = None
    pull_host: str | None = None
    pull_port: int | None = None
    labels: Mapping[str, str] = {}


async def follow_settings_file(file: SettingsFile, settings: Settings, fleet: Fleet) -> None:
    """Follow the workers of the settings file. Mistakes, and changes of other settings, are logged."""
    seen: object = "not read"  # The file may have changed since the settings were loaded.
    while True:
        if (stamp := file.stamp()) != seen:
            seen = stamp
            try:
                await _apply(await asyncio.to_thread(file.load), settings, fleet)
            except ConfigError as error:
                log.error("settings file refused, keeping the workers", reason=str(error))
        await asyncio.sleep(_FILE_CHECK_INTERVAL)


async def _apply(changed: Settings, settings: Settings, fleet: Fleet) -> None:
    if changed.workers != fleet.assigned("config"):
        fleet.assign("config", changed.workers)
    others = [name for name in Settings.model_fields if getattr(changed, name) != getattr(settings, name)]
    if set(others) - {"workers"}:
        log.warning("changed settings require a restart", sections=sorted(set(others) - {"workers"}))


async def follow_kubernetes(
    settings: KubernetesSettings, access: ClusterAccess, session: aiohttp.ClientSession, fleet: Fleet
) -> None:
    """Assign the workers of the cluster to the fleet, until cancelled."""

    async def assign(objects: Iterable[dict[str, Any]]) -> None:
        workers = _workers(settings, objects)
        if workers != fleet.assigned("kubernetes"):
            fleet.assign("kubernetes", workers)

    await _watch_of(settings, access, session, assign).run()


async def workers_of_cluster(
    settings: KubernetesSettings, access: ClusterAccess, session: aiohttp.ClientSession
) -> list[WorkerSettings]:
    """Return the present workers of the cluster. Raises KubernetesError."""
    found: list[WorkerSettings] = []

    async def collect(objects: Iterable[dict[str, Any]]) -> None:
        found.extend(_workers(settings, objects))

    watch = _watch_of(settings, access, session, collect)
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
    if settings.service:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{access.namespace}/endpointslices"
        selector = f"kubernetes.io/service-name={settings.service}"
    else:
        path, selector = f"/api/v1/namespaces/{access.namespace}/pods", settings.selector
    return ResourceWatch(session, access, path, selector, on_change)


def _workers(settings: KubernetesSettings, objects: Iterable[dict[str, Any]]) -> list[WorkerSettings]:
    addresses = service_addresses(objects, settings.port) if settings.service else pod_addresses(objects)
    found = {(address.host, address.port or settings.port): address for address in addresses}
    return [
        WorkerSettings.model_validate(
            {
                "url": f"http://{bracketed(host)}:{port}",
                "name": address.name,
                "role": None if address.role is Role.BOTH else address.role,
                "pull_host": address.pull_host,
                "pull_port": address.pull_port,
                "labels": dict(address.labels),
            }
        )
        for (host, port), address in sorted(found.items())
    ]


def _usable(host: Any, port: Any = 1) -> bool:
    """Return whether a worker can have this address. An invalid address is logged and ignored."""
    try:
        usable = not is_never_allowed(ip_address(host)) and 0 < int(port) < 65536
    except (ValueError, TypeError):
        usable = False
    if not usable:
        log.warning("kubernetes worker with an invalid address ignored", host=host, port=port)
    return usable


def pod_addresses(pods: Iterable[dict[str, Any]]) -> list[Address]:
    """Return the addresses of running pods, ready or not, that are not being deleted."""
    found: list[Address] = []
    for pod in pods:
        status, metadata = pod.get("status") or {}, pod.get("metadata") or {}
        ending = metadata.get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed")
        if status.get("podIP") and not ending and _usable(status["podIP"]):
            labels = metadata.get("labels") or {}
            role, name = _role(labels), _worker_name(metadata.get("name"))
            pull_host, pull_port = _pull_address(metadata)
            ports = _active_ports(metadata)
            for port in ports:
                worker = name if len(ports) == 1 or name is None else _worker_name(f"{name}:{port}")
                found.append(Address(status["podIP"], port, role, worker, pull_host, pull_port, labels))
    return found


def _pull_address(metadata: dict[str, Any]) -> tuple[str | None, int | None]:
    """Return the host and port of a pod's annotations. An invalid one is logged and ignored."""
    annotations = metadata.get("annotations") or {}
    host, port = annotations.get(_PULL_HOST), annotations.get(_PULL_PORT)
    if host is not None and not PULL_HOST.fullmatch(str(host)):
        log.warning("kubernetes annotation ignored", annotation=_PULL_HOST, pod=metadata.get("name"))
        host = None
    if port is not None and not (_PORT.fullmatch(str(port)) and 0 < int(port) < 65536):
        log.warning("kubernetes annotation ignored", annotation=_PULL_PORT, pod=metadata.get("name"))
        port = None
    return host, None if port is None else int(port)


def _active_ports(metadata: dict[str, Any]) -> list[int | None]:
    """Return the ports that a pod serves by its annotation. None is the port of the settings."""
    annotations = metadata.get("annotations") or {}
    for annotation in _ACTIVE_PORTS:
        if (given := annotations.get(annotation)) is None:
            continue
        ports = [port.strip() for port in str(given).split(",") if port.strip()]
        if len(ports) <= _MOST_PORTS and all(_PORT.fullmatch(port) and 0 < int(port) < 65536 for port in ports):
            return list(dict.fromkeys(map(int, ports)))
        log.warning("kubernetes annotation ignored", annotation=annotation, pod=metadata.get("name"))
    return [None]


def _role(labels: Mapping[str, str]) -> Role | None:
    """Return the role of a pod's labels; None without a known one."""
    for label in (labels.get(_ROLE_LABEL), labels.get(_LLM_D_ROLE)):
        if label is not None:
            role = _LLM_D_ROLES.get(label) or (Role(label) if label in list(Role) else None)
            if role is not None:
                return role
    return None


def service_addresses(slices: Iterable[dict[str, Any]], port: int) -> list[Address]:
    """Return the addresses of a service's endpoints that are not terminating, at `port` or else at their first port."""
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
    return given if isinstance(given, str) and WORKER_NAME.fullmatch(given) else None
