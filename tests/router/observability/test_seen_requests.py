"""Which requests are shown, and what of them."""

from __future__ import annotations

from random import Random

from manual_clock import Clock

from indexer import Target
from router.apis.usage import Usage
from router.observability.seen_requests import KEPT, PER_SECOND, SeenRequests
from router.observability.series import percentile
from router.policies import Candidate, Decision, Request, policy_named
from router.settings import PolicySettings


def decided() -> Decision:
    candidates = [Candidate(Target(f"http://w{number}", 0, "m"), overlap=16 * number) for number in range(3)]
    return policy_named(PolicySettings(), Random(1)).choose(candidates, Request(100))


def test_sampled_request_records_its_outcome() -> None:
    clock = Clock(0.0)
    requests = SeenRequests(clock)
    seen = requests.placed("m", 100, decided())
    assert seen is not None
    (first,) = requests.since(0)
    clock.now = 0.25
    seen.first_byte()
    assert requests.since(first.changed - 1) == [seen]
    before = seen.changed
    clock.now = 1.0
    seen.answered(Usage(100, 7, 32))
    seen.ended()
    assert requests.since(before) == [seen]
    told = seen.as_json()
    assert (told["worker"], told["overlap"], told["best_overlap"], told["candidates"]) == ("http://w2", 32, 32, 3)
    assert (told["first_byte_ms"], told["whole_ms"], told["cached"], told["completion"]) == (250, 1000, 32, 7)
    assert told["terms"]
    assert requests.since(seen.changed) == []


def test_sample_is_limited_in_rate_and_size() -> None:
    clock = Clock(0.0)
    requests = SeenRequests(clock)
    looked_at = 0
    for tick in range(4000):
        clock.now = tick / 400
        looked_at += requests.placed("m", 1, decided()) is not None
    assert 9 * PER_SECOND <= looked_at <= 10 * PER_SECOND + 1
    for tick in range(KEPT + 10):
        clock.now = 100.0 + tick
        requests.placed("m", 1, decided())
    assert len(requests.since(0)) == KEPT


def test_percentiles_lie_between_the_bounds() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({0.1: 0, 1.0: 0, float("inf"): 0}, 0.5) is None
    assert percentile({0.1: 0, 0.2: 10, float("inf"): 10}, 0.5) == 0.15
    assert percentile({0.1: 9, 0.2: 9, float("inf"): 10}, 0.99) == 0.2
