"""The router as one FastAPI application: the OpenAI-compatible proxy, and the index API beside it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import aiohttp
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from indexer import Indexer
from indexer.api import ReadMatch, add_error_handlers, index_routes, token_check, workers_report
from indexer.metrics import IndexCollector
from indexer.openapi import errors, json_body
from router.access import AccessControl
from router.admission.admission import Admission
from router.admission.admission_metrics import AdmissionMetrics
from router.embedded_index import running_indexer
from router.fleet.config_reload import SettingsFile, follow_workers
from router.fleet.fleet import Fleet, Worker, end_tasks
from router.fleet.kubernetes import ClusterAccess, follow_kubernetes
from router.fleet.load import LoadTable
from router.forwarding.proxied_request import ProxyServices
from router.forwarding.proxy import Proxy, ProxyContext
from router.forwarding.request_context import ContextMiddleware, RequestContexts, context_of
from router.holdings.audit import HitAudit
from router.holdings.history import RoutingHistory
from router.holdings.speculation import SpeculativeHoldings
from router.learning.learned import Learned
from router.live import FleetSnapshot, RequestStream, live_routes
from router.live.series import Series
from router.policies import WITHOUT_PROMPTS, policy_named
from router.policies.rates import Rates
from router.readiness import Readiness
from router.routes.explain import ExplainBody, explain
from router.routes.findings import findings
from router.routes.match_requests import match_reader
from router.routes.model_cards import model_card, model_cards
from router.routes.worker_api import worker_routes, worker_status
from router.routing.router import Router
from router.settings import PolicyName, Settings, UpstreamSettings
from router.sharing import LoadSharing, PeerLoad, SharingCollector, replica_channels
from router.sharing.all_processes import AllProcesses
from router.sharing.worker_processes import WorkerProcesses
from router.telemetry.metrics import AuditCollector, FleetCollector, RequestMetrics
from router.telemetry.tracing import tracing_to
from router.tokens.tokenizer_metrics import TokenizerCollector
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers
from router.upstream import Upstreams
from router.upstream.pool import KEEPALIVE_SECONDS

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@asynccontextmanager
async def running_router(
    settings: Settings, file: SettingsFile | None = None, worker_processes: WorkerProcesses | None = None
) -> AsyncIterator[FastAPI]:
    """The application with everything behind it started; all of it ends with the context.

    The workers follow the `file` that the settings came from. `worker_processes`: the processes that share its port.
    """
    async with AsyncExitStack() as stack:
        indexer = stack.enter_context(running_indexer(settings, worker_processes))
        session = await stack.enter_async_context(_client_session(settings.upstream))
        tokenizers = Tokenizers(settings.tokenizer.threads, settings.tokenizer.timeout)
        stack.push_async_callback(tokenizers.close)
        source = TokenizerSource(tokenizers, settings.models, session, settings.tokenizer)
        stack.push_async_callback(source.close)
        fleet = Fleet(settings.workers, settings.fleet, indexer, session, source.provide)
        if worker_processes:
            await worker_processes.catch_up(fleet)
        await fleet.start()
        stack.push_async_callback(fleet.stop)
        await asyncio.to_thread(indexer.wait_until_caught_up, settings.events.catch_up_timeout)
        load = LoadTable()
        channels = replica_channels(settings.replicas) + ([worker_processes.channel()] if worker_processes else [])
        peer_load = PeerLoad(settings.replicas.expiry, settings.proxy.speculation_seconds)
        sharing = LoadSharing(load, peer_load, channels)
        fleet.peer_load = peer_load.in_flight
        sharing.start()
        stack.push_async_callback(sharing.stop)
        registry = CollectorRegistry()
        registry.register(SharingCollector(sharing, fleet))
        registry.register(IndexCollector(indexer))
        registry.register(TokenizerCollector(tokenizers))
        registry.register(FleetCollector(fleet, load))
        history = RoutingHistory()
        audit = HitAudit(indexer, history, settings.audit)
        registry.register(AuditCollector(audit))
        source.audits = audit.audits
        router = Router(
            fleet,
            indexer,
            tokenizers,
            policy_named(settings.policy, Random()),
            load,
            SpeculativeHoldings(settings.proxy.speculation_seconds),
            Learned(Rates(**settings.rates.model_dump())),
            history,
            audit,
            sharing,
            settings.disaggregation,
            needs_prompts=settings.policy.name not in WITHOUT_PROMPTS,
            seen_bytes=settings.tokenizer.cache_bytes,
        )
        router.responses.on_learned.append(sharing.made)
        sharing.on_made.append(router.responses.remember)
        admission = Admission(router, settings.admission, settings.policy.name is PolicyName.KV_AWARE)
        load.on_ended.append(admission.freed)
        if admission.late_binding:
            load.on_first_byte.append(admission.wake)
        fleet.on_change.append(admission.wake)
        sharing.on_heard.append(admission.wake)
        AdmissionMetrics(admission, registry)
        requests = RequestMetrics(registry)
        fleet.on_removed += [router.removed, requests.forget, source.removed]
        if settings.kubernetes.used:
            cluster = ClusterAccess.in_cluster(settings.kubernetes.namespace)
            following = follow_kubernetes(settings.kubernetes, cluster, session, fleet)
            stack.push_async_callback(end_tasks, [asyncio.create_task(following)])
        if file is not None:
            stack.push_async_callback(end_tasks, [asyncio.create_task(follow_workers(file, settings, fleet))])
        snapshot = FleetSnapshot(fleet, indexer, load, peer_load, admission, audit, Series(requests, audit))
        router.watching = snapshot
        stack.push_async_callback(end_tasks, [asyncio.create_task(snapshot.run())])
        tracing = tracing_to(settings.otel.endpoint)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.stop)
        upstreams = Upstreams(
            _client_tls(settings.upstream), settings.proxy.connect_timeout, settings.proxy.idle_timeout
        )
        stack.push_async_callback(upstreams.close)
        fleet.on_removed.append(lambda worker: upstreams.forget(worker.url))
        passing = RequestStream(router.look_at_prompts)
        services = ProxyServices(router, admission, fleet, upstreams, settings.proxy, requests, passing)
        readiness = Readiness(fleet, indexer, settings.events.catch_up_timeout)
        access = AccessControl(settings.tenants, settings.server.token) if settings.tenants.named else None
        if access:
            access.share(sharing)
        contexts = RequestContexts(access, tracing, requests, settings.logs.access)
        proxy_context = ProxyContext(contexts, services, settings.server)
        app = _app(
            indexer,
            match_reader(tokenizers, router.resolve),
            fleet,
            load,
            sharing,
            router,
            admission,
            audit,
            registry,
            session,
            settings,
            readiness,
            source,
        )
        app.include_router(live_routes(snapshot, passing, settings.server.token, worker_processes))
        app.router.routes.append(Route("/{path:path}", Proxy(proxy_context), methods=_METHODS))  # all else

        async def let_go() -> None:
            passing.end()
            await snapshot.end()

        app.state.on_shutdown = let_go
        app.state.readiness = readiness
        app.state.fleet = fleet
        app.state.proxy_context = proxy_context
        app.add_middleware(ContextMiddleware, contexts)
        if worker_processes:
            app.add_middleware(AllProcesses, worker_processes, fleet)
        yield app


def _client_tls(settings: UpstreamSettings) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=settings.ca)
    if not settings.verify:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if settings.certificate is not None:
        tls.load_cert_chain(settings.certificate, settings.key)
    return tls


def _client_session(settings: UpstreamSettings) -> aiohttp.ClientSession:
    """For all that is asked of workers beside requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=_client_tls(settings)),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _app(
    indexer: Indexer,
    read_match: ReadMatch,
    fleet: Fleet,
    load: LoadTable,
    sharing: LoadSharing,
    router: Router,
    admission: Admission,
    audit: HitAudit,
    registry: CollectorRegistry,
    session: aiohttp.ClientSession,
    settings: Settings,
    readiness: Readiness,
    source: TokenizerSource,
) -> FastAPI:
    token = settings.server.token
    app = FastAPI(title="kvrouter")
    started = int(time.time())
    app.include_router(index_routes(indexer, read_match, token))
    app.include_router(worker_routes(fleet, settings.fleet.allowed_networks, token))
    add_error_handlers(app)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Every model and adapter that a worker serves; a tenant is told of those it may use."""
        return {"object": "list", "data": list(model_cards(fleet, started, context_of(request.scope).tenant).values())}

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model(name: str, request: Request) -> dict[str, Any]:
        """One of them."""
        return model_card(fleet, started, name, context_of(request.scope).tenant)

    @app.post("/explain", openapi_extra=json_body(ExplainBody), responses=errors(400, 404, 503))
    async def explain_decision(request: Request) -> dict[str, Any]:
        """The decision a request would get now, without sending it."""
        return await explain(router, admission, await request.body(), request.scope["headers"])

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """Every worker: whether it is used, its load, its streams and what it holds."""
        by_url = {worker.url: worker for worker in fleet.workers}
        report = workers_report(indexer)
        for entry in report:
            if worker := by_url.get(entry["worker"]):
                entry |= worker_status(worker)
                for rank in entry["ranks"]:
                    now = load.of(worker.url, rank["dp_rank"])
                    rank["load"] = {"requests": now.requests, "pending": now.pending, "context": now.context}
                    rank["saturated"] = admission.saturated(worker, rank["dp_rank"])
                    far = sharing.peer_load.of(worker.url, rank["dp_rank"])
                    rank["elsewhere"] = {"requests": far.requests, "pending": far.pending, "context": far.context}
        known = {entry["worker"] for entry in report}
        silent = [{"worker": w.url, "ranks": []} | worker_status(w) for w in fleet.workers if w.url not in known]
        return {"workers": report + silent, "tokenizers": source.report()}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the router runs, how many of its workers answer, and what is wrong."""
        up = sum(worker.up for worker in fleet.workers)
        status = "ok" if up else "no worker answers"
        found = findings(fleet, indexer, audit) + source.findings() + sharing.findings()
        return {
            "status": status,
            "workers": len(fleet.workers),
            "workers_up": up,
            "queue": {held.value: waiting for held, waiting in admission.waiting_for().items()},
            "findings": found,
        }

    @app.get("/ready")
    async def ready() -> Response:
        """200 when a worker answers and the index knows what the workers hold, else 503."""
        problem = readiness.problem()
        return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache", dependencies=[Depends(token_check(token))], responses=errors(401))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Reset the cache of every worker, and forget what they held."""
        statuses = await asyncio.gather(*(_reset(worker, router, session) for worker in fleet.workers))
        return {"workers": dict(zip((worker.url for worker in fleet.workers), statuses, strict=True))}

    return app


async def _reset(worker: Worker, router: Router, session: aiohttp.ClientSession) -> str:
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with session.post(f"{worker.url}/reset_prefix_cache", timeout=timeout) as response:
            if response.status != 200:
                return f"refused with status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return str(error) or type(error).__name__
    router.forget(worker)
    return "reset"
