"""Learning from streamed answers and from the index's counters."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from manual_clock import Clock

from indexer import Indexer, Registration, Target
from kvevents import BlockRemoved, BlockStored, EventBatch, EventSource
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.policies import Candidate
from router.policies.rates import Rates, prefill_seconds
from router.prediction.learned import Learned

TRUTH = Rates(token=1.2e-4)
TARGET = Target("http://w:1", 0, "m")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answer(learned: Learned, clock: Clock, tokens: int, waiting: int = 0, output_tokens: int = 40) -> None:
    timing = learned.timing(Candidate(TARGET, waiting=waiting), tokens)
    clock.now += prefill_seconds(TRUTH, tokens, 0, 0, 0)
    timing.first_byte()
    clock.now += (output_tokens - 1) * TRUTH.step
    timing.first_byte()
    timing.end(output_tokens)


def test_streamed_answers_tell_how_fast_a_worker_is_and_how_long_answers_are(clock: Clock) -> None:
    learned = Learned(Rates(), clock)
    for number in range(100):
        answer(learned, clock, 500 + 100 * number)
    assert learned.rates.learner(TARGET.worker, "m").rates.token == pytest.approx(TRUTH.token, rel=0.2)
    assert learned.outputs.expected("m", None) == pytest.approx(40, rel=0.2)


def test_queued_prompt_does_not_change_the_prefill_rate(clock: Clock) -> None:
    learned = Learned(Rates(), clock)
    for number in range(100):
        answer(learned, clock, 500 + 100 * number, waiting=1)
    learner = learned.rates.learner(TARGET.worker, "m")
    assert learner.rates.token == Rates().token
    assert not learner.learned


def test_answer_without_first_byte_is_ignored(clock: Clock) -> None:
    learned = Learned(Rates(), clock)
    before = learned.outputs.expected("m", None)
    learned.timing(Candidate(TARGET), 100).end(5)
    assert learned.outputs.expected("m", None) == before


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    indexer = Indexer()
    indexer.start()
    yield indexer
    indexer.stop()


def test_evictions_are_read_from_the_index(clock: Clock, indexer: Indexer) -> None:
    learned = Learned(Rates(), clock)
    indexer.register(Registration(TARGET, EventSource(0, "tcp://127.0.0.1:9")))
    tokens = list(range(512 * CHUNK_TOKENS))
    hashes = [100 + place for place in range(512)]
    stored = BlockStored(hashes, None, tokens, CHUNK_TOKENS)
    indexer.index.apply(TARGET, EventBatch(0.0, [stored], 0))
    learned.read_evictions(indexer)
    assert not learned.pressure.evicting(TARGET)
    assert learned.pressure.evicting(Target("http://silent:1", 0, "m"))
    indexer.index.apply(TARGET, EventBatch(0.0, [BlockRemoved(hashes[256:])], 0))
    clock.now += 2
    learned.read_evictions(indexer)
    assert learned.pressure.evicting(TARGET)
    prompt = array("Q", hashes)
    learned.pressure.routed(prompt, 0)
    learned.pressure.routed(prompt, 256 * CHUNK_TOKENS)
    lost = 256 * CHUNK_TOKENS / 25_600
    assert learned.pressure.price() == pytest.approx(lost / (1 - lost))
