"""The sources of a prompt beside its targets' own caches: shared pools, and peers from which a target can pull.

    own       tokens that the target holds, on its device or in tiers of its own
    loadable  tokens after them that it loads from a pool
    pullable  tokens after them that it pulls from the host tier of the peer with the longest prefix

Each target has the source that saves most. Engines load what they find in a pool, so a pool is a source even where
computing is faster; it earns no credit there. A pull needs the router's order, so it is no source there.

A load of `tokens` tokens behind `waiting` others lasts

    seconds = start + token · (waiting + tokens)

Both coefficients are learned by source, apart from the rates of computing. A target pulls only what it would compute in
more time, at its own rates and under its load.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Protocol

from indexer import MatchQuery, PoolHoldings, Target
from router.cache_state.target_cache import TargetCache, TargetCaches
from router.policies.rates import BoundedRegression, RateTable
from router.policies.records import Source
from router.routing.ranks import RoutableRank

# Seconds after the last load from a source, until its coefficients are forgotten.
_STALE_SECONDS: Final = 600.0
# A load that lasts less than this share of the computing beside it says little: errors of the latter exceed it.
_LEAST_SHARE: Final = 0.25
# The coefficients before any load is learned: the seconds before the first token, and those per token.
_FIRST_GUESS: Final[tuple[float, float]] = 0.005, 1e-5


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
    """The duration of loads, learned by source: the seconds before the first token, and those per token.

    A source without loads for some time has its first guess again: nothing is pulled from peers that were once slow, so
    nothing else would show that they are fast again.
    """

    def __init__(
        self, first_guess: tuple[float, float] = _FIRST_GUESS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the rates of sources without loads. `first_guess`: both coefficients, above 0."""
        self._first_guess = first_guess
        self._clock = clock
        self._learned: dict[str, BoundedRegression] = {}
        self._seen_at: dict[str, float] = {}

    def of(self, source: str) -> tuple[float, float]:
        """Return the seconds before the first token of a load from a source, and those per token."""
        learned = self._learned.get(source)
        if learned is None or self._clock() - self._seen_at[source] > _STALE_SECONDS:
            return self._first_guess
        return learned.coefficients

    def forget(self, is_removed: Callable[[str], bool]) -> None:
        """Forget the sources that were removed."""
        for source in [source for source in self._learned if is_removed(source)]:
            del self._learned[source], self._seen_at[source]

    def learned(self) -> dict[str, tuple[float, float]]:
        """Return the coefficients of each source with loads."""
        return {source: self.of(source) for source in self._learned}

    def seen(self, source: str, tokens: int, seconds: float, computing: float = 0.0) -> None:
        """Learn from a load of `tokens` tokens, with no other before it.

        - `seconds`: the time until the first byte of the answer.
        - `computing`: the part of it in which the rest of the prompt was computed.
        """
        now, loading = self._clock(), seconds - computing
        start, token = self.of(source)
        if max(start + token * tokens, loading) < _LEAST_SHARE * computing:
            return
        learned = self._learned.get(source)
        if learned is None or now - self._seen_at[source] > _STALE_SECONDS:
            learned = self._learned[source] = BoundedRegression(self._first_guess)
        self._seen_at[source] = now
        learned.add(1.0, tokens, 0.0, loading, now)


class SourceLoads:
    """The tokens that loads in flight move, by target and by peer that is pulled from."""

    def __init__(self, caches: TargetCaches) -> None:
        self._caches = caches

    def of(self, target: Target | None) -> int:
        """Return the tokens in flight to and from a target."""
        cache = None if target is None else self._caches.find(target)
        return 0 if cache is None else cache.loading

    def pulls(self, peer: Target) -> int:
        """Return the number of pulls in flight from a peer."""
        cache = self._caches.find(peer)
        return 0 if cache is None else cache.pulled

    def reserve(self, target: TargetCache, source: Source) -> Callable[[], None]:
        """Reserve a load at both ends. Return the function that releases it, once."""
        peer, held = None if source.peer is None else self._caches.of(source.peer), [source.tokens]
        ends = [target] if peer is None else [target, peer]
        for end in ends:
            end.loading += source.tokens
        if peer is not None:
            peer.pulled += 1

        def release() -> None:
            tokens = held.pop() if held else 0
            for end in ends if tokens else ():
                end.loading -= tokens
            if tokens and peer is not None:
                peer.pulled -= 1

        return release


class SourceFinder:
    """Finds the source of each target for a prompt, with its price by the learned rates.

    - `peers`: the peers that targets can pull from; None without pulls.
    """

    def __init__(
        self,
        pools: Pools | None,
        peers: Peers | None,
        computing: RateTable,
        caches: TargetCaches,
        prices: Mapping[str, float] | None = None,
        rates: LoadRates | None = None,
        random: Random | None = None,
    ) -> None:
        """Create a finder.

        - `computing`: the rates at which workers compute.
        - `caches`: the targets. Those whose answers lack their loads are not credited.
        - `prices`: the fixed prices of sources, as shares of computing. Those of other sources are learned.
        - `rates`: the rates of loads.
        - `random`: chooses between equal peers.
        """
        self.peers = peers
        self.rates = rates or LoadRates()
        self.loads = SourceLoads(caches)
        self._pools = pools
        self.computing = computing
        self._prices = prices or {}
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
        computed = self.computing.mean_token()
        best = max([own[rank.row] for rank in ranks], default=0)
        if self._pools is not None:
            for holdings in (*self._pools.pooled(query, best), *verified):
                for rank in ranks:
                    held = own[rank.row]
                    tokens = holdings.loadable(held, len(query.token_ids) - 1)
                    if tokens > 0 and self._pools.loads_from(rank.target, holdings):
                        source = self._source(rank, holdings.pool, tokens, computed)
                        if rank.row not in found or source.saved > found[rank.row].saved:
                            found[rank.row] = source
        if pulls and self.peers is not None:
            self._add_pulls(found, self.peers, query, ranks, own, computed)
        return found

    def _add_pulls(
        self,
        found: dict[int, Source],
        peers: Peers,
        query: MatchQuery,
        ranks: Sequence[RoutableRank],
        own: array[int],
        computed: float,
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
            if tokens < least or rank.target == peer or not peers.may_pull(rank.target):
                continue
            source, before = self._source(rank, "peers", tokens, computed, peer), found.get(rank.row)
            saves = source.saved > (0.0 if before is None else before.saved)
            if saves and source.load_seconds < self._computing_seconds(rank, own[rank.row], tokens):
                found[rank.row] = source

    def _source(
        self, rank: RoutableRank, name: str, tokens: int, computed: float, peer: Target | None = None
    ) -> Source:
        """Return a source of a target. `computed`: the mean seconds in which workers compute a token."""
        waiting, audit = max(rank.cache.loading, self.loads.of(peer)), rank.cache.audit
        price = self._prices.get(name)
        start, token = self.rates.of(name) if price is None else (0.0, price * computed)
        if audit is not None and audit.not_loading:
            token = max(token, computed)
        return Source(name, tokens, token / computed, waiting, computed, peer, start / computed)

    def _computing_seconds(self, rank: RoutableRank, held: int, tokens: int) -> float:
        """Return the seconds in which a rank would compute `tokens` tokens after those that it holds."""
        target, load = rank.target, rank.load
        return self.computing.prefill_seconds(
            target.worker, target.model, held + tokens, held, load.requests, load.context
        )
