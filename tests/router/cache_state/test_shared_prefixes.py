"""Prefixes in one tree, native and in Python, compared with a plain table of prefixes, their counts and recency."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from indexer.native import CORES
from indexer.reference.shared_prefixes import PythonSharedPrefixes
from indexer.shared_prefixes import SharedPrefixes, make_shared_prefixes
from router.cache_state.recent_prefixes import RecentPrefixes

if "native" in CORES:
    from indexer._native import SharedPrefixes as NativeSharedPrefixes

HOLDERS = 3
prompts = st.lists(st.integers(0, 2), max_size=9)
holders = st.integers(0, HOLDERS - 1)


def hashes(parts: list[int]) -> array[int]:
    """A hash for each prefix, as prompts have them."""
    made, previous = array("Q"), 0
    for part in parts:
        previous = xxh3_64_intdigest(bytes([part]), previous)
        made.append(previous)
    return made


TREES = [PythonSharedPrefixes, *([NativeSharedPrefixes] if "native" in CORES else [])]


@pytest.fixture(params=TREES)
def prefixes(request: pytest.FixtureRequest) -> SharedPrefixes:
    made: SharedPrefixes = request.param()
    return made


class HeldPrefixes(RuleBasedStateMachine):
    """A sequence of prompts that are held and released."""

    def __init__(self) -> None:
        super().__init__()
        self.trees: list[SharedPrefixes] = [made() for made in TREES]
        self.holders = [[tree.add() for tree in self.trees] for _ in range(HOLDERS)]
        self.counts: list[Counter[int]] = [Counter() for _ in range(HOLDERS)]
        self.held: list[tuple[int, list[int], array[int]]] = []

    def of_each(self, holder: int) -> list[tuple[SharedPrefixes, int]]:
        return list(zip(self.trees, self.holders[holder], strict=True))

    @rule(holder=holders, prompt=prompts)
    def hold(self, holder: int, prompt: list[int]) -> None:
        known = hashes(prompt)
        ends = [tree.hold(number, known) for tree, number in self.of_each(holder)]
        assert {tree.end(end) for tree, end in zip(self.trees, ends, strict=True)} == {len(known)}
        self.held.append((holder, ends, known))
        self.counts[holder].update(known)

    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        if self.held:
            holder, ends, known = self.held.pop(which % len(self.held))
            for (tree, number), end in zip(self.of_each(holder), ends, strict=True):
                tree.release(number, end)
            self.counts[holder].subtract(known)

    @rule(which=st.integers(0, 100), chunks=st.integers(1, 8))
    def split(self, which: int, chunks: int) -> None:
        """The end of a prompt may be split off, if its first part is held at once."""
        if self.held:
            holder, ends, known = self.held[which % len(self.held)]
            firsts = []
            for (tree, number), end in zip(self.of_each(holder), ends, strict=True):
                if end and chunks < tree.length(end):
                    firsts.append(tree.split(end, chunks))
                    tree.hold_edge(number, firsts[-1])
            if firsts:
                assert len(firsts) == len(TREES)
                self.held.append((holder, firsts, known[:-chunks]))
                self.counts[holder].update(known[:-chunks])

    @rule(prompt=prompts)
    def ask(self, prompt: list[int]) -> None:
        known = hashes(prompt)
        for holder, counts in enumerate(self.counts):
            for tree, number in self.of_each(holder):
                assert tree.longest(known).get(number, 0) == sum(1 for prefix in known if counts[prefix])
        assert all(all(tree.longest(known).values()) for tree in self.trees)

    @rule(holder=holders, prompt=prompts, window=st.integers(0, 10))
    def ask_one(self, holder: int, prompt: list[int], window: int) -> None:
        known, of_each = hashes(prompt), self.of_each(holder)
        assert len({tree.resumable(number, known, window) for tree, number in of_each}) == 1
        longest = [(tree, number, tree.longest_of(number, known)) for tree, number in of_each]
        described = {(tree.end(e), tree.length(e) * (e > 0), tree.count(e, number)) for tree, number, e in longest}
        assert len(described) == 1

    @invariant()
    def each_holds_what_it_should(self) -> None:
        for holder, counts in enumerate(self.counts):
            for tree, number in self.of_each(holder):
                assert tree.chunks(number) == sum(1 for count in counts.values() if count)

    @invariant()
    def nothing_is_left_over(self) -> None:
        ends = len({known[-1] for _, _, known in self.held if known})
        for place, tree in enumerate(self.trees):
            assert tree.is_sound()
            assert tree.size() <= sum(tree.chunks(numbers[place]) for numbers in self.holders)
            assert ends or not tree.size()


class Remembered(RuleBasedStateMachine):
    """Prompts are seen, and the prefixes not seen the longest are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes = make_shared_prefixes()
        self.holders = [RecentPrefixes(self.prefixes) for _ in range(HOLDERS)]
        self.seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(HOLDERS)]

    @rule(holder=holders, prompt=prompts, most=st.integers(1, 14))
    def remember(self, holder: int, prompt: list[int], most: int) -> None:
        known, seen = hashes(prompt), self.seen[holder]
        self.holders[holder].remember(known, most)
        for prefix in reversed(known):
            seen[prefix] = None
            seen.move_to_end(prefix)
        while known and len(seen) > most:
            seen.popitem(last=False)

    @rule(holder=holders)
    def forget(self, holder: int) -> None:
        self.holders[holder].forget()
        self.seen[holder].clear()

    @rule(prompt=prompts)
    def ask(self, prompt: list[int]) -> None:
        known = hashes(prompt)
        longest = self.prefixes.longest(known)
        for holder, seen in zip(self.holders, self.seen, strict=True):
            assert longest.get(holder.number, 0) == sum(1 for prefix in known if prefix in seen)

    @invariant()
    def each_has_seen_what_it_should(self) -> None:
        assert [holder.chunks for holder in self.holders] == list(map(len, self.seen))
        assert self.prefixes.is_sound()


