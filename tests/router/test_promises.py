"""What is predicted of promises, and which candidate a promised request goes to."""

from __future__ import annotations

from math import log
from pathlib import Path
from random import Random

import pytest

from indexer import Target
from router.admission.service_levels import ServiceLevels, read_promise
from router.learning.forecasts import Forecasts
from router.policies import Candidate, Decision, KvWeights, Request, kv_aware
from router.policies.promises import (
    NO_PROMISE,
    Estimate,
    Forecast,
    Promise,
    choose_for_promise,
    stays,
    tpot_by_rates,
)
from router.policies.rates import Rates, RateTable
from router.policies.ratios import KEPT, Ratios
from router.settings import ConfigError, Settings, load_settings

NEAR, FAR = Target("near", 0, "m"), Target("far", 0, "m")


def decided(near: Candidate, far: Candidate) -> Decision:
    decision = kv_aware(KvWeights(), Random(1))([near, far], Request(1000))
    assert decision.chosen is near
    return decision


def forecast(ttft: float, tpot: float = 0.02, others: float = 0.0) -> Forecast:
    return Forecast(Estimate(ttft, None), Estimate(tpot, None), others)


@pytest.mark.parametrize(
    ("near", "far", "chosen"),
    [
        (forecast(0.1), forecast(0.1), "near"),  # both keep it: the cheapest
        (forecast(2.0), forecast(0.1), "far"),  # only one does
        (forecast(0.1, tpot=0.2), forecast(0.1), "far"),
        (forecast(2.0), forecast(3.0), "near"),  # none does: no prefix is scattered
        (forecast(0.1, others=2.0), forecast(0.1), "far"),  # it would break those of others
        (forecast(0.1, others=1.0), forecast(2.0), "near"),
    ],
)
def test_the_cheapest_that_keeps_the_promise_and_breaks_no_other(near: Forecast, far: Forecast, chosen: str) -> None:
    decision = decided(Candidate(NEAR, overlap=900), Candidate(FAR))
    place = choose_for_promise(decision, [near, far], Promise(1.0, 0.05, 0.0), 0.0, broken_promise=15_000)
    assert decision.candidates[place].target.worker == chosen


@pytest.mark.parametrize(("others", "goes"), [(0.0, "near"), (0.3, "near"), (1.0, "far")])
def test_what_was_promised_nothing_breaks_no_promise_of_others_unless_that_costs_it_much(
    others: float, goes: str
) -> None:
    decision = decided(Candidate(NEAR, overlap=400), Candidate(FAR))
    forecasts = [forecast(9.0, 9.0, others), forecast(99.0, 99.0)]
    place = choose_for_promise(decision, forecasts, NO_PROMISE, 0.0, broken_promise=15_000)
    assert decision.candidates[place].target.worker == goes
    assert stays(decision.chosen, forecasts[0], NO_PROMISE, 1000, 0.0) is (others == 0)
    assert stays(Candidate(NEAR, overlap=900), forecasts[0], NO_PROMISE, 1000, 0.0)  # a session keeps its place


def test_what_is_refused_when_late_goes_where_it_is_in_time_whatever_that_costs() -> None:
    decision = decided(Candidate(NEAR), Candidate(FAR, pending=10**6))
    forecasts = [forecast(2.0), forecast(0.5)]
    for refuses_late, place in ((False, 0), (True, 1)):
        promise = Promise(1.0, None, 0.0, refuses_late=refuses_late)
        assert choose_for_promise(decision, forecasts, promise, 0.0, broken_promise=15_000) == place


@pytest.mark.parametrize(
    ("overlap", "at", "refuses_late", "stay"),
    [
        (900, forecast(0.5, tpot=0.2), False, True),
        (900, forecast(0.5, tpot=0.2), True, False),  # it would be refused there
        (900, forecast(1.5, tpot=0.2), False, False),  # the first token is late
        (400, forecast(0.5, tpot=0.2), False, False),
        (0, forecast(0.5), False, True),  # nothing is broken there
    ],
)
def test_a_session_keeps_its_place_unless_its_first_token_is_late(
    overlap: int, at: Forecast, refuses_late: bool, stay: bool
) -> None:
    promise = Promise(1.0, 0.05, 0.0, refuses_late=refuses_late)
    assert stays(Candidate(NEAR, overlap=overlap), at, promise, 1000, 0.0) is stay


def test_late_is_counted_from_the_arrival_and_over_the_answer() -> None:
    promise = Promise(1.0, 0.05, arrived=10.0)
    assert forecast(0.9, 0.05).late(promise, 10.0, 100) == 0
    assert forecast(0.9).late(promise, 10.5, 100) == pytest.approx(0.4)
    assert forecast(0.1, 0.06).late(promise, 10.0, 100) == pytest.approx(1.0)


