"""What a decision costs, with candidates as the router has them: a few hold part of the prompt, all have some load."""

from __future__ import annotations

import gc
from random import Random
from time import process_time

from indexer import Target
from kvrouter.tools.simulation.sides import OURS, PEERS
from router.policies import Candidate, Request

TARGETS = (64, 4096)
_SECONDS = 0.3


def candidates(count: int, random: Random) -> list[Candidate]:
    """A number of targets in the middle of a busy day."""
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
    """Seconds a decision among this many targets takes, by policy: the median of many."""
    costs: dict[str, float] = {}
    for side in (OURS, *PEERS):
        random = Random(1)
        policy, among = side.policy_for(random), candidates(count, random)
        times: list[float] = []
        gc.disable()
        while sum(times) < _SECONDS:
            request = Request(16_384, 300, str(len(times)))
            begun = process_time()
            policy(among, request)
            times.append(process_time() - begun)
        gc.enable()
        costs[side.name] = sorted(times)[len(times) // 2]
    return costs
