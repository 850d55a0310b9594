"""The policies of a run, in the order of its tables. Ours comes as the router has it, and without late binding."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from router.policies import Policy, policy_named
from router.settings import PolicyName, PolicySettings


@dataclass(frozen=True, slots=True)
class Side:
    """A policy as it is called in tables, and whether requests are held."""

    name: str
    policy: PolicyName
    late_binding: bool = False

    def policy_for(self, random: Random) -> Policy:
        """A policy of its own for one run, with the default settings."""
        return policy_named(PolicySettings(name=self.policy), random).choose


OURS = Side("kv_aware", PolicyName.KV_AWARE, late_binding=True)
OURS_AT_ONCE = Side("kv_aware, at once", PolicyName.KV_AWARE)
PEERS = [
    Side(name.value, name)
    for name in (
        PolicyName.DYNAMO,
        PolicyName.LLM_D,
        PolicyName.CACHE_AWARE,
        PolicyName.LMETRIC,
        PolicyName.SESSION_AFFINITY,
        PolicyName.LEAST_LOADED,
        PolicyName.ROUND_ROBIN,
    )
]
SIDES = [OURS, OURS_AT_ONCE, *PEERS]
