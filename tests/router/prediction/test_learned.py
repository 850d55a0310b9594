"""Learning from streamed answers, the index's counters, lengths of answers and turns of sessions."""

from __future__ import annotations

from array import array

import pytest
from manual_clock import Clock

from indexer import Indexer, Registration, Target
from kvevents import BlockRemoved, BlockStored, EventBatch, EventSource
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.load.load_messages import Kind, Message, RankLoad
from router.load.peer_load import PeerLoad
from router.load.target_load import ReservedLoad, TargetLoad
from router.policies import Candidate
from router.policies.rates import Rates, prefill_seconds
from router.prediction.learned import Learned, OutputLengths, SessionTurns

TRUTH = Rates(token=1.2e-4)
TARGET = Target("http://w:1", 0, "m")


@pytest.fixture
def learned(clock: Clock) -> Learned:
    return Learned(Rates(), clock)


NO_PEERS = PeerLoad(10.0, 10.0)
# The other prompts that a target computes: sent before, sent meanwhile by this router, sent meanwhile by another.
OTHERS = ["before", "meanwhile", "by another router"]


def answer(learned: Learned, clock: Clock, tokens: int, others: str | None = None, output_tokens: int = 40) -> None:
    load, peers = TargetLoad(), PeerLoad(10.0, 10.0)
    candidate = Candidate(TARGET, waiting=int(others == "before"))
    timing = learned.timing(candidate, tokens, ReservedLoad(load, tokens, tokens), peers)
    if others == "meanwhile":
        ReservedLoad(load, 1, 1).first_byte()
    elif others == "by another router":
        peers.apply(Message("peer", 1, Kind.NEWS, [RankLoad(TARGET.worker, 0, 1, 1, 1, 1, 0, 0.0)]))
    clock.now += prefill_seconds(TRUTH, tokens, 0, 0, 0)
    timing.first_byte()
    clock.now += (output_tokens - 1) * TRUTH.step
    timing.first_byte()
    timing.end(output_tokens)


def test_streamed_answers_tell_how_fast_a_worker_is_and_how_long_answers_are(learned: Learned, clock: Clock) -> None:
    for number in range(100):
        answer(learned, clock, 500 + 100 * number)
    assert learned.rates.learner(TARGET.worker, "m").rates.token == pytest.approx(TRUTH.token, rel=0.2)
    assert learned.outputs.expected("m", None) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("others", OTHERS)
def test_prompt_beside_others_does_not_change_the_prefill_rate(learned: Learned, clock: Clock, others: str) -> None:
    for number in range(100):
        answer(learned, clock, 500 + 100 * number, others)
    learner = learned.rates.learner(TARGET.worker, "m")
    assert learner.rates.token == Rates().token
    assert not learner.learned


def test_answer_without_first_byte_is_ignored(learned: Learned) -> None:
    before = learned.outputs.expected("m", None)
    learned.timing(Candidate(TARGET), 100, ReservedLoad(TargetLoad(), 100, 100), NO_PEERS).end(5)
    assert learned.outputs.expected("m", None) == before


def test_evictions_are_read_from_the_index(learned: Learned, clock: Clock, indexer: Indexer) -> None:
    indexer.start()
    indexer.register(Registration(TARGET, EventSource(0, "tcp://127.0.0.1:9")))
    tokens = list(range(512 * CHUNK_TOKENS))
    hashes = [100 + place for place in range(512)]
    stored = BlockStored(hashes, None, tokens, CHUNK_TOKENS)
    indexer.index.apply(TARGET, EventBatch(0.0, [stored], 0))
    learned.read_evictions(indexer)
    assert not learned.pressure.full(TARGET)
    assert learned.pressure.full(Target("http://silent:1", 0, "m"))
    indexer.index.apply(TARGET, EventBatch(0.0, [BlockRemoved(hashes[256:])], 0))
    clock.now += 2
    learned.read_evictions(indexer)
    assert learned.pressure.full(TARGET)
    prompt = array("Q", hashes)
    learned.pressure.routed(prompt, 0)
    learned.pressure.routed(prompt, 256 * CHUNK_TOKENS)
    lost = 256 * CHUNK_TOKENS / 25_600
    assert learned.pressure.price() == pytest.approx(lost / (1 - lost))


@pytest.mark.parametrize(("capacity", "full"), [(512, True), (570, False), (None, False)])
def test_target_with_little_room_is_full_before_it_evicts(
    learned: Learned, indexer: Indexer, capacity: int | None, full: bool
) -> None:
    indexer.start()
    indexer.register(Registration(TARGET, EventSource(0, "tcp://127.0.0.1:9"), capacity=capacity))
    stored = BlockStored(list(range(100, 612)), None, list(range(512 * CHUNK_TOKENS)), CHUNK_TOKENS)
    indexer.index.apply(TARGET, EventBatch(0.0, [stored], 0))
    learned.read_evictions(indexer)
    assert learned.pressure.full(TARGET) is full


def test_mean_output_of_a_model_is_learned_and_a_hint_replaces_it_within_the_limit() -> None:
    lengths = OutputLengths()
    guess = lengths.expected("m", None)
    for _ in range(1000):
        lengths.seen("m", 40)
    assert lengths.expected("m", None) == pytest.approx(40, rel=0.05)
    assert lengths.expected("other", None) == guess
    lengths = OutputLengths()
    assert lengths.expected("m", 5) == 5
    assert lengths.expected("m", 100_000) == lengths.expected("m", None)
    lengths = OutputLengths()
    assert lengths.expected("m", None, 4000) == 4000
    assert lengths.expected("m", 100, 4000) == 100
    assert lengths.expected("m", None, None) == lengths.expected("m", None)


@pytest.mark.parametrize(("turns", "expected"), [(1, 1.0), (2, 2.0), (5, 5.0), (40, 8.0)])
def test_each_turn_finds_its_session(turns: int, expected: float) -> None:
    session_turns = SessionTurns()
    assert session_turns.expected("m") == 1.0
    for number in range(3000):  # each turn says as much as the others
        turn = number % turns
        session_turns.seen("m", cached=999 if turn else 0, tokens=1000)
    assert session_turns.expected("m") == pytest.approx(expected, rel=0.1)
    assert session_turns.expected("other") == 1.0


def test_old_sessions_are_dropped() -> None:
    session_turns = SessionTurns()
    for cached, count in ((0, 10_000), (500, 3000)):
        for _ in range(count):
            session_turns.seen("m", cached, 1000)
    assert session_turns.expected("m") == pytest.approx(2.0, rel=0.01)
