"""The prefix cache against a model that names blocks by what they hold, and its events against its content."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event
from simulator.worker.cache import CachedSequence, PagedPrefixCache

BLOCK = 4


def computed(cache: PagedPrefixCache, sequence: CachedSequence) -> bool:
    """Allocate and store a whole sequence."""
    if not cache.allocate(sequence, len(sequence.tokens)):
        return False
    cache.store(sequence, len(sequence.tokens))
    return True


class Follower:
    """The cached blocks as a reader of the events sees them: copies of each block, identified by all its tokens."""

    def __init__(self) -> None:
        self.names: dict[Any, Any] = {}
        self.copies: Counter[Any] = Counter()

    def apply(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for each in event.block_hashes:
                        assert self.copies[each] > 0, "removed without having been stored"
                        self.copies[each] -= 1
                case AllBlocksCleared():
                    self.copies.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert parent is None or self.copies[parent] > 0, "stored below a parent that is not there"
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for number, each in enumerate(event.block_hashes):
            start, end = number * event.block_size, (number + 1) * event.block_size
            keys = tuple((event.extra_keys or [None] * len(event.block_hashes))[number] or ())
            above = self.names[parent][0] if parent is not None else ()
            root = self.names[parent][1] if parent is not None else keys
            self.names[each] = ((*above, *event.token_ids[start:end]), root)
            self.copies[each] += 1
            parent = each

    def content(self) -> Counter[Any]:
        return Counter({self.names[each]: count for each, count in self.copies.items() if count})


@dataclass(eq=False)
class ModelBlock:
    name: Any = None
    stored_at: int = 0


@dataclass(eq=False)
class ModelSequence:
    tokens: list[int]
    root: tuple[str, ...]
    real: CachedSequence
    blocks: list[ModelBlock] = field(default_factory=list)
    computed: int = 0

    def name(self, number: int) -> Any:
        """Return the identity of the full block at `number`."""
        return (tuple(self.tokens[: (number + 1) * BLOCK]), self.root)


class CacheMachine(RuleBasedStateMachine):
    """The model: a list of free blocks in the order they will be taken, and each sequence's own blocks."""

    @initialize(num_blocks=st.integers(4, 14))
    def start(self, num_blocks: int) -> None:
        self.cache = PagedPrefixCache(num_blocks, BLOCK)
        self.free = [ModelBlock() for _ in range(num_blocks)]
        self.blocks = list(self.free)
        self.sequences: list[ModelSequence] = []
        self.follower = Follower()
        self.clock = 0

    def chosen(self, number: int) -> ModelSequence:
        return self.sequences[number % len(self.sequences)]

    def longest_prefix(self, sequence: ModelSequence) -> list[ModelBlock]:
        found: list[ModelBlock] = []
        for number in range((len(sequence.tokens) - 1) // BLOCK):
            copies = [block for block in self.blocks if block.name == sequence.name(number)]
            if not copies:
                break
            found.append(min(copies, key=lambda block: block.stored_at))
        return found

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        adapter=st.sampled_from([None, None, "a"]),
        salt=st.sampled_from([None, None, "a", "s"]),
    )
    def arrive(self, tokens: list[int], adapter: str | None, salt: str | None) -> None:
        root = tuple(key for key in (adapter, salt) if key)
        if adapter is None and salt == "a":
            salt, root = "s", ("s",)  # the events do not say whether a lone key is an adapter: lora_name does
        self.sequences.append(ModelSequence(list(tokens), root, CachedSequence(list(tokens), adapter, salt)))

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 5), count=st.integers(1, 12))
    def compute(self, number: int, count: int) -> None:
        """Compute some more of a sequence, as far as there is room."""
        sequence = self.chosen(number)
        found = [] if sequence.blocks else self.longest_prefix(sequence)
        begin = sequence.computed or len(found) * BLOCK
        if not sequence.blocks:
            assert self.cache.hit(sequence.real) == len(found) * BLOCK
        end = min(begin + count, len(sequence.tokens))
        needed = -(-end // BLOCK) - len(sequence.blocks) - len(found)
        fits = needed <= len([block for block in self.free if block not in found])
        assert self.cache.allocate(sequence.real, end) == fits
        if not fits:
            return
        self.free = [block for block in self.free if block not in found]
        taken, self.free = self.free[:needed], self.free[needed:]
        for block in taken:
            block.name = None
        sequence.blocks += found + taken
        self.cache.store(sequence.real, end)
        for position in range(begin // BLOCK, end // BLOCK):
            block = sequence.blocks[position]
            if block.name is None:
                self.clock += 1
                block.name, block.stored_at = sequence.name(position), self.clock
        sequence.computed = end

    @precondition(lambda self: any(each.computed == len(each.tokens) for each in self.sequences))
    @rule(number=st.integers(0, 5), token=st.integers(0, 1))
    def generate(self, number: int, token: int) -> None:
        done = [each for each in self.sequences if each.computed == len(each.tokens)]
        sequence = done[number % len(done)]
        sequence.tokens.append(token)
        sequence.real.tokens.append(token)

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 5), preempted=st.booleans())
    def leave(self, number: int, preempted: bool) -> None:
        sequence = self.chosen(number)
        self.cache.free(sequence.real)
        mine, sequence.blocks, sequence.computed = sequence.blocks, [], 0
        for block in reversed(mine):
            if any(block in other.blocks for other in self.sequences):
                continue
            self.free.insert(0 if block.name is None else len(self.free), block)
        if not preempted:
            self.sequences.remove(sequence)

    @rule()
    def reset(self) -> None:
        idle = len(self.free) == len(self.blocks)
        assert self.cache.reset() == idle
        if idle:
            for block in self.blocks:
                block.name = None

    @invariant()
    def events_tell_the_content(self) -> None:
        self.follower.apply(self.cache.take_events())
        assert self.follower.content() == Counter(block.name for block in self.blocks if block.name is not None)

    @invariant()
    def is_consistent(self) -> None:
        self.cache.check_integrity([sequence.real for sequence in self.sequences])
        assert self.cache.usage == pytest.approx(1 - len(self.free) / len(self.blocks))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_prompt_always_leaves_one_token_to_compute():
    cache = PagedPrefixCache(8, BLOCK)
    first = CachedSequence(list(range(8)))
    assert computed(cache, first)
    assert cache.hit(CachedSequence(list(range(8)))) == 4
    assert cache.hit(CachedSequence(list(range(9)))) == 8
    assert cache.hit(CachedSequence([0])) == 0


