"""Figures of requests stay bounded, however many models there were."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.apis.usage import Usage
from router.observability.metrics import MOST_MODELS, OTHER_MODELS, RequestMetrics


def test_models_beyond_a_number_count_together() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for number in range(MOST_MODELS + 5):
        model = f"m{number}"
        metrics.begun(model, "w", 200, 10, 0)
        metrics.first_byte_of(model, 0.1)
        metrics.completed(model, Usage(prompt=10, completion=3, cached=0))
        metrics.streamed(model, 1.0, Usage(prompt=10, completion=3, cached=0))
    told = generate_latest(registry).decode()
    assert f'kvrouter_requests_total{{model="{OTHER_MODELS}",status="200",worker="w"}} 5.0' in told
    for name in ("requests_total", "prompt_tokens_total", "time_per_output_token_seconds_count"):
        assert told.count(f"\nkvrouter_{name}{{") == MOST_MODELS + 1
