"""The router's own selection and admission over simulated workers, with the default settings and any clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from router.admission.admission import Admission
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.routing.placement import Placement
from router.routing.selector import Selector
from router.routing.state import RoutingState
from router.settings import (
    AdmissionSettings,
    AuditSettings,
    DisaggregationSettings,
    ProxySettings,
    ReplicasSettings,
)
from router.sharing import LoadSharing, PeerLoad, SharingChannel
from simulator.fleet.sides import Side
from simulator.fleet.workers import EventIndex, SimulatedWorkers

_LINGER = ProxySettings().speculation_seconds


@dataclass(frozen=True, slots=True)
class SimulatedRouter:
    """One router of a simulation. All but `workers` are the objects of a router that serves."""

    workers: SimulatedWorkers
    state: RoutingState
    selector: Selector
    placement: Placement
    admission: Admission

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
) -> SimulatedRouter:
    """Return a router.

    - `workers`: its own records of the workers.
    - `index`: the index of what they hold.
    - `side`: its policy, and the parts that work with it.
    - `random`: breaks the ties of its policy.
    - `clock`: its time in seconds.
    - `channels`: what it shares its load over.
    """
    settings = side.settings
    load = LoadTable(clock)
    sharing = LoadSharing(load, PeerLoad(ReplicasSettings().expiry, _LINGER, clock), list(channels))
    sent_prefixes = SentPrefixes(clock)
    learned = Learned(Rates(), clock, settings.cpu_token, settings.disk_token)
    policy = side.make_policy(random, learned, load)
    audit = HitAudit(index, sent_prefixes, AuditSettings(), clock=clock)
    in_flight_prefixes = InFlightPrefixes(_LINGER, clock)
    state = RoutingState(
        workers, index, policy, load, in_flight_prefixes, sent_prefixes, audit, learned, sharing, clock
    )
    selector = Selector(state, DisaggregationSettings(), settings.broken_promise, random)
    placement = Placement(state, selector)
    admission_settings = AdmissionSettings(late_binding=side.late_binding)
    admission = Admission(selector, placement, admission_settings, policy.spec.late_binding, clock)
    load.on_ended.append(admission.freed)
    if admission.late_binding:
        load.on_first_byte.append(admission.wake)
    sharing.on_update.append(admission.wake)
    return SimulatedRouter(workers, state, selector, placement, admission)
