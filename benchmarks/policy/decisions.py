"""The processor time of a decision, as the router makes it. A tenth of the targets hold part of the prompt."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from random import Random
from time import process_time

from benchmarks.policy.sides import PEERS
from indexer import Target
from router.load.target_load import LoadTable
from router.policies import Candidate, CostColumns, LinearPolicy, Policy, Request
from router.policies.rates import Rates
from router.prediction.learned import Learned
from simulator.fleet.simulated_router import OURS

TARGETS = (64, 4096)
_SECONDS = 0.3


def candidates(count: int, random: Random) -> list[Candidate]:
    """Return candidates with random loads."""
    return [
        Candidate(
            Target(f"http://10.0.{number // 256}.{number % 256}:8000", 0, "model"),
            overlap=random.randrange(16_000) if random.random() < 0.1 else 0,
            requests=random.randrange(40),
            pending=random.randrange(8000),
            context=random.randrange(200_000),
            waiting=random.randrange(3),
            eviction=random.choice((0.0, 0.4)),
            kv_usage=random.random(),
        )
        for number in range(count)
    ]


def decision_seconds(count: int) -> dict[str, float]:
    """Return the median seconds of a decision among `count` targets, by policy."""
    costs: dict[str, float] = {}
    for side in (OURS, *PEERS):
        random = Random(1)
        policy = side.make_policy(random, Learned(Rates(), process_time, 0.1, 0.5), LoadTable(process_time))
        decide = _decider(policy.choose, candidates(count, random))
        times: list[float] = []
        gc.disable()
        while sum(times) < _SECONDS:
            request = Request(16_384, 300, str(len(times)))
            begun = process_time()
            decide(request)
            times.append(process_time() - begun)
        gc.enable()
        costs[side.name] = sorted(times)[len(times) // 2]
    return costs


def _decider(policy: Policy, among: list[Candidate]) -> Callable[[Request], object]:
    """Return a function that decides as the router does: by the columns of a linear policy, or by all candidates."""
    if not isinstance(policy, LinearPolicy):
        return lambda request: policy(among, request)
    columns, held = CostColumns(len(among)), array("I", [candidate.overlap for candidate in among])
    for row, candidate in enumerate(among):
        columns.fixed[row], columns.per_token[row], columns.shares[row] = policy.line(candidate)
    return lambda request: policy.cheapest_row(columns, request, held, {}, (), {})
