"""Policies: pure functions from candidates and a request to a decision.

- `records`: the input and output of a policy.
- `registry`: the policies by name, their needs and their sources.
- `linear`: policies whose cost is linear in the uncached tokens, which most are; costs as columns for native code.
- `kv_aware`: the default policy, with prefill tokens, load and evictions in one cost.
- `peers`: the policies of other routers.
- `rates`: the speed of workers, learned from their responses.
"""

from __future__ import annotations

from router.policies.kv_aware import KvAware, KvWeights, kv_aware, kv_cost
from router.policies.linear import CostColumns, LinearPolicy
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
