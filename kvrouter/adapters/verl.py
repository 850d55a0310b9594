"""A load balancer for the rollout servers of verl: `rollout.router_config_path` (verl 0.9.1, docs/embed.md).

The file at that path names `kvrouter.adapters.verl.LoadBalancer` as `router_class`. verl makes an actor of it, which
all agent loops ask. A request id of verl is a session: all turns of a trajectory have it, and stay on one server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import aiohttp
import structlog

from kvrouter.adapters.selector_thread import SelectorThread
from kvrouter.selection import Prompt, Reservation, SelectionError
from router.fleet.discovery import DiscoveryError, WorkerDescription, describe_worker
from router.fleet.worker_keys import WorkerKey
from router.http.client import refuse_redirects
from router.settings import FleetSettings, WorkerSettings

log = structlog.get_logger()

_MODEL: Final = "rollout"
# No report renews a reservation of verl, so that it ends by its release, or after this number of seconds.
_EXPIRY: Final = 86_400.0
# As many as verl's own balancer remembers.
_MOST_SESSIONS: Final = 10_000
_FIELDS: Final = frozenset({"router_class", "settings", "block_size", "discover"})


class LoadBalancer:
    """Chooses a server for each request by what it has cached and by its load.

    A session stays on its server unless that is full or removed. If a choice fails, the session's server, or else the
    one with the fewest requests, is returned, and `fallbacks` of `get_status` is incremented.
    """

    def __init__(self, servers: Mapping[str, Any], router_kwargs: Mapping[str, Any]) -> None:
        """Balance between servers, which are actor handles by their addresses.

        `router_kwargs` has these fields of the file:

        - `settings`: sections of kvrouter's settings.
        - `block_size`: tokens of a block, for servers that do not report it.
        - `discover`: whether servers are asked for their event streams (true).
        """
        unknown = sorted(router_kwargs.keys() - _FIELDS)
        if unknown:
            raise ValueError(f"{unknown[0]}: unknown. Known fields are {', '.join(sorted(_FIELDS))}.")
        self._block_size: int | None = router_kwargs.get("block_size")
        self._discover: bool = router_kwargs.get("discover", True)
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._ids: dict[str, str] = {}  # of workers, by server
        self._servers: dict[str, str] = {}  # by the id of their worker
        self._inflight: dict[str, int] = {}
        self._held: dict[tuple[str, str | None], list[Reservation]] = {}
        self._sessions: dict[str, str] = {}  # the id of each session's worker, by last use
        self._fallbacks = 0
        self._number = count()
        self._thread = SelectorThread(router_kwargs.get("settings"))
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        """Return the arguments of `generate` that `acquire_server` needs."""
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        """Return the arguments that `release_server` needs beside the server."""
        return ["request_id"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] | None = None, **_: Any) -> tuple[str, Any]:
        """Return the server for a request, and its handle. Raises RuntimeError without servers."""
        if not self._handles:
            raise RuntimeError("No server is registered. Add servers first.")
        own = self._sessions.get(request_id)
        held = None if prompt_ids is None else self._reserve(request_id, prompt_ids, own)
        with self._lock:
            server = self._servers.get(own or "") if held is None else self._servers.get(held.worker.name)
            if server is None:  # no choice, or removed since
                if not self._handles:
                    raise RuntimeError("No server is registered. Add servers first.")
                server = min(self._inflight, key=self._inflight.__getitem__)
            self._inflight[server] += 1
            if held is not None:
                self._held.setdefault((server, request_id), []).append(held)
            self._sessions.pop(request_id, None)
            self._sessions[request_id] = self._ids[server]
            if len(self._sessions) > _MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            return server, self._handles[server]

    def _reserve(self, request_id: str, prompt_ids: Sequence[int], own: str | None) -> Reservation | None:
        """Return a reservation for a request; None if no choice was possible."""
        prompt = Prompt(model=_MODEL, token_ids=[int(token) for token in prompt_ids] or [0], session=request_id)
        try:
            return self._thread.run(self._choose(prompt, own), undo=Reservation.drop)
        except Exception as error:
            self._fallbacks += 1
            log.warning("no choice, using the session's server, or the one with the fewest requests", reason=str(error))
            return None

    async def _choose(self, prompt: Prompt, own: str | None) -> Reservation:
        """Reserve the server of a prompt's session. If it is full or removed, reserve any server."""
        selector = self._thread.selector
        if own in self._servers:
            with suppress(SelectionError):
                return await selector.reserve(prompt, allowed=[own], expiry=_EXPIRY)
        return await selector.reserve(prompt, expiry=_EXPIRY)

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Release a request. A server that was removed since is no error."""
        with self._lock:
            if self._inflight.get(server_id, 0) > 0:
                self._inflight[server_id] -= 1
            key = server_id, request_id
            if request_id is None:
                key = next((known for known in self._held if known[0] == server_id), key)
            held = self._held.get(key, [])
            released = held.pop(0) if held else None
            if not held:
                self._held.pop(key, None)
        if released is not None:
            released.release()

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add servers. Those that are known are added anew, with an empty cache."""
        self.remove_servers([server for server in servers if server in self._handles])
        for server, handle in servers.items():
            id = f"server-{next(self._number)}"
            with self._lock:
                self._handles[server], self._ids[server], self._servers[id] = handle, id, server
                self._inflight[server] = 0
            self._thread.run(self._add(id, server))

    async def _add(self, id: str, server: str) -> None:
        found = await self._described(server) if self._discover else None
        await self._thread.selector.upsert_worker(
            id,
            model=_MODEL,
            block_size=self._block_size if found is None else found.block_size or self._block_size,
            capacity=None if found is None else found.capacity,
            streams=() if found is None else found.streams,
            dp_size=1 if found is None else max(found.ranks) + 1,
        )

    async def _described(self, server: str) -> WorkerDescription | None:
        """Return what a server reports; None if it cannot be asked, so that its cache is predicted."""
        try:
            settings = WorkerSettings.model_validate({"url": f"http://{server}"})
            fleet = FleetSettings()
            async with (
                asyncio.timeout(fleet.probe_timeout),
                aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session,
            ):
                return await describe_worker(session, settings, WorkerKey(server, settings))
        except (DiscoveryError, TimeoutError, ValueError) as error:
            log.warning("event streams not found, predicting the cache", server=server, reason=str(error))
            return None

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Remove servers, and what they had in flight. Unknown ones are ignored."""
        for server in server_ids:
            with self._lock:
                self._handles.pop(server, None)
                self._inflight.pop(server, None)
                id = self._ids.pop(server, None)
                for key in [key for key in self._held if key[0] == server]:
                    del self._held[key]
                if id is not None:
                    self._servers.pop(id, None)
            if id is not None:
                self._thread.run(self._thread.selector.delete_worker(id))

    def get_all_servers(self) -> list[str]:
        """Return the addresses of all servers."""
        return list(self._handles)

    def get_inflight_count(self, server_id: str) -> int:
        """Return the requests in flight of a server."""
        return self._inflight.get(server_id, 0)

    def get_total_inflight(self) -> int:
        """Return the requests in flight of all servers."""
        return sum(self._inflight.values())

    def get_status(self) -> dict[str, Any]:
        """Return the requests in flight by server, and the choices that failed."""
        return {
            "servers": dict(self._inflight),
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._inflight),
            "registered_handles": list(self._handles),
            "fallbacks": self._fallbacks,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget what all servers have cached, because weights were updated or requests shall move."""
        cleared, self._sessions = len(self._sessions), {}
        for id in list(self._ids.values()):
            self._thread.call(lambda id=id: self._thread.selector.forget(id))  # type: ignore[misc]
        return {"cleared_entries": cleared, "server_loads": dict(self._inflight)}

    def close(self) -> None:
        """End the selector and its thread."""
        self._thread.close()
