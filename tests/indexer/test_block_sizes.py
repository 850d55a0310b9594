"""Cached block sizes and root hashes follow later events and registrations."""

from __future__ import annotations

from indexer import Indexer, MatchQuery, Registration, Target
from kvevents import BlockStored, EventBatch

A, B = Target("a", 0, "m"), Target("b", 0, "m")


def stored(block_size: int) -> EventBatch:
    return EventBatch(0.0, [BlockStored([block_size], None, list(range(block_size)), block_size)], 0)


def held(indexer: Indexer) -> dict[Target, int]:
    return held_of(indexer, MatchQuery("m", list(range(100))))


def held_of(indexer: Indexer, query: MatchQuery) -> dict[Target, int]:
    return {match.target: match.matched_tokens for match in indexer.match(query) if match.matched_tokens}


def test_block_sizes_follow_events_and_registrations() -> None:
    indexer = Indexer()
    try:
        assert (indexer.block_sizes("m"), indexer.block_size(A)) == (frozenset(), None)
        indexer.register(Registration(A, None))
        assert (indexer.block_sizes("m"), held(indexer)) == (frozenset(), {})
        indexer.index.apply(A, stored(4))
        assert (indexer.block_sizes("m"), indexer.block_size(A), held(indexer)) == ({4}, 4, {A: 4})
        indexer.register(Registration(B, None, block_size=8))
        assert (indexer.block_sizes("m"), indexer.block_size(B), held(indexer)) == ({4, 8}, 8, {A: 4})
        indexer.index.apply(B, stored(16))
        assert (indexer.block_sizes("m"), indexer.block_size(B), held(indexer)) == ({4, 8, 16}, 16, {A: 4, B: 16})
        indexer.clear(A)
        assert (indexer.block_size(A), held(indexer)) == (4, {B: 16})
        indexer.unregister([A])
        assert (indexer.block_sizes("m"), indexer.block_size(A)) == ({8, 16}, None)
    finally:
        indexer.stop()


def test_adapters_and_salts_stay_separate_beyond_the_cache_of_roots() -> None:
    indexer = Indexer()
    tokens = list(range(8))
    try:
        indexer.register(Registration(A, None, block_size=4))
        for number, (adapter, salt) in enumerate([(None, None), ("sql", None), ("sql", "s")]):
            extra = [(salt,)] if salt else None
            event = BlockStored([number], None, tokens[:4], 4, lora_name=adapter, extra_keys=extra)
            indexer.index.apply(A, EventBatch(0.0, [event], 0))
        for number in range(2000):
            assert not held_of(indexer, MatchQuery("m", tokens, f"other {number}"))
            if number % 500 == 0:
                for asked in [(None, None), ("sql", None), ("sql", "s")]:
                    assert list(held_of(indexer, MatchQuery("m", tokens, *asked))) == [A], asked
                assert not held_of(indexer, MatchQuery("m", tokens, None, "s"))
    finally:
        indexer.stop()
