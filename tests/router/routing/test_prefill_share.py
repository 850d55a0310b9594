"""The share of time that a fleet spends on prefills."""

from __future__ import annotations

import pytest

from router.routing.load_view import HORIZON, PrefillShare


def test_until_something_is_known_all_are_taken_to_be_busy() -> None:
    share = PrefillShare()
    assert share.average == 1
    share.see(0.0, 5.0)
    assert share.average == 1
    share.see(0.0, 5.0 + HORIZON)
    assert share.average == pytest.approx(0.37, abs=0.01)


def test_share_follows_samples_and_decays() -> None:
    share = PrefillShare()
    for second in range(1, 600):
        share.see(second % 2, float(second))
    assert share.average == pytest.approx(0.5, abs=0.02)
    share.see(0.25, 600.0 + 20 * HORIZON)
    assert share.average == pytest.approx(0.25, abs=1e-6)


def test_earlier_time_is_ignored() -> None:
    share = PrefillShare()
    share.see(0.0, 100.0)
    share.see(0.0, 200.0)
    before = share.average
    share.see(1.0, 150.0)
    share.see(1.0, 200.0)
    assert share.average == before
