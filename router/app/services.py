"""All services behind the application: they are built, subscribed, started, and stopped in reverse order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from fastapi import Request

from indexer import Indexer
from kvevents import EventSource
from router.admission.admission import Admission
from router.app import subscriptions
from router.app.embedded_index import running_indexer
from router.app.readiness import CATCH_UP_SECONDS, Readiness
from router.cache_state.prompt_noise import PromptNoise
from router.cache_state.stored_prompts import StoredPrompts
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.build import FleetWatch, build_fleet, follow_sources
from router.fleet.discovery import ServedModel
from router.fleet.engine_commands import EngineCommands
from router.fleet.event_streams import RegisteredStreams, allowed_sources
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker import Worker
from router.fleet.worker_commands import Adapters
from router.fleet.worker_sources import DECLARED_SOURCE
from router.forwarding.proxy_services import ProxyContext, build_forwarding
from router.hooks.build import build_hooks
from router.http.event_loop import end_tasks
from router.load.target_load import LoadTable
from router.observability.build import Observability, build_observability
from router.observability.seen_requests import SampledTraffic
from router.reservations.declared_workers import DeclaredWorkers
from router.reservations.reservations import EXPIRY, Reservations
from router.reservations.selection_service import SelectionService
from router.reservations.worker_catalogue import WorkerCatalogue
from router.routing.build import Routing, build_cache_state, build_routing, build_state
from router.settings import ForwardTokens, Settings, SettingsFile
from router.sharing import build_sharing
from router.sharing.worker_processes import WorkerProcesses
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers
from router.upstream.build import build_upstreams, client_session


@dataclass(frozen=True, slots=True)
class Services:
    """The running services that the application's routes use. `started`: in seconds since the epoch."""

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
    commands: EngineCommands
    routing: Routing
    admission: Admission
    selection: SelectionService
    observability: Observability
    readiness: Readiness
    proxy: ProxyContext
    worker_processes: WorkerProcesses | None
    started: int

    async def end_answers(self, seconds: float) -> None:
        """Let the server stop within `seconds`: end the answers that have no end of their own, and bound the waits."""
        self.admission.stop(seconds)
        self.observability.recorder.end()
        await self.observability.snapshot.end()


def services_of(request: Request) -> Services:
    """Return the services of the application that a request was sent to."""
    services: Services = request.app.state.services
    return services


@asynccontextmanager
async def running_services(
    settings: Settings, file: SettingsFile | None = None, worker_processes: WorkerProcesses | None = None
) -> AsyncIterator[Services]:
    """Start all services of the settings, and stop them when the context ends."""
    async with AsyncExitStack() as stack:
        # Made: nothing runs but the index.
        indexer = stack.enter_context(running_indexer(settings, worker_processes))
        fleet = build_fleet(settings, indexer)
        networks = AllowedNetworks(settings.fleet.allowed_networks, fleet.is_untrusted_host)
        session = await stack.enter_async_context(client_session(settings.upstream, networks))
        cache_state = build_cache_state(indexer)
        tokenizers = Tokenizers(settings.tokenizer.threads, most_characters=settings.limits.characters)
        stack.push_async_callback(tokenizers.close)
        forwards = settings.proxy.forward_tokens is ForwardTokens.AUTO
        source = TokenizerSource(
            tokenizers, settings.models, session, settings.tokenizer, cache_state.audit.audits, forwards
        )
        stack.push_async_callback(source.close)
        adapters = Adapters(session)
        stack.push_async_callback(adapters.close)
        commands = EngineCommands(fleet, session)
        load = LoadTable()
        sharing = build_sharing(settings, load, worker_processes)
        noise = PromptNoise(tokenizers.text_of, settings.logs.prompt_text)
        sampled = SampledTraffic(indexer.names, StoredPrompts(indexer, cache_state.audit.caches), noise)
        state = build_state(settings, fleet, indexer, load, sharing, cache_state)
        routing = build_routing(settings, state, fleet, indexer, tokenizers, sampled.kept, session=session)
        late_binding = state.policy.spec.late_binding
        admission = Admission(routing.selector, routing.placement, settings.admission, late_binding, gate=state.gate)
        hooks = build_hooks(settings, session)
        observability = build_observability(
            settings, fleet, indexer, tokenizers, source, routing, admission, sampled, hooks
        )
        upstreams = build_upstreams(settings, networks, fleet)
        proxy = build_forwarding(settings, fleet, upstreams, routing, admission, observability, source, hooks)

        async def on_model(worker: Worker, model: ServedModel) -> None:
            await source.provide(worker, model)
            adapters.provide(worker, model)

        async def on_declared(worker: Worker, model: ServedModel) -> None:
            """Load no tokenizer, because the prompts for declared workers are token ids."""

        async def check_streams(sources: Sequence[EventSource]) -> Sequence[EventSource]:
            allowed, refused = await allowed_sources(networks, sources)
            if refused:
                raise ValueError(refused[0])
            return allowed

        peer_load = sharing.peer_load.in_flight
        watch = FleetWatch(fleet, settings.fleet, indexer, session, networks, on_model, peer_load)

        reservations = Reservations(fleet, routing, admission, EXPIRY)
        stack.callback(reservations.close)
        declared = DeclaredWorkers(fleet, watch.prober, DECLARED_SOURCE, on_declared)
        catalogue = WorkerCatalogue(fleet, indexer, declared, check_streams)
        selection = SelectionService(indexer, routing, reservations, catalogue)

        # Subscribed: before the first event.
        subscriptions.subscribe_routing(routing, fleet)
        subscriptions.subscribe_commands(commands, routing, fleet)
        subscriptions.subscribe_admission(admission, routing, fleet)
        fleet.on_removed.append(reservations.worker_removed)
        subscriptions.subscribe_observability(observability, admission, routing, fleet)
        subscriptions.subscribe_tokens(source, adapters, fleet)
        subscriptions.subscribe_forwarding(proxy, routing, fleet)

        # Started: what starts a task also ends it.
        sharing.start()
        stack.push_async_callback(sharing.stop)
        if worker_processes:
            await worker_processes.catch_up(fleet, catalogue.upsert)
        await watch.start()
        stack.push_async_callback(watch.stop)
        await asyncio.to_thread(indexer.wait_until_caught_up, CATCH_UP_SECONDS)
        stack.push_async_callback(end_tasks, follow_sources(settings, file, session, fleet))
        registered_streams = RegisteredStreams(indexer, networks)
        stack.push_async_callback(end_tasks, [asyncio.create_task(registered_streams.run())])
        stack.push_async_callback(end_tasks, [asyncio.create_task(observability.snapshot.run())])
        stack.push_async_callback(proxy.close)
        waits_for_workers = bool(settings.admission.cold_start_timeout)
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
            commands,
            routing,
            admission,
            selection,
            observability,
            Readiness(fleet, indexer, CATCH_UP_SECONDS, waits_for_workers),
            proxy,
            worker_processes,
            int(time.time()),
        )
