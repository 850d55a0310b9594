"""The pace of prompts: it starts with a crowded queue or a refusal, and ends with both."""

from __future__ import annotations

from router.admission.pace import Pace
from router.routing.ranks import Limits


def test_pace_starts_and_ends_with_a_crowded_queue() -> None:
    limits = Limits(computed=True)
    pace = Pace(limits, 30.0, lambda: None, lambda: 0.0)
    for crowded in (True, False):
        pace.see(crowded)
        assert limits.paced is crowded


def test_pace_lasts_for_some_time_after_a_refusal() -> None:
    limits, now = Limits(computed=True), [0.0]
    pace = Pace(limits, 30.0, lambda: None, lambda: now[0])
    pace.refused()
    assert limits.paced
    now[0] = 29.0
    pace.see(False)
    assert limits.paced
    now[0] = 30.0
    pace.see(False)
    assert not limits.paced
