"""What each target holds of a prompt, or will hold once it has computed what is in flight to it.

Four sources say so: the index, by the engines' events; prompts in flight from this router, and from others; and the
history of answers, where events are missing.
"""

from __future__ import annotations

from array import array
from typing import Final

from indexer import Indexer, Match, MatchQuery, Target, UnknownModelError
from indexer.hashing import PackedPrompt
from kvevents import Tier
from router.holdings.audit import HitAudit
from router.holdings.history import RoutingHistory
from router.holdings.speculation import CHUNK_TOKENS, SpeculativeHoldings
from router.routing.routable_rank import RoutableRank, ServedModel
from router.routing.routed_prompt import RoutedPrompt
from router.routing.target_directory import ModelTargets
from router.sharing import PeerLoad

# Members of an enumeration are looked up in it each time.
_GPU: Final = Tier.GPU
_CPU: Final = Tier.CPU
_DISK: Final = Tier.DISK
_UNKNOWN: Final = Tier.UNKNOWN


class Overlaps:
    """What targets have of a request's prompts, by row of those that have any. Amounts are in tokens.

    `tokens`: what counts. `by_events`: by events and prompts in flight, of rows where that is another number.
    `transfers`: how many of them are in CPU memory and on disk, of rows that have any there.
    """

    __slots__ = ("by_events", "tokens", "transfers")

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.by_events: dict[int, int] = {}
        self.transfers: dict[int, tuple[int, int]] = {}

    def add(self, row: int, tokens: int, by_events: int) -> None:
        """Count what a target has of one more prompt."""
        before = self.tokens.get(row, 0)
        if tokens != by_events or row in self.by_events:
            self.by_events[row] = self.by_events.get(row, before) + by_events
        self.tokens[row] = before + tokens

    def add_transfer(self, row: int, tiers: dict[Tier, int]) -> None:
        """Count what of it has to be loaded."""
        cpu, disk = tiers[_CPU], tiers[_DISK] + tiers[_UNKNOWN]
        if cpu or disk:
            before = self.transfers.get(row, (0, 0))
            self.transfers[row] = before[0] + cpu, before[1] + disk

    def events_of(self, row: int) -> int:
        """What a target has by events and prompts in flight."""
        known = self.by_events.get(row)
        return self.tokens.get(row, 0) if known is None else known


class OverlapFinder:
    """Asks all four sources."""

    def __init__(
        self,
        indexer: Indexer,
        speculation: SpeculativeHoldings,
        peer_load: PeerLoad,
        history: RoutingHistory,
        audit: HitAudit,
    ) -> None:
        self._indexer = indexer
        self._speculation = speculation
        self._peer_load = peer_load
        self._history = history
        self._audit = audit
        self._clears = 0
        self._times_cleared: dict[Target, int] = {}

    def find(
        self,
        targets: ModelTargets,
        served: ServedModel,
        prompt: RoutedPrompt,
        hashes: list[array[int]],
        now: float,
        overlaps: Overlaps,
    ) -> None:
        """Add the overlaps of the targets that serve a model. `hashes`: the chunk hashes of each of the prompts."""
        if self._clears != self._indexer.index.clears:
            self._forget_cleared()
        of_target = targets.of_target
        for number, chunks in enumerate(hashes):
            matches = self._matches(served, prompt.token_ids[number], prompt.cache_salt)
            own, peers = self._speculation.overlaps(chunks, now), self._peer_load.overlaps(chunks)
            history = self._history.overlaps(chunks)
            tokens = len(prompt.identities[number])
            for target, shared in peers.items():
                own[target] = max(own.get(target, 0), shared)
            for target in history:
                if target not in own:
                    own[target] = 0
            simple = not number and not self._audit.distrusts_any
            for target, match in matches.items():  # there may be thousands
                rank = of_target.get(target)
                if rank is None or rank.served is not served:
                    continue
                in_flight = own.pop(target, -1) if own else -1
                if in_flight >= 0 or not simple:
                    self._add(overlaps, rank, match, max(in_flight, 0), history.get(target, 0), chunks, tokens)
                    continue
                overlaps.tokens[rank.row] = match.matched_tokens
                if match.tiers[_GPU] != match.matched_tokens:
                    overlaps.add_transfer(rank.row, match.tiers)
            for target, in_flight in own.items():
                rank = of_target.get(target)
                if rank is not None and rank.served is served:
                    self._add(overlaps, rank, None, in_flight, history.get(target, 0), chunks, tokens)

    def _add(
        self,
        overlaps: Overlaps,
        rank: RoutableRank,
        match: Match | None,
        in_flight: int,
        sent: int,
        chunks: array[int],
        tokens: int,
    ) -> None:
        """Add what a target has of a prompt of `tokens`: by the index, in flight and by what was `sent` there."""
        target = rank.target
        if in_flight or sent:
            window = self._indexer.window(target)
            if window is not None:
                # Groups of layers that keep but the last tokens of a prompt: not everything in common can be reused.
                in_flight = self._speculation.resumable(target, chunks, window)
                sent = self._history.resumable(target, chunks, window)
        if in_flight:
            in_flight = self._full_blocks(target, in_flight, tokens)
        if sent:
            sent = self._full_blocks(target, sent, tokens)
        held = match.matched_tokens if match is not None else 0
        by_events = held if held > in_flight else in_flight
        overlap = in_flight if self._audit.distrusts(target) else by_events
        if sent > overlap:
            overlap = sent
        overlaps.add(rank.row, overlap, by_events)
        if match is not None and overlap == held > in_flight:  # else it is being computed there
            overlaps.add_transfer(rank.row, match.tiers)

    def _forget_cleared(self) -> None:
        """Expect nothing more of targets whose events said that they hold nothing any more."""
        self._clears = self._indexer.index.clears
        before, self._times_cleared = self._times_cleared, {}
        for registration in self._indexer.registered():
            target = registration.target
            times = self._times_cleared[target] = self._indexer.times_cleared(target)
            if times > before.get(target, 0):
                self._speculation.forget_ended(target)
                self._history.forget(target)

    def _matches(self, served: ServedModel, token_ids: PackedPrompt, cache_salt: str | None) -> dict[Target, Match]:
        """What targets hold of a prompt, by the index."""
        if served.replacement is not None:
            return {}
        try:
            return self._indexer.held(MatchQuery(served.model, token_ids, served.adapter, cache_salt))
        except UnknownModelError:
            return {}

    def _full_blocks(self, target: Target, shared: int, tokens: int) -> int:
        """What a target reuses of a prompt of `tokens` when it has computed `shared` of them."""
        shared = min(shared, tokens - 1)
        return shared - shared % (self._indexer.block_size(target) or CHUNK_TOKENS)
