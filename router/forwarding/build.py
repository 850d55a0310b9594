"""Everything that forwards requests to workers, as one record."""

from __future__ import annotations

import structlog

from router.admission.admission import Admission
from router.auth import AuthGate
from router.fleet.fleet import Fleet
from router.forwarding.failover.stream_failover import StreamFailover
from router.forwarding.long_bodies import LongBodies
from router.forwarding.proxy_services import ProxyContext, ProxyServices
from router.forwarding.request_context import RequestContexts
from router.observability.build import Observability
from router.observability.tracing import tracing_to
from router.prediction.service_levels import ServiceLevels
from router.routing.build import Routing
from router.settings import Settings
from router.upstream import Upstreams

log = structlog.get_logger()


def build_forwarding(
    settings: Settings,
    fleet: Fleet,
    upstreams: Upstreams,
    routing: Routing,
    admission: Admission,
    observability: Observability,
) -> ProxyContext:
    """Return what serves requests for workers. Its `close` ends the threads that it owns."""
    gate = AuthGate(settings)
    if gate.withholds_keys and any(known.has_key for known in (settings.fleet, *settings.workers)):
        log.warning("requests without a key of their own are shown to workers without one", setting="proxy.worker_keys")
    proxy, metrics = settings.proxy, observability.requests
    tracing = tracing_to(settings.otel.endpoint)
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
        failover,
        ServiceLevels.from_settings(settings),
    )
    contexts = RequestContexts(gate, tracing, metrics, settings.logs.access)
    return ProxyContext(contexts, services, settings.server, gate, tracing)
