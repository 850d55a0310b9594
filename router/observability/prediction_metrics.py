"""The accuracy of predicted times, and the outcomes of SLOs: for Prometheus and the page."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.observability.metrics import MOST_MODELS, OTHER_MODELS
from router.prediction.predictions import WatchedAnswer
from router.prediction.slo import SLO, Ratios

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TPOT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


class _ModelAccuracy:
    def __init__(self) -> None:
        self.answers = 0
        self.errors = Ratios()  # of TTFT, as shares of the measured time
        self.in_band = Ratios()  # 1 if TTFT was within the predicted range, else 0
        self.slos = {"met": 0, "missed": 0, "refused": 0}


class PredictionMetrics:
    """The metrics of answers that are compared with their predictions, and of SLOs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft_error = Histogram(
            "kvrouter_ttft_error_seconds",
            "Absolute error of the predicted time to first token, in seconds",
            ["model"],
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )
        self._tpot_error = Histogram(
            "kvrouter_tpot_error_seconds",
            "Absolute error of the predicted time per output token, in seconds",
            ["model"],
            registry=registry,
            buckets=_TPOT_BUCKETS,
        )
        self._calibration = Gauge(
            "kvrouter_ttft_calibration_ratio",
            "Share of recent first tokens within the predicted range: 0.8 is accurate",
            ["model"],
            registry=registry,
        )
        self._slos = Counter(
            "kvrouter_slo_answers",
            "Answers with an SLO, by outcome: met, missed or refused",
            ["model", "service_level", "outcome"],
            registry=registry,
        )
        self._of_models: dict[str, _ModelAccuracy] = {}

    def refused(self, model: str, slo: SLO) -> None:
        """Count a refused request with an SLO."""
        self._slo(self._named(model), slo, "refused")

    def summary(self) -> list[dict[str, Any]]:
        """Return each model's compared answers, median error, share within the predicted range, and SLO outcomes."""
        return [
            {
                "model": model,
                "answers": known.answers,
                "ttft_error": round(known.errors.at(0.5), 3) if known.errors else None,
                "in_band": round(1 - known.in_band.at_most(0.5), 3) if known.in_band else None,
                "slo_answers": known.slos,
            }
            for model, known in sorted(self._of_models.items())
        ]

    def _of(self, model: str) -> _ModelAccuracy:
        return self._of_models.setdefault(model, _ModelAccuracy())

    def _named(self, model: str) -> str:
        known = model in self._of_models or len(self._of_models) < MOST_MODELS
        return model if known else OTHER_MODELS

    def first_token(self, answer: WatchedAnswer) -> None:
        """Count a watched answer that began."""
        model, ttft, predicted = self._named(answer.target.model), answer.ttft, answer.predicted_ttft
        assert ttft is not None
        known = self._of(model)
        known.answers += 1
        error = abs(ttft - predicted.expected)
        self._ttft_error.labels(model).observe(error)
        if answer.prediction.ttft.ratios is not None:
            known.errors.add(error / max(ttft, 1e-6))
            known.in_band.add(float(predicted.low <= ttft <= predicted.high))
            self._calibration.labels(model).set(1 - known.in_band.at_most(0.5))

    def answered(self, answer: WatchedAnswer) -> None:
        """Count a watched answer that is complete."""
        model = self._named(answer.target.model)
        if answer.tpot is not None:
            self._tpot_error.labels(model).observe(abs(answer.tpot - answer.predicted_tpot.expected))
        if answer.slo is not None:
            self._slo(model, answer.slo, "met" if answer.slo_met else "missed")

    def _slo(self, model: str, slo: SLO, outcome: str) -> None:
        self._slos.labels(model, slo.service_level, outcome).inc()
        self._of(model).slos[outcome] += 1
