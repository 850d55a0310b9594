"""Full fleets in virtual time: the limit that computes itself, the order of the queue, refusals and the pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from benchmarks.replicas.simulation import RouterChannel, RouterNetwork
from router.policies.interface import Candidate, Request
from router.policies.rates import Rates
from router.settings import PolicyName
from router.settings.own_code import check_function
from simulator.fleet.engine import Profile
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side, SimulatedRouter
from simulator.fleet.trace import TracedRequest

BLOCK = 16
PROFILE = Profile("small", Rates(0.01, 1e-4, 0.0, 0.0), 16_384, max_requests=64)
LARGE = replace(PROFILE, kv_tokens=1_310_720, max_requests=1024)
HIGH = -1
AUTO = replace(OURS, requests="auto")


def request(number: int, arrival: float, tokens: int, output: int) -> TracedRequest:
    """Return a request that shares no prefix with another. One in ten has high priority."""
    ids = tuple(range(1000 * number, 1000 * number + (tokens + output) // BLOCK))
    priority = 0 if number % 10 else HIGH
    return TracedRequest(arrival, tokens, output, ids[: tokens // BLOCK], ids, str(number), priority=priority)


def arrivals(rate: float, seconds: float, make: Callable[[int, float], TracedRequest]) -> list[TracedRequest]:
    return [make(number, number / rate) for number in range(int(rate * seconds))]


def long_answers(number: int, at: float) -> TracedRequest:
    return request(number, at, 300, Random(number).randrange(400, 1000))


def long_prompts(number: int, at: float) -> TracedRequest:
    return request(number, at, 4000, Random(number).randrange(50, 150))


def run(
    side: Side, requests: Sequence[TracedRequest], workers: int = 1, profile: Profile = PROFILE
) -> tuple[Simulation, list[Outcome]]:
    simulation = Simulation(FleetSpec(profile, workers, profile.kv_tokens, BLOCK), side, Random(0))
    return simulation, simulation.run(requests)


def ttfts(outcomes: Sequence[Outcome], priority: int) -> list[float]:
    return [each.begun - each.request.arrival for each in outcomes if each.request.priority == priority]


def test_full_memory_holds_requests_in_the_router_in_their_order() -> None:
    requests = arrivals(5.0, 60.0, long_answers)
    simulation, outcomes = run(AUTO, requests)
    refused = [each for each in outcomes if each.refused]
    assert max(ttfts(outcomes, HIGH)) < 6.0  # an answer takes 10 s
    assert refused
    assert all(each.request.priority == 0 and each.retry_after for each in refused)
    assert max(each.begun - each.request.arrival for each in outcomes if not each.refused) < 32.0
    before, without = run(OURS, requests)
    assert max(ttfts(without, HIGH)) > 20.0
    preemptions = [sum(engine.preemptions for engine in each.engines) for each in (simulation, before)]
    assert preemptions[0] < preemptions[1] / 5


class TwoRouters(Simulation):
    """A run with two routers that share their load. Each request arrives at a random one."""

    def make_routers(self) -> list[SimulatedRouter]:
        network = RouterNetwork(0.005, prompts=True)
        return [self.make_router(RouterChannel(network)) for _ in range(2)]

    def router_of(self, outcome: Outcome) -> SimulatedRouter:  # noqa: ARG002
        return self.random.choice(self.routers)


def own_costs(candidates: list[Candidate], request: Request) -> list[float]:  # noqa: ARG001
    """A policy of one's own, which does not know prefills."""
    return [float(each.requests) for each in candidates]


def sides() -> dict[str, tuple[type[Simulation], Side, bool]]:
    """Return routers by name, and whether answers are streamed."""
    plain = replace(AUTO, policy=PolicyName.ROUND_ROBIN)
    own = replace(AUTO, policy=check_function("test_overload:own_costs", []))
    return {
        "kv_aware": (Simulation, AUTO, True),
        "whole answers": (Simulation, AUTO, False),
        "round_robin": (Simulation, plain, True),
        "round_robin, whole answers": (Simulation, plain, False),
        "own policy": (Simulation, own, True),
        "two routers": (TwoRouters, AUTO, True),
    }


@pytest.mark.parametrize("name", sides())
def test_order_holds_although_memory_never_limits_prompts(name: str) -> None:
    kind, side, streamed = sides()[name]
    requests = [replace(each, streamed=streamed) for each in arrivals(5.0, 45.0, long_prompts)]
    outcomes = kind(FleetSpec(LARGE, 1, LARGE.kv_tokens, BLOCK), side, Random(0)).run(requests)
    assert max(ttfts(outcomes, HIGH)) < 4.0
    answered = [each for each in outcomes if not each.refused]
    assert 0.5 < len(answered) / len(outcomes) < 0.9
    assert max(each.begun - each.sent for each in answered) < 4.0  # in the engine
    assert max(each.begun - each.request.arrival for each in answered) < 34.0


def test_order_holds_for_two_hours() -> None:
    slow = replace(PROFILE, rates=Rates(0.03, 1e-3, 0.0, 0.0), max_requests=4)
    _, outcomes = run(replace(AUTO, metrics_interval=4.0), arrivals(0.24, 7200.0, long_answers), profile=slow)
    for begin in range(0, 7200, 1200):
        part = [each for each in outcomes if begin <= each.request.arrival < begin + 1200]
        assert max(ttfts(part, HIGH)) < 30.0  # an answer takes 22 s, and the next one waits in the engine
        waited = [each.sent - each.request.arrival for each in part if not each.refused]
        assert 0.6 < len(waited) / len(part) < 0.9
        assert max(waited) < 31.0


