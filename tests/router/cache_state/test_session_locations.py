"""Places of sessions that were said to go on: what they weigh, and until when."""

from __future__ import annotations

from random import Random

import pytest
from manual_clock import Clock

from indexer import Target
from router.cache_state.session_locations import STEEP, SessionLocations

A, B, OTHER = Target("a", 0, "m"), Target("b", 0, "m"), Target("a", 0, "other")


@pytest.fixture
def locations(clock: Clock) -> SessionLocations:
    return SessionLocations(clock)


def test_eviction_cost_grows_with_returning_sessions(locations: SessionLocations) -> None:
    assert [locations.weight(target, 2, 1000) for target in (A, B)] == [1.0, 1.0]
    locations.record((None, "s"), A, 400, None)
    assert [locations.weight(target, 2, 1000) for target in (A, B)] == [1 + STEEP * 0.2, 1 - STEEP * 0.2]
    assert locations.weight(OTHER, 1, 1000) == 1.0  # another model's
    assert locations.weight(A, 2, None) == 1.0  # of what size is not known
    locations.record((None, "t"), A, 600, None)
    assert [locations.weight(target, 4, 1000) for target in (A, B)] == [1 + STEEP * 0.75, 1 - STEEP * 0.25]
    locations.record((None, "u"), B, 800, None)
    assert locations.weight(B, 4, 400) == locations.weight(A, 4, 400) == 1.0  # more than can be kept anywhere


def test_location_is_the_last_target_until_the_session_ends(locations: SessionLocations) -> None:
    key = (None, "s")
    locations.record(key, A, 400, 1.0)
    locations.record(key, B, 500, 1.0)
    assert [locations.retained_tokens(A), locations.retained_tokens(B), locations.get(key)] == [0, 500, B]
    locations.record(("salt", "s"), A, 100, 1.0)  # another tenant's session of this name
    assert [locations.retained_tokens(A), locations.retained_tokens(B)] == [100, 500]
    locations.drop(key)
    assert [locations.retained_tokens(B), locations.get(key), len(locations)] == [0, None, 1]
    locations.drop(key)


def test_location_is_kept_for_twice_the_announced_pause(locations: SessionLocations, clock: Clock) -> None:
    answered = locations.record((None, "s"), A, 400, 30.0)
    clock.now += 1000
    locations.expire(clock.now)
    assert locations.retained_tokens(A) == 400  # its request is still in flight
    answered()
    locations.expire(clock.now + 59.9)
    assert locations.retained_tokens(A) == 400
    locations.expire(clock.now + 60)
    assert locations.retained_tokens(A) == 0


def test_late_end_of_an_earlier_request_is_ignored(locations: SessionLocations, clock: Clock) -> None:
    key = (None, "s")
    first = locations.record(key, A, 400, 1.0)
    locations.record(key, B, 500, 1.0)
    first()
    first(failed=True)
    locations.expire(clock.now + 1000)
    assert locations.retained_tokens(B) == 500


def test_failed_requests_and_removed_targets_have_no_wanted_tokens(locations: SessionLocations) -> None:
    failed = locations.record((None, "s"), A, 400, 1.0)
    failed(failed=True)
    locations.record((None, "t"), A, 400, 1.0)
    locations.record((None, "u"), B, 400, 1.0)
    locations.forget("a")
    assert [locations.retained_tokens(A), locations.retained_tokens(B), len(locations)] == [0, 400, 1]


def test_counts_equal_the_model_after_any_events(locations: SessionLocations, clock: Clock) -> None:
    random, calls = Random(1), []
    for _ in range(2000):
        key = (None, str(random.randrange(20)))
        if random.random() < 0.6:
            pause = random.choice((None, 3.0))
            calls.append(locations.record(key, random.choice((A, B)), random.randrange(1, 100), pause))
        elif random.random() < 0.5:
            locations.drop(key)
        elif calls:
            calls.pop(random.randrange(len(calls)))(failed=random.random() < 0.2)
        clock.now += random.random()
        locations.expire(clock.now)
    for call in calls:
        call()
    locations.expire(clock.now + 1000)
    assert [len(locations), locations.retained_tokens(A), locations.retained_tokens(B)] == [0, 0, 0]
    assert locations.weight(A, 2, 1000) == 1.0


@pytest.mark.derives
def test_repeated_sessions_do_not_accumulate(
    locations: SessionLocations, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cache_state.session_locations._MOST_LOCATIONS", 8)
    for _ in range(100):
        locations.record((None, "s"), A, 10, 86_400.0)()
    assert len(locations._due) <= 2 * 8
    assert locations.retained_tokens(A) == 10
    locations.expire(clock.now + 3601)  # an hour is the most
    assert locations.retained_tokens(A) == 0
