"""Finding what begins as something new does, within a bound of memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.apis.prefix_cache import PrefixCache, common_places


@dataclass(eq=False)
class Seen:
    whole: str | bytes
    size: int = 1000


def text(seed: object, length: int) -> str:
    return "".join(Random(str(seed)).choices("abcdef", k=length))


def find(known: PrefixCache, whole: str | bytes) -> Seen | None:
    """What begins alike up to the first place at least."""
    found: Seen | None = known.find(whole, lambda seen: seen if seen.whole[:1024] == whole[:1024] else None)
    return found


def test_the_next_turn_finds_the_last() -> None:
    known: PrefixCache = PrefixCache(10**6)
    first = Seen(text(1, 9000))
    known.put(first)
    assert find(known, str(first.whole) + "more") is first
    assert find(known, str(first.whole)) is first
    assert find(known, str(first.whole)[:1500]) is first
    assert find(known, "x" + str(first.whole)) is None
    assert find(known, text(1, 9000)[:-800]) is first
    assert find(known, "short") is None


def test_the_one_with_more_in_common_is_found() -> None:
    known: PrefixCache = PrefixCache(10**6)
    system = text("system", 5000)
    chats = [Seen((system + text(number, 20_000)).encode()) for number in range(10)]
    for chat in chats:
        known.put(chat)
    for chat in chats:
        assert find(known, bytes(chat.whole) + b"next") is chat
    assert find(known, system.encode() + b"another") is chats[-1]


def test_the_same_characters_at_a_place_are_not_enough() -> None:
    known: PrefixCache = PrefixCache(10**6)
    known.put(Seen("a" * 900 + text(1, 5000)))
    assert find(known, "b" * 900 + text(1, 5000)) is None


def test_what_was_used_longest_ago_is_forgotten() -> None:
    known: PrefixCache = PrefixCache(100_000)
    all_seen = [Seen(text(number, 3000), 9000) for number in range(50)]
    for number, seen in enumerate(all_seen):
        known.put(seen)
        assert known.bytes <= 100_000
        assert find(known, all_seen[0].whole) is all_seen[0]
        assert find(known, seen.whole) is seen, number
    assert 5 < len(known) < 11
    assert find(known, all_seen[1].whole) is None
    known.put(Seen(text("large", 3000), 10**6))
    assert find(known, text("large", 3000)) is None
    assert find(known, all_seen[0].whole) is all_seen[0]


def test_what_takes_the_place_of_another_is_found_in_its_stead() -> None:
    known: PrefixCache = PrefixCache(100_000)
    turn = Seen(text(1, 3000))
    known.put(turn)
    for length in range(4000, 40_000, 1000):
        longer = Seen(text(1, length))
        known.put(longer, turn, length - 1000, instead=True)
        assert len(known) == 1
        assert find(known, str(longer.whole) + "x") is longer
        turn = longer


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 12_000), st.booleans()), max_size=30))
def test_what_is_found_begins_alike(asked: list[tuple[int, int, int, bool]]) -> None:
    known: PrefixCache = PrefixCache(60_000)
    for opening, rest, length, replace in asked:
        whole = text(opening, 2000) + text(rest, length)
        found = find(known, whole)
        if found is not None:
            assert whole[:1024] == found.whole[:1024]
        common = 0
        if found is not None:
            same = (place for place in range(min(len(whole), len(found.whole))) if whole[place] != found.whole[place])
            common = next(same, min(len(whole), len(found.whole)))
        known.put(Seen(whole, len(whole)), found, common, instead=replace)
        assert known.bytes <= 60_000
        assert find(known, whole) is not None or len(known) == 0 or len(whole) > 50_000


@settings(max_examples=200)
@given(st.text("ab", max_size=30), st.text("ab", max_size=30), st.sets(st.integers(1, 40)), st.integers(0, 3))
def test_places_in_what_two_begin_with_alike(one: str, other: str, places: set[int], beyond: int) -> None:
    known = one + other[::-1]
    ordered = [place for place in sorted(places) if place + beyond <= len(known)]
    expected = sum((one + other).startswith(known[: place + beyond]) for place in ordered)
    for count in range(len(ordered) + 1):
        found = common_places(one + other, known, ordered, count, beyond)
        assert found == min(count, expected)
        new, start = (one + other).encode(), memoryview(known.encode())
        assert common_places(new, start, array("I", ordered), count, beyond) == found