def test_stored_event_has_parent_tokens_and_medium():
    cache = PagedPrefixCache(8, BLOCK)
    sequence = CachedSequence(list(range(10)))
    cache.allocate(sequence, 5)
    cache.store(sequence, 5)
    cache.allocate(sequence, 10)
    cache.store(sequence, 10)
    first, second = cache.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.token_ids) == (None, [0, 1, 2, 3])
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[0], [4, 5, 6, 7])
    assert (first.block_size, first.medium, first.extra_keys) == (BLOCK, "GPU", None)
    assert cache.take_events() == []


def test_extra_keys_have_adapter_in_all_blocks_and_salt_in_first():
    cache = PagedPrefixCache(8, BLOCK)
    computed(cache, CachedSequence(list(range(8)), adapter="poet", cache_salt="pepper"))
    [event] = cache.take_events()
    assert isinstance(event, BlockStored)
    assert event.lora_name == "poet"
    assert event.extra_keys == [["poet", "pepper"], ["poet"]]


def test_adapters_and_salts_share_no_blocks():
    cache = PagedPrefixCache(32, BLOCK)
    tokens = list(range(9))
    namespaces = [(None, None), ("x", None), (None, "x"), ("x", "x"), ("xx", None), (None, "xx")]
    for adapter, salt in namespaces:
        sequence = CachedSequence(list(tokens), adapter, salt)
        assert cache.hit(sequence) == 0
        assert computed(cache, sequence)
        cache.free(sequence)
    for adapter, salt in namespaces:
        assert cache.hit(CachedSequence(list(tokens), adapter, salt)) == 8


def test_finished_sequence_is_evicted_from_its_end():
    cache = PagedPrefixCache(4, BLOCK)
    old = CachedSequence(list(range(16)))
    computed(cache, old)
    cache.free(old)
    probe = CachedSequence(list(range(17)))
    for left in (12, 8, 4, 0):
        cache.allocate(CachedSequence([99] * BLOCK), BLOCK)
        assert cache.hit(probe) == left


def test_used_blocks_are_never_evicted_and_failed_allocation_changes_nothing():
    cache = PagedPrefixCache(4, BLOCK)
    running = CachedSequence(list(range(12)))
    computed(cache, running)
    cache.take_events()
    waiting = CachedSequence([*range(8), *range(50, 60)])  # two blocks shared, three new, one free
    assert not cache.allocate(waiting, len(waiting.tokens))
    assert waiting.blocks == []
    assert cache.take_events() == []
    cache.check_integrity([running])


def test_concurrent_sequences_hold_copies_of_equal_block():
    cache = PagedPrefixCache(4, BLOCK)
    twins = [CachedSequence(list(range(4))) for _ in range(2)]
    for twin in twins:
        cache.allocate(twin, 4)
    for twin in twins:
        cache.store(twin, 4)
    follower = Follower()
    follower.apply(cache.take_events())
    assert list(follower.content().values()) == [2]
    for twin in twins:
        cache.free(twin)
    cache.check_integrity([])
    for left in (2, 2, 1, 0):  # two blocks were never used
        cache.allocate(CachedSequence([99] * BLOCK), BLOCK)
        follower.apply(cache.take_events())
        assert sum(follower.content().values()) == left


def test_caches_have_different_hashes():
    hashes = []
    for _ in range(2):
        cache = PagedPrefixCache(4, BLOCK)
        computed(cache, CachedSequence([1, 2, 3, 4]))
        [event] = cache.take_events()
        assert isinstance(event, BlockStored)
        hashes += event.block_hashes
    assert hashes[0] != hashes[1]
    assert all(0 <= each < 2**64 for each in hashes)
