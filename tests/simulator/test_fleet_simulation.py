"""A run of the simulated fleet: the router's own objects in virtual time, and the outcomes of requests."""

from __future__ import annotations

import ast
import asyncio
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.fleet
from benchmarks.policy.grid import Cell, play
from benchmarks.policy.sides import OURS_AT_ONCE, SIDES, WITHOUT_EVENTS
from benchmarks.policy.workloads import CONVERSATION
from kvevents import BlockRemoved, BlockStored
from router.admission.admission import Admission
from router.admission.ticket import WaitReason
from router.cache_state.target_audit import Basis
from router.policies.rates import Rates, prefill_seconds
from router.prediction.predictions import WatchedAnswer
from router.routing.placement import Placement
from router.routing.selector import TargetSelector
from simulator.fleet.block_cache import BlockCache
from simulator.fleet.engine import LLAMA_70B, Engine, Profile, Progress, StoredBlocks
from simulator.fleet.fleet import FleetSpec, Simulation
from simulator.fleet.simulated_router import OURS, Knowledge, Side
from simulator.fleet.trace import BLOCK_TOKENS, RequestSLO, TracedRequest, engine_hash, prompt_of, tokens_of
from simulator.fleet.virtual_time import VirtualTimeLoop
from simulator.fleet.workers import MODEL, events_of

FLEET = FleetSpec(LLAMA_70B, 3, 30_000)


def request(arrival: float, blocks: tuple[int, ...], output: int = 50, extra: int = 100) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS + extra, output, blocks, blocks, str(blocks[:1]))


