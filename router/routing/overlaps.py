"""The overlap of a prompt with each target: what the target has cached, or will have after the prompts in flight.

Four sources have a part: the index, by the engines' events; this router's prompts in flight; those of other routers;
and sent prefixes, if a target's events are missing.
"""

from __future__ import annotations

from array import array
from itertools import chain, takewhile

from indexer import MatchQuery, RowMatches, Target, TargetRows, UnknownModelError
from indexer.hashing import PackedPrompt
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.routing.ranks import RoutableRank, ServedModel
from router.routing.state import RoutingState
from router.routing.target_directory import ModelTargets


class OverlapFinder:
    """Finds overlaps in all four sources.

    - `uncached`: the URLs of workers whose engines have no prefix cache.
    """

    def __init__(self, state: RoutingState) -> None:
        self._indexer = state.indexer
        self._in_flight_prefixes = state.in_flight_prefixes
        self._peer_load = state.sharing.peer_load
        self._sent_prefixes = state.sent_prefixes
        self._audit = state.audit
        self.uncached: set[str] = set()

    def find(
        self,
        targets: ModelTargets,
        served: ServedModel,
        prompt: RoutedRequest,
        hashes: list[array[int]],
        now: float,
    ) -> list[tuple[RowMatches, dict[int, int]]]:
        """Return the overlaps of the targets that serve a model with each prompt.

        They are the overlap that counts, and the overlap by events and prompts in flight for rows in which it differs.
        `hashes`: the chunk hashes of each prompt.
        """
        if self._indexer.index.cleared:
            self.forget_cleared()
        rows = targets.rows_of[served].index
        earlier: set[int] = set()
        overlaps: list[tuple[RowMatches, dict[int, int]]] = []
        for number, chunks in enumerate(hashes):
            found = self._matches(rows, served, prompt.token_ids[number], prompt.cache_salt)
            by_events: dict[int, int] = {}
            tokens = prompt.identities[number].length
            if number:
                self._add_earlier(targets, served, found, chunks, earlier, tokens)
            if len(hashes) > 1:
                earlier.update(chunks)
            self._correct_all(targets, served, found, by_events, chunks, tokens, now)
            for cache in self._audit.shortened:
                rank = targets.of_target.get(cache.target)
                if rank is not None and rank.served is served:
                    _subtract_draft_block(found, by_events, rank.row, cache.draft_block.tokens)
            if self.uncached:
                self._clear_uncached(targets, found, by_events)
            overlaps.append((found, by_events))
        return overlaps

    def _correct_all(
        self,
        targets: ModelTargets,
        served: ServedModel,
        found: RowMatches,
        by_events: dict[int, int],
        chunks: array[int],
        tokens: int,
        now: float,
    ) -> None:
        """Correct the index's overlaps by prompts in flight, here and of other routers, and by sent prefixes."""
        distrusted = [cache.target for cache in self._audit.distrusted]
        in_flight = self._prompts_in_flight(chunks, now)
        beyond = [
            rank
            for target, shared in in_flight.items()
            if (rank := targets.of_target.get(target)) is not None
            and rank.served is served
            and not rank.cache.distrusted
            and shared > found.tokens[rank.row]
        ]
        if self.forget_evicted(beyond):
            in_flight = self._prompts_in_flight(chunks, now)
        sent_prefixes = self._sent_prefixes.overlaps(chunks)
        for target in chain(sent_prefixes, distrusted):
            if target not in in_flight:
                in_flight[target] = 0
        for target, shared in in_flight.items():
            rank = targets.of_target.get(target)
            if rank is not None and rank.served is served:
                self._correct(found, by_events, rank, chunks, shared, sent_prefixes.get(target, 0), tokens)

    def _add_earlier(
        self,
        targets: ModelTargets,
        served: ServedModel,
        found: RowMatches,
        chunks: array[int],
        earlier: set[int],
        tokens: int,
    ) -> None:
        """Add what a prompt shares with earlier prompts of its request, which its target computes before.

        - `chunks`: the chunk hashes of the prompt, which has `tokens` tokens.
        - `earlier`: the chunk hashes of the earlier prompts.
        """
        shared = CHUNK_TOKENS * sum(1 for _ in takewhile(earlier.__contains__, chunks))
        if not shared:
            return
        for rank in targets.ranks:
            if rank.served is served and self._indexer.window(rank.target) is None:
                found.add(rank.row, self._full_blocks(rank.target, shared, tokens), 0, 0)

    def _correct(
        self,
        found: RowMatches,
        by_events: dict[int, int],
        rank: RoutableRank,
        chunks: array[int],
        in_flight: int,
        sent: int,
        tokens: int,
    ) -> None:
        """Correct the index's overlap of a target with a prompt of `tokens` tokens.

        - `in_flight`, `sent`: the tokens that the prompt shares with prompts in flight, and with sent prefixes.

        If the target's events are wrong, the index does not count.
        """
        row, target, trusted = rank.row, rank.target, not rank.cache.distrusted
        if in_flight or sent:
            window = self._indexer.window(target)
            if window is not None:
                # Some groups of layers keep only the end of a prompt, so not all common tokens can be reused.
                in_flight = self._in_flight_prefixes.resumable(target, chunks, window)
                sent = self._sent_prefixes.resumable(rank.cache, chunks, window)
        if in_flight < found.tokens[row] and not sent and trusted:
            return
        if in_flight:
            in_flight = self._full_blocks(target, in_flight, tokens)
        if sent:
            sent = self._full_blocks(target, sent, tokens)
        held = found.tokens[row]
        expected = held if held > in_flight else in_flight
        overlap = expected if trusted else in_flight
        if sent > overlap:
            overlap = sent
        if not overlap == held > in_flight:  # the blocks are computed there, or do not count
            found.transfers.pop(row, None)
        found.tokens[row] = overlap
        if overlap != expected:
            by_events[row] = expected

    def _clear_uncached(self, targets: ModelTargets, found: RowMatches, by_events: dict[int, int]) -> None:
        for rank in targets.ranks:
            if rank.worker.url in self.uncached:
                found.tokens[rank.row] = 0
                found.transfers.pop(rank.row, None)
                by_events.pop(rank.row, None)

    def _prompts_in_flight(self, chunks: array[int], now: float) -> dict[Target, int]:
        """Return the tokens that a prompt shares with prompts in flight, here and of other routers, by target."""
        found = self._in_flight_prefixes.overlaps(chunks, now)
        for target, shared in self._peer_load.overlaps(chunks).items():
            found[target] = max(found.get(target, 0), shared)
        return found

    def forget_evicted(self, ranks: list[RoutableRank]) -> bool:
        """Forget prompts that ended before the last evictions of these ranks. Return whether there were any."""
        held = (self._in_flight_prefixes, self._peer_load.prompts)
        return True in [prompts.forget_evicted(rank.target) for rank in ranks for prompts in held]

    def forget_cleared(self) -> None:
        """Forget ended prompts of targets whose events reported a cleared cache."""
        cleared = self._indexer.index.cleared
        while cleared:
            target = cleared.pop()  # one by one, because a thread adds to the set meanwhile
            self._in_flight_prefixes.forget_ended(target)
            self._audit.forget_sent(target)

    def _matches(
        self, rows: TargetRows, served: ServedModel, token_ids: PackedPrompt, cache_salt: str | None
    ) -> RowMatches:
        found = RowMatches(rows)
        if served.replacement is not None:
            return found
        try:
            self._indexer.match_rows(MatchQuery(served.model, token_ids, served.adapter, cache_salt), rows, found)
        except UnknownModelError:
            return found
        return found

    def _full_blocks(self, target: Target, shared: int, tokens: int) -> int:
        """Return the tokens that a target reuses of a prompt whose first `shared` tokens it has computed."""
        shared = min(shared, tokens - 1)
        return shared - shared % (self._indexer.block_size(target) or CHUNK_TOKENS)


def _subtract_draft_block(found: RowMatches, by_events: dict[int, int], row: int, tokens: int) -> None:
    """Subtract the last `tokens` tokens of a row's overlap, because the engine computes them again."""
    found.tokens[row] = max(found.tokens[row] - tokens, 0)
    if row in by_events:
        by_events[row] = max(by_events[row] - tokens, 0)
    cpu, disk = found.transfers.pop(row, (0, 0))
    disk = min(disk, found.tokens[row])
    cpu = min(cpu, found.tokens[row] - disk)
    if cpu or disk:
        found.transfers[row] = cpu, disk
