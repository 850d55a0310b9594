"""Causes of low hits: named when they apply, and not on healthy traffic."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from indexer import Target
from router.observability.advice import ADVICE, Severity, advised
from router.prediction.learned import LEAST_EVICTED, EvictionPressure

CHUNK = 16
ONE, OTHER = Target("one", 0, "m"), Target("other", 0, "m")


class Clock:
    """A clock that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def hashes(session: int, chunks: int) -> array[int]:
    """Return the chunk hashes of a session's prompt of this many chunks."""
    return array("Q", [session * 1_000_000 + place for place in range(chunks)])


def converse(pressure: EvictionPressure, targets: list[Target], held: float) -> None:
    """Route 20 sessions of 5 turns each. `held`: the share of known prompts that their targets hold."""
    for session in range(20):
        for turn in range(1, 6):
            target = targets[turn % len(targets)]
            overlap = int(held * 64 * (turn - 1)) * CHUNK
            pressure.routed(hashes(session, 64 * turn), overlap, overlap, 0.0, target)


def test_sessions_that_move_are_counted() -> None:
    clock = Clock()
    pressure = EvictionPressure(CHUNK, clock=clock)
    converse(pressure, [ONE, OTHER], held=0.0)
    turns, moved = pressure.moved_turns()
    assert (round(turns), round(moved)) == (80, 80)
    clock.now += 3000
    assert pressure.moved_turns()[0] < 1


@pytest.mark.parametrize(("targets", "held"), [([ONE], 1.0), ([ONE], 0.0), ([ONE, OTHER], 1.0)])
def test_sessions_that_stay_or_find_their_prefix_elsewhere_do_not_move(targets: list[Target], held: float) -> None:
    clock = Clock()
    pressure = EvictionPressure(CHUNK, clock=clock)
    converse(pressure, targets, held)
    turns, moved = pressure.moved_turns()
    assert (round(turns), round(moved)) == (80, 0)


def test_prompts_that_return_after_evictions_are_lost() -> None:
    clock = Clock()
    pressure = EvictionPressure(CHUNK, clock=clock)
    pressure.removed({ONE: 0})
    converse(pressure, [ONE], held=0.0)
    assert pressure.lost_share() == 0.0  # nothing was evicted: caches are off, or were reset
    pressure.removed({ONE: 10 * LEAST_EVICTED})
    assert pressure.lost_share() > 0.5


def test_evictions_of_what_never_returns_are_no_loss() -> None:
    clock = Clock()
    pressure = EvictionPressure(CHUNK, clock=clock)
    pressure.removed({ONE: 0})
    converse(pressure, [ONE], held=1.0)
    pressure.removed({ONE: 10 * LEAST_EVICTED})
    assert pressure.lost_share() == 0.0


# One cause is one finding


def names(*found: dict[str, Any]) -> list[str]:
    return [each["finding"] for each in advised(found)]


def test_consequences_are_left_out() -> None:
    down, key = {"finding": "worker_down", "worker": "a"}, {"finding": "worker_key", "worker": "a"}
    assert names(down, key) == ["worker_key"]
    assert names(down, key | {"worker": "b"}) == ["worker_down", "worker_key"]
    drift = {"finding": "drift", "worker": "a", "dp_rank": 0, "model": "m"}
    assert names({"finding": "prompts_differ", "model": "m"}, drift) == ["prompts_differ"]
    assert names({"finding": "prompts_differ", "model": "n"}, drift) == ["prompts_differ", "drift"]


def test_worst_finding_is_first_and_each_has_advice() -> None:
    found = advised(
        [{"finding": "prompts_asked", "model": "m"}, {"finding": "drift"}, {"finding": "worker_down", "worker": "a"}]
    )
    assert [each["severity"] for each in found] == ["error", "warning", "info"]
    assert all(each["action"] and each["link"].endswith(each["finding"]) for each in found)
    assert advised([{"finding": "of_a_later_version"}])[0]["severity"] == "warning"


def test_ranks_of_a_worker_are_joined() -> None:
    ranks = [{"finding": "drift", "worker": "a", "dp_rank": rank, "model": "m", "detail": str(rank)} for rank in (0, 3)]
    [found] = advised(ranks)
    assert (found["dp_rank"], found["dp_ranks"], found["detail"]) == (0, [0, 3], "0")
    assert ranks[0] == {"finding": "drift", "worker": "a", "dp_rank": 0, "model": "m", "detail": "0"}


def test_advice_is_short_and_complete() -> None:
    for name, (severity, meaning, action) in ADVICE.items():
        assert severity in Severity
        assert 10 < len(meaning) < 120, name
        assert action.endswith("."), name
