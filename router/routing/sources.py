"""The sources of a prompt beside its targets' own caches: shared pools, and peers from which a target can pull.

    own       tokens that the target holds, on its device or in tiers of its own
    loadable  tokens after them that it loads from a pool
    pullable  tokens after them that it pulls from the host tier of the peer with the longest prefix

Each target has the source that saves most. Engines load what they find in a pool, so a pool is a source even where
computing is faster; it earns no credit there. A pull needs the router's order, so it is no source there.

Loads are learned apart from computing: their seconds per token, by source.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
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
# Seconds after the last load from a source, until its rate is forgotten.
_STALE_SECONDS: Final = 600.0
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


class Peers(Protocol):
    """The targets of a fleet, as peers to pull from.

    - `per_source`: the most pulls in flight from one peer.
    - `least_tokens`: the fewest tokens that are pulled.
    """

    @property
    def per_source(self) -> int: ...

    @property
    def least_tokens(self) -> int: ...

    def holders(self, query: MatchQuery, own: Sequence[tuple[Target, int]]) -> Sequence[tuple[Target, int, int]]:
        """Return the targets that can be pulled from, each with the tokens that it holds, and its block size.

        - `own`: the tokens that each candidate counts as its own.
        """

    def may_pull(self, target: Target) -> bool:
        """Return whether a target can pull."""


class LoadRates:
    """The seconds per token of loads, learned by source. `start`: the value of a source without loads.

    Both are summed, because most of a short load is latency. A source without loads for some time has its start value
    again: nothing is pulled from peers that were once slow, so nothing else would show that they are fast again.
    """

    def __init__(self, start: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._start = start
        self._clock = clock
        self._sums: dict[str, tuple[float, float]] = {}
        self._seen_at: dict[str, float] = {}

    def of(self, source: str) -> float:
        """Return the seconds per token of a source."""
        if source in self._sums and self._clock() - self._seen_at[source] > _STALE_SECONDS:
            del self._sums[source]
        seconds, tokens = self._sums.get(source, (self._start, 1.0))
        return seconds / tokens

    def seen(self, source: str, tokens: int, seconds: float) -> None:
        """Learn from a load of `tokens` tokens that lasted `seconds`, with nothing before it."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        self._seen_at[source] = self._clock()
        before = self._sums.get(source, (self._start * _PRIOR_TOKENS, _PRIOR_TOKENS))
        seconds = min(seconds, _OUTLIER * tokens * before[0] / before[1])
        self._sums[source] = _KEPT * before[0] + seconds, _KEPT * before[1] + tokens


class SourceLoads:
    """The tokens that loads in flight move, by target and by peer that is pulled from."""

    def __init__(self) -> None:
        self._tokens: dict[Target, int] = {}
        self._pulls: dict[Target, int] = {}

    def of(self, target: Target | None) -> int:
        """Return the tokens in flight to and from a target."""
        return 0 if target is None else self._tokens.get(target, 0)

    def pulls(self, peer: Target) -> int:
        """Return the number of pulls in flight from a peer."""
        return self._pulls.get(peer, 0)

    def reserve(self, target: Target, source: Source) -> Callable[[], None]:
        """Reserve a load at both ends. Return the function that releases it, once."""
        ends, held = [target] if source.peer is None else [target, source.peer], [source.tokens]
        for end in ends:
            self._tokens[end] = self._tokens.get(end, 0) + source.tokens
        if source.peer is not None:
            self._pulls[source.peer] = self.pulls(source.peer) + 1

        def release() -> None:
            tokens = held.pop() if held else 0
            for end in ends if tokens else ():
                _subtract(self._tokens, end, tokens)
            if tokens and source.peer is not None:
                _subtract(self._pulls, source.peer, 1)

        return release


def _subtract(amounts: dict[Target, int], target: Target, amount: int) -> None:
    left = amounts[target] - amount
    if left:
        amounts[target] = left
    else:
        del amounts[target]


class SourceFinder:
    """Finds the source of each target for a prompt, with its price by the learned rates.

    - `peers`: the peers that targets can pull from; None without pulls.
    """

    def __init__(
        self,
        pools: Pools | None,
        peers: Peers | None,
        token_seconds: Callable[[], float],
        prices: Mapping[str, float] | None = None,
        not_loading: Collection[Target] = (),
        load_seconds: float = _LOAD_SECONDS,
        random: Random | None = None,
    ) -> None:
        """Create a finder.

        - `token_seconds`: returns the mean seconds in which workers compute a token.
        - `prices`: the fixed prices of sources, as shares of computing. Those of other sources are learned.
        - `not_loading`: the targets whose answers lack their loads. They are not credited.
        - `load_seconds`: the seconds per loaded token before any load is learned.
        - `random`: chooses between equal peers.
        """
        self.peers = peers
        self.rates = LoadRates(load_seconds)
        self.loads = SourceLoads()
        self._pools = pools
        self._token_seconds = token_seconds
        self._prices = prices or {}
        self._not_loading = not_loading
        self._random = random or Random()

    def has_pool(self, target: Target) -> bool:
        """Return whether a target loads from a pool."""
        return self._pools is not None and self._pools.has_pool(target)

    def find(
        self,
        query: MatchQuery,
        ranks: Sequence[RoutableRank],
        own: array[int],
        verified: Sequence[PoolHoldings] = (),
        pulls: bool = True,
    ) -> dict[int, Source]:
        """Return the source of each row that has one.

        - `ranks`: the targets that may compute the prompt.
        - `own`: the tokens that the target of each row holds.
        - `verified`: what pools of unknown content have, as they answered.
        - `pulls`: whether the request may name a peer.
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
        if pulls and self.peers is not None:
            self._add_pulls(found, self.peers, query, ranks, own)
        return found

    def _add_pulls(
        self,
        found: dict[int, Source],
        peers: Peers,
        query: MatchQuery,
        ranks: Sequence[RoutableRank],
        own: array[int],
    ) -> None:
        """Add pulls from the peer with the fewest loads, among those whose prefix is the longest within one block."""
        least = max(peers.least_tokens, 1)
        short = [rank for rank in ranks if own[rank.row] + least < len(query.token_ids)]
        if not short:
            return
        held = [(rank.target, own[rank.row]) for rank in ranks]
        holders = [each for each in peers.holders(query, held) if self.loads.pulls(each[0]) < peers.per_source]
        longest = max([tokens for _, tokens, _ in holders], default=0)
        near = [(peer, tokens) for peer, tokens, block in holders if tokens > longest - block]
        if not near:
            return
        peer, longest = min(near, key=lambda holder: (self.loads.of(holder[0]), self._random.random()))
        for rank in short:
            tokens = longest - own[rank.row]
            if tokens >= least and rank.target != peer and peers.may_pull(rank.target):
                self._add(found, rank, "peers", tokens, peer)

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
