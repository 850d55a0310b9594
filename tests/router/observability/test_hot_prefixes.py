"""The prefixes that most requests share, as a tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, prompt_hashes
from router.observability.seen_requests import HALF_LIFE, MAX_PREFIXES, HotPrefixes, lengths
from router.policies import Candidate

HERE, THERE = (Candidate(Target(f"http://{name}", 0, "m")) for name in ("here", "there"))


def prompt(*parts: int) -> array[int]:
    """Return the hashes of a prompt. Each part becomes eight chunks."""
    tokens = [part for part in parts for _ in range(8 * CHUNK_TOKENS)]
    return prompt_hashes("m", None, None, array("I", tokens))


def every(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from every(node["longer"])


def test_shared_prefix_counts_longer_prefixes() -> None:
    prefixes = HotPrefixes()
    for last in (1, 2, 1):
        prefixes.seen(prompt(9, 9, last), [HERE])
    (shared,) = prefixes.tree()
    assert shared["share"] == 1
    assert shared["tokens"] == 13 * CHUNK_TOKENS  # the greatest length that is looked at of the 16 they share
    assert [round(longer["share"], 2) for longer in shared["longer"]] == [0.67, 0.33]


def test_holders_hold_the_whole_prefix() -> None:
    prefixes = HotPrefixes()
    part, whole = (Candidate(each.target, overlap=tokens) for each, tokens in ((HERE, 64), (THERE, 128)))
    prefixes.seen(prompt(1), [part, whole])
    prefixes.seen(prompt(2), [part])
    prefixes.seen(prompt(1), [part, whole])
    first, second = prefixes.tree()
    assert (first["tokens"], first["held_by"]) == (128, 1)
    assert first["holders"] == [{"worker": "http://there", "dp_rank": 0}]
    assert second["held_by"] == 0


def test_weights_of_prefixes_decay() -> None:
    now = 0.0
    prefixes = HotPrefixes(lambda: now)
    for _ in range(4):
        prefixes.seen(prompt(1), [])
    for _ in range(60):  # far enough that the weights are brought down on the way
        now += HALF_LIFE
        prefixes.seen(prompt(2), [])
    now += 2 * HALF_LIFE
    prefixes.seen(prompt(3), [])
    shares = [node["share"] for node in prefixes.tree()]
    assert shares[0] > 0.6
    assert len(shares) == 2


def test_number_of_prefixes_is_bounded() -> None:
    prefixes = HotPrefixes()
    for number in range(MAX_PREFIXES):
        prefixes.seen(prompt(0, 1 + number % 2**10, number), [])
    assert prefixes._known <= MAX_PREFIXES
    assert sum(1 for _ in every(prefixes.tree())) <= prefixes._known
    assert prefixes.tree()[0]["share"] == 1


@given(st.integers(0, 5000))
def test_lengths_grow_and_are_few(chunks: int) -> None:
    found = list(lengths(chunks))
    assert found == sorted(set(found))
    assert all(1 <= length <= chunks for length in found)
    assert len(found) <= 35
    assert not chunks or found[-1] * 4 // 3 >= chunks or found[-1] + 1 > chunks
