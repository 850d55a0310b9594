"""Pulls from peers: a worker takes the beginning of a prompt from another worker's host tier, and computes the rest.

    choice ──▶ the request names the peer ──▶ the answer reports cached tokens ──▶ pulled, or failed
       ▲                                                                                  │
       └──────────────────── after failures in a row, a pause without pulls ──────────────┘

A worker that cannot pull computes the prompt and reports no error. So only cached tokens show whether a pull succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import structlog

from http_api.errors import RequestError
from indexer import Match, MatchQuery, Target, UnknownModelError
from indexer.targets import WorkerNames
from kvevents import Tier
from kvevents.endpoints import join_host_port
from router.cache_state.target_cache import TargetCaches
from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.http.headers import Headers
from router.routing.disaggregation.bodies import fields_of, with_fields
from router.settings import PullProtocol, PullSettings

log = structlog.get_logger()

SOURCE_HEADER: Final = b"x-kv-cache-source-host-port"
# The paths whose requests may name a peer.
PULL_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
# After this number of failed pulls in a row, a target neither pulls nor is pulled from for a time in seconds.
_FAILURES: Final = 3
_PAUSE_SECONDS: Final = 60.0
_LAST_PORT: Final = 65_535
# Pulls in flight from one DP rank: more would share its bandwidth, and take longer than computing.
_MOST_FROM_ONE: Final = 4
# The shortest prefix that is pulled, in tokens. Most of a shorter pull would be latency.
_LEAST_TOKENS: Final = 1024


class PullResult(StrEnum):
    """The result of a pull. UNKNOWN: the answer did not report its cached tokens."""

    PULLED = "pulled"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PullEndpoint:
    """The address of a peer, and the form in which requests name it."""

    protocol: PullProtocol
    host: str
    port: int

    def body(self, body: bytes) -> bytes:
        """Return a body that names the peer, with a new id. Other fields of `kv_transfer_params` stay."""
        if self.protocol is not PullProtocol.P2P:
            return body
        host = f"[{self.host}]" if ":" in self.host else self.host  # the engine appends the port
        source = {"kv_request_id": str(uuid4()), "remote_host": host, "remote_port": self.port}
        try:
            params = bytes(fields_of(body).get("kv_transfer_params", _NULL))
            before = {} if params == b"null" else fields_of(params)
            return with_fields(body, kv_transfer_params=before | {"remote_kv_source": source})
        except RequestError:
            return body  # the engine refuses it

    @property
    def headers(self) -> Headers:
        """The headers that name the peer."""
        if self.protocol is not PullProtocol.SIDECAR:
            return []
        return [(SOURCE_HEADER, join_host_port(self.host, self.port).encode())]

    def with_headers(self, headers: Headers) -> Headers:
        """Return a request's headers with those that name the peer."""
        return [header for header in headers if header[0] != SOURCE_HEADER] + self.headers


_NULL: Final = msgspec.Raw(b"null")


class HostTiers(Protocol):
    """The index, as far as it knows what host tiers hold."""

    def held_in(self, query: MatchQuery, tier: Tier) -> list[Match]:
        """Return the prompt tokens that each target holds in one tier, the most first. Raises UnknownModelError."""

    def block_size(self, target: Target) -> int | None:
        """Return a target's block size in tokens; None if it is not known."""

    def targets(self, model: str, tenant: str) -> Collection[Target]:
        """Return the targets that serve a model for a tenant. Raises UnknownModelError."""


