"""The parts of a router that a rule of another one reads, and its description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from router.load.target_load import LoadTable
from router.policies import Policy
from router.policies.pairs import PairRule
from router.prediction.learned import Learned
from router.settings import FleetSettings

METRICS_INTERVAL = FleetSettings().metrics_interval


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a router that a rule may read. `random` breaks its ties."""

    random: Random
    learned: Learned
    load: LoadTable


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of another router.

    - `source`: its repository and commit, or its paper.
    - `pairs`: makes its choice of a prefill and a decode worker; None: each of them by the rule.
    - `metrics_interval`: the seconds between two scrapes of an engine.
    - `queues`: requests wait while all targets have much to compute, as in `PrefillQueue`.
    """

    make: Callable[[Parts], Policy]
    source: str
    pairs: Callable[[Random], PairRule] | None = None
    metrics_interval: float = METRICS_INTERVAL
    queues: bool = False
