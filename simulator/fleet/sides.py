"""The policies of a run, in the order of its tables. Ours comes as the router has it, and without late binding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from router.policies import Policy, policy_named
from router.settings import PolicyName, PolicySettings


class Knowledge(StrEnum):
    """What is known of caches: by events, or by what was sent to workers, with or without what they report of it."""

    EVENTS = "events"
    REPORTED = "reported"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class Side:
    """A policy as it is called in tables, whether requests are held, and what it knows of the caches.

    `weights`: of its cost, where they are not the default ones.
    """

    name: str
    policy: PolicyName
    late_binding: bool = False
    knowledge: Knowledge = Knowledge.EVENTS
    weights: PolicySettings | None = None

    def policy_for(self, random: Random) -> Policy:
        """A policy of its own for one run."""
        return policy_named(self.weights or PolicySettings(name=self.policy), random).choose


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
# Before workers that tell no events. SGLang's cache_aware keeps a tree of what it sent to each worker.
WITHOUT_EVENTS = [
    OURS,
    Side("kv_aware, reported", PolicyName.KV_AWARE, late_binding=True, knowledge=Knowledge.REPORTED),
    Side("kv_aware, sent", PolicyName.KV_AWARE, late_binding=True, knowledge=Knowledge.SENT),
    Side("cache_aware, sent", PolicyName.CACHE_AWARE, knowledge=Knowledge.SENT),
    Side("round_robin", PolicyName.ROUND_ROBIN),
]
SIDES = [OURS, OURS_AT_ONCE, *PEERS]