class Pulls:
    """The pulls between the workers of a fleet.

    - `per_source`: the most pulls in flight from one target.
    - `least_tokens`: the fewest tokens that are pulled.
    - `on_ended`: called with the result of each pull, and its tokens.
    """

    def __init__(
        self,
        settings: PullSettings,
        index: HostTiers,
        find_worker: Callable[[str], Worker | None],
        caches: TargetCaches,
        names: WorkerNames | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the pulls of a fleet, between the targets of `caches`."""
        self.per_source = _MOST_FROM_ONE
        self.least_tokens = _LEAST_TOKENS
        self.on_ended: list[Callable[[PullResult, int], None]] = []
        self._protocol = settings.protocol
        self._port = settings.port
        self._index = index
        self._find_worker = find_worker
        self._caches = caches
        self._names = names or WorkerNames()
        self._clock = clock

    def allows(self, path: str, answers: int, forms: Collection[PullProtocol]) -> bool:
        """Return whether a request may name a peer, in one of these forms. Several answers would pull with one id."""
        return path in PULL_PATHS and answers == 1 and self._protocol in forms

    def may_pull(self, target: Target) -> bool:
        """Return whether a target can pull."""
        worker = self._find_worker(target.worker)
        return worker is not None and self._speaks(worker) and not self._paused(target)

    def holders(
        self,
        query: MatchQuery,
        own: Sequence[tuple[Target, int]],  # noqa: ARG002
    ) -> list[tuple[Target, int, int]]:
        """Return the targets that can be pulled from, each with the tokens in its host tier, and its block size.

        The target with the most tokens is first. Workers that only decode are among them.
        """
        try:
            matches = self._index.held_in(query, Tier.CPU)
        except UnknownModelError:
            return []
        return [
            (match.target, match.matched_tokens, self._index.block_size(match.target) or 1)
            for match in matches
            if match.matched_tokens >= self.least_tokens and self._peer(match.target) is not None
        ]

    def pullable(self, query: MatchQuery, own: Mapping[Target, int]) -> dict[Target, int]:
        """Return the tokens of a prompt that each target can pull, beside its own. Loads and prices do not count."""
        holders, found = self.holders(query, ()), dict[Target, int]()
        for target in self._index.targets(query.model, query.tenant) if holders else ():
            longest = max([tokens for peer, tokens, _ in holders[:2] if peer != target], default=0)
            tokens = longest - own.get(target, 0)
            if tokens >= self.least_tokens and self.may_pull(target):
                found[target] = tokens
        return found

    def endpoint(self, peer: Target) -> PullEndpoint | None:
        """Return the address by which requests name a peer; None if it cannot be pulled from now."""
        worker, protocol = self._peer(peer), self._protocol
        if worker is None or protocol is None:
            return None
        url, settings = urlsplit(worker.url), worker.settings
        host = url.hostname or ""
        if protocol is PullProtocol.P2P:
            host = settings.pull_host or host
            port = (settings.pull_port or self._port) + peer.dp_rank
            return PullEndpoint(protocol, host, port) if port <= _LAST_PORT else None
        return PullEndpoint(protocol, host, url.port or (443 if url.scheme == "https" else 80))

    def _peer(self, target: Target) -> Worker | None:
        """Return the worker of a target; None if the target cannot be pulled from now."""
        worker = self._find_worker(target.worker)
        cache = self._caches.find(target)
        distrusted = cache is not None and cache.distrusted
        if worker is None or not self._speaks(worker) or self._paused(target) or distrusted:
            return None
        if not worker.up or not worker.computes or not worker.health.circuit.closed:
            return None
        if self._protocol is PullProtocol.SIDECAR and len(worker.ranks()) > 1:
            return None  # the header names a server, not a rank
        return worker

    def ended(self, target: Target, peer: Target, tokens: int, result: PullResult) -> None:
        """Record the result of a pull of `tokens` tokens."""
        for on_ended in self.on_ended:
            on_ended(result, tokens)
        for end in (target, peer):
            if self._find_worker(end.worker) is None:
                continue  # it was removed
            cache = self._caches.of(end)
            if result is PullResult.PULLED:
                cache.failed_pulls = 0
            elif result is PullResult.FAILED:
                cache.failed_pulls += 1
                cache.pull_failed_at = self._clock()
                if cache.failed_pulls == _FAILURES:
                    log.warning("pulls fail, pausing them", seconds=_PAUSE_SECONDS, **self._names.about(end))

    def _speaks(self, worker: Worker) -> bool:
        """Return whether a worker's engine understands the protocol, as far as that is known."""
        known = worker.description
        return known is not None and (self._protocol is not PullProtocol.P2P or known.engine is Engine.VLLM)

    def _paused(self, target: Target) -> bool:
        cache = self._caches.find(target)
        if cache is None or cache.failed_pulls < _FAILURES:
            return False
        return self._clock() - cache.pull_failed_at < _PAUSE_SECONDS
