"""The prefix that a target reaches with a pool."""

import pytest

from indexer.pools.holdings import PoolHoldings

HELD = PoolHoldings("p", 16, ((0, 64), (96, 128)))


@pytest.mark.parametrize(("own", "reach"), [(0, 64), (32, 64), (80, 80), (96, 128), (160, 160), (95, 95)])
def test_prefix_continues_where_device_or_pool_has_the_next_block(own: int, reach: int) -> None:
    assert HELD.reach(own) == reach
    assert HELD.loadable(own) == reach - own


def test_pool_without_the_first_block_loads_nothing_for_an_empty_target() -> None:
    assert PoolHoldings("p", 16, ((16, 64),)).reach(0) == 0
