"""The routers that a simulation compares: a policy, with the parts of the router that work with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from router.load.target_load import LoadTable
from router.policies import NamedPolicy, policy_named
from router.prediction.learned import Learned
from router.settings import PolicyName, PolicySettings


class Knowledge(StrEnum):
    """The source of what a router knows of the workers' caches.

    - EVENTS: the engines' events.
    - REPORTED: the prompts sent to workers, and the cached tokens that answers report.
    - SENT: the prompts sent to workers.
    """

    EVENTS = "events"
    REPORTED = "reported"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class Side:
    """A router, by its name in tables.

    - `policy`: the name of its policy.
    - `late_binding`: whether requests wait while the chosen worker is busy.
    - `knowledge`: the source of what it knows of the workers' caches.
    - `weights`: the settings of its policy; None for the defaults.
    - `slos`: whether it reads the requests' SLOs.
    - `hints`: whether it reads the requests' hints.
    """

    name: str
    policy: PolicyName
    late_binding: bool = False
    knowledge: Knowledge = Knowledge.EVENTS
    weights: PolicySettings | None = None
    slos: bool = False
    hints: bool = False

    @property
    def settings(self) -> PolicySettings:
        """The settings of its policy."""
        return self.weights or PolicySettings(name=self.policy)

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:  # noqa: ARG002
        """Return a policy for one run.

        - `random`: breaks ties.
        - `learned`, `load`: what the router knows, for rules that predict latencies.
        """
        return policy_named(self.settings, random)


OURS = Side("kv_aware", PolicyName.KV_AWARE, late_binding=True)
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
