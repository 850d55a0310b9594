"""Routing over workers that receive no requests: for benchmarks of the choice, and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from random import Random

from indexer import Indexer
from router.app.subscriptions import subscribe_routing
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_cache import TargetCaches
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.load.peer_load import PeerLoad
from router.load.running_prompts import RunningPrompts
from router.load.target_load import LoadTable
from router.policies import NamedPolicy, policy_named
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.routing.build import Routing, build_routing
from router.routing.state import RoutingState
from router.settings import FleetSettings, Settings, WorkerSettings
from router.sharing import LoadSharing
from router.tokens.tokenizers import Tokenizers

MODEL, BLOCK = "model", 16


def make_fleet(
    workers: Iterable[WorkerSettings],
    indexer: Indexer,
    settings: FleetSettings | None = None,
    description: WorkerDescription | None = None,
) -> Fleet:
    """Return a fleet of workers that are up. No probe and no scrape runs.

    - `description`: what every worker serves; None: `MODEL`, on one rank with blocks of `BLOCK` tokens.
    """
    served = description or WorkerDescription(Engine.VLLM, {MODEL: ServedModel(MODEL, MODEL)}, block_size=BLOCK)
    fleet = Fleet(workers, settings or FleetSettings(), indexer)
    for worker in fleet.workers:
        worker.describe(served)
        worker.problem = None
    return fleet


def make_routing(
    fleet: Fleet,
    indexer: Indexer,
    settings: Settings | None = None,
    *,
    policy: NamedPolicy | None = None,
    peer_load: PeerLoad | None = None,
    linger: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Routing:
    """Return routing over a fleet and an index, subscribed to their events.

    - `settings`: None: the defaults.
    - `policy`: None: the one that the settings name, with ties broken by `Random(1)`.
    - `peer_load`: the load of other routers; None: none.
    - `linger`: the seconds that a prompt counts as cached soon after its request ended.
    """
    settings = settings or Settings()
    load, sent_prefixes = LoadTable(clock), SentPrefixes(clock)
    state = RoutingState(
        fleet,
        indexer,
        policy or policy_named(settings.policy, Random(1)),
        load,
        InFlightPrefixes(linger, clock),
        sent_prefixes,
        HitAudit(indexer, TargetCaches(), sent_prefixes, clock=clock),
        Learned(Rates(), clock),
        LoadSharing(load, peer_load or PeerLoad(5.0, 2.0, clock), []),
        clock,
        running=RunningPrompts() if settings.admission.requests == "auto" else None,
    )
    routing = build_routing(settings, state, fleet, indexer, Tokenizers(), random=Random(1))
    subscribe_routing(routing, fleet)
    return routing
