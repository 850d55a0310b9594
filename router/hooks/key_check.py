"""The check of API keys at a URL of the operator's (`hooks.key_url`), with a bounded cache.

The URL receives a GET with the key in `Authorization: Bearer`. Its status decides: 2xx accepts the key, and 401 and 403
refuse it. Its header `x-kvrouter-tenant` names the tenant of the settings that the key belongs to.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final, Protocol

import aiohttp

from router.auth.tenants import unknown_key
from router.http.client import connection_problem
from router.http.event_loop import SharedCalls

# Keys of each kind that are remembered. Refused keys do not evict accepted ones.
MOST_CACHED: Final = 10_000
# Keys that are asked for at a time.
MOST_ASKED: Final = 256
# A refused key is remembered for at most this time, so that a new key works soon.
_REFUSED_SECONDS: Final = 5.0
_TENANT: Final = "x-kvrouter-tenant"


class KeyCheckError(RuntimeError):
    """An error for a key about which no usable answer is known."""


class Check(Protocol):
    """A check of keys that the settings lack. `name`: its setting under `hooks`."""

    name: str

    async def check(self, key: str) -> str:
        """Return the tenant of an accepted key; "" without one. Raises RequestError (401) and KeyCheckError."""

    async def close(self) -> None:
        """Cancel all questions."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for a key. `tenant`: "" without one."""

    accepted: bool
    tenant: str = ""


class _Cache:
    """Verdicts by hashes of keys, each for some seconds; the least recently added is evicted."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()

    def get(self, name: bytes) -> Verdict | None:
        found = self._known.get(name)
        return found[1] if found is not None and found[0] > self._clock() else None

    def put(self, name: bytes, verdict: Verdict) -> None:
        self._known.pop(name, None)
        if len(self._known) >= MOST_CACHED:
            self._known.popitem(last=False)
        self._known[name] = (self._clock() + self._seconds, verdict)


class KeyCheck:
    """The check. `seconds`: how long an accepted key is remembered. Concurrent requests with one key ask once."""

    name = "key_url"

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        seconds: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._session = session
        self._timeout = aiohttp.ClientTimeout(timeout)
        self._accepted = _Cache(seconds, clock)
        self._refused = _Cache(min(seconds, _REFUSED_SECONDS), clock)
        self._asking = SharedCalls[Verdict]()

    async def check(self, key: str) -> str:
        """Return the tenant of an accepted key; "" without one. Raises RequestError (401) and KeyCheckError."""
        if not key:
            raise unknown_key()
        name = sha256(key.encode()).digest()
        verdict = self._accepted.get(name) or self._refused.get(name) or await self._ask(name, key)
        if not verdict.accepted:
            raise unknown_key()
        return verdict.tenant

    async def close(self) -> None:
        """Cancel all questions."""
        await self._asking.close()

    async def _ask(self, name: bytes, key: str) -> Verdict:
        if name not in self._asking and len(self._asking) >= MOST_ASKED:
            raise KeyCheckError(f"{MOST_ASKED} keys are being checked")
        return await asyncio.shield(self._asking.start(name, partial(self._answer, name, key)))

    async def _answer(self, name: bytes, key: str) -> Verdict:
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with self._session.get(self._url, headers=headers, timeout=self._timeout) as response:
                status, tenant = response.status, response.headers.get(_TENANT, "")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KeyCheckError(f"hooks.key_url {connection_problem(error)}") from error
        if 200 <= status < 300:
            verdict = Verdict(True, tenant)
            self._accepted.put(name, verdict)
        elif status in (401, 403):
            verdict = Verdict(False)
            self._refused.put(name, verdict)
        else:
            raise KeyCheckError(f"hooks.key_url answers {status}")
        return verdict
