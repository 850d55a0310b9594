"""Fleets of prefill and decode workers in the simulation: engines, transfers, and the router's own choice of a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policy.rivals.pairs import dynamo_pairs
from router.apis.requests import RoutedRequest
from router.policies.rates import prefill_seconds
from router.prediction.slo import SLO
from router.routing.assignment import Selection
from router.routing.disaggregation.transfers import TransferTimes
from router.settings import Role
from simulator.fleet.engine import LLAMA_70B, Engine, Handover
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side, SimulatedRouter
from simulator.fleet.sources import SourceSpec
from simulator.fleet.trace import BLOCK_TOKENS, RequestSLO, TracedRequest
from simulator.fleet.transfers import Network, NetworkSpec

PAIRS = FleetSpec(LLAMA_70B, 4, 200_000, prefill=2, decode=2)
ALWAYS = Side("always in pairs", OURS.policy, pairs=partial(dynamo_pairs, conditional=False))


def request(arrival: float, blocks: tuple[int, ...], output: int = 50, extra: int = 100) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS + extra, output, blocks, blocks, str(blocks[:1]))


def run(spec: FleetSpec, *requests: TracedRequest, side: Side = ALWAYS) -> list[Outcome]:
    return Simulation(spec, side, Random(0)).run(list(requests))


@settings(max_examples=15)
@given(
    st.lists(
        st.builds(
            lambda arrival, length, fork, output: request(
                arrival, tuple(range(fork)) + tuple(range(100 * fork, 100 * fork + length)), output
            ),
            st.floats(0, 10),
            st.integers(0, 40),
            st.integers(0, 20),
            st.integers(1, 300),
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(0, 2),
    st.integers(20_000, 60_000),
)
def test_every_request_is_answered_and_no_memory_is_kept(
    requests: list[TracedRequest], integrated: int, kv_tokens: int
) -> None:
    requests.sort(key=lambda asked: asked.arrival)
    spec = FleetSpec(LLAMA_70B, 4 + integrated, max(kv_tokens, 32_000), prefill=2, decode=2)
    simulation = Simulation(spec, OURS, Random(1))
    for outcome in simulation.run(requests):
        assert outcome.request.arrival - 1e-6 <= outcome.sent < outcome.begun <= outcome.ended < inf
        assert spec.roles[outcome.worker] is not Role.PREFILL
        if outcome.prefill >= 0:
            assert spec.roles[outcome.prefill] is Role.PREFILL
            assert outcome.sent < outcome.prefilled < outcome.begun
            assert 0 <= outcome.moved < outcome.request.input_tokens
    assert [engine.kv_usage for engine in simulation.engines] == [0.0] * spec.workers
    loads = simulation.routers[0].state.load
    assert all(not loads.of(target.worker, 0).requests for target in simulation._targets)


def test_first_token_follows_prefill_transfer_and_one_step() -> None:
    (outcome,) = run(PAIRS, request(0.0, tuple(range(20))))
    tokens = outcome.request.input_tokens
    rates, network = LLAMA_70B.rates, Network(PAIRS.network, PAIRS.roles)
    assert outcome.prefilled == pytest.approx(prefill_seconds(rates, tokens, 0, 0, 0), rel=0.01)
    assert outcome.moved == tokens - 1
    transfer = PAIRS.network.latency + outcome.moved / network.rate(outcome.prefill, outcome.worker)
    step = rates.step + rates.token + rates.attention * tokens
    assert outcome.begun - outcome.prefilled == pytest.approx(transfer + step, rel=0.01)


def test_second_turn_moves_only_what_decode_lacks() -> None:
    spec = replace(PAIRS, workers=2, prefill=1, decode=1)
    first = request(0.0, tuple(range(20)), output=BLOCK_TOKENS)
    second = request(30.0, tuple(range(40)))
    outcomes = run(spec, first, second)
    assert outcomes[1].cached == 20 * BLOCK_TOKENS  # on the prefill worker
    assert outcomes[1].moved == outcomes[1].request.input_tokens - 1 - 20 * BLOCK_TOKENS


def test_short_rest_is_computed_by_the_decode_worker_that_keeps_the_session() -> None:
    first = request(0.0, tuple(range(40)))
    outcomes = run(PAIRS, first, request(60.0, tuple(range(41))), side=OURS)
    assert outcomes[1].prefill == -1
    assert outcomes[1].cached == 40 * BLOCK_TOKENS


def test_decode_batch_is_bounded_by_memory_and_the_prefill_worker_holds_its_blocks_meanwhile() -> None:
    spec = FleetSpec(LLAMA_70B, 2, 20 * BLOCK_TOKENS, prefill=1, decode=1)
    simulation = Simulation(spec, ALWAYS, Random(0))
    one, other = (request(0.0, tuple(range(start, start + 12)), output=2000) for start in (0, 100))
    third, fourth = (request(0.01, tuple(range(start, start + 12)), output=10) for start in (200, 300))
    outcomes = simulation.run([one, other, third, fourth])
    assert outcomes[1].prefilled < outcomes[0].ended
    assert outcomes[1].begun > outcomes[0].ended  # two do not fit
    assert outcomes[3].prefilled > outcomes[0].ended  # the prefill worker still held the prompt before


def test_transfers_wait_for_both_ends_and_for_their_pair() -> None:
    spec = NetworkSpec(end=100.0, node=100.0, rack=50.0, far=10.0, latency=0.0, per_node=2, per_rack=4)
    network = Network(spec, [Role.PREFILL] * 4 + [Role.DECODE] * 4)
    rates = {receiver: network.rate(0, receiver) for receiver in range(4, 8)}
    assert sorted(rates.values()) == [10.0, 10.0, 50.0, 100.0]
    near, *_, far = sorted(rates, key=lambda receiver: -rates[receiver])
    assert network.transfer(0, far, 100, 0.0) == 10.0
    assert network.transfer(0, near, 100, 0.0) == 2.0  # after the second in which the sender was busy
    assert network.transfer(0, far, 100, 3.0) == 20.0  # after the pair's first transfer
    assert network.transfer(0, near, 100, 4.0) == 5.0  # the sender does not wait for another pair
    slower = next(sender for sender in range(1, 4) if network.rate(sender, near) == spec.rack)
    assert [network.transfer(slower, near, 100, 20.0) for _ in range(2)] == [22.0, 24.0]
    assert network.transfer(0, near, 100, 20.0) == 23.0  # after the two seconds in which the receiver is busy


def test_prefill_engine_keeps_blocks_until_they_are_fetched() -> None:
    sender, receiver = (Engine(LLAMA_70B, 100 * BLOCK_TOKENS) for _ in range(2))
    asked = request(0.0, tuple(range(10)))
    sender.submit(asked, 0.0, prefill_only=True)
    begun = []
    while sender.next_event < inf:
        begun += sender.advance().begun
    (computed,) = begun
    assert sender.kv_usage > 0
    moved: list[int] = []

    def transfer(tokens: int, now: float) -> float:
        moved.append(tokens)
        return now + 1.0

    receiver.submit(asked, 5.0, fetched=Handover(computed, transfer))
    fetched, first = [], []
    while receiver.next_event < inf:
        at = receiver.next_event
        progress = receiver.advance()
        fetched += [(at, handover) for handover in progress.fetched]
        first += [at for _ in progress.begun]
    assert moved == [asked.input_tokens - 1]
    assert fetched == [(6.0, Handover(computed, transfer))]
    assert first[0] > 6.0
    sender.release(computed, 6.0)
    assert sender.kv_usage == 0
    assert sender.cache.matched(asked.blocks) == 10


def spread(count: int, seconds: float) -> Iterator[TracedRequest]:
    """Yield long prompts that share nothing."""
    random, arrival = Random(2), 0.0
    for number in range(count):
        arrival += random.expovariate(count / seconds)
        yield request(arrival, tuple(range(100 * number, 100 * number + random.randrange(4, 60))), 100)


class Predicted(Simulation):
    """A run that records the predicted TTFT of pairs when their requests arrive, by the identity of the request."""

    predicted: dict[int, float]

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:
        selection = router.selector.choose(prompt)
        assert selection is not None
        if selection.disaggregation is not None and selection.prefill is not None:
            self.predicted[id(outcome.request)] = selection.disaggregation.inputs["predicted_ttft"]


def test_prices_of_pairs_and_rates_of_prefill_workers_are_learned_from_answers() -> None:
    simulation = Predicted(PAIRS, ALWAYS, Random(0))
    simulation.predicted = {}
    outcomes = simulation.run(list(spread(250, 500.0)))
    state, network = simulation.routers[0].state, Network(PAIRS.network, PAIRS.roles)
    targets = simulation._targets
    for sender in (0, 1):
        rates = state.learned.rates.learner(targets[sender].worker, targets[sender].model).rates
        expected = prefill_seconds(LLAMA_70B.rates, 20_000, 0, 0, 0)
        assert prefill_seconds(rates, 20_000, 0, 0, 0) == pytest.approx(expected, rel=0.1)
        for receiver in (2, 3):
            learned = state.transfers.seconds(targets[sender], targets[receiver], 20_000)
            expected = PAIRS.network.latency + 20_000 / network.rate(sender, receiver)
            assert learned == pytest.approx(expected, rel=0.3)
    ratios = [
        simulation.predicted[id(each.request)] / (each.begun - each.sent)
        for each in outcomes[100:]
        if id(each.request) in simulation.predicted
    ]
    assert sum(0.8 < ratio < 1.25 for ratio in ratios) >= 0.9 * len(ratios)


class Chosen(Simulation):
    """A run that records the selection of each request with its SLO at its arrival."""

    chosen: list[Selection]

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:
        wanted = outcome.request.slo
        assert wanted is not None
        slo = SLO(wanted.ttft, wanted.tpot, self.loop.time(), refuses_late=wanted.refuses_late)
        selection = router.selector.choose(prompt, slo=slo)
        assert selection is not None
        self.chosen.append(selection)


def test_latency_of_a_pair_is_predicted_and_compared_with_the_slo() -> None:
    spec = replace(PAIRS, workers=2, prefill=1, decode=1)
    asked = request(0.0, tuple(range(120)))
    own = prefill_seconds(LLAMA_70B.rates, asked.input_tokens, 0, 0, 0)
    for ttft, missed in ((own + 2.0, False), (own, True)):
        simulation = Chosen(spec, replace(ALWAYS, slos=True), Random(0))
        simulation.chosen = []
        (outcome,) = simulation.run([replace(asked, slo=RequestSLO("due", ttft, 0.05))])
        (selection,) = simulation.chosen
        assert selection.prediction is not None
        assert selection.slo_missed is missed
        assert selection.prediction.ttft.expected == pytest.approx(outcome.begun, rel=0.15)
        assert selection.prediction.tpot.expected == pytest.approx((outcome.ended - outcome.begun) / 49, rel=0.3)


def test_prefill_worker_pulls_what_a_decode_worker_generated() -> None:
    spec = replace(PAIRS, workers=2, prefill=1, decode=1, sources=SourceSpec(pulls=True, link_rate=1.0))
    first = request(0.0, tuple(range(10)), output=30 * BLOCK_TOKENS, extra=0)
    first = replace(first, finished=tuple(range(40)))
    second = request(400.0, tuple(range(70)))
    pulled, computed = (run(spec, first, second, side=replace(ALWAYS, sources=sources))[1] for sources in (True, False))
    assert computed.prefill == pulled.prefill == 0
    assert computed.cached == 10 * BLOCK_TOKENS
    assert pulled.cached == 40 * BLOCK_TOKENS
    assert pulled.begun - pulled.sent < 0.8 * (computed.begun - computed.sent)


def test_transfers_of_a_removed_worker_are_forgotten() -> None:
    simulation = Simulation(PAIRS, ALWAYS, Random(0))
    simulation.run(list(spread(40, 80.0)))
    state, worker = simulation.routers[0].state, simulation.routers[0].workers.workers[2]
    fresh = TransferTimes(state.learned.rates).seconds(simulation._targets[0], simulation._targets[2], 20_000)
    assert state.transfers.seconds(simulation._targets[0], simulation._targets[2], 20_000) != fresh
    simulation.routers[0].placement.removed(worker)
    assert state.transfers.seconds(simulation._targets[0], simulation._targets[2], 20_000) == fresh


def test_request_waits_in_the_router_while_its_prefill_worker_is_busy() -> None:
    late = replace(ALWAYS, late_binding=True)
    requests = [request(0.0, tuple(range(100 * number, 100 * number + 60))) for number in range(3)]
    held = run(PAIRS, *requests, side=late)
    assert sorted(each.sent > 1.0 for each in held) == [False, False, True]
    many = [request(0.0, tuple(range(100 * number, 100 * number + 60))) for number in range(12)]
    sent_late = [each.sent > 1.0 for each in run(PAIRS, *many, side=late)]
    assert sum(sent_late) == 2  # as many as there are prefill workers; the others show in their load
