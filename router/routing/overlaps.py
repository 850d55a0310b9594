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
from router.routing.routed_prompt import RoutedPrompt
from router.routing.target_directory import ServedModel
from router.sharing import PeerLoad

# Members of an enumeration are looked up in it each time.
_CPU: Final = Tier.CPU
_DISK: Final = Tier.DISK
_UNKNOWN: Final = Tier.UNKNOWN


class Overlap:
    """What a target has of a request's prompts, in tokens.

    `by_events`: by events and prompts in flight, whether or not that is what counts. `cpu`, `disk`: what of `tokens`
    has to be loaded from there.
    """

    __slots__ = ("by_events", "cpu", "disk", "tokens")

    def __init__(self, tokens: int, by_events: int) -> None:
        self.tokens = tokens
        self.by_events = by_events
        self.cpu = 0
        self.disk = 0


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

    def find(
        self, served: ServedModel, prompt: RoutedPrompt, hashes: list[array[int]], now: float
    ) -> dict[Target, Overlap]:
        """The overlap of each target that has any. `hashes`: the chunk hashes of each of the prompts."""
        found: dict[Target, Overlap] = {}
        for number, chunks in enumerate(hashes):
            matches = self._matches(served, prompt.token_ids[number], prompt.cache_salt)
            own, peers = self._speculation.overlaps(chunks, now), self._peer_load.overlaps(chunks)
            history = self._history.overlaps(chunks)
            tokens = len(prompt.identities[number])
            for source in matches, peers, history:
                for target in source:
                    if target not in own:
                        own[target] = 0
            for target, in_flight in own.items():  # there may be thousands here too
                if peers:
                    in_flight = max(in_flight, peers.get(target, 0))
                if in_flight:
                    in_flight = self._full_blocks(target, in_flight, tokens)
                sent = self._full_blocks(target, history[target], tokens) if target in history else 0
                match = matches.get(target)
                held = match.matched_tokens if match is not None else 0
                by_events = held if held > in_flight else in_flight
                overlap = max(sent, in_flight if self._audit.distrusts(target) else by_events)
                total = found.get(target)
                if total is None:
                    total = found[target] = Overlap(overlap, by_events)
                else:
                    total.tokens += overlap
                    total.by_events += by_events
                if match is not None and overlap == held > in_flight:  # else it is being computed there
                    total.cpu += match.tiers[_CPU]
                    total.disk += match.tiers[_DISK] + match.tiers[_UNKNOWN]
        return found

    def _matches(self, served: ServedModel, token_ids: PackedPrompt, cache_salt: str | None) -> dict[Target, Match]:
        """What targets hold of a prompt, by the index."""
        try:
            return self._indexer.held(MatchQuery(served.model, token_ids, served.adapter, cache_salt))
        except UnknownModelError:
            return {}

    def _full_blocks(self, target: Target, shared: int, tokens: int) -> int:
        """What a target reuses of a prompt of `tokens` when it has computed `shared` of them."""
        shared = min(shared, tokens - 1)
        return shared - shared % (self._indexer.block_size(target) or CHUNK_TOKENS)
