"""The part of the Kubernetes API that the router uses: a list of objects that a watch keeps current.

A watch continues from a resource version, which bookmarks keep recent. If the API server has dropped that version
(status 410), all objects are listed again. They are also listed at intervals. While the API server is not reachable,
the objects stay unchanged.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import uniform
from typing import Any

import aiohttp
import msgspec
import structlog

from kvevents.decoding import read_json
from router.http.client import connection_problem

log = structlog.get_logger()

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_TIMEOUT = 30.0
_FIRST_BACKOFF = 0.5
_LONGEST_BACKOFF = 30.0
# Seconds without a byte after which a watch is opened again. The API server sends a bookmark about once a minute. A
# watch whose connection was lost without a reset stays silent.
_SILENCE = 80.0
# Seconds between two complete lists, in addition to the watch: they bound the harm of a lost event.
RESYNC_SECONDS = 300.0
_SHORT_WATCH = 1.0  # A watch that ends sooner counts as failed.
_LONGEST_LINE = 16 * 2**20
_GONE = 410

Objects = dict[str, dict[str, Any]]


class KubernetesError(Exception):
    """The API server is not configured, not reachable, or sent an answer that cannot be parsed."""


class _GoneError(Exception):
    """The API server has dropped the resource version, so that all objects must be listed again."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The API server and the credentials. The token is read for every request, because Kubernetes replaces it."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, namespace: str) -> ClusterAccess:
        """Return the access of the pod's service account. Raises KubernetesError outside of a cluster."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise KubernetesError("kubernetes: not in a pod of a cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            own = namespace or (_ACCOUNT / "namespace").read_text().strip()
        except OSError as error:
            raise KubernetesError(f"kubernetes: no service account: {error}") from error
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        return cls(url, own, _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def headers(self) -> dict[str, str]:
        """Return the headers of requests, with the token."""
        token = {"Authorization": f"Bearer {self.token_file.read_text().strip()}"} if self.token_file else {}
        return {"Accept": "application/json"} | token

    def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context that trusts the cluster's authority.

        Python 3.13 verifies strictly by default. Many clusters' authorities lack the extensions that this requires.
        """
        if self.ca_file is None:
            return True
        context = ssl.create_default_context(cafile=self.ca_file)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


class ResourceWatch:
    """A current copy of the objects at one path. `on_change` is called with all of them after each change."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        access: ClusterAccess,
        path: str,
        selector: str,
        on_change: Callable[[Iterable[dict[str, Any]]], Awaitable[None]],
    ) -> None:
        self._session = session
        self._access = access
        self._url = access.url + path
        self._selector = selector
        self._on_change = on_change
        self._tls = access.tls()
        self._objects: Objects = {}
        self._version: str | None = None  # None: all objects must be listed
        self._listed_at = 0.0

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        while True:
            try:
                if self._version is None or time.monotonic() - self._listed_at >= RESYNC_SECONDS:
                    await self.list()
                began = time.monotonic()
                await self._watch(self._version or "")
                failures = failures + 1 if time.monotonic() - began < _SHORT_WATCH else 0
            except _GoneError:
                log.info("kubernetes dropped the watched version, listing again", url=self._url)
                # It is an answer, so that a list follows at once, unless the version is that of a list just made.
                fresh = self._version is None or time.monotonic() - self._listed_at < _SHORT_WATCH
                failures = failures + 1 if fresh else 0
                self._version = None
            except (KubernetesError, aiohttp.ClientError, TimeoutError, OSError) as error:
                failures += 1
                log.warning("kubernetes request failed", url=self._url, reason=connection_problem(error))
            if failures > 1:  # The first failure is retried at once.
                await asyncio.sleep(_backoff(failures))

    async def list(self) -> None:
        """List all objects once. Raises KubernetesError, aiohttp.ClientError, OSError."""
        async with self._get(aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT)) as response:
            await _check_status(response)
            answer = _decoded(await response.read())
        try:
            objects = {_name(found): found for found in answer.get("items") or []}
            version = str(answer["metadata"]["resourceVersion"])
        except (KeyError, TypeError) as error:
            raise KubernetesError(f"invalid list: no {error}") from error
        self._objects, self._version, self._listed_at = objects, version, time.monotonic()
        await self._on_change(self._objects.values())

    async def _watch(self, version: str) -> None:
        """Follow the changes since a version, until the server ends the watch or is silent. Raises _GoneError."""
        seconds = max(int(RESYNC_SECONDS), 1)
        total = seconds + _REQUEST_TIMEOUT
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_REQUEST_TIMEOUT, sock_read=_SILENCE)
        more = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        async with self._get(timeout, **more) as response:
            await _check_status(response)
            try:
                async for line in _lines(response.content):
                    await self._apply(_decoded(line))
            except aiohttp.SocketTimeoutError:
                log.info("kubernetes watch was silent, watching again", url=self._url, seconds=_SILENCE)

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
            raise KubernetesError(f"invalid event: no {error}") from error
        self._version = version
        if kind == "DELETED":
            self._objects.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._objects[name] = found
        else:
            return  # A bookmark only moves the version.
        await self._on_change(self._objects.values())

    def _get(self, timeout: aiohttp.ClientTimeout, **more: str) -> Any:
        query = {"labelSelector": self._selector} | more
        return self._session.get(
            self._url, params=query, headers=self._access.headers(), ssl=self._tls, timeout=timeout
        )


def _backoff(failures: int) -> float:
    return min(_FIRST_BACKOFF * 2.0 ** min(failures - 2, 16), _LONGEST_BACKOFF) * uniform(0.5, 1.0)


def _name(found: dict[str, Any]) -> str:
    # Bookmarks have no name.
    return str(found["metadata"].get("name", ""))


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return read_json(text, dict[str, Any])
    except msgspec.DecodeError as error:
        raise KubernetesError(f"invalid JSON: {error}") from error


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == _GONE:
        raise _GoneError
    if response.status != 200:
        raise KubernetesError(f"status {response.status}: {(await response.text())[:200]}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the complete lines of a stream. A last line without an end is dropped."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _LONGEST_LINE:
            raise KubernetesError(f"a line of more than {_LONGEST_LINE} bytes")
