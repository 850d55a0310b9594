"""When a request is held, and in which order held ones choose."""

from __future__ import annotations

import pytest

from router.routing.late_binding import STEP_TOKENS, held_order, should_hold


@pytest.mark.parametrize(
    ("pending", "held"), [(0, False), (STEP_TOKENS, False), (STEP_TOKENS + 1, True), (10 * STEP_TOKENS, True)]
)
def test_a_request_is_held_while_its_choice_has_more_to_prefill_than_a_step_takes(pending: int, held: bool) -> None:
    assert should_hold(pending) is held


def test_short_prefills_go_first_and_long_ones_give_way_for_two_seconds() -> None:
    short, long_one = 0.1, 60.0
    assert held_order(10.0, short) < held_order(10.0, 2 * short)
    assert held_order(11.5, short) < held_order(10.0, long_one) < held_order(12.0, short)
    assert held_order(10.0, long_one) < held_order(10.1, 2.0)
