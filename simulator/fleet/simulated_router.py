"""A simulated router: its policy and parts, and the product's selection and admission with any clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Literal

from router.admission.admission import Admission
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_cache import TargetCaches
from router.fleet.worker import Worker
from router.load.running_prompts import RunningPrompts
from router.load.target_load import LoadTable
from router.policies import NamedPolicy, policy_named
from router.policies.pairs import PairRule
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.prediction.slo import MISSED_SLO_COST
from router.routing.placement import Placement
from router.routing.selector import TargetSelector
from router.routing.sources import LoadRates, Pools, SourceFinder
from router.routing.state import RoutingState
from router.settings import (
    AdmissionSettings,
    DisaggregationSettings,
    FleetSettings,
    PolicyName,
    PolicySettings,
)
from router.settings.own_code import check_function
from router.sharing import LoadSharing, PeerLoad, SharingChannel
from simulator.fleet.observer import Observer
from simulator.fleet.sources import SimulatedPeers, SourceSpec
from simulator.fleet.workers import EventIndex, SimulatedWorkers


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

    - `late_binding`: whether requests wait while the chosen worker is busy.
    - `requests`: `admission.requests`.
    - `weights`: the settings of its policy; None for the defaults.
    - `sources`: whether it counts what workers can load from the pool and from peers.
    - `programs`: whether calls of sessions wait for room.
    - `pairs`: makes its choice of a prefill and a decode worker; None for that of its policy.
    - `slo_miss_cost`: the cost of a missed SLO, in prefill tokens.
    - `metrics_interval`: the seconds between two scrapes of an engine.
    """

    name: str
    policy: str
    late_binding: bool = False
    requests: int | Literal["auto"] | None = None
    knowledge: Knowledge = Knowledge.EVENTS
    weights: PolicySettings | None = None
    slos: bool = False
    hints: bool = False
    sources: bool = False
    programs: bool = False
    pairs: Callable[[Random], PairRule] | None = None
    slo_miss_cost: float = MISSED_SLO_COST
    metrics_interval: float = FleetSettings().metrics_interval

    @property
    def settings(self) -> PolicySettings:
        return self.weights or PolicySettings.model_validate({"name": self.policy})

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:  # noqa: ARG002
        """Return a policy for one run. Rules that predict latencies override this, and read `learned` and `load`."""
        policy = policy_named(self.settings, random)
        return policy if self.pairs is None else replace(policy, choose_pair=self.pairs(random))

    def make_admission(self, policy: NamedPolicy, make: Callable[[type[Admission]], Admission]) -> Admission:  # noqa: ARG002
        """Return the queue for one run, which `make` creates. Rules with a queue of their own override this."""
        return make(Admission)


OURS = Side("kv_aware", PolicyName.KV_AWARE, late_binding=True)
PLAIN = [
    Side(name.value, name)
    for name in (
        PolicyName.CACHE_AWARE,
        PolicyName.SESSION_AFFINITY,
        PolicyName.LEAST_LOADED,
        PolicyName.ROUND_ROBIN,
    )
]


def side_named(name: str) -> Side:
    """Return the router with a policy, by the policy's name in the settings. Raises ValueError for other names."""
    if name == OURS.name:
        return OURS
    return Side(name, name if name in list(PolicyName) else check_function(name, list(PolicyName)))


def side_with(scorer: str) -> Side:
    """Return the router with the default policy and a scorer, by its name in `policy.extra`. Raises ValueError."""
    weights = PolicySettings(extra=[check_function(scorer, [])])
    return replace(OURS, name=f"{OURS.name} + {scorer}", weights=weights)


@dataclass(frozen=True, slots=True)
class SimulatedRouter:
    """One router of a simulation. All but `workers` and `observer` are the objects of a router that serves."""

    workers: SimulatedWorkers
    state: RoutingState
    selector: TargetSelector
    placement: Placement
    admission: Admission
    observer: Observer

    def scraped(self, worker: Worker, metrics: str) -> None:
        """Read an engine's metrics."""
        sharing = self.state.sharing
        in_flight = worker.health.in_flight() + sharing.peer_load.in_flight(worker.url, worker.ranks())
        worker.metrics.read(metrics, in_flight)
        self.selector.scraped(worker)
        self.admission.wake()


def build_router(
    workers: SimulatedWorkers,
    index: EventIndex,
    side: Side,
    random: Random,
    clock: Callable[[], float],
    channels: Sequence[SharingChannel] = (),
    sources: SourceSpec | None = None,
    pools: Pools | None = None,
) -> SimulatedRouter:
    """Return a router over its own records of the workers. It shares its load over `channels`."""
    settings = side.settings
    load = LoadTable(clock)
    sharing = LoadSharing(load, PeerLoad(clock=clock), list(channels))
    sent_prefixes = SentPrefixes(clock)
    learned = Learned(Rates(), clock, settings.cpu_token, settings.disk_token)
    policy = side.make_policy(random, learned, load)
    audit = HitAudit(index, TargetCaches(), sent_prefixes, clock=clock)
    in_flight_prefixes = InFlightPrefixes(clock=clock)
    for prompts in (in_flight_prefixes, sharing.peer_load.prompts):
        prompts.evictions = index.index.evictions
    state = RoutingState(
        workers, index, policy, load, in_flight_prefixes, sent_prefixes, audit, learned, sharing, clock
    )
    if side.requests == "auto":
        state.running = RunningPrompts()
    if sources is not None and side.sources:
        peers = SimulatedPeers(index.held) if sources.pulls else None
        rates = LoadRates(clock=clock)
        state.sources = SourceFinder(pools, peers, learned.rates, audit.caches, rates=rates, random=Random(0))
    selector = TargetSelector(state, DisaggregationSettings(), random, side.slo_miss_cost)
    placement = Placement(state, selector)
    programs: Literal["auto", "off"] = "auto" if side.programs else "off"
    admission_settings = AdmissionSettings(requests=side.requests, late_binding=side.late_binding, programs=programs)

    def make_admission(kind: type[Admission]) -> Admission:
        return kind(selector, placement, admission_settings, policy.spec.late_binding, clock, state.gate)

    admission = side.make_admission(policy, make_admission)
    load.on_ended.append(admission.wake)
    if admission.late_binding or admission.limits.computed or type(admission) is not Admission:
        load.on_first_byte.append(admission.wake)
    sharing.on_update.append(admission.wake)
    observer = policy.choose if isinstance(policy.choose, Observer) else Observer()
    return SimulatedRouter(workers, state, selector, placement, admission, observer)
