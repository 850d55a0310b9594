"""The simulated fleet: its engines' times and caches, its router, and what comes out."""

from __future__ import annotations

from math import ceil, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policy.decisions import candidates
from benchmarks.policy.grid import Cell, full_grid, play, quick_grid
from benchmarks.policy.report import CellResult, markdown, verdict
from benchmarks.policy.workloads import CONVERSATION
from router.policies.rates import prefill_seconds
from simulator.fleet.engine import BlockCache, Engine
from simulator.fleet.fleet import Fleet, Outcome
from simulator.fleet.measures import Measures, measured, percentile
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.sides import OURS, OURS_AT_ONCE, SIDES
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

RATES = LLAMA_70B.rates


def request(arrival: float, blocks: tuple[int, ...], output: int = 50, extra: int = 100) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS + extra, output, blocks, blocks, str(blocks[:1]))


def run_engine(
    requests: list[TracedRequest], kv_tokens: int = 100_000
) -> tuple[Engine, dict[int, tuple[float, float]]]:
    """When each request began and ended, by its place."""
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


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    asked = request(1.0, tuple(range(40)), output=100)
    _, times = run_engine([asked])
    prefill = prefill_seconds(RATES, asked.input_tokens, 0, 0, 0)
    assert times[0][0] == pytest.approx(1.0 + prefill, rel=1e-6)
    contexts = [asked.input_tokens + 1 + step for step in range(99)]
    decode = sum(RATES.step + RATES.token + RATES.context_token * context for context in contexts)
    assert times[0][1] - times[0][0] == pytest.approx(decode)


def test_what_was_computed_is_not_computed_again() -> None:
    blocks = tuple(range(10))
    _, times = run_engine([request(0, blocks), request(10, blocks)])
    assert times[1][0] - 10 == pytest.approx(prefill_seconds(RATES, 5220, 5120, 0, 0))


def test_a_request_that_comes_while_others_decode_waits_for_the_step_under_way() -> None:
    _, alone = run_engine([request(0, (1, 2), output=1000)])
    _, times = run_engine([request(0, (1, 2), output=1000), request(5.0, (3, 4), output=2)])
    assert 5.0 < times[1][0] < 5.0 + RATES.step * 1.2 + prefill_seconds(RATES, 1124, 0, 1, 2000)
    assert times[0][1] > alone[0][1]


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
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


@given(requests_lists, st.sampled_from([30_000, 100_000]))
def test_every_request_is_answered_and_no_block_is_lost(requests: list[TracedRequest], kv_tokens: int) -> None:
    requests.sort(key=lambda asked: asked.arrival)
    engine, times = run_engine(requests, kv_tokens)
    for place, asked in enumerate(requests):
        begun, ended = times[place]
        assert asked.arrival < begun <= ended
    assert engine.cache.in_use == 0


@given(requests_lists, st.booleans(), st.integers(0, 10))
def test_a_fleet_answers_every_request_once(requests: list[TracedRequest], late_binding: bool, seed: int) -> None:
    requests.sort(key=lambda asked: asked.arrival)
    random = Random(seed)
    fleet = Fleet(LLAMA_70B, 3, 30_000, OURS.policy_for(random), late_binding, random)
    for outcome in fleet.run(requests):
        assert outcome.request.arrival < outcome.begun <= outcome.ended < inf
        assert 0 <= outcome.cached < outcome.request.input_tokens


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_a_run_depends_on_its_seed_only(side: object) -> None:
    cell = Cell(CONVERSATION, LLAMA_70B, 2, 200_000, 0.5, seconds=40.0)
    assert side in SIDES
    first, second = (play(cell, cell.requests(1), side, 1) for _ in range(2))  # type: ignore[arg-type]
    assert first == second


def test_prefixes_are_found_where_they_are() -> None:
    cell = Cell(CONVERSATION, LLAMA_70B, 4, 400_000, 0.5, seconds=120.0)
    hit_rates = {side.name: play(cell, cell.requests(0), side, 0).hit_rate for side in SIDES}
    assert hit_rates["kv_aware"] > hit_rates["round_robin"] + 0.1


def test_measures_leave_the_warm_up_out() -> None:
    slow, quick = (
        Outcome(request(arrival, (1,), output=11, extra=0), arrival + wait, arrival + wait + 1, cached)
        for arrival, wait, cached in ((0.0, 9.0, 0), (10.0, 1.0, 256))
    )
    assert measured([slow, quick]) == Measures(0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 1 / 5)
    assert [percentile(range(100), share) for share in (0.5, 0.9, 0.99)] == [50, 90, 99]


def result(**ttft_p90: list[float]) -> CellResult:
    sides = {name.replace("_at_once", ", at once"): values for name, values in ttft_p90.items()}
    return CellResult(
        "cell", {name: [Measures(0.5, 0.1, p90, 1.0, 0.02, 0.03, 4.0) for p90 in p90s] for name, p90s in sides.items()}
    )


def test_a_cell_is_lost_to_a_peer_that_is_better_beyond_noise() -> None:
    ours = [1.0, 1.1, 1.2]
    lost = result(kv_aware=ours, kv_aware_at_once=ours, a=[0.8, 0.9, 1.3], b=[0.97, 1.09, 1.1], c=[2.0, 2.0, 2.0])
    assert lost.lost_to(OURS.name) == ["a"]
    assert "(lost)" in verdict([lost])
    even = result(kv_aware=ours, kv_aware_at_once=ours, b=[0.97, 1.09, 1.19])
    assert even.lost_to(OURS.name) == even.lost_to(OURS_AT_ONCE.name) == []
    assert "1.01" in verdict([even])


def test_tables_are_aligned() -> None:
    table = markdown([["a", "b"], ["long", "1.25"]])
    assert table.splitlines() == ["| a    |    b |", "| ---- | ---: |", "| long | 1.25 |"]
    assert len({len(line) for line in result(kv_aware=[1.0], kv_aware_at_once=[123.0]).table().splitlines()}) == 1


def test_the_grids_have_names_that_tell_cells_apart() -> None:
    for grid in (list(full_grid()), list(quick_grid())):
        assert len({cell.name for cell in grid}) == len(grid)


def test_the_candidates_of_the_decision_cost_are_as_many_as_asked() -> None:
    among = candidates(64, Random(0))
    assert len({candidate.target for candidate in among}) == 64
    assert 0 < sum(candidate.overlap > 0 for candidate in among) < ceil(64 / 2)
