"""Everything that observes the router, as one record: metrics, the live page's data, and recordings of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from indexer import Indexer
from indexer.api.metrics import IndexCollector, add_process_metrics
from router.admission.admission import Admission
from router.admission.admission_metrics import AdmissionMetrics, DemandCollector
from router.admission.saturation import Saturation
from router.fleet.fleet import Fleet
from router.hooks.hooks import HookCollector, Hooks
from router.observability.advice import advised
from router.observability.fleet_report import About, findings
from router.observability.fleet_snapshot import FleetSnapshot, Series
from router.observability.llm_d_metrics import LlmDCollector
from router.observability.low_hits import LowHits, MeanLoad
from router.observability.metrics import (
    AuditCollector,
    FleetCollector,
    LoadRateCollector,
    PolicyCollector,
    RequestMetrics,
)
from router.observability.pair_metrics import PairCollector
from router.observability.prediction_metrics import PredictionMetrics
from router.observability.request_recorder import RequestRecorder
from router.observability.seen_requests import SampledTraffic
from router.observability.session_figures import SessionCollector, SessionObserver
from router.routing.build import Routing
from router.settings import Settings
from router.sharing import SharingCollector
from router.tokens.model_state import TokenizerCollector
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class Observability:
    """The services that observe the router.

    - `registry`: every Prometheus metric.
    - `about`: the version, the policy and the models.
    - `sessions`: the sessions of agents.
    - `findings`: returns what is wrong now, for `/health`.
    """

    registry: CollectorRegistry
    requests: RequestMetrics
    admission: AdmissionMetrics
    predictions: PredictionMetrics
    snapshot: FleetSnapshot
    recorder: RequestRecorder
    about: About
    sessions: SessionObserver
    findings: Callable[[], list[dict[str, Any]]]


def build_observability(
    settings: Settings,
    fleet: Fleet,
    indexer: Indexer,
    tokenizers: Tokenizers,
    source: TokenizerSource,
    routing: Routing,
    admission: Admission,
    sampled: SampledTraffic,
    hooks: Hooks | None = None,
) -> Observability:
    """Return the observers of the router's other parts. `sampled`: the sample that the placement records."""
    state = routing.state
    sharing, learned = state.sharing, state.learned
    registry = CollectorRegistry()
    add_process_metrics(registry)
    requests = RequestMetrics(registry)
    predictions = PredictionMetrics(registry)
    sessions = SessionObserver(fleet, state.gate, admission, state.clock)
    saturation = Saturation(fleet, state.load, admission)
    for collector in (
        SharingCollector(sharing, fleet),
        IndexCollector(indexer),
        TokenizerCollector(tokenizers),
        FleetCollector(fleet, state.load),
        AuditCollector(state.audit),
        LoadRateCollector(None if state.sources is None else state.sources.rates),
        DemandCollector(fleet, state.load, admission),
        SessionCollector(sessions),
        PairCollector(routing.selector.pairs),
        saturation,
    ):
        registry.register(collector)
    if settings.picker.llm_d_metrics:
        registry.register(
            LlmDCollector(requests, fleet, state.load, admission, saturation, settings.picker.pool or "kvrouter")
        )
    if state.policy.custom is not None:
        registry.register(PolicyCollector(state.policy.custom))
    if hooks is not None:
        registry.register(HookCollector(hooks))

    assert sampled.stored is not None
    assert sampled.kept.noise is not None
    mean_load = MeanLoad(fleet, state.load, sharing.peer_load)
    low_hits = LowHits(sampled.stored, learned.pressure, mean_load, sampled.kept.noise)

    def all_findings() -> list[dict[str, Any]]:
        custom = state.policy.custom
        of_policy = custom.findings() if custom is not None else []
        of_fleet = findings(fleet, indexer, state.audit) + low_hits.findings(indexer.names.about)
        of_hooks = hooks.findings() if hooks is not None else []
        of_parts = saturation.findings() + source.findings() + sharing.findings() + sessions.findings()
        return advised(of_fleet + of_parts + of_policy + of_hooks)

    about = About(settings.policy.name, fleet, source)
    snapshot = FleetSnapshot(
        fleet,
        indexer,
        state.load,
        sharing.peer_load,
        admission,
        state.audit,
        sampled,
        Series(requests, state.audit, admission.waiting_for, learned.seconds_per_token),
        about,
        all_findings,
        predictions.summary,
        low_hits.sample,
        sessions.report,
        saturation.report,
    )
    return Observability(
        registry,
        requests,
        AdmissionMetrics(admission, registry),
        predictions,
        snapshot,
        RequestRecorder(routing.reader.require_prompts),
        about,
        sessions,
        all_findings,
    )
