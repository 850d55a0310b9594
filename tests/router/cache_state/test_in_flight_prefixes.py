"""Prompts in flight count as cached soon."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from indexer import DEFAULT_TENANT, Target
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from router.cache_state import in_flight_prefixes
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, InFlightPrefixes, prompt_hashes

LINGER = 2.0
HERE, THERE = Target("here", 0, "m"), Target("there", 0, "m")
PROMPT = list(range(10 * CHUNK_TOKENS))


def hashes(token_ids: list[int], model: str = "m", adapter: str | None = None, salt: str | None = None) -> array[int]:
    return prompt_hashes(model, adapter, salt, token_ids)


def overlap(holdings: InFlightPrefixes, target: Target, hashes: array[int]) -> int:
    return holdings.overlaps(hashes).get(target, 0)


@pytest.fixture
def holdings(clock: Clock) -> InFlightPrefixes:
    return InFlightPrefixes(LINGER, clock)


def test_prompt_matches_the_shared_prefix_of_one_in_flight(holdings: InFlightPrefixes) -> None:
    holdings.hold(HERE, hashes(PROMPT))
    sibling = PROMPT[: 4 * CHUNK_TOKENS] + [7] * 100
    assert overlap(holdings, HERE, hashes(sibling)) == 4 * CHUNK_TOKENS
    assert overlap(holdings, HERE, hashes(PROMPT)) == len(PROMPT)
    assert overlap(holdings, THERE, hashes(sibling)) == 0


@pytest.mark.parametrize(
    "other",
    [hashes([7, *PROMPT]), hashes(PROMPT, "n"), hashes(PROMPT, adapter="poet"), hashes(PROMPT, salt="pepper")],
    ids=["another start", "another model", "an adapter", "a salt"],
)
def test_only_a_common_prefix_of_the_same_model_adapter_and_salt_counts(
    holdings: InFlightPrefixes, other: array[int]
) -> None:
    holdings.hold(HERE, hashes(PROMPT))
    assert overlap(holdings, HERE, other) == 0


def test_prompt_expires_some_time_after_its_end(holdings: InFlightPrefixes, clock: Clock) -> None:
    ended = holdings.hold(HERE, hashes(PROMPT))
    clock.now += 1000  # a long answer
    assert overlap(holdings, HERE, hashes(PROMPT)) == len(PROMPT)
    ended()
    clock.now += LINGER - 0.01
    assert overlap(holdings, HERE, hashes(PROMPT)) == len(PROMPT)
    clock.now += 0.02
    assert overlap(holdings, HERE, hashes(PROMPT)) == 0
    assert len(holdings) == 0


def test_prompts_that_ended_before_an_eviction_are_dropped(holdings: InFlightPrefixes, clock: Clock) -> None:
    evictions = {HERE: 5, THERE: 0}
    holdings.evictions = evictions.__getitem__
    starts = [[number, *PROMPT[1:]] for number in range(4)]
    before, running, lasting, there = (hashes(start) for start in starts)
    for target, prompt, lasts in ((HERE, before, False), (HERE, lasting, True), (THERE, there, False)):
        holdings.hold(target, prompt, lasting=lasts)()
    still = holdings.hold(HERE, running)
    assert not holdings.forget_evicted(HERE)
    evictions[HERE] += 3
    assert holdings.forget_evicted(HERE)
    assert not holdings.forget_evicted(HERE)
    assert not holdings.forget_evicted(THERE)
    assert [overlap(holdings, HERE, prompt) for prompt in (before, running, lasting)] == [0, len(PROMPT), len(PROMPT)]
    assert overlap(holdings, THERE, there) == len(PROMPT)
    still()
    assert not holdings.forget_evicted(HERE), "it ended after the eviction"
    clock.now += LINGER + 1
    assert overlap(holdings, HERE, running) == 0
    assert holdings.prompts == 1


def test_reset_drops_earlier_prompts(holdings: InFlightPrefixes, clock: Clock) -> None:
    before = holdings.hold(HERE, hashes(PROMPT))
    holdings.hold(THERE, hashes(PROMPT))
    holdings.forget(HERE)
    assert overlap(holdings, HERE, hashes(PROMPT)) == 0
    assert overlap(holdings, THERE, hashes(PROMPT)) == len(PROMPT)
    holdings.hold(HERE, hashes(PROMPT))
    before()
    clock.now += LINGER + 1
    assert overlap(holdings, HERE, hashes(PROMPT)) == len(PROMPT)


def test_ended_prompts_are_bounded(holdings: InFlightPrefixes, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_prefixes, "MAX_ENDED", 25)
    for number in range(10):
        clock.now += 0.01
        prompt = hashes([number, *PROMPT[1:]])
        holdings.hold(HERE, prompt, lasting=number % 2 == 0)()
        assert overlap(holdings, HERE, prompt) == len(PROMPT)
        assert len(holdings) <= 25


def test_empty_targets_are_dropped(holdings: InFlightPrefixes, clock: Clock) -> None:
    kept, known = holdings.hold(HERE, hashes(PROMPT)), hashes(PROMPT)
    for number in range(3000):
        ended = holdings.hold(Target(f"http://{number}", 0, "m"), known)
        clock.now += LINGER
        ended()
    clock.now += LINGER
    assert len(holdings._targets) <= 1024
    assert holdings.overlaps(known) == {HERE: len(PROMPT)}
    kept()


lengths = st.integers(0, 12 * CHUNK_TOKENS)


@given(st.lists(st.tuples(lengths, st.floats(0, 10)), min_size=1, max_size=10), st.floats(0, 5), lengths)
def test_overlap_is_with_the_longest_held_and_in_the_end_nothing_is_left(
    prompts: list[tuple[int, float]], linger: float, asked: int
) -> None:
    """Prompts with a common start, each of a length and ending at a time."""
    clock = Clock(0.0)
    holdings = InFlightPrefixes(linger, clock)
    text = list(range(12 * CHUNK_TOKENS))
    endings = [(ends, length, holdings.hold(HERE, hashes(text[:length]))) for length, ends in prompts]
    endings.sort(key=lambda ending: ending[0])
    for number, (ends, _, ended) in enumerate(endings):
        clock.now = ends
        ended()
        still = [length for at, length, _ in endings[: number + 1] if at + linger > clock.now]
        still += [length for _, length, _ in endings[number + 1 :]]
        longest = min(max(still, default=0), asked)
        assert overlap(holdings, HERE, hashes(text[:asked])) == longest // CHUNK_TOKENS * CHUNK_TOKENS
    clock.now += linger + 0.001
    assert len(holdings) == 0


def test_hashes_of_the_index_are_used_if_blocks_have_the_size_of_chunks() -> None:
    prompt = PackedPrompt.of(PROMPT)
    namespace = Namespace("m", DEFAULT_TENANT, None, "pepper", CHUNK_TOKENS)
    known = prompt.hashes(namespace_hash(namespace), CHUNK_TOKENS, 3)
    assert len(known) == 3
    assert prompt_hashes("m", None, "pepper", prompt) is known
    assert known == prompt_hashes("m", None, "pepper", PROMPT)
    # A secret changes all hashes.
    assert prompt.hashes(namespace_hash(namespace, "secret"), CHUNK_TOKENS, 3) != known[:3]


def test_failed_prompt_is_dropped_at_once(holdings: InFlightPrefixes) -> None:
    failed = holdings.hold(HERE, hashes(PROMPT))
    ended = holdings.hold(HERE, hashes(PROMPT[: 3 * CHUNK_TOKENS]))
    failed(True)
    assert overlap(holdings, HERE, hashes(PROMPT)) == 3 * CHUNK_TOKENS
    ended()
    assert overlap(holdings, HERE, hashes(PROMPT)) == 3 * CHUNK_TOKENS
