"""Hashes taken over from prompts that begin alike: the same as those made from the start."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import PackedPrompt
from router.tokens.prompt_cache import PromptCache, common_start, common_tokens, reference_common_start

BLOCK = 4


def tokens_of(text: str) -> bytes:
    """A token for each two characters."""
    return array("I", [ord(a) * 128 + ord(b) for a, b in zip(text[::2], text[1::2], strict=False)]).tobytes()


def seen(cache: PromptCache, text: str) -> PackedPrompt:
    prompt = cache.prompt(text, tokens_of(text), cache.find(text))
    prompt.hashes(1, BLOCK, len(prompt) // BLOCK)
    return prompt


def text_of(seed: int, length: int) -> str:
    return "".join(Random(seed).choices("abcdefgh \n", k=length))


@given(
    parts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 12_000), st.integers(0, 2), st.integers(0, 3_000)), max_size=8
    ),
    limit=st.sampled_from([0, 30_000, 200_000, 10**7]),
)
def test_cached_hashes_equal_computed_hashes(parts: list[tuple[int, int, int, int]], limit: int) -> None:
    cache = PromptCache(limit)
    for seed, length, end, more in parts:
        text = text_of(seed, 12_000)[:length] + text_of(10 + end, more)
        prompt = seen(cache, text)
        alone = PackedPrompt(tokens_of(text))
        assert prompt == alone
        end_ = len(alone) // BLOCK
        assert prompt.hashes(1, BLOCK, end_)[:end_] == alone.hashes(1, BLOCK, end_)[:end_]
        assert cache.bytes <= limit
        if limit == 10**7 and len(text) >= 1024:
            assert cache.find(text).common == len(text)


def test_next_turn_reuses_hashes() -> None:
    cache, opening = PromptCache(10**6), text_of(0, 20_000)
    earlier = seen(cache, opening)
    text = opening + text_of(1, 3000)
    later = cache.prompt(text, tokens_of(text), cache.find(text))
    assert later.hash_bytes == earlier.hash_bytes
    assert len(cache) == 1  # a continuation replaces its beginning


def test_texts_with_different_ends_share_one_entry() -> None:
    cache, opening = PromptCache(10**6), text_of(0, 20_000)
    for number in range(1, 4):
        text = opening + text_of(number, 2000)
        found = cache.find(text)
        seen(cache, text)
        assert (found.known is None, found.common >= len(opening)) == (number == 1, number > 1)
    assert len(cache) == 1


def test_early_difference_reuses_the_common_start() -> None:
    cache, opening = PromptCache(10**6), text_of(0, 20_000)
    seen(cache, opening)
    text = opening[:9000] + text_of(1, 9000)
    later = cache.prompt(text, tokens_of(text), cache.find(text))
    assert 4500 // BLOCK - 2 <= later.hash_bytes // 8 <= 4500 // BLOCK
    assert len(cache) == 2


def test_difference_in_the_middle_reuses_the_part_before() -> None:
    cache, opening, end = PromptCache(10**7), text_of(0, 20_000), text_of(1, 9_000)
    known = [seen(cache, opening + str(number) + end) for number in range(8)]
    text = opening + "x" + end
    begun = cache.find(text)
    assert begun.common == len(opening)
    later = cache.prompt(text, tokens_of(text), begun)
    assert later.hash_bytes == len(opening) // 2 // BLOCK * known[0].hash_bytes // (len(known[0]) // BLOCK)


def test_least_recently_used_entry_is_dropped_first() -> None:
    texts = [text_of(seed, 5000) for seed in range(4)]
    probe = PromptCache(10**6)
    seen(probe, texts[0])
    cache = PromptCache(7 * probe.bytes // 2)
    for text in (texts[0], texts[1], texts[2], texts[0] + "x", texts[3]):
        seen(cache, text)
    assert [cache.find(text).known is not None for text in texts] == [True, False, True, True]


def test_token_ids_without_a_text_are_cached() -> None:
    cache, tokens = PromptCache(10**6), tokens_of(text_of(0, 20_000))
    earlier = cache.prompt_for_tokens(tokens)
    earlier.hashes(1, BLOCK, 1000)
    later = cache.prompt_for_tokens(tokens + tokens_of(text_of(1, 100)))
    assert later.hash_bytes == earlier.hash_bytes > 0


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_length_of_common_token_prefix(one: list[int], other: list[int]) -> None:
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    assert common_tokens(PackedPrompt.of(one), PackedPrompt.of(other)) == alike


pieces = st.lists(st.sampled_from(["a", "ab" * 40, "é", "漢", "🙂"]), max_size=5).map("".join)


@pytest.mark.parametrize("common", [common_start, reference_common_start])
@given(start=pieces, one=pieces, other=pieces)
def test_length_of_common_text_prefix(common: Callable[[Any, Any], int], start: str, one: str, other: str) -> None:
    one, other = start + one, start + other
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert common(one, other) == alike
    assert common(one.encode("utf-32-le"), other.encode("utf-32-le")) // 4 == alike
