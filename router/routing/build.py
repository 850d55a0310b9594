"""Routing, and the cache state that it reads, as records that are made once from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import aiohttp

from indexer import Indexer
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_cache import TargetCaches
from router.fleet.fleet import Fleet
from router.load.running_prompts import RunningPrompts
from router.load.target_load import LoadTable
from router.policies import policy_named
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.routing.assignment import Samples
from router.routing.encoders import Encoders
from router.routing.placement import Placement
from router.routing.pool_verifier import PoolVerifier
from router.routing.prompt_reader import PromptReader
from router.routing.pulls import Pulls
from router.routing.selector import TargetSelector
from router.routing.sources import SourceFinder
from router.routing.state import RoutingState
from router.settings import Settings
from router.sharing import LoadSharing
from router.tokens.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class CacheState:
    """The prefixes in flight, the sent prefixes, and the audit of the predicted cache hits."""

    in_flight_prefixes: InFlightPrefixes
    sent_prefixes: SentPrefixes
    audit: HitAudit


def build_cache_state(indexer: Indexer) -> CacheState:
    """Return the cache state of an index's targets."""
    in_flight_prefixes, sent_prefixes = InFlightPrefixes(), SentPrefixes()
    return CacheState(
        in_flight_prefixes, sent_prefixes, HitAudit(indexer, TargetCaches(), sent_prefixes, indexer.names)
    )


@dataclass(frozen=True, slots=True)
class Routing:
    """The parts that bring a request to its target, and the state that they share."""

    state: RoutingState
    reader: PromptReader
    selector: TargetSelector
    placement: Placement
    encoders: Encoders


def build_state(
    settings: Settings,
    fleet: Fleet,
    indexer: Indexer,
    load: LoadTable,
    sharing: LoadSharing,
    cache_state: CacheState,
) -> RoutingState:
    """Return the state that the parts of routing share, with the policy of the settings and nothing learned yet."""
    policy = settings.policy
    learned = Learned(Rates(), cpu_token=policy.cpu_token, disk_token=policy.disk_token)
    sources = pulls = None
    if settings.pulls.protocol is not None:
        pulls = Pulls(settings.pulls, indexer, fleet.at, cache_state.audit.caches, indexer.names)
    if settings.pools or pulls is not None:
        prices = {pool.name: pool.price for pool in settings.pools if pool.price is not None}
        sources = SourceFinder(indexer, pulls, learned.rates, cache_state.audit.caches, prices)
    return RoutingState(
        fleet,
        indexer,
        policy_named(policy, Random()),
        load,
        cache_state.in_flight_prefixes,
        cache_state.sent_prefixes,
        cache_state.audit,
        learned,
        sharing,
        sources=sources,
        pulls=pulls,
        running=RunningPrompts() if settings.admission.requests == "auto" else None,
    )


def build_routing(
    settings: Settings,
    state: RoutingState,
    fleet: Fleet,
    indexer: Indexer,
    tokenizers: Tokenizers,
    samples: Samples | None = None,
    random: Random | None = None,
    session: aiohttp.ClientSession | None = None,
) -> Routing:
    """Return the parts of routing over one state. `random` breaks ties. `session`: for questions to pools."""
    random = random or Random()
    for prompts in (state.in_flight_prefixes, state.sharing.peer_load.prompts):
        prompts.evictions = indexer.index.evictions
    selector = TargetSelector(state, settings.disaggregation, random)
    masters = any(pool.master is not None for pool in settings.pools)
    verifier = PoolVerifier(indexer, session) if session is not None and masters else None
    reader = PromptReader(state, fleet, indexer, tokenizers, settings.proxy.forward_unknown_models, verifier)
    encoders = Encoders(fleet, state.load, random, state.clock)
    return Routing(state, reader, selector, Placement(state, selector, samples), encoders)
