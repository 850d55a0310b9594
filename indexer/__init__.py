"""Who holds what: workers' event streams, the prefix tree, and the API that answers `/match`."""

from indexer.cores import core_name
from indexer.factory import make_index
from indexer.holdings import Target
from indexer.index import Index
from indexer.indexer import Indexer, Registration
from indexer.matching import Match, RowMatches, TargetRows
from indexer.queries import DEFAULT_TENANT, MatchQuery, UnknownModelError

__all__ = [
    "DEFAULT_TENANT",
    "Index",
    "Indexer",
    "Match",
    "MatchQuery",
    "Registration",
    "RowMatches",
    "Target",
    "TargetRows",
    "UnknownModelError",
    "core_name",
    "make_index",
]
