"""What a placement costs: the index, the load, the policy and the reservation, by the router itself.

A real router over workers that get no requests: every one has something in flight, a tenth of them hold the first half
of the prompt by their events.
"""

from __future__ import annotations

import gc
from random import Random
from time import process_time

import aiohttp

from benchmarks.policy.decisions import TARGETS
from indexer import Indexer, Registration, Target
from indexer.hashing import PackedPrompt
from kvevents import BlockStored, EventBatch
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.load import LoadTable
from router.holdings.audit import HitAudit
from router.holdings.history import RoutingHistory
from router.holdings.speculation import SpeculativeHoldings
from router.learning.learned import Learned
from router.policies import policy_named
from router.policies.rates import Rates
from router.routing.routed_prompt import RoutedPrompt
from router.routing.router import Router
from router.settings import AuditSettings, DisaggregationSettings, FleetSettings, PolicySettings, WorkerSettings
from router.sharing import LoadSharing, PeerLoad
from router.tokens.tokenizers import Tokenizers

_MODEL, _BLOCK = "model", 16
_PROMPT_TOKENS = 2048
_SECONDS = 1.0


async def placing_seconds() -> dict[int, float]:
    """Seconds a placement and its release take, by how many targets there are: the median of many."""
    costs: dict[int, float] = {}
    async with aiohttp.ClientSession() as session:
        for count in TARGETS:
            indexer = Indexer()
            try:
                costs[count] = _median(_router(count, indexer, session))
            finally:
                indexer.stop()
    return costs


def _median(router: Router) -> float:
    random = Random(1)
    shared = list(range(_PROMPT_TOKENS // 2))
    times: list[float] = []
    gc.disable()
    while sum(times) < _SECONDS:
        tokens = shared + [random.randrange(100_000) for _ in range(_PROMPT_TOKENS // 2)]
        packed = PackedPrompt.of(tokens)
        prompt = RoutedPrompt(_MODEL, len(tokens), [packed], [packed], exact=True)
        begun = process_time()
        router.place(prompt).release()
        times.append(process_time() - begun)
    gc.enable()
    return sorted(times)[len(times) // 2]


def _router(count: int, indexer: Indexer, session: aiohttp.ClientSession) -> Router:
    random = Random(0)
    urls = [f"http://10.0.{number // 256}.{number % 256}:8000" for number in range(count)]

    async def nothing(*_: object) -> None: ...

    workers = [WorkerSettings.model_validate({"url": url}) for url in urls]
    fleet = Fleet(workers, FleetSettings(), indexer, session, nothing)
    tokens = list(range(_PROMPT_TOKENS // 2))
    stored = BlockStored(list(range(len(tokens) // _BLOCK)), None, tokens, _BLOCK)
    loads = LoadTable()
    for number, worker in enumerate(fleet.workers):
        target = Target(worker.url, 0, _MODEL)
        worker.description = WorkerDescription(Engine.VLLM, {_MODEL: ServedModel(_MODEL, _MODEL)}, block_size=_BLOCK)
        worker.problem, worker.targets = None, {target}
        indexer.register(Registration(target, None, "vLLM", _BLOCK))
        if number % 10 == 0:
            indexer.index.apply(target, EventBatch(0.0, [stored], 0))
        load = loads.of(worker.url, 0)
        load.requests, load.context = random.randrange(40), random.randrange(200_000)
    history = RoutingHistory()
    return Router(
        fleet,
        indexer,
        Tokenizers(),
        policy_named(PolicySettings(), random),
        loads,
        SpeculativeHoldings(2.0),
        Learned(Rates()),
        history,
        HitAudit(indexer, history, AuditSettings()),
        LoadSharing(loads, PeerLoad(5.0, 2.0), []),
        DisaggregationSettings(),
    )
