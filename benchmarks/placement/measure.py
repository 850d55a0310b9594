"""The time of one choice in a fleet of many workers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from time import thread_time_ns
from typing import NamedTuple

import msgspec

from benchmarks.make_routing import BLOCK, MODEL, make_fleet, make_routing
from indexer import Indexer, MatchQuery, Registration, RowMatches, Target, TargetRows
from indexer.hashing import PackedPrompt
from kvevents import BlockStored, EventBatch
from router.apis.requests import RoutedRequest
from router.policies import NamedPolicy, Policy, policy_named
from router.prediction.slo import SLO
from router.routing import selector as selector_module
from router.routing.build import Routing
from router.settings import PolicySettings, WorkerSettings

SHARED_TOKENS = 1024


def routing_over(targets: int, holders: int, policy: NamedPolicy, indexer: Indexer) -> Routing:
    """Return routing over `targets` workers, of which `holders` hold the tokens 0, 1, 2, … up to `SHARED_TOKENS`."""
    random = Random(0)
    urls = [f"http://10.0.{number // 256}.{number % 256}:8000" for number in range(targets)]
    fleet = make_fleet([WorkerSettings.model_validate({"url": url}) for url in urls], indexer)
    routing = make_routing(fleet, indexer, policy=policy, linger=0.0)
    stored = BlockStored(list(range(SHARED_TOKENS // BLOCK)), None, list(range(SHARED_TOKENS)), BLOCK)
    holding = set(random.sample(range(targets), holders))
    for number, worker in enumerate(fleet.workers):
        target = Target(worker.url, 0, MODEL)
        worker.targets = {target}
        indexer.register(Registration(target, None, "vLLM", BLOCK))
        if number in holding:
            indexer.index.apply(target, EventBatch(0.0, [stored], 0))
        load = routing.state.load.of(worker.url, 0)
        load.requests, load.context = random.randrange(40), random.randrange(200_000)
        load.pending = random.randrange(8000)
    return routing


TARGETS = (1, 64, 512, 4096)
_OWN_TOKENS = 1024
_FEWEST, _MOST, _SECONDS = 25, 2000, 1.0


class Measured(NamedTuple):
    """The measurements of one fleet, in microseconds.

    - `columns`, `candidates`: a placement, by columns and by candidates.
    - `nothing_shared`: a placement by columns of prompts without a common start.
    - `index_alone`: the index's answer.
    - `kept_nowhere`: the choice for an SLO that no target meets.
    """

    targets: int
    holders: int
    columns: float
    candidates: float
    nothing_shared: float
    index_alone: float
    kept_nowhere: float


def measure(targets: int, holders: int) -> Measured:
    """Measure one fleet."""
    indexer = Indexer()
    try:
        by_columns = policy_named(PolicySettings(), Random(1))
        by_candidates = NamedPolicy(by_columns.spec, _called(by_columns.choose))
        both = [routing_over(targets, holders, each, indexer) for each in (by_columns, by_candidates)]
        columns, candidates = (_median(_placements(routing, _prompts())) for routing in both)
        apart = routing_over(targets, holders, by_columns, indexer)
        nothing_shared = _median(_placements(apart, _prompts(shared=0)))
        kept_nowhere = _median(_choices_kept_nowhere(both[0]))
        index_alone = _median(_matches(indexer))
        return Measured(targets, holders, columns, candidates, nothing_shared, index_alone, kept_nowhere)
    finally:
        indexer.stop()


def _called(policy: Policy) -> Policy:
    """Return the policy as one that reads a record of every candidate."""
    return lambda candidates, request: policy(candidates, request)


def _placements(routing: Routing, prompts: Iterator[RoutedRequest]) -> Iterator[float]:
    """Yield the microseconds of placements: choice, reservation and record of a request in flight."""
    for prompt in prompts:
        begun = thread_time_ns()
        assignment = routing.placement.place(prompt)
        yield (thread_time_ns() - begun) / 1000
        assignment.first_byte()
        assignment.release()


def _choices_kept_nowhere(routing: Routing) -> Iterator[float]:
    """Yield the microseconds of choices that predict the times of every target."""
    slo = SLO(None, tpot=1e-9, arrived=0.0)
    for prompt in _prompts():
        begun = thread_time_ns()
        routing.selector.choose(prompt, slo=slo)
        yield (thread_time_ns() - begun) / 1000


def _matches(indexer: Indexer) -> Iterator[float]:
    """Yield the microseconds of the index's answers to the same prompts."""
    targets = [registration.target for registration in indexer.registered()]
    rows = TargetRows(len(targets), {target: row for row, target in enumerate(targets)})
    for prompt in _prompts():
        begun = thread_time_ns()
        indexer.match_rows(MatchQuery(MODEL, prompt.token_ids[0], None, None), rows, RowMatches(rows))
        yield (thread_time_ns() - begun) / 1000


def _prompts(shared: int = SHARED_TOKENS) -> Iterator[RoutedRequest]:
    """Yield prompts of equal length with a common start of `shared` tokens and different ends."""
    random = Random(1)
    while True:
        own = random.choices(range(100_000), k=SHARED_TOKENS + _OWN_TOKENS - shared)
        packed = PackedPrompt.of([*range(shared), *own])
        yield RoutedRequest(MODEL).tokenized([packed])


def _median(microseconds: Iterator[float]) -> float:
    times: list[float] = []
    gc.disable()
    while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < 1e6 * _SECONDS):
        times.append(next(microseconds))
    gc.enable()
    return median(times)


def compiled() -> bool:
    """Return whether this router is compiled."""
    return not str(selector_module.__file__).endswith(".py")


def main(write: Callable[[bytes], object]) -> None:
    """Measure all fleets, in which no, eight and all targets hold the start of the prompts."""
    fleets = [(targets, holders) for targets in TARGETS for holders in sorted({0, min(8, targets), targets})]
    write(msgspec.json.encode([measure(*fleet) for fleet in fleets]))


if __name__ == "__main__":
    main(sys.stdout.buffer.write)
