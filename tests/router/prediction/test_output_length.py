"""How long answers are expected to be."""

from __future__ import annotations

import pytest

from router.prediction.learned import OutputLengths


def test_the_mean_of_a_model_is_learned() -> None:
    lengths = OutputLengths()
    guess = lengths.expected("m", None)
    for _ in range(1000):
        lengths.seen("m", 40)
    assert lengths.expected("m", None) == pytest.approx(40, rel=0.05)
    assert lengths.expected("other", None) == guess


def test_a_request_bounds_what_is_expected_of_it() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", 5) == 5
    assert lengths.expected("m", 100_000) == lengths.expected("m", None)
