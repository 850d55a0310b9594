"""The services of the router that proxied requests use, and their construction from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import environ
from typing import Final, TypeVar

import structlog

from router.admission.admission import Admission
from router.auth import AuthGate
from router.cache_state.billing_lines import BillingLines
from router.fleet.fleet import Fleet
from router.forwarding.failover.stream_failover import StreamFailover
from router.forwarding.request_context import RequestContexts
from router.forwarding.retries import ELSEWHERE, RetryBudget
from router.forwarding.shared_users import SharedUsers
from router.forwarding.token_forwarding import TokenForwarding
from router.hooks.hooks import Hooks
from router.http.arriving import ArrivingBytes
from router.http.websocket import SharedWebSockets
from router.observability.build import Observability
from router.observability.gen_ai import GenAiMetrics
from router.observability.metrics import RequestMetrics
from router.observability.request_recorder import RequestRecorder
from router.observability.spans import Tracing
from router.prediction.service_levels import ServiceLevels
from router.routing.build import Routing
from router.settings import Backend, EncodingSettings, ProxySettings, ServerSettings, Settings
from router.tokens.tokenizer_source import TokenizerSource
from router.upstream import Upstreams

# Bodies of up to this size are parsed on the event loop: at most two milliseconds of work.
LONG_BODY: Final = 256 * 1024

T = TypeVar("T")
log = structlog.get_logger()


async def aside_if_long(body: bytes, read: Callable[[bytes], T]) -> T:
    """Return the result of `read`, which runs in a thread if the body is long."""
    return await asyncio.to_thread(read, body) if len(body) > LONG_BODY else read(body)


class LongBodies:
    """The thread for long bodies, with at most `limit` waiting bytes, which are counted as in `ArrivingBytes`."""

    def __init__(self, limit: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")
        self._waiting = ArrivingBytes(limit)

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which parses a body of `size` bytes. Raises RequestError (503) if too many bytes are waiting."""
        self._waiting.add(0, size)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting.end(size)

    async def close(self) -> None:
        """Stop the thread after its current work."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


class ProxyServices:
    """The services of proxied requests.

    - `attempts`: the most workers that a request is sent to.
    - `elsewhere`: statuses of workers that are retried on another worker.
    - `reads_senders`: whether a custom policy reads tenants and headers.
    - `keepalive_interval`: silence after which a stream gets a comment, in seconds; None: it gets none.
    - `sidecar_encodes`: whether the sidecars of workers send media items to encode workers.
    - `hooks_after`: calls the functions after an answer; None without any.
    - `ask_usage`: whether workers are asked for token counts that the client did not ask for.
    """

    def __init__(
        self,
        routing: Routing,
        admission: Admission,
        fleet: Fleet,
        upstreams: Upstreams,
        settings: ProxySettings,
        metrics: RequestMetrics,
        recorder: RequestRecorder,
        long_bodies: LongBodies,
        encoding: EncodingSettings,
        sidecar_encodes: bool,
        arriving: ArrivingBytes,
        stream_failover: StreamFailover | None = None,
        service_levels: ServiceLevels | None = None,
        token_forwarding: TokenForwarding | None = None,
        gen_ai: GenAiMetrics | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.reader = routing.reader
        self.selector = routing.selector
        self.placement = routing.placement
        self.encoders = routing.encoders
        self.responses = routing.state.responses
        self.turns = routing.state.turns
        self.pulls = routing.state.pulls
        self.shared_users = SharedUsers()
        self.reads_senders = routing.state.policy.custom is not None
        self.admission = admission
        self.fleet = fleet
        self.upstreams = upstreams
        self.settings = settings
        self.metrics = metrics
        self.recorder = recorder
        self.long_bodies = long_bodies
        self.encoding = encoding
        self.sidecar_encodes = sidecar_encodes
        self.stream_failover = stream_failover
        self.service_levels = service_levels
        self.token_forwarding = token_forwarding
        self.gen_ai = gen_ai
        self.hooks_after = hooks if hooks is not None and hooks.has_after else None
        self.billing_lines = BillingLines(settings.billing_line, fleet)
        self.budget = RetryBudget(settings.retry_share)
        self.attempts = settings.attempts
        interval = settings.keepalive_interval
        self.keepalive_interval: float | None = None if interval == "off" else interval
        self.elsewhere = ELSEWHERE.union(settings.retry_statuses)
        # Only usage shows whether a pull succeeded, and functions after answers receive it.
        self.ask_usage = settings.ask_usage or self.pulls is not None or self.hooks_after is not None
        self.loop = asyncio.get_running_loop()
        self.websockets = SharedWebSockets(self.loop, arriving, settings.client_timeout)


@dataclass(frozen=True, slots=True)
class ProxyContext:
    """The dependencies of a server that receives requests for workers. Without `tracing`, no spans are made."""

    contexts: RequestContexts
    services: ProxyServices
    settings: ServerSettings
    gate: AuthGate
    tracing: Tracing | None = None
    hooks: Hooks | None = None

    async def close(self) -> None:
        """Close all connections to workers, and end the threads of long bodies, spans and hooks."""
        if self.hooks is not None:
            await self.hooks.close()
        await self.services.long_bodies.close()
        await self.services.upstreams.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)
        if self.services.gen_ai is not None:
            await asyncio.to_thread(self.services.gen_ai.stop)


def build_forwarding(
    settings: Settings,
    fleet: Fleet,
    upstreams: Upstreams,
    routing: Routing,
    admission: Admission,
    observability: Observability,
    tokenizer_source: TokenizerSource,
    hooks: Hooks | None = None,
) -> ProxyContext:
    """Return what serves requests for workers. Its `close` ends the threads that it owns."""
    gate = AuthGate(settings)
    if gate.withholds_keys and any(known.has_key for known in (settings.fleet, *settings.workers)):
        log.warning(
            "client requests without Authorization are forwarded without the worker's API key",
            setting="proxy.worker_keys",
        )
    proxy, metrics = settings.proxy, observability.requests
    tracing = _tracing_to(settings.otel.endpoint)
    failover = None
    if proxy.stream_failovers:
        failover = StreamFailover(fleet, routing.reader, proxy.stream_failovers, observability.registry)
    services = ProxyServices(
        routing,
        admission,
        fleet,
        upstreams,
        proxy,
        metrics,
        observability.recorder,
        LongBodies(settings.limits.arriving_bytes),
        settings.encoding,
        settings.disaggregation.backend is Backend.SIDECAR,
        gate.arrivals,
        failover,
        ServiceLevels.from_settings(settings),
        TokenForwarding(tokenizer_source, fleet, observability.registry) if tokenizer_source.forwards else None,
        _metrics_by_otlp(observability),
        hooks,
    )
    contexts = RequestContexts(gate, tracing, metrics, settings.logs.access, hooks)
    return ProxyContext(contexts, services, settings.server, gate, tracing, hooks)


def _tracing_to(endpoint: object | None) -> Tracing | None:
    """Return tracing that sends spans to a collector's URL; None without an endpoint."""
    if endpoint is None:
        return None
    from router.observability.otel import OtelTracing  # an extra

    return OtelTracing(str(endpoint))


def _metrics_by_otlp(observability: Observability) -> GenAiMetrics | None:
    """Return metrics that are exported by OTLP; None unless `OTEL_METRICS_EXPORTER` names `otlp`."""
    if "otlp" not in map(str.strip, environ.get("OTEL_METRICS_EXPORTER", "").split(",")):
        return None
    try:
        from router.observability.otel_metrics import OtelMetrics  # an extra
    except ImportError:
        log.warning("OTEL_METRICS_EXPORTER needs more packages: pip install 'kvrouter[otel]'")
        return None
    return OtelMetrics(observability.registry)
