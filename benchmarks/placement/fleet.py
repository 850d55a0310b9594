"""A real router over workers that are never asked anything: each has a load, some hold the start of the prompts."""

from __future__ import annotations

from random import Random

import aiohttp

from indexer import Indexer, Registration, Target
from kvevents import BlockStored, EventBatch
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable
from router.policies import NamedPolicy
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.routing.router import Router
from router.settings import AuditSettings, DisaggregationSettings, FleetSettings, WorkerSettings
from router.sharing import LoadSharing, PeerLoad
from router.tokens.tokenizers import Tokenizers

MODEL, BLOCK = "model", 16
SHARED_TOKENS = 1024


def router_over(
    targets: int, holders: int, policy: NamedPolicy, indexer: Indexer, session: aiohttp.ClientSession
) -> Router:
    """A router over `targets` workers, of which `holders` hold the tokens 0, 1, 2, … up to `SHARED_TOKENS`."""
    random = Random(0)
    urls = [f"http://10.0.{number // 256}.{number % 256}:8000" for number in range(targets)]

    async def nothing(*_: object) -> None: ...

    workers = [WorkerSettings.model_validate({"url": url}) for url in urls]
    fleet = Fleet(workers, FleetSettings(), indexer, session, nothing)
    stored = BlockStored(list(range(SHARED_TOKENS // BLOCK)), None, list(range(SHARED_TOKENS)), BLOCK)
    loads = LoadTable()
    holding = set(random.sample(range(targets), holders))
    for number, worker in enumerate(fleet.workers):
        target = Target(worker.url, 0, MODEL)
        worker.describe(WorkerDescription(Engine.VLLM, {MODEL: ServedModel(MODEL, MODEL)}, block_size=BLOCK))
        worker.problem, worker.targets = None, {target}
        indexer.register(Registration(target, None, "vLLM", BLOCK))
        if number in holding:
            indexer.index.apply(target, EventBatch(0.0, [stored], 0))
        load = loads.of(worker.url, 0)
        load.requests, load.context = random.randrange(40), random.randrange(200_000)
        load.pending = random.randrange(8000)
    sent_prefixes = SentPrefixes()
    return Router(
        fleet,
        indexer,
        Tokenizers(),
        policy,
        loads,
        InFlightPrefixes(0.0),
        Learned(Rates()),
        sent_prefixes,
        HitAudit(indexer, sent_prefixes, AuditSettings()),
        LoadSharing(loads, PeerLoad(5.0, 2.0), []),
        DisaggregationSettings(),
    )
