"""Expected number of turns of sessions."""

from __future__ import annotations

import pytest

from router.prediction.learned import SessionTurns


@pytest.mark.parametrize(("turns", "expected"), [(1, 1.0), (2, 2.0), (5, 5.0), (40, 8.0)])
def test_each_turn_finds_its_session(turns: int, expected: float) -> None:
    learned = SessionTurns()
    assert learned.expected("m") == 1.0
    for number in range(3000):  # each turn says as much as the others
        turn = number % turns
        learned.seen("m", cached=999 if turn else 0, tokens=1000)
    assert learned.expected("m") == pytest.approx(expected, rel=0.1)
    assert learned.expected("other") == 1.0


def test_old_sessions_are_dropped() -> None:
    learned = SessionTurns()
    for cached, count in ((0, 10_000), (500, 3000)):
        for _ in range(count):
            learned.seen("m", cached, 1000)
    assert learned.expected("m") == pytest.approx(2.0, rel=0.01)
