from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.apis.usage import Usage
from router.observability.counters import Counter, Histogram
from router.observability.metrics import MOST_MODELS, OTHER_MODELS, RequestMetrics

BOUNDS = (0.0005, 0.25, 1.0, 2.5)
LABELS = ["model", "status"]


def _told(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(
    st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.sampled_from(["a", 'b"\n']), st.integers(1, 3)))
)
def test_exposition_equals_that_of_prometheus_client(seen: list[tuple[float, str, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    their_counter = prometheus_client.Counter("answers", "Answers", LABELS, registry=theirs)
    their_histogram = prometheus_client.Histogram("seconds", "Time", LABELS, registry=theirs, buckets=BOUNDS)
    counter = Counter("answers", "Answers", LABELS, ours)
    histogram = Histogram("seconds", "Time", LABELS, ours, BOUNDS)
    for value, model, status in seen:
        their_counter.labels(model, str(status)).inc(value)
        their_histogram.labels(model, str(status)).observe(value)
        counter.labels(model, status).amount += value
        histogram.labels(model, status).observe(value)
    assert _told(ours) == _told(theirs)
    at_most = histogram.at_most()
    assert at_most == {bound: sum(value <= bound for value, _, _ in seen) for bound in at_most}
    assert set(at_most) == ({*BOUNDS, float("inf")} if seen else set())


def test_series_end() -> None:
    counter = Counter("answers", "Answers", LABELS, CollectorRegistry())
    counter.labels("a", 200).amount += 2
    counter.labels("b", 200).amount += 3
    counter.labels("b", 500).amount += 1
    assert counter.by("status") == {200: 5, 500: 1}
    counter.labels("b", 500).amount -= 1
    counter.forget("a")
    assert counter.total == 3


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
