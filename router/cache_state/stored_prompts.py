"""The check that workers store what they are sent: the first cause to rule out where hits are low.

The beginning of some routed prompts is looked up in the index after their answers. If none of a worker's prompts is
found, its prefix cache is off, or its events have other tokens than the router sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from indexer import Indexer, MatchQuery, Target, UnknownModelError
from indexer.hashing import TOKEN_BYTES, PackedPrompt
from indexer.streams.sequence import StreamState
from router.cache_state.target_cache import TargetCache, TargetCaches

# Prompts in a row that were not found, until they are a finding.
MISSES: Final = 8
# Seconds from the end of an answer to the look-up: events of its blocks have arrived by then.
DELAY: Final = 3.0
# Blocks of a prompt that are looked up, and the fewest of them.
_MOST_BLOCKS: Final = 4
_FEWEST_BLOCKS: Final = 2
_MOST_WAITING: Final = 256
_UNKNOWN_BLOCK_SIZE: Final = 64


@dataclass(slots=True)
class SentPrompt:
    """The beginning of a prompt that a target was sent. Call it when the request ends."""

    cache: TargetCache
    query: MatchQuery
    stored_before: int
    clock: Callable[[], float]
    ended: float | None = None
    failed: bool = False

    def __call__(self, failed: bool = False) -> None:
        """Record the end of the request. `failed`: the target did not compute it."""
        self.ended, self.failed = self.clock(), failed


class StoredPrompts:
    """The look-ups of sent prompts, by target."""

    def __init__(self, indexer: Indexer, caches: TargetCaches, clock: Callable[[], float] = time.monotonic) -> None:
        self._indexer = indexer
        self._caches = caches
        self._clock = clock
        self._waiting: deque[SentPrompt] = deque(maxlen=_MOST_WAITING)

    def sent(
        self, cache: TargetCache, model: str, token_ids: PackedPrompt, adapter: str | None, salt: str | None
    ) -> SentPrompt | None:
        """Return the record of a prompt that is sent to a target; `None` if it is too short or cannot be looked up."""
        target = cache.target
        size = self._indexer.block_size(target) or _UNKNOWN_BLOCK_SIZE
        stored = self._stored(target)
        if stored is None or token_ids.media or self._indexer.window(target) is not None:
            return None
        if len(token_ids) <= _FEWEST_BLOCKS * size:
            return None
        beginning = PackedPrompt(token_ids.tokens[: (_MOST_BLOCKS * size + 1) * TOKEN_BYTES])
        sent = SentPrompt(cache, MatchQuery(model, beginning, adapter, salt), stored, self._clock)
        self._waiting.append(sent)
        return sent

    def check(self) -> None:
        """Look up the prompts whose answers ended a while ago."""
        due = self._clock() - DELAY
        for sent in [each for each in self._waiting if each.ended is not None and each.ended <= due]:
            self._waiting.remove(sent)
            if not sent.failed:
                self._look_up(sent)

    def findings(self) -> list[tuple[str, Target, str]]:
        """Return the findings: name, target and detail."""
        found = []
        for cache in self._caches:
            target, unstored = cache.target, cache.unstored
            if not unstored:
                continue
            stored = self._stored(target)
            if stored is None:
                cache.unstored = 0  # its events are missing now
            elif unstored >= MISSES and stored == cache.stored_before:
                found.append(("prefix_caching_off", target, f"none of the last {unstored} prompts was stored"))
            elif unstored >= MISSES:
                detail = f"none of the last {unstored} prompts is found in the events that it sends"
                found.append(("tokens_differ", target, detail))
        return found

    def _look_up(self, sent: SentPrompt) -> None:
        try:
            matches = self._indexer.match(sent.query)
        except (UnknownModelError, OverflowError, TypeError):
            return
        # Engines that ignore the rank of a request choose one themselves.
        cache, target = sent.cache, sent.cache.target
        if any(match.target.worker == target.worker for match in matches):
            cache.unstored = 0
        elif self._stored(target) is not None:
            if not cache.unstored:
                cache.stored_before = sent.stored_before
            cache.unstored += 1

    def _stored(self, target: Target) -> int | None:
        """Return the events that a target sent about stored blocks; `None` without a live stream."""
        report = self._indexer.report(target)
        if report is None or report.stream is None or report.stream.state is not StreamState.LIVE:
            return None
        return report.holdings.counters.stored
