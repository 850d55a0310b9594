"""Where a request should go: policies are pure functions from candidates and a request to a decision.

records      what a policy is given and what it answers
registry     the policies by name, what each needs and where it comes from
kv_aware     the default: prefill tokens, load and evictions in one cost
in_seconds   the same in seconds, for unlike workers whose rates are known
peers        what other routers do
rates        how fast workers are, learned from their answers
"""

from __future__ import annotations

from router.policies.kv_aware import KvWeights, kv_aware, kv_cost
from router.policies.records import ByTurn, Candidate, Cost, Decision, Policy, Request
from router.policies.registry import POLICIES, NamedPolicy, PolicySpec, policy_named

__all__ = [
    "POLICIES",
    "ByTurn",
    "Candidate",
    "Cost",
    "Decision",
    "KvWeights",
    "NamedPolicy",
    "Policy",
    "PolicySpec",
    "Request",
    "kv_aware",
    "kv_cost",
    "policy_named",
]
