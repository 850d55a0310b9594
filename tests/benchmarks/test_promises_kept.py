"""The simulation of SLOs: classes, sides and results."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from benchmarks.policy.slos import (
    HALF,
    OURS_PROMISED,
    PROMISED,
    REFUSING,
    SIDES,
    TODAY,
    Ground,
    Played,
    classed,
    in_time,
    keepable,
    kept,
    play,
)
from benchmarks.policy.workloads import AGENT, SINGLE
from indexer import Target
from router.admission.admission import LATE_TRIES
from router.policies import Candidate, policy_named
from router.prediction.slo import SLO, Estimate, Prediction
from router.settings import PolicySettings
from simulator.fleet.fleet import Outcome
from simulator.fleet.predicted_latency import predicted_latency
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.promised_fleet import By, PromisedFleet
from simulator.fleet.trace import Promised, TracedRequest

GROUND = Ground(AGENT, 2, 300_000, 0.5, 1.6, seconds=40.0)


@pytest.mark.parametrize("side", SIDES)
def test_every_side_answers_all_requests_and_is_judged_by_slos(side: str) -> None:
    requests = classed(GROUND.requests(1.0, 0), HALF, 0)
    played = play(side, GROUND, requests, 0)
    assert len(played.outcomes) == len(requests)
    assert all(outcome.ended >= outcome.begun >= outcome.request.arrival for outcome in played.outcomes)
    result = kept(played)
    assert 0.5 < result.share <= 1
    assert result.others > 0
    assert (side in (TODAY, "dynamo")) == (result.error == 0)


@pytest.mark.parametrize("side", SIDES)
def test_only_sides_with_predictions_refuse_late_requests(side: str) -> None:
    requests = classed(GROUND.requests(4.0, 0), REFUSING, 0)
    played = play(side, GROUND, requests, 0)
    refused = [outcome for outcome in played.outcomes if outcome.refused]
    assert (side in (TODAY, "dynamo")) == (not refused)
    assert all(outcome.request.promised and outcome.request.promised.refuses_late for outcome in refused)
    assert all(outcome.begun == outcome.ended == inf for outcome in refused)
    assert all(outcome.ended < inf for outcome in played.outcomes if not outcome.refused)
    assert not any(outcome.refused for outcome in play(side, GROUND, requests[:20], 0).outcomes)


def test_refusing_late_requests_meets_more_slos() -> None:
    shares = {}
    for mix in (PROMISED, REFUSING):
        shares[mix] = kept(play(OURS_PROMISED, GROUND, classed(GROUND.requests(4.0, 0), mix, 0), 0))
    assert shares[PROMISED].refused == 0 < shares[REFUSING].refused
    assert shares[REFUSING].share > shares[PROMISED].share


def test_overloaded_fleet_still_meets_some_slos() -> None:
    ground = Ground(SINGLE, 2, 300_000, 0.5, 1.6, seconds=200.0)
    requests = classed(ground.requests(1.3, 0), PROMISED, 0)
    ours, today = (kept(play(side, ground, requests, 0)).share for side in (OURS_PROMISED, TODAY))
    assert today < 0.1
    assert ours > 0.3


class _Watching(PromisedFleet):
    """Counts how many held requests that were late choose at one event, and stay late."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_vain: list[int] = []
        self._chose = set[int]()

    def _retry(self) -> set[int]:
        late = self._late()
        self._chose.clear()
        bound = super()._retry()
        self.in_vain.append(len(late & self._chose & self._late()))
        return bound

    def _choose(self, request: TracedRequest) -> Candidate:
        self._chose.add(id(request))
        return super()._choose(request)

    def _late(self) -> set[int]:
        requests = (id(held.outcome.request) for held in self._held)
        return {request for request in requests if self._missed.get(id(self._slos[request]))}


def test_late_requests_that_choose_at_one_event_are_bounded() -> None:
    random = Random(0)
    choose = policy_named(PolicySettings(), random).choose
    fleet = _Watching(LLAMA_70B, 2, 300_000, choose, random, By.BROKEN_PROMISES, True)
    fleet.run(classed(GROUND.requests(4.0, 0), PROMISED, 0))
    assert max(fleet.in_vain) == LATE_TRIES


def test_sessions_have_one_class_and_runs_are_deterministic() -> None:
    requests = classed(GROUND.requests(1.0, 0), PROMISED, 0)
    by_session: dict[str, set[Promised | None]] = {}
    for request in requests:
        by_session.setdefault(request.session, set()).add(request.promised)
    assert all(len(classes) == 1 for classes in by_session.values())
    assert kept(play(OURS_PROMISED, GROUND, requests, 1)) == kept(play(OURS_PROMISED, GROUND, requests, 1))


def test_keepable_share_is_that_of_an_idle_fleet_without_evictions() -> None:
    promised = Promised("interactive", 2.0, 0.05)
    first = TracedRequest(1.0, 100_000, 11, tuple(range(196)), (), "s", promised)
    again = TracedRequest(9.0, 100_000, 11, tuple(range(196)), (), "s", promised)
    unknown = TracedRequest(10.0, 100_000, 11, tuple(range(1000, 1196)), (), "t", promised)
    assert keepable([first, again, unknown]) == 0.5
    assert keepable([first]) == 0.0


def test_in_time_compares_ttft_and_tpot() -> None:
    outcome = Outcome(TracedRequest(1.0, 10, 11, (), (), "s"), begun=2.0, ended=3.0)
    assert in_time(outcome, 1.0, 0.1)
    assert in_time(outcome, None, None)
    assert not in_time(outcome, 0.9, None)
    assert not in_time(outcome, None, 0.09)
    assert kept(Played([outcome], 0.0)).others == 1.0


@pytest.mark.parametrize(("most", "chosen"), [(False, "b"), (True, "a")])
def test_llm_d_side_chooses_least_or_most_headroom(most: bool, chosen: str) -> None:
    targets = [Candidate(Target(name, 0, "m"), requests=1) for name in "abc"]
    predictions = [Prediction(Estimate(ttft, None), Estimate(0.02, None)) for ttft in (0.1, 0.9, 5.0)]
    choice = predicted_latency(targets, predictions, SLO(1.0, 0.05, 0.0), 0.0, 100, Random(1), most)
    assert choice.target.worker == chosen


def test_llm_d_side_chooses_idle_then_least_late_if_no_worker_meets_the_slo() -> None:
    targets = [Candidate(Target(name, 0, "m"), requests=name != "c") for name in "abc"]
    predictions = [Prediction(Estimate(ttft, None), Estimate(0.02, None)) for ttft in (2.0, 3.0, 4.0)]
    slo = SLO(1.0, 0.05, 0.0)
    assert predicted_latency(targets, predictions, slo, 0.0, 100, Random(1)).target.worker == "c"
    busy = predicted_latency(targets[:2], predictions[:2], slo, 0.0, 100, Random(1))
    assert busy.target.worker == "a"
