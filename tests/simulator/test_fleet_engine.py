"""The simulated engine: the times of its requests, and its cache."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.rates import prefill_seconds
from simulator.fleet.engine import LLAMA_70B, BlockCache, Engine, Progress, StoredBlocks
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

RATES = LLAMA_70B.rates


def request(arrival: float, blocks: tuple[int, ...], output: int = 50, extra: int = 100) -> TracedRequest:
    return TracedRequest(arrival, len(blocks) * BLOCK_TOKENS + extra, output, blocks, blocks, str(blocks[:1]))


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
