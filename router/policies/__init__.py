"""Where a request should go: policies are pure functions from candidates and a request to a decision.

records      what a policy is given and what it answers
kv_aware     the default: prefill tokens, load and evictions in one cost
in_seconds   the same in seconds, for unlike workers whose rates are known
peers        what other routers do
"""

from __future__ import annotations

from random import Random

from router.policies.kv_aware import KvWeights, kv_aware, kv_cost
from router.policies.peers import (
    AtRandom,
    RoundRobin,
    cache_aware,
    dynamo,
    least_loaded,
    llm_d,
    lmetric,
    session_affinity,
)
from router.policies.records import ByTurn, Candidate, Cost, Decision, Policy, Request
from router.settings import PolicyName, PolicySettings

__all__ = [
    "WITHOUT_PROMPTS",
    "ByTurn",
    "Candidate",
    "Cost",
    "Decision",
    "KvWeights",
    "Policy",
    "Request",
    "kv_aware",
    "kv_cost",
    "policy_named",
]

# Those that look at no prompt.
WITHOUT_PROMPTS = frozenset((PolicyName.ROUND_ROBIN, PolicyName.RANDOM, PolicyName.LEAST_LOADED))


def policy_named(settings: PolicySettings, random: Random) -> Policy:
    """The policy that the settings name. `random` breaks its ties."""
    match settings.name:
        case PolicyName.KV_AWARE:
            return kv_aware(
                KvWeights(
                    settings.interference,
                    settings.interference_per_request,
                    settings.eviction,
                    settings.context,
                    settings.cpu_token,
                    settings.disk_token,
                    settings.near,
                ),
                random,
            )
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.RANDOM:
            return AtRandom(random)
        case PolicyName.LEAST_LOADED:
            return least_loaded(random)
        case PolicyName.SESSION_AFFINITY:
            return session_affinity(random)
        case PolicyName.CACHE_AWARE:
            return cache_aware(random)
        case PolicyName.DYNAMO:
            return dynamo(random)
        case PolicyName.LLM_D:
            return llm_d(random)
        case PolicyName.LMETRIC:
            return lmetric(random)
