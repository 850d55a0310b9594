"""Everything behind the application, started in order and stopped in reverse.

    indexer ──▶ fleet ──▶ load sharing ──▶ router ──▶ admission ──▶ proxy
                  └─ followed: Kubernetes, the settings file

`Services` is what routes and the proxy work with. Each is made in one place here, and connected to the others it hears
from. What starts a background task also ends it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import aiohttp
import structlog
from prometheus_client import CollectorRegistry

from indexer import Indexer
from indexer.api.metrics import IndexCollector, add_process_metrics
from router.admission.admission import Admission
from router.admission.admission_metrics import AdmissionMetrics, DemandCollector
from router.app.embedded_index import running_indexer
from router.app.readiness import Readiness
from router.app.subscriptions import subscribe_routing
from router.auth import AuthGate
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.adapters import Adapters
from router.fleet.allowed_networks import AllowedNetworks, GuardedResolver
from router.fleet.discovery import ServedModel
from router.fleet.event_streams import RegisteredStreams
from router.fleet.fleet import Fleet, Worker
from router.fleet.kubernetes import ClusterAccess
from router.fleet.prober import Prober
from router.fleet.source_watch import follow_kubernetes, follow_settings_file
from router.fleet.watch import FleetWatch
from router.forwarding.failover.stream_failover import StreamFailover
from router.forwarding.long_bodies import LongBodies
from router.forwarding.proxy_services import ProxyContext, ProxyServices
from router.forwarding.request_context import RequestContexts
from router.http.client import refuse_redirects
from router.http.event_loop import end_tasks
from router.load.target_load import LoadTable
from router.observability.about import About
from router.observability.findings import findings
from router.observability.fleet_snapshot import FleetSnapshot
from router.observability.metrics import AuditCollector, FleetCollector, RequestMetrics
from router.observability.prediction_metrics import PredictionMetrics
from router.observability.request_recorder import RequestRecorder
from router.observability.seen_requests import SampledTraffic
from router.observability.series import Series
from router.observability.tracing import tracing_to
from router.policies import policy_named
from router.policies.rates import Rates
from router.policies.registry import NamedPolicy
from router.prediction.learned import Learned
from router.prediction.service_levels import ServiceLevels
from router.routing.build import Routing, build_routing
from router.routing.state import RoutingState
from router.settings import Settings, SettingsFile, UpstreamSettings
from router.sharing import LoadSharing, PeerLoad, SharingCollector, replica_channels
from router.sharing.worker_processes import WorkerProcesses
from router.tokens.tokenizer_report import TokenizerCollector
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers
from router.upstream import Upstreams
from router.upstream.pool import KEEPALIVE_SECONDS

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Services:
    """What the application's routes and the proxy work with; all of it runs.

    `session`: for all that is asked of workers beside requests. `started`: in seconds since the epoch.
    """

    settings: Settings
    indexer: Indexer
    session: aiohttp.ClientSession
    tokenizers: Tokenizers
    tokenizer_source: TokenizerSource
    fleet: Fleet
    prober: Prober
    networks: AllowedNetworks
    registered_streams: RegisteredStreams
    adapters: Adapters
    load: LoadTable
    sharing: LoadSharing
    audit: HitAudit
    routing: Routing
    admission: Admission
    registry: CollectorRegistry
    snapshot: FleetSnapshot
    request_recorder: RequestRecorder
    readiness: Readiness
    proxy: ProxyContext
    worker_processes: WorkerProcesses | None
    about: About
    findings: Callable[[], list[dict[str, Any]]]
    started: int

    async def end_streams(self) -> None:
        """End the answers that have no end of their own, so that the server can stop."""
        self.request_recorder.end()
        await self.snapshot.end()


@asynccontextmanager
async def running_services(
    settings: Settings, file: SettingsFile | None = None, worker_processes: WorkerProcesses | None = None
) -> AsyncIterator[Services]:
    """Start everything that the settings want; all of it ends with the context.

    The workers follow the `file` that the settings came from. `worker_processes`: those that share its port.
    """
    async with AsyncExitStack() as stack:
        registry = CollectorRegistry()
        add_process_metrics(registry)
        indexer = stack.enter_context(running_indexer(settings, worker_processes))
        fleet = Fleet(
            settings.workers,
            settings.fleet,
            indexer,
            bool(settings.server.token),
            settings.aliases,
            settings.models if settings.admission.cold_start_timeout else None,
        )
        networks = AllowedNetworks(settings.fleet.allowed_networks, fleet.is_untrusted_host)
        session = await stack.enter_async_context(_client_session(settings.upstream, networks))
        tokenizers = Tokenizers(settings.tokenizer.threads, settings.tokenizer.timeout, settings.limits.characters)
        stack.push_async_callback(tokenizers.close)
        source = TokenizerSource(tokenizers, settings.models, session, settings.tokenizer)
        stack.push_async_callback(source.close)
        adapters = Adapters(session)
        stack.push_async_callback(adapters.close)

        async def on_model(worker: Worker, model: ServedModel) -> None:
            await source.provide(worker, model)
            adapters.provide(worker, model)

        load = LoadTable()
        sharing = _load_sharing(settings, load, worker_processes)
        sharing.start()
        stack.push_async_callback(sharing.stop)
        peer_load = sharing.peer_load.in_flight
        watch = FleetWatch(fleet, settings.fleet, indexer, session, networks, on_model, peer_load)
        sent_prefixes = SentPrefixes()
        audit = HitAudit(indexer, sent_prefixes, settings.audit, indexer.names)
        source.audits = audit.audits
        policy = policy_named(settings.policy, Random())
        policy_settings = settings.policy
        learned = Learned(
            Rates(**settings.rates.model_dump()),
            cpu_token=policy_settings.cpu_token,
            disk_token=policy_settings.disk_token,
        )
        in_flight_prefixes = InFlightPrefixes(settings.proxy.speculation_seconds)
        state = RoutingState(fleet, indexer, policy, load, in_flight_prefixes, sent_prefixes, audit, learned, sharing)
        sampled = SampledTraffic(indexer.names)
        routing = build_routing(settings, state, fleet, indexer, tokenizers, sampled)
        subscribe_routing(routing, fleet)
        admission = _admission(settings, routing, policy, fleet, load, sharing)
        metrics = RequestMetrics(registry)
        AdmissionMetrics(admission, registry)
        predictions = PredictionMetrics(learned.predictions, registry)
        admission.refusals.on_slo_refused.append(predictions.refused)
        for collector in (
            SharingCollector(sharing, fleet),
            IndexCollector(indexer),
            TokenizerCollector(tokenizers),
            FleetCollector(fleet, load),
            AuditCollector(audit),
            DemandCollector(fleet, load, admission),
        ):
            registry.register(collector)
        fleet.on_removed += [
            metrics.forget,
            source.removed,
            adapters.removed,
        ]
        fleet.on_scrape.append(lambda worker: audit.recomputed.worker_said(worker.url, worker.metrics.drafts))
        fleet.on_removed.append(lambda worker: audit.recomputed.worker_said(worker.url, drafts=False))
        if worker_processes:
            await worker_processes.catch_up(fleet)
        await watch.start()
        stack.push_async_callback(watch.stop)
        await asyncio.to_thread(indexer.wait_until_caught_up, settings.events.catch_up_timeout)
        _follow_workers(stack, settings, file, session, fleet)
        registered_streams = RegisteredStreams(indexer, networks)
        stack.push_async_callback(end_tasks, [asyncio.create_task(registered_streams.run())])

        about = About(settings.policy.name, fleet, source)

        def all_findings() -> list[dict[str, Any]]:
            return findings(fleet, indexer, audit) + source.findings() + sharing.findings()

        series = Series(metrics, audit, admission.waiting_for, learned.seconds_per_token)
        snapshot = FleetSnapshot(
            fleet,
            indexer,
            load,
            sharing.peer_load,
            admission,
            audit,
            sampled,
            series,
            about,
            all_findings,
            predictions.summary,
        )
        stack.push_async_callback(end_tasks, [asyncio.create_task(snapshot.run())])
        request_recorder = RequestRecorder(routing.reader.look_at_prompts)
        proxy = _proxy(
            stack, settings, routing, admission, fleet, networks, sharing, metrics, request_recorder, registry
        )
        yield Services(
            settings,
            indexer,
            session,
            tokenizers,
            source,
            fleet,
            watch.prober,
            networks,
            registered_streams,
            adapters,
            load,
            sharing,
            audit,
            routing,
            admission,
            registry,
            snapshot,
            request_recorder,
            Readiness(fleet, indexer, settings.events.catch_up_timeout, bool(settings.admission.cold_start_timeout)),
            proxy,
            worker_processes,
            about,
            all_findings,
            int(time.time()),
        )


def _load_sharing(settings: Settings, load: LoadTable, worker_processes: WorkerProcesses | None) -> LoadSharing:
    channels = replica_channels(settings.replicas) + ([worker_processes.channel()] if worker_processes else [])
    peer_load = PeerLoad(settings.replicas.expiry, settings.proxy.speculation_seconds)
    return LoadSharing(load, peer_load, channels)


def _admission(
    settings: Settings, routing: Routing, policy: NamedPolicy, fleet: Fleet, load: LoadTable, sharing: LoadSharing
) -> Admission:
    """The queue, woken by everything after which a waiting request may find a place."""
    admission = Admission(routing.selector, routing.placement, settings.admission, policy.spec.late_binding)
    load.on_ended.append(admission.freed)
    if admission.late_binding:
        load.on_first_byte.append(admission.wake)
    fleet.on_change.append(admission.wake)
    sharing.on_update.append(admission.wake)
    return admission


def _follow_workers(
    stack: AsyncExitStack,
    settings: Settings,
    file: SettingsFile | None,
    session: aiohttp.ClientSession,
    fleet: Fleet,
) -> None:
    """Add and remove workers as Kubernetes and the settings file say."""
    tasks: list[asyncio.Task[None]] = []
    if settings.kubernetes.used:
        cluster = ClusterAccess.in_cluster(settings.kubernetes.namespace)
        tasks.append(asyncio.create_task(follow_kubernetes(settings.kubernetes, cluster, session, fleet)))
    if file is not None:
        tasks.append(asyncio.create_task(follow_settings_file(file, settings, fleet)))
    stack.push_async_callback(end_tasks, tasks)


def _proxy(
    stack: AsyncExitStack,
    settings: Settings,
    routing: Routing,
    admission: Admission,
    fleet: Fleet,
    networks: AllowedNetworks,
    sharing: LoadSharing,
    metrics: RequestMetrics,
    request_recorder: RequestRecorder,
    registry: CollectorRegistry,
) -> ProxyContext:
    """What requests for workers need on their way."""
    tracing = tracing_to(settings.otel.endpoint)
    if tracing is not None:
        stack.push_async_callback(asyncio.to_thread, tracing.stop)
    proxy_settings = settings.proxy
    upstreams = Upstreams(
        _client_tls(settings.upstream),
        proxy_settings.connect_timeout,
        proxy_settings.idle_timeout,
        networks.to_connect,
        fleet.key_of,
    )
    stack.push_async_callback(upstreams.close)
    fleet.on_key.append(lambda worker: upstreams.show(worker.url, worker.key.authorization))
    fleet.on_removed.append(lambda worker: upstreams.forget(worker.url))
    gate = AuthGate(settings)
    if gate.withholds_keys and any(known.has_key for known in (settings.fleet, *settings.workers)):
        log.warning("requests without a key of their own are shown to workers without one", setting="proxy.worker_keys")
    gate.access.share(sharing)
    contexts = RequestContexts(gate, tracing, metrics, settings.logs.access)
    failovers = settings.proxy.stream_failovers
    failover = StreamFailover(fleet, routing.reader, failovers, registry) if failovers else None
    long_bodies = LongBodies(settings.limits.arriving_bytes)
    stack.push_async_callback(long_bodies.close)
    services = ProxyServices(
        routing,
        admission,
        fleet,
        upstreams,
        settings.proxy,
        metrics,
        request_recorder,
        long_bodies,
        failover,
        ServiceLevels.of(settings),
    )
    return ProxyContext(contexts, services, settings.server)


@cache
def _system_tls() -> ssl.SSLContext:
    """Trusts what the system trusts, whose certificates take 20 ms to read. Shared; nobody changes it."""
    return ssl.create_default_context()


def _client_tls(settings: UpstreamSettings) -> ssl.SSLContext:
    if settings.ca is None and settings.verify and settings.certificate is None:
        return _system_tls()
    tls = ssl.create_default_context(cafile=settings.ca)
    if not settings.verify:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if settings.certificate is not None:
        tls.load_cert_chain(settings.certificate, settings.key)
    return tls


def _client_session(settings: UpstreamSettings, networks: AllowedNetworks) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_SECONDS,
            ssl=_client_tls(settings),
            resolver=GuardedResolver(networks, aiohttp.ThreadedResolver()),
        ),
        middlewares=(refuse_redirects,),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )
