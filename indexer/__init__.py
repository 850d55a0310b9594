"""Which target holds which prefix: the index, the event streams that feed it, and the API that answers `/match`."""

from indexer.index import (
    DEFAULT_TENANT,
    Index,
    Match,
    MatchQuery,
    RowMatches,
    TargetRows,
    UnknownModelError,
)
from indexer.indexer import Indexer, make_index
from indexer.native import core_name
from indexer.pools.holdings import PoolHoldings
from indexer.targets import Registration, Target

__all__ = [
    "DEFAULT_TENANT",
    "Index",
    "Indexer",
    "Match",
    "MatchQuery",
    "PoolHoldings",
    "Registration",
    "RowMatches",
    "Target",
    "TargetRows",
    "UnknownModelError",
    "core_name",
    "make_index",
]
