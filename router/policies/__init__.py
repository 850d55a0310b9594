"""Policies: pure functions from candidates and a request to a decision."""

from __future__ import annotations

from router.policies.kv_aware import KvAware, KvWeights, kv_aware, kv_cost
from router.policies.linear import CostColumns, LinearPolicy
from router.policies.records import ByTurn, Candidate, Cost, Decision, Policy, Request
from router.policies.registry import POLICIES, NamedPolicy, PolicySpec, made, policy_named

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
    "made",
    "policy_named",
]
