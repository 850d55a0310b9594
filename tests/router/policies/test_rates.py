"""The rates of workers, learned from noisy samples."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.policies.rates import BOUND, HALF_LIFE, BoundedRegression, RateLearner, Rates, RateTable, prefill_seconds

START = Rates()


def show(learner: RateLearner, truth: Rates, random: Random, begin: int = 0, noise: float = 0.1) -> None:
    """Let a learner see 400 requests of a worker, one a second, one in twenty of them stalled."""
    for second in range(begin, begin + 400):
        tokens = random.randrange(200, 16_000)
        cached = random.randrange(0, tokens)
        requests = random.randrange(0, 30)
        context = 3000 * requests
        stalled = 20.0 if random.random() < 0.05 else 1.0
        step = truth.step + truth.context_token * context + truth.token * requests
        under_way = random.random() * step if requests else 0.0
        seconds = prefill_seconds(truth, tokens, cached, requests, context) * random.uniform(1 - noise, 1 + noise)
        learner.prefill_seen(tokens, cached, requests, context, (under_way + seconds) * stalled, second)
        seconds = 100 * step * random.uniform(1 - noise, 1 + noise) * stalled
        learner.decode_seen(100, requests, context, seconds, second)


factors = st.floats(0.3, 3.0)


@given(factors, factors, factors, factors, st.integers(0, 1000))
def test_known_rates_are_recovered_from_noisy_samples(
    step: float, token: float, attention: float, context_token: float, seed: int
) -> None:
    truth = Rates(
        START.step * step, START.token * token, START.attention * attention, START.context_token * context_token
    )
    learner = RateLearner(START)
    show(learner, truth, Random(seed))
    assert learner.learned
    for tokens, cached, requests in ((8000, 0, 0), (8000, 6000, 20), (2000, 0, 10)):
        expected = prefill_seconds(truth, tokens, cached, requests, 3000 * requests)
        assert prefill_seconds(learner.rates, tokens, cached, requests, 3000 * requests) == pytest.approx(
            expected, rel=0.3
        )
    # A token's price alone is less certain, because it trades off against attention's.
    assert learner.rates.step == pytest.approx(truth.step, rel=0.3)


@pytest.mark.parametrize("factor", [1 / 40, 40])
def test_rates_are_learned_after_few_requests(factor: float) -> None:
    truth = Rates(*(factor * rate for rate in (START.step, START.token, START.attention, START.context_token)))
    learner, random = RateLearner(START), Random(1)
    for second in range(10):
        tokens = random.randrange(200, 4000)
        seconds = prefill_seconds(truth, tokens, 0, 1, 3000) * random.uniform(0.7, 1.3)
        learner.prefill_seen(tokens, 0, 1, 3000, seconds, second)
        learner.decode_seen(100, 2, 3000, 100 * truth.step * random.uniform(0.7, 1.3), second)
    assert prefill_seconds(learner.rates, 2000, 0, 1, 3000) == pytest.approx(
        prefill_seconds(truth, 2000, 0, 1, 3000), rel=0.3
    )


def test_stalled_first_sample_changes_rates_little() -> None:
    learner = RateLearner(START)
    assert (learner.rates, learner.learned) == (START, False)
    learner.prefill_seen(2000, 0, 1, 3000, 50 * prefill_seconds(START, 2000, 0, 1, 3000), 0)
    assert learner.rates.token < 2 * START.token


anything = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(anything, anything, st.floats(0, 1e3), anything, st.floats(0, 1e4)), max_size=30))
def test_whatever_is_seen_coefficients_stay_within_their_bounds(samples: list[tuple[float, ...]]) -> None:
    regression = BoundedRegression((4e-5, 1e-9))
    for x0, x1, known, seconds, now in samples:
        regression.add(x0, x1, known, seconds, now)
        for found, expected in zip(regression.coefficients, (4e-5, 1e-9), strict=True):
            assert expected / BOUND * (1 - 1e-9) <= found <= expected * BOUND * (1 + 1e-9)


def test_rates_follow_a_changed_worker() -> None:
    learner = RateLearner(START)
    show(learner, Rates(token=1e-4), Random(1))
    show(learner, START, Random(2), begin=round(3 * HALF_LIFE))
    assert learner.rates.token == pytest.approx(START.token, rel=0.2)


def test_similar_workers_share_rates_and_different_ones_have_their_own(clock: Clock) -> None:
    table = RateTable(START, clock)
    for worker in "ab":
        show(table.learner(worker, "m"), START, Random(1))
    assert table.slowest_if_unlike("m") is None
    assert table.slowest_if_unlike("other") is None
    table = RateTable(START, clock)
    show(table.learner("slow", "m"), Rates(token=1e-4), Random(1))
    assert table.slowest_if_unlike("m") is None
    show(table.learner("fast", "m"), START, Random(1))
    clock.now += 10
    slowest = table.slowest_if_unlike("m")
    assert slowest == table.learner("slow", "m").rates
    assert table.learned_or("fast", "m", slowest) == table.learner("fast", "m").rates
    assert table.learned_or("new", "m", slowest) == slowest


def show_prompts(learner: RateLearner, truth: Rates, shortest: int, longest: int, noise: float, count: int) -> None:
    """Let a learner see prompts of these lengths, with measured times that differ from the true ones by `noise`."""
    random = Random(longest)
    for second in range(count):
        tokens = random.randrange(shortest, longest)
        seconds = prefill_seconds(truth, tokens, 0, 0, 0) * random.lognormvariate(0, noise)
        learner.prefill_seen(tokens, 0, 0, 0, seconds, second)


@pytest.mark.parametrize(("count", "noise"), [(25, 0.4), (100, 0.4), (400, 0.1)])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_workers_with_other_prompts_are_unlike_only_if_their_speed_differs(
    count: int, noise: float, factor: float
) -> None:
    clock = Clock()
    table, first = RateTable(START, clock), START
    second = Rates(START.step, factor * START.token, factor * START.attention)
    show_prompts(table.learner("short", "m"), first, 500, 4000, noise, count)
    show_prompts(table.learner("long", "m"), second, 4000, 60_000, noise, count)
    slowest = table.slowest_if_unlike("m")
    assert slowest == (table.learner("long", "m").rates if factor > 1 else None)


def test_new_worker_uses_rates_of_its_model() -> None:
    table = RateTable(START, Clock())
    assert table.likely("new", "m") == START
    for second in range(10):
        table.prefill_seen("slow", "m", 2000, 0, 1, 3000, 4.0, second)
    slow = table.learner("slow", "m")
    assert table.likely("new", "m") == slow.rates != START
    assert table.likely("new", "other") == START
    show(table.learner("new", "m"), START, Random(1))
    assert table.likely("new", "m") == table.learner("new", "m").rates


def test_decode_worker_has_its_own_steps_and_computes_like_the_others() -> None:
    """A decode worker answers prompts that other workers compute, and is never measured with one of its own."""
    table, truth = RateTable(START, Clock()), Rates(step=0.03, context_token=9e-8)
    for second in range(30):
        table.prefill_seen("prefill", "m", 2000, 0, 0, 0, 4.0, second)
    prefill, decode, random = table.learner("prefill", "m").rates, table.learner("decode", "m"), Random(2)
    for second in range(200):
        requests, context = 1 + second % 8, random.randrange(100_000)
        step = truth.step + truth.context_token * context + truth.token * requests
        decode.decode_seen(100, requests, context, 100 * step, second)
    for found in (table.likely("decode", "m"), table.learned_or("decode", "m", prefill)):
        assert (found.token, found.attention) == (prefill.token, prefill.attention)
        assert found.step == pytest.approx(truth.step, rel=0.05)
        assert found.context_token == pytest.approx(truth.context_token, rel=0.05)