requests_lists = st.lists(
    st.builds(
        lambda arrival, length, fork, output: request(
            arrival, tuple(range(fork)) + tuple(range(100 * fork, 100 * fork + length)), output
        ),
        st.floats(0, 20),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(1, 600),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=40)
@given(requests_lists, st.booleans(), st.integers(0, 10))
def test_every_request_is_answered_once(requests: list[TracedRequest], late_binding: bool, seed: int) -> None:
    requests.sort(key=lambda asked: asked.arrival)
    side = OURS if late_binding else OURS_AT_ONCE
    for outcome in Simulation(FLEET, side, Random(seed)).run(requests):
        assert outcome.request.arrival - 1e-6 <= outcome.sent < outcome.begun <= outcome.ended < inf
        assert 0 <= outcome.cached < outcome.request.input_tokens
        assert 0 <= outcome.worker < FLEET.workers


@pytest.mark.parametrize("side", [*SIDES, *WITHOUT_EVENTS[1:]], ids=lambda side: side.name)
def test_run_depends_only_on_its_seed(side: Side) -> None:
    cell = Cell(CONVERSATION, LLAMA_70B, 2, 200_000, 0.5, seconds=40.0)
    first, second = (play(cell, cell.requests(1), side, 1) for _ in range(2))
    assert first == second


def test_cached_prefixes_are_found() -> None:
    cell = Cell(CONVERSATION, LLAMA_70B, 4, 400_000, 0.5, seconds=60.0)
    compared = [side for side in SIDES if side.name in ("kv_aware", "round_robin")]
    hit_rates = {side.name: play(cell, cell.requests(0), side, 0).hit_rate for side in compared}
    assert hit_rates["kv_aware"] > hit_rates["round_robin"] + 0.1


def hot_prefix_among_long_prompts() -> list[TracedRequest]:
    """Return short continuations of one prefix, which stay on one worker, and long prompts beside them."""
    random, requests, arrival = Random(0), list[TracedRequest](), 0.0
    for number in range(1, 600):
        arrival += random.expovariate(5.5)
        hot = random.random() < 0.7
        blocks = tuple(range(16)) if hot else tuple(range(100 * number, 100 * number + random.randrange(4, 28)))
        requests.append(request(arrival, blocks, 60, random.randrange(100, 400)))
    return requests


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_learned_rates_differ_only_if_workers_do(factor: float) -> None:
    """Prompts that arrive while another is computed share its steps. They do not make their worker look slow."""
    true = LLAMA_70B.rates
    first = Rates(true.step, factor * true.token, factor * true.attention, true.context_token)
    spec = FleetSpec(LLAMA_70B, 3, 1_200_000, unlike=(replace(LLAMA_70B, rates=first),))
    run = Simulation(spec, OURS, Random(0))
    learned, found = run.routers[0].state.learned.rates, list[Rates | None]()
    run.run(hot_prefix_among_long_prompts(), lambda: found.append(learned.slowest_if_unlike(MODEL)))
    assert (found[-1] is not None) is (factor > 1)
    assert factor > 1 or set(found) == {None}
    for target, profile in zip(run.routers[0].workers.targets, spec.profiles, strict=True):
        rates = learned.learner(target.worker, MODEL).rates
        for tokens in (4000, 24_000):
            expected = prefill_seconds(profile.rates, tokens, 0, 0, 0)
            assert prefill_seconds(rates, tokens, 0, 0, 0) == pytest.approx(expected, rel=0.1)


def test_next_turn_arrives_a_pause_after_the_answer() -> None:
    third = request(0.0, (1, 2, 3))
    second = replace(request(0.0, (1, 2)), following=third, pause=500.0)
    first = replace(request(2.0, (1,)), following=second, pause=5.0)
    outcomes = Simulation(FLEET, OURS, Random(0)).run([first], until=400.0)
    assert [each.request.blocks for each in outcomes] == [(1,), (1, 2)]
    assert outcomes[1].request.arrival == pytest.approx(outcomes[0].ended + 5.0)
    assert outcomes[1].cached == BLOCK_TOKENS


def test_run_uses_the_routers_own_objects() -> None:
    run = Simulation(FLEET, OURS, Random(0))
    assert run.run([]) == []
    (router,) = run.routers
    assert type(router.selector) is TargetSelector
    assert type(router.placement) is Placement
    assert type(router.admission) is Admission


def test_simulation_imports_no_rule_of_the_selection() -> None:
    """The rules of late binding, of capacity and of SLOs are applied by the selector and admission alone."""
    modules = {"router.routing.late_binding", "router.routing.ranks"}
    names = {"choose_for_slo", "SLOSelector", "TRIES", "LATE_TRIES"}
    for file in Path(simulator.fleet.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in modules, file
                assert not {alias.name for alias in node.names} & names, file


def overload() -> list[TracedRequest]:
    """Return requests with long unshared prompts, faster than two workers compute them."""
    return [request(0.1 * number, tuple(range(100 * number, 100 * number + 40))) for number in range(30)]


def test_late_binding_holds_requests_in_the_routers_queue() -> None:
    run = Simulation(FleetSpec(LLAMA_70B, 2, 300_000), OURS, Random(0))
    waits: list[tuple[WaitReason, float]] = []
    run.routers[0].admission.on_waited.append(lambda reason, seconds: waits.append((reason, seconds)))
    outcomes = run.run(overload())
    held = [outcome for outcome in outcomes if outcome.sent > outcome.request.arrival + 1e-6]
    assert len(held) == len(waits) > 10
    assert {reason for reason, _ in waits} == {WaitReason.LATE_BINDING}
    assert sum(seconds for _, seconds in waits) == pytest.approx(sum(each.sent - each.request.arrival for each in held))
    at_once = Simulation(FleetSpec(LLAMA_70B, 2, 300_000), OURS_AT_ONCE, Random(0)).run(overload())
    assert all(outcome.sent == pytest.approx(outcome.request.arrival) for outcome in at_once)


def test_load_is_released_when_a_run_has_ended() -> None:
    run = Simulation(FLEET, OURS, Random(0))
    run.run(overload())
    (router,) = run.routers
    for worker in router.workers.workers:
        load = router.state.load.of(worker.url, 0)
        assert (load.requests, load.pending, load.context, load.waiting) == (0, 0, 0, 0)
        assert not worker.health.attempts
    assert router.admission.queue.length == 0


def test_slos_are_read_by_sides_that_read_slos() -> None:
    slo = RequestSLO("interactive", 2.0, 0.5, refuses_late=True)
    requests = [replace_slo(each, slo) for each in overload()]
    spec = FleetSpec(LLAMA_70B, 2, 300_000)
    assert not any(outcome.refused for outcome in Simulation(spec, OURS, Random(0)).run(requests))
    run = Simulation(spec, Side("slos", OURS.policy, late_binding=True, slos=True), Random(0))
    answers: list[WatchedAnswer] = []
    run.routers[0].state.learned.predictions.on_answered.append(answers.append)
    outcomes = run.run(requests)
    refused = sum(outcome.refused for outcome in outcomes)
    assert 0 < refused < len(requests)
    assert sum(answer.slo is not None for answer in answers) == len(requests) - refused
    assert all(outcome.begun == outcome.ended == inf for outcome in outcomes if outcome.refused)


def replace_slo(asked: TracedRequest, slo: RequestSLO) -> TracedRequest:
    return TracedRequest(
        asked.arrival, asked.input_tokens, asked.output_tokens, asked.blocks, asked.finished, asked.session, slo
    )


@pytest.mark.parametrize(
    ("knowledge", "basis"), [(Knowledge.EVENTS, Basis.EVENTS), (Knowledge.SENT, Basis.SENT_PREFIXES)]
)
def test_knowledge_of_caches_comes_from_events_or_from_sent_prompts(knowledge: Knowledge, basis: Basis) -> None:
    run = Simulation(FLEET, Side("side", OURS.policy, knowledge=knowledge), Random(0))
    outcomes = run.run([request(2.0 * number, (1, 2, 3, 4)) for number in range(4)])
    (router,) = run.routers
    assert {router.state.audit.basis(target) for target in router.workers.targets} == {basis}
    assert [outcome.cached for outcome in outcomes] == [0, 2048, 2048, 2048]


def test_prompts_share_tokens_as_far_as_they_share_blocks() -> None:
    first, second = request(0, (1, 2, 3)), request(0, (1, 2, 4))
    one, other = (list(prompt_of(each, number, BLOCK_TOKENS)) for number, each in enumerate((first, second)))
    assert len(one) == first.input_tokens
    assert one[: 2 * BLOCK_TOKENS] == other[: 2 * BLOCK_TOKENS]
    assert not set(one[2 * BLOCK_TOKENS :]) & set(other[2 * BLOCK_TOKENS :])


def test_events_report_the_tokens_of_prompts() -> None:
    batch = events_of(Progress(stored=[StoredBlocks(1, [2, -3])], removed=[7]), BLOCK_TOKENS)
    assert batch.events == [
        BlockStored([2, engine_hash(-3)], 1, tokens_of([2, -3], BLOCK_TOKENS), BLOCK_TOKENS),
        BlockRemoved([7]),
    ]
    prompt = list(prompt_of(request(0, (2, -3), extra=0), 0, BLOCK_TOKENS))
    assert tokens_of([2, -3], BLOCK_TOKENS) == prompt


def test_virtual_time_gives_the_decisions_of_a_real_event_loop() -> None:
    """Arrivals and first tokens are 100 ms or more apart, so that a busy machine does not change their order."""
    first, second = tuple(range(40)), tuple(range(100, 140))
    requests = [
        request(0.1, first, output=2),
        request(0.3, second, output=2),
        request(0.5, tuple(range(200, 230)), output=2),
        request(0.7, (*first, 300), output=2),
        request(2.9, (*second, 400), output=2),
        request(3.0, (*first, 300, 301), output=2),
    ]
    virtual, real = (decisions(requests, loop) for loop in (None, asyncio.new_event_loop()))
    assert virtual == real
    assert virtual[1] == [WaitReason.LATE_BINDING] * 2


def decisions(
    requests: list[TracedRequest], loop: asyncio.AbstractEventLoop | None
) -> tuple[list[tuple[int, int]], list[WaitReason]]:
    """Return each request's worker and cached tokens, and the reasons for which requests waited."""
    run = Simulation(FleetSpec(LLAMA_70B, 2, 300_000), OURS, Random(3), loop)
    waits: list[WaitReason] = []
    run.routers[0].admission.on_waited.append(lambda reason, _: waits.append(reason))
    return [(outcome.worker, outcome.cached) for outcome in run.run(requests)], waits


RATES = LLAMA_70B.rates


def run_engine(
    requests: list[TracedRequest], kv_tokens: int = 100_000
) -> tuple[Engine, dict[int, tuple[float, float]]]:
    """Return when each request began and ended, by its position."""
    engine = Engine(LLAMA_70B, kv_tokens)
    times: dict[int, list[float]] = {id(asked): [] for asked in requests}
    coming = list(requests)
    while coming or engine.next_event < inf:
        if coming and coming[0].arrival <= engine.next_event:
            asked = coming.pop(0)
            engine.submit(asked, asked.arrival)
            continue
        now = engine.next_event
        progress = engine.advance()
        for sequence in progress.begun + progress.ended:
            times[id(sequence.request)].append(now)
    return engine, {place: (times[id(asked)][0], times[id(asked)][-1]) for place, asked in enumerate(requests)}


def test_lone_request_takes_its_prefill_and_its_decode_steps() -> None:
    asked = request(1.0, tuple(range(40)), output=100)
    _, times = run_engine([asked])
    prefill = prefill_seconds(RATES, asked.input_tokens, 0, 0, 0)
    assert times[0][0] == pytest.approx(1.0 + prefill, rel=1e-6)
    contexts = [asked.input_tokens + 1 + step for step in range(99)]
    decode = sum(RATES.step + RATES.token + RATES.context_token * context for context in contexts)
    assert times[0][1] - times[0][0] == pytest.approx(decode)


def test_cached_blocks_are_not_computed_again() -> None:
    blocks = tuple(range(10))
    _, times = run_engine([request(0, blocks), request(10, blocks)])
    assert times[1][0] - 10 == pytest.approx(prefill_seconds(RATES, 5220, 5120, 0, 0))


def test_new_request_begins_after_the_decode_step_under_way() -> None:
    _, alone = run_engine([request(0, (1, 2), output=1000)])
    _, times = run_engine([request(0, (1, 2), output=1000), request(5.0, (3, 4), output=2)])
    assert 5.0 < times[1][0] < 5.0 + RATES.step * 1.2 + prefill_seconds(RATES, 1124, 0, 1, 2000)
    assert times[0][1] > alone[0][1]


def test_least_recently_used_leaf_is_evicted_first() -> None:
    cache = BlockCache(6)
    for blocks in ((1, 2, 3), (4, 5, 6)):
        assert cache.acquire((), 3)
        assert all(map(cache.name, blocks))
        cache.release(list(blocks), 0)
    assert cache.acquire((1,), 2)
    assert cache.take_removed() == [3, 2]
    assert cache.matched((1, 2, 3)) == 1
    assert not cache.acquire((), 4)
    assert cache.matched((4, 5, 6)) == 3


@given(requests_lists, st.sampled_from([30_000, 100_000]))
def test_every_request_is_answered_and_every_block_is_released(requests: list[TracedRequest], kv_tokens: int) -> None:
    requests.sort(key=lambda asked: asked.arrival)
    engine, times = run_engine(requests, kv_tokens)
    for place, asked in enumerate(requests):
        begun, ended = times[place]
        assert asked.arrival < begun <= ended
    assert engine.cache.in_use == 0


def test_stored_blocks_name_the_block_before_them() -> None:
    engine = Engine(LLAMA_70B, 100_000)
    progress: list[Progress] = []
    for asked in (request(0, (1, 2, 3)), request(20, (1, 2, 4, 5))):
        engine.submit(asked, asked.arrival)
        while engine.next_event < inf:
            progress.append(engine.advance())
    stored = [run for each in progress for run in each.stored]
    assert stored == [StoredBlocks(None, [1, 2, 3]), StoredBlocks(2, [4, 5])]


def test_counts_of_running_and_waiting_requests() -> None:
    engine = Engine(LLAMA_70B, 10 * BLOCK_TOKENS)
    for blocks in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)):
        engine.submit(request(0, blocks), 0.0)
    assert (engine.running, engine.waiting) == (0, 2)
    engine.advance()
    assert (engine.running, engine.waiting) == (1, 1)
    assert engine.kv_usage == 0.6


