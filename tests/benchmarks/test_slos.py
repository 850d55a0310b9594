"""The simulation of SLOs: classes, sides, and figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from statistics import mean

import pytest

from benchmarks.policy.headroom import headroom_side, most_suitable
from benchmarks.policy.measures import in_time
from benchmarks.policy.slos import (
    ALL_WITH_SLOS,
    HALF,
    OURS_WITH_SLOS,
    REFUSING,
    SIDES,
    TODAY,
    Ground,
    Played,
    classed,
    keepable,
    kept,
    play,
)
from benchmarks.policy.workloads import AGENT, SINGLE
from indexer import Target
from router.admission.admission import LATE_TRIES
from router.load.target_load import LoadTable
from router.policies import Candidate, Decision, NamedPolicy, Request
from router.prediction.learned import Learned
from router.prediction.predictions import WatchedAnswer
from router.prediction.slo import Estimate, Prediction
from router.settings import PolicyName
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import Side
from simulator.fleet.trace import RequestSLO, TracedRequest

GROUND = Ground(AGENT, 2, 300_000, 0.5, 1.6, seconds=40.0)


@pytest.mark.parametrize("side", SIDES)
def test_every_side_answers_every_request(side: str) -> None:
    requests = classed(GROUND.requests(1.0, 0), HALF, 0)
    played = play(side, GROUND, requests, 0)
    assert len(played.outcomes) == len(requests)
    assert all(outcome.ended >= outcome.begun >= outcome.request.arrival for outcome in played.outcomes)
    result = kept(played)
    assert 0.5 < result.share <= 1
    assert result.others > 0
    assert (side in (TODAY, "dynamo")) == (result.error == 0)


@pytest.mark.parametrize("side", SIDES)
def test_sides_that_read_slos_refuse_late_requests_of_refusing_classes(side: str) -> None:
    requests = classed(GROUND.requests(4.0, 0), REFUSING, 0)
    played = play(side, GROUND, requests, 0)
    refused = [outcome for outcome in played.outcomes if outcome.refused]
    assert (side in (TODAY, "dynamo")) == (not refused)
    assert all(outcome.request.slo and outcome.request.slo.refuses_late for outcome in refused)
    assert all(outcome.begun == outcome.ended == inf for outcome in refused)
    assert all(outcome.ended < inf for outcome in played.outcomes if not outcome.refused)
    assert not any(outcome.refused for outcome in play(side, GROUND, requests[:20], 0).outcomes)


def test_refusing_late_requests_meets_more_slos() -> None:
    shares, refused = {}, {}
    for mix in (ALL_WITH_SLOS, REFUSING):
        runs = [
            kept(play(OURS_WITH_SLOS, GROUND, classed(GROUND.requests(4.0, seed), mix, seed), seed))
            for seed in range(3)
        ]
        shares[mix], refused[mix] = mean(run.share for run in runs), mean(run.refused for run in runs)
    assert refused[ALL_WITH_SLOS] == 0 < refused[REFUSING]
    assert shares[REFUSING] > shares[ALL_WITH_SLOS] + 0.05


def test_some_slos_are_met_far_beyond_saturation() -> None:
    ground = Ground(SINGLE, 2, 300_000, 0.5, 1.6, seconds=200.0)
    requests = classed(ground.requests(1.3, 0), ALL_WITH_SLOS, 0)
    ours, today = (kept(play(side, ground, requests, 0)).share for side in (OURS_WITH_SLOS, TODAY))
    assert today < 0.1
    assert ours > 0.3


class _LateChoices:
    """The policy of a run. It counts the waiting requests with a missed SLO that choose at one event, and stay."""

    def __init__(self, policy: NamedPolicy) -> None:
        self.run: Simulation | None = None
        self.most = 0
        self._policy = policy.choose
        self._at = -1.0
        self._chose: set[str] = set()

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        assert self.run is not None
        queue = self.run.routers[0].admission.queue
        late = {each.prompt.session for each in queue.in_order() if each.slo_missed}
        if self.run.loop.time() > self._at:
            self._at = self.run.loop.time()
            self.most = max(self.most, len(self._chose & late))
            self._chose = set()
        if request.session in late:
            self._chose.add(request.session)
        return self._policy(candidates, request)


@dataclass(frozen=True, slots=True)
class _WatchedSide(Side):
    watching: list[_LateChoices] = field(default_factory=list)

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:
        policy = super(_WatchedSide, self).make_policy(random, learned, load)
        self.watching.append(_LateChoices(policy))
        return NamedPolicy(policy.spec, self.watching[0])


def test_few_waiting_requests_with_a_missed_slo_choose_at_one_event() -> None:
    side = _WatchedSide("watched", PolicyName.KV_AWARE, late_binding=True, slos=True)
    run = Simulation(GROUND.cell(0.0).fleet, side, Random(0))
    side.watching[0].run = run
    requests = classed(GROUND.requests(4.0, 0), ALL_WITH_SLOS, 0)
    run.run([replace(request, session=str(number)) for number, request in enumerate(requests)])
    assert side.watching[0].most == LATE_TRIES


def test_sessions_have_one_class_and_runs_repeat() -> None:
    requests = classed(GROUND.requests(1.0, 0), ALL_WITH_SLOS, 0)
    by_session: dict[str, set[RequestSLO | None]] = {}
    for request in requests:
        by_session.setdefault(request.session, set()).add(request.slo)
    assert all(len(classes) == 1 for classes in by_session.values())
    assert kept(play(OURS_WITH_SLOS, GROUND, requests, 1)) == kept(play(OURS_WITH_SLOS, GROUND, requests, 1))


def test_share_that_could_be_kept_is_that_of_an_idle_fleet_without_evictions() -> None:
    slo = RequestSLO("interactive", 2.0, 0.05)
    first = TracedRequest(1.0, 100_000, 11, tuple(range(196)), (), "s", slo)
    again = TracedRequest(9.0, 100_000, 11, tuple(range(196)), (), "s", slo)
    unknown = TracedRequest(10.0, 100_000, 11, tuple(range(1000, 1196)), (), "t", slo)
    assert keepable([first, again, unknown]) == 0.5
    assert keepable([first]) == 0.0


def test_answer_within_both_times_is_in_time() -> None:
    outcome = Outcome(TracedRequest(1.0, 10, 11, (), (), "s"), begun=2.0, ended=3.0, worker=0)
    assert in_time(outcome, 1.0, 0.1)
    assert in_time(outcome, None, None)
    assert not in_time(outcome, 0.9, None)
    assert not in_time(outcome, None, 0.09)
    assert kept(Played([outcome], 0.0)).others == 1.0


INTERACTIVE_SLO = RequestSLO("interactive", 1.0, 0.05)


@pytest.mark.parametrize(("most", "chosen"), [(False, "b"), (True, "a")])
def test_llm_d_chooses_the_least_or_the_most_headroom(most: bool, chosen: str) -> None:
    targets = [Candidate(Target(name, 0, "m"), requests=1) for name in "abc"]
    predictions = [Prediction(Estimate(ttft, None), Estimate(0.02, None)) for ttft in (0.1, 0.9, 5.0)]
    assert most_suitable(targets, predictions, INTERACTIVE_SLO, 100, Random(1), most).target.worker == chosen


def test_llm_d_chooses_an_idle_target_and_then_the_least_late_if_none_meets_the_slo() -> None:
    targets = [Candidate(Target(name, 0, "m"), requests=name != "c") for name in "abc"]
    predictions = [Prediction(Estimate(ttft, None), Estimate(0.02, None)) for ttft in (2.0, 3.0, 4.0)]
    assert most_suitable(targets, predictions, INTERACTIVE_SLO, 100, Random(1)).target.worker == "c"
    assert most_suitable(targets[:2], predictions[:2], INTERACTIVE_SLO, 100, Random(1)).target.worker == "a"


@pytest.mark.parametrize("slo", [None, INTERACTIVE_SLO])
def test_selector_keeps_the_choice_of_llm_ds_rule(slo: RequestSLO | None) -> None:
    """The selector looks for another target if an SLO is missed. Without a cost of missed SLOs it keeps the choice."""
    prompt = TracedRequest(0.0, 60_000, 2, tuple(range(117)), tuple(range(117)), "s", slo)
    watched: list[WatchedAnswer] = []
    side = headroom_side("llm_d", False, {"s": slo})
    run = Simulation(FleetSpec(LLAMA_70B, 3, 300_000), side, Random(0))
    run.routers[0].state.learned.predictions.on_answered.append(watched.append)
    first, again = run.run([prompt, replace(prompt, arrival=0.5)])
    assert again.worker == first.worker  # it holds the prompt, and its TTFT is at most 5 s longer
    assert [answer.slo is None for answer in watched if answer.slo] == [False] * (0 if slo is None else 2)