TestHeldPrefixes = HeldPrefixes.TestCase
TestHeldPrefixes.settings = settings(max_examples=50, stateful_step_count=40)
TestRemembered = Remembered.TestCase
TestRemembered.settings = settings(max_examples=60, stateful_step_count=40)


def test_growing_prompt_has_few_edges(prefixes: SharedPrefixes) -> None:
    holder = prefixes.add()
    known = hashes([7] * 5000)
    ends = [prefixes.hold(holder, known[:length]) for length in range(1000, 5001, 1000)]
    assert (prefixes.size(), prefixes.chunks(holder)) == (5, 5000)
    assert prefixes.longest(known) == {holder: 5000}
    for end in ends[:-1]:
        prefixes.release(holder, end)
    assert (prefixes.size(), prefixes.chunks(holder)) == (1, 5000)
    prefixes.release(holder, ends[-1])
    assert (prefixes.size(), prefixes.chunks(holder)) == (0, 0)
    assert prefixes.is_sound()


def test_holder_with_prompts_cannot_be_removed(prefixes: SharedPrefixes) -> None:
    holder = prefixes.add()
    end = prefixes.hold(holder, hashes([1]))
    with pytest.raises(ValueError, match="the holder has prompts"):
        prefixes.remove(holder)
    prefixes.release(holder, end)
    prefixes.remove(holder)


def test_kept_conversation_is_one_edge(prefixes: SharedPrefixes) -> None:
    holder = RecentPrefixes(prefixes)
    known = hashes([7] * 500)
    assert [holder.remember(known[:length], 450) for length in (100, 200, 200, 400)] == [0, 100, 200, 200]
    assert (prefixes.size(), holder.chunks) == (1, 400)
    holder.remember(known, 450)
    assert prefixes.longest(known) == {holder.number: 450}


@pytest.mark.parametrize("tree", TREES)
@given(told=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.booleans()), max_size=30))
def test_unknown_hashes_are_ignored(tree: Callable[[], SharedPrefixes], told: list[tuple[list[int], bool]]) -> None:
    """Other routers may send any hashes."""
    prefixes = tree()
    holder = prefixes.add()
    held: list[int] = []
    for known, ends in told:
        held.append(prefixes.hold(holder, array("Q", known)))
        assert prefixes.longest(array("Q", known)).get(holder, 0) <= len(known)
        if ends:
            prefixes.release(holder, held.pop(0))
        assert prefixes.size() <= prefixes.chunks(holder)
    for edge in held:
        prefixes.release(holder, edge)
    assert (prefixes.size(), prefixes.chunks(holder)) == (0, 0)