def test_answer_that_outgrows_the_memory_preempts_the_request_that_was_admitted_last() -> None:
    first, last = (request(0, tuple(range(start, start + 4)), output=1500) for start in (0, 10))
    engine, times = run_engine([first, last], 12 * BLOCK_TOKENS)
    _, alone = run_engine([first], 12 * BLOCK_TOKENS)
    assert engine.preemptions == 1
    assert times[0][1] == pytest.approx(alone[0][1], rel=0.05)
    assert times[1][0] < times[0][1] < times[1][1]
    assert 0 < engine.recomputed < last.input_tokens + last.output_tokens
    assert engine.cache.in_use == 0


def test_waiting_prompt_is_admitted_only_if_the_whole_of_it_fits() -> None:
    engine = Engine(LLAMA_70B, 40 * BLOCK_TOKENS)
    engine.submit(request(0, tuple(range(8)), output=400), 0.0)
    engine.advance()
    engine.submit(request(0, tuple(range(100, 132)), output=1), 0.0)
    while engine.waiting:
        assert engine.running == 1
        progress = engine.advance()
    assert progress.ended
    assert engine.preemptions == 0


@pytest.mark.parametrize(
    ("profile", "refused_at"),
    [(replace(LLAMA_70B, max_queued_requests=3), 3), (replace(LLAMA_70B, max_queued_tokens=5000), 2)],
)
def test_engine_is_full_at_its_limits(profile: Profile, refused_at: int) -> None:
    engine = Engine(profile, 100_000)
    for number in range(refused_at):
        assert not engine.full
        engine.submit(request(0, tuple(range(10 * number, 10 * number + 5))), 0.0)
    assert engine.full
    while engine.next_event < inf:
        engine.advance()
    assert not engine.full


