"""Expected length of answers."""

from __future__ import annotations

import pytest

from router.prediction.learned import OutputLengths


def test_mean_output_of_a_model_is_learned() -> None:
    lengths = OutputLengths()
    guess = lengths.expected("m", None)
    for _ in range(1000):
        lengths.seen("m", 40)
    assert lengths.expected("m", None) == pytest.approx(40, rel=0.05)
    assert lengths.expected("other", None) == guess


def test_limit_of_a_request_bounds_its_expected_output() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", 5) == 5
    assert lengths.expected("m", 100_000) == lengths.expected("m", None)
