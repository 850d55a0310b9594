"""Prefixes in one tree, compared with a plain table of each holder's prefixes, their counts and recency."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from router.cache_state.sent_prefixes import RecentPrefixes
from router.cache_state.shared_prefixes import Edge, PrefixHolder, SharedPrefixes

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


def edges(prefixes: SharedPrefixes[PrefixHolder] | SharedPrefixes[RecentPrefixes]) -> int:
    """Return the number of edges, and check the invariants of each."""
    stack, seen = [prefixes._root], 0
    while stack:
        edge = stack.pop()  # type: ignore[misc]
        for first, longer in edge.longer.items():
            assert longer.parent is edge
            assert longer.hashes[0] == first
            assert longer.end == edge.end + len(longer.hashes)
            assert longer.counts, "an edge that nobody holds"
            assert all(count > 0 for count in longer.counts.values())
            assert edge.parent is None or longer.counts.keys() <= edge.counts.keys()
            single = edge.parent is not None and len(edge.longer) == 1
            assert not (single and all(edge.counts[each] == 1 and each in longer.counts for each in edge.counts))
            stack.append(longer)  # type: ignore[arg-type]
            seen += 1
    return seen


class HeldPrefixes(RuleBasedStateMachine):
    """A sequence of prompts that are held and released."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: SharedPrefixes[PrefixHolder] = SharedPrefixes()
        self.holders = [PrefixHolder() for _ in range(HOLDERS)]
        self.counts: list[Counter[int]] = [Counter() for _ in range(HOLDERS)]
        self.held: list[tuple[int, Edge[PrefixHolder], array[int]]] = []

    @rule(holder=holders, prompt=prompts)
    def hold(self, holder: int, prompt: list[int]) -> None:
        known = hashes(prompt)
        self.held.append((holder, self.prefixes.hold(self.holders[holder], known), known))
        self.counts[holder].update(known)

    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        if self.held:
            holder, edge, known = self.held.pop(which % len(self.held))
            self.prefixes.release(self.holders[holder], edge)
            self.counts[holder].subtract(known)

    @rule(prompt=prompts)
    def ask(self, prompt: list[int]) -> None:
        known = hashes(prompt)
        longest = self.prefixes.longest(known)
        for holder, counts in zip(self.holders, self.counts, strict=True):
            assert longest.get(holder, 0) == sum(1 for prefix in known if counts[prefix])
        assert all(longest.values())

    @invariant()
    def each_holds_what_it_should(self) -> None:
        for holder, counts in zip(self.holders, self.counts, strict=True):
            assert holder.chunks == sum(1 for count in counts.values() if count)

    @invariant()
    def nothing_is_left_over(self) -> None:
        ends = len({known[-1] for _, _, known in self.held if known})
        assert edges(self.prefixes) <= sum(holder.chunks for holder in self.holders)
        assert ends or not edges(self.prefixes)


class Remembered(RuleBasedStateMachine):
    """Prompts are seen, and the prefixes not seen the longest are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: SharedPrefixes[RecentPrefixes] = SharedPrefixes()
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
            assert longest.get(holder, 0) == sum(1 for prefix in known if prefix in seen)

    @invariant()
    def each_has_seen_what_it_should(self) -> None:
        assert [holder.chunks for holder in self.holders] == list(map(len, self.seen))
        edges(self.prefixes)


TestHeldPrefixes = HeldPrefixes.TestCase
TestHeldPrefixes.settings = settings(max_examples=50, stateful_step_count=40)
TestRemembered = Remembered.TestCase
TestRemembered.settings = settings(max_examples=60, stateful_step_count=40)


def test_growing_prompt_has_few_edges() -> None:
    prefixes: SharedPrefixes[PrefixHolder] = SharedPrefixes()
    holder = PrefixHolder()
    known = hashes([7] * 5000)
    ends = [prefixes.hold(holder, known[:length]) for length in range(1000, 5001, 1000)]
    assert (edges(prefixes), holder.chunks) == (5, 5000)
    assert prefixes.longest(known) == {holder: 5000}
    for end in ends[:-1]:
        prefixes.release(holder, end)
    assert (edges(prefixes), holder.chunks) == (1, 5000)
    prefixes.release(holder, ends[-1])
    assert (edges(prefixes), holder.chunks) == (0, 0)


def test_kept_conversation_is_one_edge() -> None:
    prefixes: SharedPrefixes[RecentPrefixes] = SharedPrefixes()
    holder = RecentPrefixes(prefixes)
    known = hashes([7] * 500)
    assert [holder.remember(known[:length], 450) for length in (100, 200, 200, 400)] == [0, 100, 200, 200]
    assert (edges(prefixes), holder.chunks) == (1, 400)
    holder.remember(known, 450)
    assert prefixes.longest(known) == {holder: 450}


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.booleans()), max_size=30))
def test_unknown_hashes_are_ignored(told: list[tuple[list[int], bool]]) -> None:
    """Other routers may send any hashes."""
    prefixes: SharedPrefixes[PrefixHolder] = SharedPrefixes()
    holder = PrefixHolder()
    held: list[Edge[PrefixHolder]] = []
    for known, ends in told:
        held.append(prefixes.hold(holder, array("Q", known)))
        assert prefixes.longest(array("Q", known)).get(holder, 0) <= len(known)
        if ends:
            prefixes.release(holder, held.pop(0))
        assert edges(prefixes) <= holder.chunks
    for edge in held:
        prefixes.release(holder, edge)
    assert (edges(prefixes), holder.chunks) == (0, 0)
