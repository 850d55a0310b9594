"""The choice of a target in one native call: match, prefixes in flight, sent prefixes, costs, and the lowest cost.

`router.routing.overlaps`, `router.routing.candidates` and `router.policies.linear` make the same choice step by step.
They are its specification, and choose where the call does not: for several prompts, for prompts of replaced adapters,
and among targets with wrong events, windows, draft blocks or no prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from indexer import UnknownModelError
from indexer.index import ChoiceQuestion, ChosenRows
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, HolderRows, InFlightPrefixes
from router.cache_state.prefix_demand import HORIZON
from router.cache_state.sent_prefixes import SentPrefixes
from router.policies import LinearPolicy
from router.routing.load_view import LoadView
from router.routing.overlaps import OverlapFinder
from router.routing.ranks import ServedModel
from router.routing.state import RoutingState
from router.routing.target_directory import ModelTargets, ServedRows

# The seconds for which a target counts as one that keeps prompts whole.
_UNITS_SECONDS: Final = 0.25
# The calls for one choice: with unknown holders, with evicted prompts, and without both.
_MOST_CALLS: Final = 3


class NativeChoice:
    """The call, and what it reads."""

    def __init__(self, state: RoutingState, policy: LinearPolicy | None, overlaps: OverlapFinder) -> None:
        """Create the choice by a policy's columns. Without a policy, only the overlaps of its result count."""
        self._indexer = state.indexer
        self._in_flight = state.in_flight_prefixes
        self._peers = state.sharing.peer_load.prompts
        self._sent = state.sent_prefixes
        self._audit = state.audit
        self._pressure = state.learned.pressure
        self._overlaps = overlaps
        self._least = 1 if policy is None else policy.least_uncached
        self._loading = (0.0, 0.0, 0.0) if policy is None else (policy.cpu_token, policy.disk_token, policy.near)

    def find(
        self,
        targets: ModelTargets,
        view: LoadView,
        prompt: RoutedRequest,
        excluded: Collection[int],
        spare: float,
        now: float,
    ) -> ChosenRows | None:
        """Return the choice for a request; None if it has to be made step by step.

        `spare`: the share of its time that the fleet can spare for copies of prefixes, if it is above 0.
        """
        if len(targets.served) != 1 or len(prompt.identities) != 1:
            return None
        served, indexer, audit = targets.served[0], self._indexer, self._audit
        if served.replacement is not None:
            return None
        if audit.distrusted or audit.shortened or indexer.salted or self._overlaps.uncached:
            return None
        index, rows, salt = indexer.index, targets.rows_of[served], prompt.cache_salt
        if index.cleared:
            self._overlaps.forget_cleared()
        changes = indexer.registrations + index.block_size_changes
        if now >= rows.until or changes != rows.changes:
            rows.changes, rows.until = changes, now + _UNITS_SECONDS
            rows.roots, rows.units, rows.windowed = self._roots(served, None), rows.index.nothing[:], False
        if rows.windowed:
            return None
        question = rows.question
        if question is None:
            columns = view.columns
            lines = columns.fixed, columns.per_token, columns.shares
            question = rows.question = ChoiceQuestion(rows.index, lines, (served.root, CHUNK_TOKENS))
        question.roots = rows.roots if salt is None else self._roots(served, salt)
        question.chunking = served.root if salt is None else served.root_of(salt), CHUNK_TOKENS
        cpu, disk, near = self._loading
        question.prices = prompt.tokens, self._least, cpu, disk, near
        forks = self._pressure.demand.forks
        question.demand = (forks, self._pressure.stride, now, HORIZON, spare) if spare > 0 and forks else None
        question.excluded = list(excluded) if excluded else []
        for _ in range(_MOST_CALLS):
            question.units, question.in_flight = rows.units, []
            in_flight = [(self._in_flight, rows.in_flight), (self._peers, rows.peers)]
            in_flight = [(prefixes, holders) for prefixes, holders in in_flight if prefixes.prompts]
            for prefixes, holders in in_flight:
                question.in_flight.append(prefixes.tree(holders, now))  # may release prompts: `prompts` may become 0
            question.sent = self._sent.tree(rows.sent) if self._sent.holders else None
            chosen = index.choose_rows(question, prompt.token_ids[0], prompt.identities[0])
            if chosen is None:
                return None
            _, _, _, _, raised, unknown, _, _, _ = chosen
            if unknown:
                if not self._know(targets, served, rows, [*in_flight, (self._sent, rows.sent)], unknown):
                    return None
            elif not raised or not self._overlaps.forget_evicted([targets.ranks[row] for row in raised]):
                return chosen
        return None

    def _roots(self, served: ServedModel, salt: str | None) -> list[tuple[int, int]]:
        """Return the block sizes of a model, each with the hash that prompts start from; none if it is not known."""
        try:
            return self._indexer.roots(served.model, served.adapter, salt)
        except UnknownModelError:
            return []

    def _know(
        self,
        targets: ModelTargets,
        served: ServedModel,
        rows: ServedRows,
        trees: list[tuple[InFlightPrefixes | SentPrefixes, HolderRows]],
        unknown: list[tuple[int, int]],
    ) -> bool:
        """Find the rows and block sizes of unknown holders. Return False if one keeps only windows of prompts."""
        for tree, holder in unknown:
            prefixes, holders = trees[tree]
            target = prefixes.target_of(holder)
            rank = None if target is None else targets.of_target.get(target)
            if rank is None or rank.served is not served:
                holders.place(holder, -1)
                continue
            if self._indexer.window(rank.target) is not None:
                rows.windowed = True
                return False
            holders.place(holder, rank.row)
            rows.units[rank.row] = self._indexer.block_size(rank.target) or CHUNK_TOKENS
        return True
