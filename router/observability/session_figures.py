"""The sessions of agents by model: how many are live, how many calls wait for room, and how many more would fit.

A model's targets have room for `live + more` sessions of the mean size. These figures are in `/health`, in the metrics,
on the page and in the finding `sessions_wait`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.programs import Gate, RankCapacity
from router.routing.state import RoutedFleet

# The seconds that a call waits for room before it is a finding.
_LONG = 10.0


class SessionFigures(NamedTuple):
    """The sessions of one model.

    - `live`: sessions with a call in flight, or with an answer a short time ago.
    - `waiting`: calls that wait for room.
    - `more`: sessions of the mean size that fit beside the live ones; None if sizes or caches are not known.
    - `targets`: the DP ranks that serve the model.
    """

    live: int
    waiting: int
    more: int | None
    targets: int

    @property
    def load(self) -> float | None:
        """The live sessions and waiting calls, as a multiple of the sessions that fit."""
        if self.more is None:
            return None
        return (self.live + self.waiting) / max(self.live + self.more, 1)

    @property
    def missing_targets(self) -> int:
        """The DP ranks by which the fleet is too small for all of them."""
        return ceil(self.targets * self.load) - self.targets if self.load is not None and self.load > 1 else 0

    def as_json(self) -> dict[str, int | None]:
        """Return the figures for `/health` and the page."""
        return {"live": self.live, "waiting": self.waiting, "more": self.more}


class SessionObserver:
    """Computes the figures of all models that have sessions."""

    def __init__(self, fleet: RoutedFleet, gate: Gate, admission: Admission, clock: Callable[[], float]) -> None:
        self.gate = gate
        self._fleet = fleet
        self._admission = admission
        self._clock = clock

    def figures(self) -> dict[str, SessionFigures]:
        """Return the figures of each model that has sessions."""
        gate = self.gate
        gate.sessions.expire()
        waiting = Counter(self._fleet.model_of(each.name or "") or each.name or "" for each in self._admission.held())
        live = gate.sessions.live()
        found: dict[str, SessionFigures] = {}
        for model in sorted(live.keys() | waiting.keys()):
            answering, computing = self._ranks(model), self._ranks(model, prefill=True)
            more = gate.more_sessions(model, answering)
            if computing and more is not None:
                computed = gate.more_sessions(model, computing)
                more = None if computed is None else min(more, computed)
            found[model] = SessionFigures(live[model], waiting[model], more, len(answering) + len(computing))
        return found

    def _ranks(self, model: str, prefill: bool = False) -> list[RankCapacity]:
        workers = self._fleet.able(model, prefill)
        return [
            RankCapacity(each.target(rank, model), each.capacity_tokens) for each in workers for rank in each.ranks()
        ]

    def report(self) -> dict[str, dict[str, int | None]]:
        """Return the figures of each model as JSON."""
        return {model: of.as_json() for model, of in self.figures().items()}

    def findings(self) -> list[dict[str, Any]]:
        """Return a finding for each model whose sessions wait for room."""
        held = self._admission.held()
        if not held or self._clock() < held[0].since + _LONG:
            return []
        return [
            {"finding": "sessions_wait", "model": model, "detail": _detail(of)}
            for model, of in self.figures().items()
            if of.waiting
        ]


def _detail(of: SessionFigures) -> str:
    fit = "" if of.more is None else f" The KV caches hold {of.live + of.more} sessions of this size."
    add = f" {of.missing_targets} more workers or DP ranks like these would hold all." if of.missing_targets else ""
    return f"{of.live} sessions are live, and {of.waiting} calls wait for room.{fit}{add}"


class SessionCollector(Collector):
    """The sessions of agents for Prometheus."""

    def __init__(self, observer: SessionObserver) -> None:
        self._observer = observer

    def collect(self) -> Iterator[Metric]:
        gate, figures = self._observer.gate, self._observer.figures()
        sessions = gate.sessions
        known = GaugeMetricFamily("kvrouter_sessions", "Sessions of agents that are known", labels=["state"])
        live = sum(of.live for of in figures.values())
        known.add_metric(["live"], live)
        known.add_metric(["idle"], max(len(sessions) - live, 0))
        waiting = GaugeMetricFamily("kvrouter_sessions_waiting", "Calls that wait for room", labels=["model"])
        more = GaugeMetricFamily("kvrouter_sessions_more", "Sessions that fit beside the live ones", labels=["model"])
        load = GaugeMetricFamily(
            "kvrouter_sessions_load",
            "Live sessions and waiting calls, as a multiple of the sessions that fit",
            labels=["model"],
        )
        for model, of in figures.items():
            waiting.add_metric([model], of.waiting)
            if of.more is not None and of.load is not None:
                more.add_metric([model], of.more)
                load.add_metric([model], of.load)
        tokens = GaugeMetricFamily(
            "kvrouter_working_set_tokens",
            "Tokens that live sessions need, shared prefixes once",
            labels=["worker", "dp_rank", "model"],
        )
        for target, each in sessions.working_sets.items():
            tokens.add_metric([target.worker, str(target.dp_rank), target.model], each.tokens)
        closed = GaugeMetricFamily(
            "kvrouter_programs_gate_closed", "1 while calls of sessions wait for room", int(gate.closed)
        )
        lost = CounterMetricFamily(
            "kvrouter_session_lost_tokens", "Context tokens of sessions that were evicted before they returned"
        )
        lost.add_metric([], gate.lost_tokens)
        cold = CounterMetricFamily("kvrouter_session_cold_returns", "Calls of sessions whose context was evicted")
        cold.add_metric([], gate.cold_returns)
        yield from (known, waiting, more, load, tokens, closed, lost, cold)
