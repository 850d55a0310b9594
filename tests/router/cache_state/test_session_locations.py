"""Places of sessions that were said to go on: what they weigh, and until when."""

from __future__ import annotations

from random import Random

import pytest
from manual_clock import Clock

from indexer import Target
from router.cache_state.session_locations import STEEP, SessionLocations

A, B, OTHER = Target("a", 0, "m"), Target("b", 0, "m"), Target("a", 0, "other")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def places(clock: Clock) -> SessionLocations:
    return SessionLocations(clock)


def test_what_many_come_back_for_is_dear_and_what_nobody_wants_is_cheap(places: SessionLocations) -> None:
    assert [places.weight(target, 2, 1000) for target in (A, B)] == [1.0, 1.0]
    places.keep((None, "s"), A, 400, None)
    assert [places.weight(target, 2, 1000) for target in (A, B)] == [1 + STEEP * 0.2, 1 - STEEP * 0.2]
    assert places.weight(OTHER, 1, 1000) == 1.0  # another model's
    assert places.weight(A, 2, None) == 1.0  # of what size is not known
    places.keep((None, "t"), A, 600, None)
    assert [places.weight(target, 4, 1000) for target in (A, B)] == [1 + STEEP * 0.75, 1 - STEEP * 0.25]
    places.keep((None, "u"), B, 800, None)
    assert places.weight(B, 4, 400) == places.weight(A, 4, 400) == 1.0  # more than can be kept anywhere


def test_a_place_is_where_the_last_request_went_until_the_session_ends(places: SessionLocations) -> None:
    key = (None, "s")
    places.keep(key, A, 400, 1.0)
    places.keep(key, B, 500, 1.0)
    assert [places.wanted(A), places.wanted(B), places.of(key)] == [0, 500, B]
    places.keep(("salt", "s"), A, 100, 1.0)  # another tenant's session of this name
    assert [places.wanted(A), places.wanted(B)] == [100, 500]
    places.leave(key)
    assert [places.wanted(B), places.of(key), len(places)] == [0, None, 1]
    places.leave(key)


def test_a_place_is_kept_for_twice_the_pause_that_was_announced(places: SessionLocations, clock: Clock) -> None:
    answered = places.keep((None, "s"), A, 400, 30.0)
    clock.now += 1000
    places.expire(clock.now)
    assert places.wanted(A) == 400  # its request is still in flight
    answered()
    places.expire(clock.now + 59.9)
    assert places.wanted(A) == 400
    places.expire(clock.now + 60)
    assert places.wanted(A) == 0


def test_an_earlier_request_that_ends_late_changes_nothing(places: SessionLocations, clock: Clock) -> None:
    key = (None, "s")
    first = places.keep(key, A, 400, 1.0)
    places.keep(key, B, 500, 1.0)
    first()
    first(failed=True)
    places.expire(clock.now + 1000)
    assert places.wanted(B) == 500


def test_what_failed_and_what_is_gone_is_not_wanted(places: SessionLocations) -> None:
    failed = places.keep((None, "s"), A, 400, 1.0)
    failed(failed=True)
    places.keep((None, "t"), A, 400, 1.0)
    places.keep((None, "u"), B, 400, 1.0)
    places.forget("a")
    assert [places.wanted(A), places.wanted(B), len(places)] == [0, 400, 1]


def test_counts_stay_right_whatever_comes(places: SessionLocations, clock: Clock) -> None:
    random, calls = Random(1), []
    for _ in range(2000):
        key = (None, str(random.randrange(20)))
        if random.random() < 0.6:
            calls.append(places.keep(key, random.choice((A, B)), random.randrange(1, 100), random.choice((None, 3.0))))
        elif random.random() < 0.5:
            places.leave(key)
        elif calls:
            calls.pop(random.randrange(len(calls)))(failed=random.random() < 0.2)
        clock.now += random.random()
        places.expire(clock.now)
    for call in calls:
        call()
    places.expire(clock.now + 1000)
    assert [len(places), places.wanted(A), places.wanted(B), places.weight(A, 2, 1000)] == [0, 0, 0, 1.0]


@pytest.mark.derives
def test_a_session_that_comes_again_and_again_leaves_nothing_behind(
    places: SessionLocations, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cache_state.session_locations._MOST_PLACES", 8)
    for _ in range(100):
        places.keep((None, "s"), A, 10, 86_400.0)()
    assert len(places._due) <= 2 * 8
    assert places.wanted(A) == 10
    places.expire(clock.now + 3601)  # an hour is the most
    assert places.wanted(A) == 0
