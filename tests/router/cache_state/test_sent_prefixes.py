"""Prefixes that ranks are predicted to hold, because they were sent to them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, prompt_hashes
from router.cache_state.recent_prefixes import DEFAULT_CAPACITY
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.target_cache import TargetCache

A, B = Target("http://a", 0, "m"), Target("http://b", 0, "m")
CHUNK = CHUNK_TOKENS


def hashes(*parts: int) -> array[int]:
    """A prompt of chunks, each of them one number."""
    return prompt_hashes("m", None, None, [part for part in parts for _ in range(CHUNK)])


def overlap(prefixes: SentPrefixes, target: Target, *parts: int) -> int:
    return prefixes.overlaps(hashes(*parts)).get(target, 0) // CHUNK


def remember(prefixes: SentPrefixes, cache: TargetCache, *parts: int, capacity: int | None = None) -> None:
    prefixes.remember(cache, hashes(*parts), capacity)


def test_sent_prefix_is_predicted_for_its_target() -> None:
    prefixes, cache = SentPrefixes(), TargetCache(A)
    remember(prefixes, cache, 1, 2, 3)
    assert [overlap(prefixes, A, 1, 2, 4), overlap(prefixes, A, 2, 3), overlap(prefixes, B, 1, 2, 3)] == [2, 0, 0]
    prefixes.forget(cache)
    assert overlap(prefixes, A, 1, 2, 3) == 0
    assert (prefixes.holders, len(prefixes)) == ({}, 0)


def test_least_recent_prefix_is_evicted_first_from_its_end() -> None:
    prefixes, cache = SentPrefixes(), TargetCache(A)
    for parts in ((1, 2, 3), (7, 8), (1, 2), (9,)):
        remember(prefixes, cache, *parts, capacity=5 * CHUNK)
    assert [overlap(prefixes, A, 1, 2, 3), overlap(prefixes, A, 7, 8), overlap(prefixes, A, 9)] == [2, 2, 1]
    remember(prefixes, cache, 5, 6, capacity=5 * CHUNK)
    assert [overlap(prefixes, A, 1, 2, 3), overlap(prefixes, A, 7, 8), overlap(prefixes, A, 5, 6)] == [2, 0, 2]


def test_unknown_capacity_has_a_default_bound() -> None:
    prefixes, cache = SentPrefixes(), TargetCache(A)
    for first in range(5):
        remember(prefixes, cache, *range(first * 10_000, first * 10_000 + 8_000))
    assert len(prefixes) == DEFAULT_CAPACITY // CHUNK


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30), st.integers(1, 20))
def test_target_of_a_prefix_holds_all_shorter_prefixes(prompts: list[list[int]], capacity: int) -> None:
    prefixes, cache = SentPrefixes(), TargetCache(A)
    for prompt in prompts:
        remember(prefixes, cache, *prompt, capacity=capacity * CHUNK)
        assert len(prefixes) <= capacity
        if len(prompt) <= capacity:
            assert overlap(prefixes, A, *prompt) == len(prompt)
    for prompt in prompts:
        held = overlap(prefixes, A, *prompt)
        assert all(overlap(prefixes, A, *prompt[:part]) == part for part in range(held + 1))


class Kept:
    """A cache of `chunks` chunks that expire after `seconds` seconds, and the sent prefixes that learn its bounds."""

    def __init__(self, chunks: int, seconds: float = 1e9) -> None:
        self.now = 1000.0
        self.prefixes = SentPrefixes(lambda: self.now)
        self.cache = TargetCache(A)
        self._chunks = chunks
        self._seconds = seconds
        self._held: dict[int, float] = {}  # each is a prefix, by its hash; the least recent first
        self.promised = self.found = self.wrong = 0

    def restart(self) -> None:
        self._held.clear()

    def ask(self, *parts: int, after: float = 1.0) -> tuple[int, int]:
        """Send a prompt. Return the number of predicted chunks and of cached chunks."""
        self.now += after
        prompt = hashes(*parts)
        promised = self.prefixes.overlaps(prompt).get(A, 0) // CHUNK
        self._held = {prefix: at for prefix, at in self._held.items() if at > self.now - self._seconds}
        found = 0
        while found < len(prompt) and prompt[found] in self._held:
            found += 1
        for prefix in reversed(prompt):  # a prompt's end is the first of it to go
            self._held.pop(prefix, None)
            self._held[prefix] = self.now
        while len(self._held) > self._chunks:
            del self._held[next(iter(self._held))]
        self.prefixes.compare(self.cache, prompt, found * CHUNK, self.now)
        self.prefixes.remember(self.cache, prompt, None)
        self.promised += promised
        self.found += found
        self.wrong += max(promised - found, 0)
        return promised, found


def document(number: int) -> range:
    return range(100 * number, 100 * number + 20)


def test_capacity_is_learned_from_missed_predictions() -> None:
    kept = Kept(chunks=100)  # five documents
    for turn in range(400):
        kept.ask(*document(turn * 7919 % 11 if turn % 3 else 0))
    kept.promised = kept.found = kept.wrong = 0
    for turn in range(400):
        kept.ask(*document(turn * 7919 % 11 if turn % 3 else 0))
    assert kept.found > 100 * 20
    assert kept.wrong < 0.15 * kept.found
    assert kept.promised > 0.6 * kept.found
    learned = kept.cache.retention
    assert 60 * CHUNK <= learned.tokens <= 240 * CHUNK


def test_lifetime_is_learned_from_missed_predictions() -> None:
    kept = Kept(chunks=10_000, seconds=300.0)
    for turn in range(8):
        kept.ask(*document(0))
        kept.ask(*document(turn + 1))
        kept.ask(*document(0))
        kept.ask(*document(0), after=600.0)  # too late
    assert kept.ask(*document(0)) == (20, 20)
    assert kept.ask(*document(0), after=600.0) == (0, 0)
    learned = kept.cache.retention
    assert 1.0 < learned.seconds < 600.0


def test_one_answer_reveals_a_reset_cache() -> None:
    kept = Kept(chunks=10_000)
    for turn in range(3):
        for number in range(5):
            kept.ask(*document(number), after=1.0 + turn)
    assert kept.ask(*document(0)) == (20, 20)
    kept.restart()
    assert kept.ask(*document(1)) == (20, 0)
    assert [kept.ask(*document(number)) for number in (2, 3, 4)] == [(0, 0)] * 3
    assert kept.ask(*document(1)) == (20, 20)


def test_removed_target_leaves_no_state() -> None:
    kept = Kept(chunks=10_000, seconds=300.0)
    for _ in range(4):
        kept.ask(*document(0), after=600.0)
        kept.ask(*document(0))
    assert kept.prefixes._expiring == {kept.cache}
    kept.cache.removed = True
    kept.prefixes.forget(kept.cache)
    assert (kept.prefixes._expiring, kept.prefixes.holders, len(kept.prefixes)) == (set(), {}, 0)
