from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.telemetry.tallies import Spread, Tally

BOUNDS = (0.0005, 0.25, 1.0, 2.5)
LABELS = ["model", "status"]


def _told(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(
    st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.sampled_from(["a", 'b"\n']), st.integers(1, 3)))
)
def test_what_is_told_is_what_the_library_tells(seen: list[tuple[float, str, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("answers", "Answers", LABELS, registry=theirs)
    histogram = Histogram("seconds", "Time", LABELS, registry=theirs, buckets=BOUNDS)
    tally = Tally("answers", "Answers", LABELS, ours)
    spread = Spread("seconds", "Time", LABELS, ours, BOUNDS)
    for value, model, status in seen:
        counter.labels(model, str(status)).inc(value)
        histogram.labels(model, str(status)).observe(value)
        tally.of(model, status).amount += value
        spread.of(model, status).observe(value)
    assert _told(ours) == _told(theirs)
    at_most = spread.at_most()
    assert at_most == {bound: sum(value <= bound for value, _, _ in seen) for bound in at_most}
    assert set(at_most) == ({*BOUNDS, float("inf")} if seen else set())


def test_series_end() -> None:
    tally = Tally("answers", "Answers", LABELS, CollectorRegistry())
    tally.of("a", 200).amount += 2
    tally.of("b", 200).amount += 3
    tally.forget("a")
    assert tally.total == 3