@pytest.mark.parametrize(("make", "rate"), [(long_prompts, 5.0), (long_answers, 4.0)], ids=["prefill", "decode"])
def test_order_holds_for_pairs_if_either_stage_is_full(
    make: Callable[[int, float], TracedRequest], rate: float
) -> None:
    profile = PROFILE if make is long_answers else replace(PROFILE, kv_tokens=131_072)
    requests, spec = arrivals(rate, 50.0, make), FleetSpec(profile, 2, profile.kv_tokens, BLOCK, prefill=1, decode=1)
    first, normal, answered = [], [], []
    for side in (AUTO, OURS):
        outcomes = Simulation(spec, side, Random(0)).run(requests)
        first.append(max(ttfts(outcomes, HIGH)))
        normal.append(max(each.begun - each.request.arrival for each in outcomes if not each.refused))
        answered.append(sum(each.ended < 50.0 for each in outcomes))
    assert first[0] < 6.0 < 20.0 < first[1]
    assert normal[0] < 33.0
    assert answered[0] >= 0.9 * answered[1]


def test_slots_are_found_and_one_request_waits_in_the_engine() -> None:
    requests = arrivals(4.0, 60.0, long_answers)
    profile = replace(PROFILE, max_requests=4)
    simulation = Simulation(FleetSpec(profile, 1, profile.kv_tokens, BLOCK), AUTO, Random(0))
    waiting: list[int] = []

    def look() -> None:
        if simulation.loop.time() < 60.0:
            waiting.append(simulation.engines[0].waiting)
            simulation.loop.call_later(0.5, look)

    simulation.loop.call_later(45.0, look)
    outcomes = simulation.run(requests)
    assert set(waiting) <= {0, 1}
    assert max(ttfts(outcomes[180:], HIGH)) < 15.0


def test_answers_keep_their_speed_while_the_fleet_refuses_requests() -> None:
    requests, profile = arrivals(5.0, 60.0, long_prompts), replace(PROFILE, kv_tokens=131_072)
    _, outcomes = run(AUTO, requests, profile=profile)
    _, without = run(OURS, requests, profile=profile)
    assert median(token_seconds(outcomes)) < 0.4 * median(token_seconds(without))
    assert max(ttfts(outcomes, HIGH)) < 3.0


def test_fleet_below_saturation_is_served_as_without_limits() -> None:
    requests = arrivals(1.5, 120.0, long_prompts)
    served = [[(each.begun, each.ended) for each in run(side, requests, 2)[1]] for side in (AUTO, OURS)]
    assert served[0] == served[1]


def test_full_fleet_sends_each_session_to_the_worker_that_holds_it() -> None:
    requests = list[TracedRequest]()
    for number, turn in ((number, turn) for turn in range(16) for number in range(30)):
        ids, tokens = tuple(range(10_000 * number, 10_000 * number + 3000)), 2400 + 1440 * turn
        blocks, finished = ids[: tokens // BLOCK], ids[: (tokens + 32) // BLOCK]
        requests.append(TracedRequest(1.2 * turn + 0.04 * number, tokens, 32, blocks, finished, str(number)))
    _, outcomes = run(AUTO, requests, 2, replace(PROFILE, kv_tokens=1_048_576))
    workers: dict[str | None, list[int]] = {}
    for each in outcomes:
        if not each.refused:
            workers.setdefault(each.request.session, []).append(each.worker)
    moves = sum(before != after for used in workers.values() for before, after in pairwise(used))
    assert any(each.refused for each in outcomes)
    assert moves < 0.02 * len(requests)


def test_full_queue_sends_short_prompts_first() -> None:
    requests = arrivals(8.0, 60.0, lambda number, at: request(10 * number + 1, at, 400 if number % 2 else 4000, 32))
    _, outcomes = run(AUTO, requests, profile=replace(PROFILE, kv_tokens=131_072))
    short = [each for each in outcomes if each.request.input_tokens == 400]
    assert sum(each.refused for each in outcomes) > 50
    assert sum(each.refused for each in short) < 0.02 * len(short)


def test_lower_priority_makes_way_while_more_higher_ones_wait_than_there_are_targets() -> None:
    def three(number: int, at: float) -> TracedRequest:
        return replace(request(number, at, 4000, 32), priority=(HIGH, 0, 0, 0, 1)[number % 5])

    _, outcomes = run(AUTO, arrivals(8.0, 50.0, three), 1, replace(PROFILE, kv_tokens=131_072))
    late = [each for each in outcomes if 20.0 < each.request.arrival < 45.0]
    assert max(ttfts(outcomes, HIGH)) < 6.0
    refused = [each.refused for each in late if each.request.priority == 1]
    assert sum(refused) > 0.9 * len(refused)


def token_seconds(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the seconds of a token of each answer that began after 40 seconds."""
    return [
        (each.ended - each.begun) / (each.request.output_tokens - 1)
        for each in outcomes
        if not each.refused and each.begun > 40.0
    ]
