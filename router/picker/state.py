"""The state that a picker's requests share: addresses, deadlines, objectives, rewrites, own answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from ipaddress import ip_address
from itertools import count
from random import Random
from typing import Any, Final, Protocol

import msgspec

from kvevents.endpoints import join_host_port
from router.app.routes.model_cards import model_card, model_cards
from router.auth.tenants import unknown_key
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.forwarding.proxy_services import ProxyContext
from router.forwarding.request_context import RequestContext
from router.http.event_loop import SharedCalls
from router.picker.model_rewrites import ModelRewrites
from router.settings import PickerSettings
from router.upstream import Origin

# Seconds until a resolved address expires.
_FRESH_SECONDS = 30.0
# The path of InferenceObjectives in Kubernetes' API. llm-d, which maintains them now, uses another group.
OBJECTIVES_PATH: Final = "/apis/{group}/v1alpha2/namespaces/{namespace}/inferenceobjectives"
_HIGHEST: Final = 2**31 - 1
_MODELS = "/v1/models"


@dataclass(slots=True)
class _Known:
    address: str
    until: float


class Addresses:
    """The addresses of workers by their URLs."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._asking = SharedCalls[str]()

    def of(self, url: str) -> str | None:
        """Return a worker's address, even if it has expired; None if `found` has to resolve it first."""
        if numeric := _numeric(url):
            return numeric
        known = self._known.get(url)
        if known is None:
            return None
        if known.until < time.monotonic():
            self._ask(url)
        return known.address

    async def found(self, url: str) -> str:
        """Return a worker's address, resolved if necessary. Raises OSError for an unknown name."""
        return self.of(url) or str(await asyncio.shield(self._ask(url)))

    def forget(self, url: str) -> None:
        """Forget the address of a removed worker."""
        self._known.pop(url, None)

    async def close(self) -> None:
        """Cancel all name resolution."""
        await self._asking.close()

    def _ask(self, url: str) -> asyncio.Task[str]:
        return self._asking.start(url, partial(self._resolve, url))

    async def _resolve(self, url: str) -> str:
        origin = Origin.of(url)
        found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # engines listen there, if at only one of both
        address = join_host_port(str(found[0][4][0]), origin.port)
        self._known[url] = _Known(address, time.monotonic() + _FRESH_SECONDS)
        return address


@lru_cache(maxsize=4096)
def _numeric(url: str) -> str | None:
    """Return the address in a URL; None if the URL has a name."""
    origin = Origin.of(url)
    try:
        ip_address(origin.host)
    except ValueError:
        return None
    return join_host_port(origin.host, origin.port)


class Deadlines:
    """Deadlines by key, `seconds` after they are set, with one timer for all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Hashable, tuple[float, Callable[[], None]]] = {}  # the first is the next
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: Hashable, late: Callable[[], None]) -> None:
        """Set the deadline of a key; `late` is called when it passes."""
        loop = asyncio.get_running_loop()
        self._due[key] = (loop.time() + self._seconds, late)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._ring)

    def drop(self, key: Hashable) -> None:
        self._due.pop(key, None)

    def close(self) -> None:
        """Drop all deadlines."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, (at, late) in list(self._due.items()):
            if at > now:
                self._timer = loop.call_later(at - now, self._ring)
                return
            del self._due[key]
            late()


class Objectives:
    """Priorities of objectives: higher is sooner, 0 is the default. Those of the cluster override `settings`."""

    def __init__(self, settings: Mapping[str, int]) -> None:
        self._settings = dict(settings)
        self._cluster: dict[str, int] = {}

    def priority(self, name: str) -> int | None:
        """Return the priority of an objective; None if it is unknown."""
        found = self._cluster.get(name)
        return self._settings.get(name) if found is None else found

    async def follow(self, objects: Iterable[dict[str, Any]]) -> None:
        """Replace the priorities from the cluster by those of its InferenceObjectives; 0 without one."""
        found: dict[str, int] = {}
        for each in objects:
            name = (each.get("metadata") or {}).get("name")
            priority = (each.get("spec") or {}).get("priority") or 0
            if name and isinstance(priority, int) and abs(priority) <= _HIGHEST:
                found[str(name)] = priority
        self._cluster = found


class OwnAnswers:
    """Responses that list the models of all workers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._started = int(time.time())

    def to(self, context: RequestContext) -> bytes | None:
        """Return the response's body; None if the request is for a worker. Raises RequestError (401, 404)."""
        if context.head.method != "GET" or not context.head.path.startswith(_MODELS):
            return None
        if context.admitted.unknown_key:  # hooks are called for requests to workers only
            raise unknown_key()
        if context.head.path == _MODELS:
            cards = model_cards(self._fleet, self._started, context.tenant)
            return msgspec.json.encode({"object": "list", "data": list(cards.values())})
        if context.head.path.startswith(_MODELS + "/"):
            name = context.head.path.removeprefix(_MODELS + "/")
            return msgspec.json.encode(model_card(self._fleet, self._started, name, context.tenant))
        return None


class ObservedRequest(Protocol):
    """A request whose response Envoy shows in a separate stream."""

    def observed(self, data: bytes, ended: bool) -> bool:
        """Receive bytes of the response. Return whether more are wanted."""


@dataclass(slots=True)
class PickerState:
    """The dependencies of requests, and the requests by the numbers under which their responses are observed."""

    proxy_context: ProxyContext
    fleet: Fleet
    settings: PickerSettings
    own_answers: OwnAnswers
    objectives: Objectives
    rewrites: ModelRewrites
    body_deadlines: Deadlines
    addresses: Addresses = field(default_factory=Addresses)
    requests: dict[str, ObservedRequest] = field(default_factory=dict)
    observed: bool = False  # a second filter shows responses
    reports_heads: bool | None = None  # Envoy shows the heads of responses; None: unknown
    numbers: count[int] = field(default_factory=lambda: count(1))
    random: Random = field(default_factory=Random)

    def address_of(self, worker: Worker) -> str | None:
        """Return a worker's address; None if it is unknown."""
        return self.addresses.of(worker.url)

    def worker_at(self, address: str) -> Worker | None:
        """Return the worker at an address; None if the address is unknown."""
        return next((each for each in self.fleet.workers if self.address_of(each) == address), None)
