"""The time of one choice in a fleet of many workers."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from time import thread_time_ns
from typing import NamedTuple

import msgspec

from indexer import Indexer, MatchQuery, Registration, Target, TargetRows
from indexer.hashing import PackedPrompt
from kvevents import BlockStored, EventBatch
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable
from router.policies import NamedPolicy, Policy, policy_named
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.prediction.slo import SLO
from router.routing import router as router_module
from router.routing.routed_prompt import RoutedPrompt
from router.routing.router import Router
from router.settings import AuditSettings, DisaggregationSettings, FleetSettings, PolicySettings, WorkerSettings
from router.sharing import LoadSharing, PeerLoad
from router.tokens.tokenizers import Tokenizers

MODEL, BLOCK = "model", 16
SHARED_TOKENS = 1024


def router_over(targets: int, holders: int, policy: NamedPolicy, indexer: Indexer) -> Router:
    """A router over `targets` workers, of which `holders` hold the tokens 0, 1, 2, … up to `SHARED_TOKENS`."""
    random = Random(0)
    urls = [f"http://10.0.{number // 256}.{number % 256}:8000" for number in range(targets)]

    workers = [WorkerSettings.model_validate({"url": url}) for url in urls]
    fleet = Fleet(workers, FleetSettings(), indexer)
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


TARGETS = (1, 64, 512, 4096)
_OWN_TOKENS = 1024
_FEWEST, _MOST, _SECONDS = 25, 2000, 1.0


class Measured(NamedTuple):
    """One fleet, in microseconds: a placement by columns and by candidates, what of it is the index's answer, and the
    choice for a request whose promise no target keeps."""

    targets: int
    holders: int
    columns: float
    candidates: float
    index_alone: float
    kept_nowhere: float


async def measure(targets: int, holders: int) -> Measured:
    """Measure one fleet."""
    indexer = Indexer()
    try:
        by_columns = policy_named(PolicySettings(), Random(1))
        by_candidates = NamedPolicy(by_columns.spec, _called(by_columns.choose))
        routers = [router_over(targets, holders, each, indexer) for each in (by_columns, by_candidates)]
        columns, candidates = (_median(_placements(router)) for router in routers)
        kept_nowhere = _median(_choices_kept_nowhere(routers[0]))
        return Measured(targets, holders, columns, candidates, _median(_matches(indexer)), kept_nowhere)
    finally:
        indexer.stop()


def _called(policy: Policy) -> Policy:
    """The same policy as one that looks at a record of every candidate."""
    return lambda candidates, request: policy(candidates, request)


def _placements(router: Router) -> Iterator[float]:
    """Microseconds of placements: choice, reservation and what is recorded of a request in flight."""
    for prompt in _prompts():
        begun = thread_time_ns()
        assignment = router.place(prompt)
        yield (thread_time_ns() - begun) / 1000
        assignment.first_byte()
        assignment.release()


def _choices_kept_nowhere(router: Router) -> Iterator[float]:
    """Microseconds of choices that look at what every target would take."""
    slo = SLO(None, tpot=1e-9, arrived=0.0)
    for prompt in _prompts():
        begun = thread_time_ns()
        router.choose(prompt, slo=slo)
        yield (thread_time_ns() - begun) / 1000


def _matches(indexer: Indexer) -> Iterator[float]:
    """Microseconds of the index's answers to the same prompts."""
    targets = [registration.target for registration in indexer.registered()]
    rows = TargetRows(len(targets), {target: row for row, target in enumerate(targets)})
    for prompt in _prompts():
        begun = thread_time_ns()
        indexer.match_rows(MatchQuery(MODEL, prompt.token_ids[0], None, None), rows)
        yield (thread_time_ns() - begun) / 1000


def _prompts() -> Iterator[RoutedPrompt]:
    """Prompts that begin alike, and go on each in its own way."""
    random = Random(1)
    while True:
        packed = PackedPrompt.of([*range(SHARED_TOKENS), *random.choices(range(100_000), k=_OWN_TOKENS)])
        yield RoutedPrompt(MODEL, len(packed), [packed], [packed], exact=True)


def _median(microseconds: Iterator[float]) -> float:
    times: list[float] = []
    gc.disable()
    while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < 1e6 * _SECONDS):
        times.append(next(microseconds))
    gc.enable()
    return median(times)


def compiled() -> bool:
    """Whether the router that runs here is compiled."""
    return not str(router_module.__file__).endswith(".py")


def main(write: Callable[[bytes], object]) -> None:
    """Measure all fleets: none, eight and all targets hold the start of the prompts."""
    fleets = [(targets, holders) for targets in TARGETS for holders in sorted({0, min(8, targets), targets})]
    write(msgspec.json.encode([asyncio.run(measure(*fleet)) for fleet in fleets]))


if __name__ == "__main__":
    main(sys.stdout.buffer.write)
