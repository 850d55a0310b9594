"""The sources of a prompt beside its targets' own caches: shared pools, and peers from which a target can pull.

    own       tokens that the target holds, on its device or in tiers of its own
    loadable  tokens after them that it loads from a pool
    pullable  tokens after them that it pulls from the peer with the longest prefix

Each target has the source that saves most. Engines load what they find in a pool, so a pool is a source even where
computing is faster; it earns no credit there. A pull needs the router's order, so it is no source there.

Loads are learned apart from computing: their seconds per token, by source.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from indexer import MatchQuery, PoolHoldings, Target
from router.policies.records import Source
from router.routing.ranks import RoutableRank

# The share of the sums that is kept at each load.
_KEPT: Final = 0.95
# The tokens of a load that the start value counts for.
_PRIOR_TOKENS: Final = 8192.0
# A load counts at most this multiple of its expected seconds, so that a stall changes little.
_OUTLIER: Final = 4.0
# Shorter loads say little of the seconds per token.
_LEAST_TOKENS: Final = 1024
# The seconds per loaded token before any load is learned.
_LOAD_SECONDS: Final = 1 / 100_000


class Pools(Protocol):
    """The pools of a fleet."""

    def pooled(self, query: MatchQuery, reach: int) -> Sequence[PoolHoldings]:
        """Return what each pool holds of a prompt, of which some target holds `reach` tokens."""

    def has_pool(self, target: Target) -> bool:
        """Return whether a target loads from any pool."""

    def loads_from(self, target: Target, holdings: PoolHoldings) -> bool:
        """Return whether a target loads these blocks."""


class LoadRates:
    """The seconds per token of loads, learned by source. `start`: the value of a source without loads.

    Both are summed, because most of a short load is latency.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._sums: dict[str, tuple[float, float]] = {}

    def of(self, source: str) -> float:
        """Return the seconds per token of a source."""
        seconds, tokens = self._sums.get(source, (self._start, 1.0))
        return seconds / tokens

    def seen(self, source: str, tokens: int, seconds: float) -> None:
        """Learn from a load of `tokens` tokens that lasted `seconds`, with nothing before it."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        before = self._sums.get(source, (self._start * _PRIOR_TOKENS, _PRIOR_TOKENS))
        seconds = min(seconds, _OUTLIER * tokens * before[0] / before[1])
        self._sums[source] = _KEPT * before[0] + seconds, _KEPT * before[1] + tokens


class SourceLoads:
    """The tokens that loads in flight move, by target and by peer that is pulled from."""

    def __init__(self) -> None:
        self._tokens: dict[Target, int] = {}

    def of(self, target: Target | None) -> int:
        """Return the tokens in flight to and from a target."""
        return 0 if target is None else self._tokens.get(target, 0)

    def reserve(self, target: Target, source: Source) -> Callable[[], None]:
        """Reserve a load at both ends. Return the function that releases it, once."""
        ends, held = [target] if source.peer is None else [target, source.peer], [source.tokens]
        for end in ends:
            self._tokens[end] = self._tokens.get(end, 0) + source.tokens

        def release() -> None:
            tokens = held.pop() if held else 0
            for end in ends if tokens else ():
                left = self._tokens[end] - tokens
                if left:
                    self._tokens[end] = left
                else:
                    del self._tokens[end]

        return release


class SourceFinder:
    """Finds the source of each target for a prompt, with its price by the learned rates.

    - `pulls`: whether targets can pull from each other.
    """

    def __init__(
        self,
        pools: Pools | None,
        pulls: bool,
        token_seconds: Callable[[], float],
        prices: Mapping[str, float] | None = None,
        not_loading: Collection[Target] = (),
        load_seconds: float = _LOAD_SECONDS,
    ) -> None:
        """Create a finder.

        - `token_seconds`: returns the mean seconds in which workers compute a token.
        - `prices`: the fixed prices of sources, as shares of computing. Those of other sources are learned.
        - `not_loading`: the targets whose answers lack their loads. They are not credited.
        - `load_seconds`: the seconds per loaded token before any load is learned.
        """
        self.pulls = pulls
        self.rates = LoadRates(load_seconds)
        self.loads = SourceLoads()
        self._pools = pools
        self._token_seconds = token_seconds
        self._prices = prices or {}
        self._not_loading = not_loading

    def has_pool(self, target: Target) -> bool:
        """Return whether a target loads from a pool."""
        return self._pools is not None and self._pools.has_pool(target)

    def find(
        self,
        query: MatchQuery,
        ranks: Sequence[RoutableRank],
        own: array[int],
        verified: Sequence[PoolHoldings] = (),
    ) -> dict[int, Source]:
        """Return the source of each row that has one.

        - `ranks`: the targets that may compute the prompt.
        - `own`: the tokens that the target of each row holds.
        - `verified`: what pools of unknown content have, as they answered.
        """
        found: dict[int, Source] = {}
        best = max([own[rank.row] for rank in ranks], default=0)
        if self._pools is not None:
            for holdings in (*self._pools.pooled(query, best), *verified):
                for rank in ranks:
                    held = own[rank.row]
                    tokens = min(holdings.reach(held), len(query.token_ids) - 1) - held
                    if tokens > 0 and self._pools.loads_from(rank.target, holdings):
                        self._add(found, rank, holdings.pool, tokens, None)
        if self.pulls:
            peers = [rank for rank in ranks if own[rank.row] == best]
            peer = min(peers, key=lambda rank: self.loads.of(rank.target))
            for rank in ranks:
                tokens = best - own[rank.row]
                if tokens > 0:
                    self._add(found, rank, "peers", tokens, peer.target)
        return found

    def _add(self, found: dict[int, Source], rank: RoutableRank, name: str, tokens: int, peer: Target | None) -> None:
        waiting = max(self.loads.of(rank.target), self.loads.of(peer))
        computed, price = self._token_seconds(), self._prices.get(name)
        seconds = self.rates.of(name) if price is None else price * computed
        if rank.target in self._not_loading:
            seconds = max(seconds, computed)
        source = Source(name, tokens, seconds / computed, waiting, seconds, peer)
        before = found.get(rank.row)
        if source.saved > (0.0 if before is None else before.saved) or (before is None and peer is None):
            found[rank.row] = source
