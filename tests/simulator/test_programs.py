"""Sessions whose contexts need more memory than the fleet has, in virtual time, with the router's own admission."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count
from random import Random

from benchmarks.policy.sessions import Turn, chained
from benchmarks.replicas.simulation import RouterChannel, RouterNetwork
from router.admission.room import OVERTAKING_SECONDS, ROOM_SECONDS
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, SimulatedRouter
from simulator.fleet.trace import TracedRequest

BLOCK = 512
PROGRAMS = replace(OURS, programs=True)
# Two caches of 64,000 tokens for sixteen sessions of 16,000: half of them fit.
FLEET = FleetSpec(LLAMA_70B, 2, 64_000, BLOCK)


def sessions(number: int, tokens: int = 16_000, turns: int = 8, pause: float = 1.0) -> list[TracedRequest]:
    """Sessions that begin within a second, and ask again a pause after each answer."""
    ids = count()
    kept = [Turn(tokens - 512 * turns, 20), *[Turn(492, 20, pause)] * (turns - 1)]
    return [chained(each / number, f"session {each}", (), kept, ids, BLOCK) for each in range(number)]


def hits(outcomes: list[Outcome]) -> float:
    """The share of the tokens of later turns that were cached."""
    turns = defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        turns[outcome.request.session].append(outcome)
    later = [outcome for of_one in turns.values() for outcome in of_one[1:]]
    return sum(each.cached for each in later) / sum(each.request.input_tokens for each in later)


def waits(outcomes: list[Outcome]) -> list[float]:
    return [each.sent - each.request.arrival for each in outcomes if not each.refused]


def test_sessions_that_do_not_fit_wait_so_that_the_others_keep_their_context() -> None:
    thrashing = Simulation(FLEET, OURS, Random(1)).run(sessions(16))
    kept = Simulation(FLEET, PROGRAMS, Random(1)).run(sessions(16))
    assert not any(each.refused for each in kept)
    assert len(kept) == len(thrashing) == 16 * 8
    assert hits(kept) > hits(thrashing) + 0.15
    assert max(each.ended for each in kept) < max(each.ended for each in thrashing)
    assert max(waits(kept)) < OVERTAKING_SECONDS


def test_sessions_that_fit_are_served_exactly_as_without() -> None:
    fleet = replace(FLEET, kv_tokens=400_000)
    usual = Simulation(fleet, OURS, Random(1)).run(sessions(16))
    gated = Simulation(fleet, PROGRAMS, Random(1)).run(sessions(16))
    assert [each.ended for each in gated] == [each.ended for each in usual]


def test_no_wait_is_longer_than_its_bound_and_only_new_sessions_are_refused() -> None:
    # Long answers and pauses: what is admitted stays for minutes, and far more sessions come than fit.
    turns = [Turn(14_000, 1500), Turn(500, 1500, 4.0), Turn(500, 1500, 4.0), Turn(500, 4000, 4.0)]
    ids = count()
    crowd = [chained(each * 5.0, f"session {each}", (), turns, ids, BLOCK) for each in range(80)]
    outcomes = Simulation(replace(FLEET, kv_tokens=48_000), PROGRAMS, Random(1)).run(crowd)
    refused = {each.request.session for each in outcomes if each.refused}
    answered = {each.request.session for each in outcomes if not each.refused}
    assert refused
    assert not refused & answered
    assert max(waits(outcomes)) < ROOM_SECONDS + 31  # then it waits for its target, as without the gate


def test_pairs_keep_contexts_at_both_workers() -> None:
    fleet = replace(FLEET, workers=4, prefill=2, decode=2)
    thrashing = Simulation(fleet, OURS, Random(1)).run(sessions(16))
    kept = Simulation(fleet, PROGRAMS, Random(1)).run(sessions(16))
    assert not any(each.refused for each in kept)
    assert any(each.prefill >= 0 for each in kept)
    assert hits(kept) > hits(thrashing) + 0.15
    assert max(waits(kept)) < OVERTAKING_SECONDS


class RoutersAlone(Simulation):
    """A fleet behind two routers that do not share their load, each with half of the sessions."""

    def make_routers(self) -> list[SimulatedRouter]:
        return [self.make_router() for _ in range(2)]

    def router_of(self, outcome: Outcome) -> SimulatedRouter:
        return self.routers[int(outcome.request.session.split()[1]) % 2]


class RoutersTogether(RoutersAlone):
    """Two routers that share their load."""

    def make_routers(self) -> list[SimulatedRouter]:
        network = RouterNetwork(0.005, prompts=True)
        return [self.make_router(RouterChannel(network)) for _ in range(2)]


class AnyRouter(RoutersTogether):
    """Two routers that share their load. Each call arrives at a random one, as through a balancer."""

    def router_of(self, outcome: Outcome) -> SimulatedRouter:  # noqa: ARG002
        return self.random.choice(self.routers)


def test_calls_of_a_session_at_different_routers_are_warm_returns() -> None:
    one = Simulation(FLEET, PROGRAMS, Random(1)).run(sessions(16))
    any_router = AnyRouter(FLEET, PROGRAMS, Random(1)).run(sessions(16))
    assert hits(any_router) > hits(one) - 0.1
    assert max(waits(any_router)) < OVERTAKING_SECONDS


def test_two_routers_that_share_load_keep_as_many_contexts_as_one() -> None:
    one, alone, together = [
        hits(simulation(FLEET, PROGRAMS, Random(1)).run(sessions(16)))
        for simulation in (Simulation, RoutersAlone, RoutersTogether)
    ]
    assert together > one - 0.05
    assert alone < together - 0.05