def run_for_an_hour(loop: asyncio.AbstractEventLoop) -> list[tuple[str, float]]:
    """Return what ran, and when."""
    log: list[tuple[str, float]] = []
    start = loop.time()

    def note(name: str) -> None:
        log.append((name, round(loop.time() - start, 6)))

    async def main() -> None:
        loop.call_later(3600.0, note, "late")
        loop.call_later(0.5, note, "first")
        loop.call_later(0.6, note, "second")
        loop.call_later(0.4, note, "cancelled").cancel()
        loop.call_soon(note, "soon")
        future = loop.create_future()
        loop.call_later(1.0, future.set_result, None)
        await future
        note("future")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await loop.create_future()
        note("timeout")
        await asyncio.sleep(3600.0)

    loop.run_until_complete(main())
    loop.close()
    return log


def test_timers_run_at_their_time_without_sleeping() -> None:
    begun = time.monotonic()
    assert run_for_an_hour(VirtualTimeLoop()) == [
        ("soon", 0.0),
        ("first", 0.5),
        ("second", 0.6),
        ("future", 1.0),
        ("timeout", 3.0),
        ("late", 3600.0),
    ]
    assert time.monotonic() - begun < 60.0


def test_clock_stands_still_while_a_callback_runs() -> None:
    loop = VirtualTimeLoop()

    async def main() -> tuple[float, float]:
        await asyncio.sleep(1.5)
        before = loop.time()
        time.sleep(0.01)  # noqa: ASYNC251
        return before, loop.time()

    assert loop.run_until_complete(main()) == (1.5, 1.5)
    loop.close()


def test_wait_that_nothing_ends_is_an_error() -> None:
    loop = VirtualTimeLoop()

    async def main() -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="Deadlock in virtual time"):
        loop.run_until_complete(main())
    loop.close()
