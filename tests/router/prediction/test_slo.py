"""Predictions for SLOs, and the candidate that a request with an SLO gets."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from indexer import Target
from router.policies import Candidate, Decision, KvWeights, Request, kv_aware
from router.policies.rates import Rates, RateTable
from router.prediction.predictions import Predictions
from router.prediction.service_levels import ServiceLevels, read_slo
from router.prediction.slo import (
    KEPT,
    NO_SLO,
    SLO,
    Estimate,
    Prediction,
    Ratios,
    choose_for_slo,
    expected_misses,
    step_by_rates,
    tpot_by_rates,
)
from router.settings import ConfigError, Settings, load_settings

NEAR, FAR = Target("near", 0, "m"), Target("far", 0, "m")


def decided(near: Candidate, far: Candidate) -> Decision:
    decision = kv_aware(KvWeights(), Random(1))([near, far], Request(max(1000, near.overlap + 100)))
    assert decision.chosen is near
    return decision


def prediction(ttft: float, tpot: float = 0.02, others: float = 0.0) -> Prediction:
    return Prediction(Estimate(ttft, None), Estimate(tpot, None), others)


@pytest.mark.parametrize(
    ("near", "far", "chosen"),
    [
        (prediction(0.1), prediction(0.1), "near"),  # both keep it: the cheapest
        (prediction(2.0), prediction(0.1), "far"),  # only one does
        (prediction(0.1, tpot=0.2), prediction(0.1), "far"),
        (prediction(2.0), prediction(3.0), "near"),  # none does: no prefix is scattered
        (prediction(0.1, others=2.0), prediction(0.1), "far"),  # it would break those of others
        (prediction(0.1, others=1.0), prediction(2.0), "near"),
    ],
)
def test_cheapest_candidate_that_meets_its_slo_and_breaks_no_other_wins(
    near: Prediction, far: Prediction, chosen: str
) -> None:
    decision = decided(Candidate(NEAR, overlap=900), Candidate(FAR))
    place = choose_for_slo(decision, [near, far], SLO(1.0, 0.05, 0.0), 0.0, slo_miss_cost=15_000)
    assert decision.candidates[place].target.worker == chosen


@pytest.mark.parametrize(("others", "goes"), [(0.0, "near"), (0.3, "near"), (1.0, "far")])
def test_request_without_slo_avoids_breaking_others_up_to_a_cost(others: float, goes: str) -> None:
    decision = decided(Candidate(NEAR, overlap=400), Candidate(FAR))
    predictions = [prediction(9.0, 9.0, others), prediction(99.0, 99.0)]
    place = choose_for_slo(decision, predictions, NO_SLO, 0.0, slo_miss_cost=5_000)
    assert decision.candidates[place].target.worker == goes


def test_refusable_request_gets_a_target_in_time_at_any_cost() -> None:
    decision = decided(Candidate(NEAR), Candidate(FAR, pending=10**6))
    predictions = [prediction(2.0), prediction(0.5)]
    for refuses_late, place in ((False, 0), (True, 1)):
        slo = SLO(1.0, None, 0.0, refuses_late=refuses_late)
        assert choose_for_slo(decision, predictions, slo, 0.0, slo_miss_cost=15_000) == place


@pytest.mark.parametrize(("turns", "goes"), [(1.0, "near"), (8.0, "far")])
def test_session_leaves_its_prefix_for_the_slos_of_all_turns(turns: float, goes: str) -> None:
    decision = decided(Candidate(NEAR, overlap=20_000), Candidate(FAR))
    predictions = [prediction(0.1, others=0.5), prediction(0.2)]
    for slo, there in ((SLO(1.0, 0.05, 0.0), goes), (NO_SLO, "near")):
        place = choose_for_slo(decision, predictions, slo, 0.0, slo_miss_cost=40_000, turns=turns)
        assert decision.candidates[place].target.worker == there


def test_late_is_counted_from_the_arrival_and_over_the_answer() -> None:
    slo = SLO(1.0, 0.05, arrived=10.0)
    assert prediction(0.9, 0.05).slo_missed_by(slo, 10.0, 100) == 0
    assert prediction(0.9).slo_missed_by(slo, 10.5, 100) == pytest.approx(0.4)
    assert prediction(0.1, 0.06).slo_missed_by(slo, 10.0, 100) == pytest.approx(1.0)


def test_ratios_forget_the_oldest() -> None:
    ratios = Ratios()
    for number in range(KEPT + 10):
        ratios.add(float(number))
    assert len(ratios) == KEPT
    assert (ratios.at(0.0), ratios.at(1.0)) == (10.0, KEPT + 9.0)
    assert ratios.at_most(10.0) == pytest.approx(1 / KEPT)
    assert ratios.at_most(KEPT + 9.0) == 1.0


def test_predictions_are_corrected_by_measurements() -> None:
    clock = 0.0
    predictions = Predictions(RateTable(Rates(), lambda: clock), clock=lambda: clock)
    candidate = Candidate(NEAR)
    first = predictions.of(candidate, 1000, 100, backlog=0.0)
    assert not first.measured
    for number in range(40):
        answer = predictions.watch(NEAR, predictions.of(candidate, 1000, 100, 0.0), None, clock)
        clock += first.ttft.by_rates * (2.0 if number % 2 else 3.0)
        answer.first_token(clock)
        clock += 10 * first.tpot.by_rates * 4
        answer.ended(11)
    now = predictions.of(candidate, 1000, 100, 0.0)
    assert now.measured
    assert now.ttft.band.low == pytest.approx(2 * first.ttft.by_rates)
    assert now.ttft.band.high == pytest.approx(3 * first.ttft.by_rates)
    assert now.tpot.expected == pytest.approx(4 * first.tpot.by_rates)
    assert now.ttft.chance(2.5 * first.ttft.by_rates) == pytest.approx(0.5)
    # Another worker of the model is taken to be alike.
    assert predictions.of(Candidate(FAR), 1000, 100, 0.0).ttft.expected == pytest.approx(now.ttft.expected)


def test_prefills_slow_concurrent_decodes_and_break_their_slos() -> None:
    clock = 0.0
    predictions = Predictions(RateTable(Rates(), lambda: clock), clock=lambda: clock)
    candidate, prompt = Candidate(NEAR, requests=1, context=4000), 50_000
    predictions.track_slos()
    quiet = predictions.of(candidate, 100, 100, 0.0).tpot.expected
    end = predictions.hold(NEAR, tpot=1.05 * quiet)
    assert 0 < predictions.of(candidate, 100, 100, 0.0).others_missed < 0.02
    kept = predictions.of(candidate, prompt, 100, 0.0)
    assert 0.2 < kept.others_missed < 0.5
    predictions.placed(NEAR, 5.0, clock)  # half of the last seconds
    busy = predictions.of(candidate, 100, 100, 0.0)
    assert busy.tpot.expected == pytest.approx(2 * quiet, rel=0.05)
    assert 0 < busy.others_missed < 0.02
    # It seems to be broken already, but to make it later still is not for nothing.
    assert 0.05 < predictions.of(candidate, prompt, 100, 0.0).others_missed < kept.others_missed
    end(False)
    clock += 100
    assert 0 < predictions.of(candidate, prompt, 100, 0.0).others_missed < kept.others_missed  # without an SLO
    assert predictions.of(Candidate(NEAR), prompt, 100, 0.0).others_missed == 0
    predictions.forget("near")
    assert predictions.of(candidate, 100, 100, 0.0).tpot.expected == pytest.approx(quiet)


def test_loose_slo_is_hardly_broken_by_a_prefill() -> None:
    strict, loose = ({tpot: 10} for tpot in (0.05, 0.2))
    for before in (0.03, 0.05, 0.06):
        assert expected_misses(loose, 0, before, 1.1 * before) < 0.4 * expected_misses(strict, 0, before, 1.1 * before)
    assert expected_misses(strict, 0, 0.1, 0.11) < expected_misses(loose, 0, 0.1, 0.11)  # there is less to lose
    assert expected_misses(strict, 10, 0.05, 0.05) == 0
    # An answer without an SLO counts half of one whose SLO is its current latency.
    assert expected_misses({}, 20, 0.05, 0.055) == pytest.approx(expected_misses(strict, 0, 0.05, 0.055))


def test_prefill_worker_has_a_slow_decode_rate() -> None:
    step = step_by_rates(Candidate(NEAR), Rates(), 1, 1)
    assert step < tpot_by_rates(step, prefill_share=3.0) < 1


def test_promises_are_read_from_headers_and_classes() -> None:
    settings = Settings(
        service_levels={"fast": {"ttft": 1.0, "when_late": "refuse"}, "slow": {"ttft": 30.0, "tpot": 0.2}},
        models={"m": {"service_level": "slow"}},
    )
    levels = ServiceLevels.from_settings(settings)
    assert ServiceLevels.from_settings(Settings()) is None
    by_model = read_slo([], levels, "", "m", 5.0)
    assert (by_model.service_level, by_model.first_token_by, by_model.tpot) == ("slow", 35.0, 0.2)
    named = read_slo([(b"x-kvrouter-service-level", b"fast"), (b"x-slo-tpot-ms", b"50")], levels, "", "m", 5.0)
    assert (named.ttft, named.tpot, named.refuses_late) == (1.0, 0.05, True)
    assert read_slo([(b"x-slo-ttft-ms", b"0")], None, "", "m", 5.0) is None  # none, as llm-d has it
    assert read_slo([], levels, "", "other", 5.0) is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("service_levels: {fast: {}}", "no SLO"),
        ("service_levels: {fast: {ttft: 0}}", r"service_levels\.fast\.ttft"),
        ("service_levels: {'no name': {ttft: 1}}", "service_levels"),
        ("models: {m: {service_level: fast}}", r"models\.m\.service_level: 'fast' is not defined"),
    ],
)
def test_error_names_an_invalid_service_level(tmp_path: Path, given: str, found: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(given)
    with pytest.raises(ConfigError, match=found):
        load_settings(file)
