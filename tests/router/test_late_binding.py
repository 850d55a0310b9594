"""When a request is held, and in which order held ones choose."""

from __future__ import annotations

import pytest

from router.routing.late_binding import STEP_TOKENS, held_order, should_hold


@pytest.mark.parametrize(
    ("pending", "held"), [(0, False), (STEP_TOKENS, False), (STEP_TOKENS + 1, True), (10 * STEP_TOKENS, True)]
)
def test_a_request_is_held_while_its_choice_has_more_to_prefill_than_a_step_takes(pending: int, held: bool) -> None:
    assert should_hold(pending) is held


def test_short_prefills_go_first_and_nobody_starves() -> None:
    long_one = held_order(arrival=10.0, prefill_seconds=2.0)
    assert held_order(10.0, 0.1) < long_one
    assert held_order(13.0, 0.1) < long_one
    assert held_order(14.0, 0.1) > long_one
