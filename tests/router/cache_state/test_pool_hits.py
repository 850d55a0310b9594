"""Tokens that a worker loaded from a shared pool are no error of its events."""

import pytest

from indexer import Target
from router.cache_state.target_audit import CachePrediction


@pytest.mark.parametrize(("cached", "own"), [(64, 64), (32, 32), (0, 0), (96, 64), (192, 64), (224, 96)])
def test_cached_tokens_above_the_workers_own_are_loads_as_far_as_the_pool_has_them(cached: int, own: int) -> None:
    prediction = CachePrediction(Target("w", 0, "m"), [], 300, 64, 64, True, None, 0.0, loadable=128)
    assert prediction.without_loads(cached) == own
