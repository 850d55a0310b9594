"""Where a request should go: policies are pure functions from candidates and a request to a decision.

records      what a policy is given and what it answers
registry     the policies by name, what each needs and where it comes from
linear       policies whose cost is a straight line of the uncached tokens: most are
cost_columns the lines of all targets as columns, which native code goes through
kv_aware     the default: prefill tokens, load and evictions in one cost
in_seconds   the same in seconds, for unlike workers whose rates are known
peers        what other routers do
rates        how fast workers are, learned from their answers
"""

from __future__ import annotations

from router.policies.cost_columns import CostColumns
from router.policies.kv_aware import KvAware, KvWeights, kv_aware, kv_cost
from router.policies.linear import LinearPolicy
from router.policies.records import ByTurn, Candidate, Cost, Decision, Policy, Request
from router.policies.registry import POLICIES, NamedPolicy, PolicySpec, policy_named

__all__ = [
    "POLICIES",
    "ByTurn",
    "Candidate",
    "Cost",
    "CostColumns",
    "Decision",
    "KvAware",
    "KvWeights",
    "LinearPolicy",
    "NamedPolicy",
    "Policy",
    "PolicySpec",
    "Request",
    "kv_aware",
    "kv_cost",
    "policy_named",
]
