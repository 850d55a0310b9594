"""What ranks are likely to hold by what was sent to them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.holdings.history import DEFAULT_CAPACITY, RoutingHistory
from router.holdings.speculation import CHUNK_TOKENS, prompt_hashes

A, B = Target("http://a", 0, "m"), Target("http://b", 0, "m")
CHUNK = CHUNK_TOKENS


def hashes(*parts: int) -> array[int]:
    """A prompt of chunks, each of them one number."""
    return prompt_hashes("m", None, None, [part for part in parts for _ in range(CHUNK)])


def overlap(history: RoutingHistory, target: Target, *parts: int) -> int:
    return history.overlaps(hashes(*parts)).get(target, 0) // CHUNK


def remember(history: RoutingHistory, target: Target, *parts: int, capacity: int | None = None) -> None:
    history.remember(target, hashes(*parts), capacity)


def test_what_was_sent_is_held_by_whom_it_was_sent_to() -> None:
    history = RoutingHistory()
    remember(history, A, 1, 2, 3)
    assert [overlap(history, A, 1, 2, 4), overlap(history, A, 2, 3), overlap(history, B, 1, 2, 3)] == [2, 0, 0]
    history.forget(A)
    assert overlap(history, A, 1, 2, 3) == 0
    assert (history.targets(), len(history)) == ([], 0)


def test_the_least_recent_is_forgotten_first_and_from_its_end() -> None:
    history = RoutingHistory()
    remember(history, A, 1, 2, 3, capacity=5 * CHUNK)
    remember(history, A, 7, 8, capacity=5 * CHUNK)
    remember(history, A, 1, 2, capacity=5 * CHUNK)
    remember(history, A, 9, capacity=5 * CHUNK)
    assert [overlap(history, A, 1, 2, 3), overlap(history, A, 7, 8), overlap(history, A, 9)] == [2, 2, 1]
    remember(history, A, 5, 6, capacity=5 * CHUNK)
    assert [overlap(history, A, 1, 2, 3), overlap(history, A, 7, 8), overlap(history, A, 5, 6)] == [2, 0, 2]


def test_without_a_known_capacity_there_is_a_bound() -> None:
    history = RoutingHistory()
    for first in range(5):
        remember(history, A, *range(first * 10_000, first * 10_000 + 8_000))
    assert len(history) == DEFAULT_CAPACITY // CHUNK


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30), st.integers(1, 20))
def test_whoever_holds_a_prefix_holds_all_shorter_ones(prompts: list[list[int]], capacity: int) -> None:
    history = RoutingHistory()
    for prompt in prompts:
        remember(history, A, *prompt, capacity=capacity * CHUNK)
        assert len(history) <= capacity
        if len(prompt) <= capacity:
            assert overlap(history, A, *prompt) == len(prompt)
    for prompt in prompts:
        held = overlap(history, A, *prompt)
        assert all(overlap(history, A, *prompt[:part]) == part for part in range(held + 1))