def test_ratios_forget_the_oldest() -> None:
    ratios = Ratios()
    for number in range(KEPT + 10):
        ratios.add(float(number))
    assert len(ratios) == KEPT
    assert (ratios.at(0.0), ratios.at(1.0)) == (10.0, KEPT + 9.0)
    assert ratios.at_most(10.0) == pytest.approx(1 / KEPT)
    assert ratios.at_most(KEPT + 9.0) == 1.0


def test_forecasts_are_put_right_by_what_came() -> None:
    clock = 0.0
    forecasts = Forecasts(RateTable(Rates(), lambda: clock), clock=lambda: clock)
    candidate = Candidate(NEAR)
    first = forecasts.of(candidate, 1000, 100, backlog=0.0)
    assert not first.measured
    for number in range(40):
        answer = forecasts.watch(NEAR, forecasts.of(candidate, 1000, 100, 0.0), None, clock)
        clock += first.ttft.by_rates * (2.0 if number % 2 else 3.0)
        answer.first_token(clock)
        clock += 10 * first.tpot.by_rates * 4
        answer.ended(11)
    now = forecasts.of(candidate, 1000, 100, 0.0)
    assert now.measured
    assert now.ttft.band.low == pytest.approx(2 * first.ttft.by_rates)
    assert now.ttft.band.high == pytest.approx(3 * first.ttft.by_rates)
    assert now.tpot.expected == pytest.approx(4 * first.tpot.by_rates)
    assert now.ttft.chance(2.5 * first.ttft.by_rates) == pytest.approx(0.5)
    # Another worker of the model is taken to be alike.
    assert forecasts.of(Candidate(FAR), 1000, 100, 0.0).ttft.expected == pytest.approx(now.ttft.expected)


def test_prefills_slow_what_decodes_beside_them_and_break_its_promises() -> None:
    clock = 0.0
    forecasts = Forecasts(RateTable(Rates(), lambda: clock), clock=lambda: clock)
    candidate, prompt = Candidate(NEAR, requests=4, context=4000), 50_000
    forecasts.promise()
    quiet = forecasts.of(candidate, 100, 100, 0.0).tpot.expected
    end = forecasts.hold(NEAR, tpot=1.05 * quiet)
    assert 0 < forecasts.of(candidate, 100, 100, 0.0).others_broken < 0.02
    much = forecasts.of(candidate, prompt, 100, 0.0)
    assert much.others_broken == pytest.approx(0.5 + 0.25 * log(much.tpot.expected / quiet), abs=0.05)
    forecasts.placed(NEAR, 5.0, clock)  # half of the last seconds
    busy = forecasts.of(candidate, 100, 100, 0.0)
    assert busy.tpot.expected == pytest.approx(2 * quiet, rel=0.05)
    assert 0 < busy.others_broken < 0.02
    # It seems to be broken already, but to make it later still is not for nothing.
    later = forecasts.of(candidate, prompt, 100, 0.0)
    assert later.others_broken == pytest.approx(0.25 * log(later.tpot.expected / busy.tpot.expected), abs=0.05)
    end(False)
    clock += 100
    assert forecasts.of(candidate, prompt, 100, 0.0).others_broken == 0
    forecasts.forget("near")
    assert forecasts.of(candidate, 100, 100, 0.0).tpot.expected == pytest.approx(quiet)


def test_a_worker_that_only_computes_prompts_decodes_slowly_but_not_never() -> None:
    assert tpot_by_rates(Candidate(NEAR), Rates(), 1, 1, prefill_share=3.0) < 1


def test_promises_are_read_from_headers_and_classes() -> None:
    settings = Settings(
        service_levels={"fast": {"ttft": 1.0, "when_late": "refuse"}, "slow": {"ttft": 30.0, "tpot": 0.2}},
        models={"m": {"service_level": "slow"}},
    )
    levels = ServiceLevels.of(settings)
    assert ServiceLevels.of(Settings()) is None
    by_model = read_promise([], levels, "", "m", 5.0)
    assert by_model is not None
    assert (by_model.service_level, by_model.first_token_by, by_model.tpot) == ("slow", 35.0, 0.2)
    named = read_promise([(b"x-kvrouter-service-level", b"fast"), (b"x-slo-tpot-ms", b"50")], levels, "", "m", 5.0)
    assert named is not None
    assert (named.ttft, named.tpot, named.refuses_late) == (1.0, 0.05, True)
    assert read_promise([(b"x-slo-ttft-ms", b"0")], None, "", "m", 5.0) is None  # none, as llm-d has it
    assert read_promise([], levels, "", "other", 5.0) is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("service_levels: {fast: {}}", "promises nothing"),
        ("service_levels: {fast: {ttft: 0}}", r"service_levels\.fast\.ttft"),
        ("service_levels: {'no name': {ttft: 1}}", "service_levels"),
        ("models: {m: {service_level: fast}}", r"models\.m\.service_level: there is no 'fast'"),
    ],
)
def test_classes_that_cannot_be_are_named(tmp_path: Path, given: str, found: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(given)
    with pytest.raises(ConfigError, match=found):
        load_settings(file)
