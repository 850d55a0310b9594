"""The state of each target's cache that the index does not have. One object for each target is removed with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from indexer import Target
from router.cache_state.recent_prefixes import RecentPrefixes, Retention
from router.cache_state.target_audit import Basis, DraftBlock, TargetAudit


class TargetCache:
    """The cache of one target.

    - `audit`: its answers beside their predictions; None before the first comparable answer.
    - `draft_block`: the part of each hit that its engine computes again.
    - `sent`: the prompts that it answered; None if its events show what it holds.
    - `retention`: how much it keeps, and for how long; None if its answers have not shown it.
    - `unstored`, `stored_before`: the prompts in a row that were not found in its events, and the events before them.
    - `failed_pulls`, `pull_failed_at`: the failed pulls in a row at either end, and the time of the last one.
    - `loading`, `pulled`: the tokens that loads in flight move to and from it, and the pulls in flight from it.
    - `removed`: whether the target was removed. Its last answers teach nothing.
    """

    __slots__ = (
        "audit",
        "draft_block",
        "failed_pulls",
        "loading",
        "pull_failed_at",
        "pulled",
        "removed",
        "retention",
        "sent",
        "stored_before",
        "target",
        "unstored",
    )

    def __init__(self, target: Target) -> None:
        self.target = target
        self.audit: TargetAudit | None = None
        self.draft_block = DraftBlock()
        self.sent: RecentPrefixes | None = None
        self.retention: Retention | None = None
        self.unstored = 0
        self.stored_before = 0
        self.failed_pulls = 0
        self.pull_failed_at = 0.0
        self.loading = 0
        self.pulled = 0
        self.removed = False

    @property
    def distrusted(self) -> bool:
        """True if the target's events are known to be wrong."""
        return self.audit is not None and self.audit.basis is Basis.SENT_PREFIXES


class TargetCaches:
    """The caches of all targets, each made when the target is first named."""

    def __init__(self) -> None:
        self._caches: dict[Target, TargetCache] = {}

    def of(self, target: Target) -> TargetCache:
        """Return the cache of a target, which is added if it is new."""
        cache = self._caches.get(target)
        if cache is None:
            cache = self._caches[target] = TargetCache(target)
        return cache

    def find(self, target: Target) -> TargetCache | None:
        """Return the cache of a target; None if it is not known."""
        return self._caches.get(target)

    def __iter__(self) -> Iterator[TargetCache]:
        return iter(list(self._caches.values()))

    def remove(self, worker: str, kept: Collection[Target] = ()) -> list[TargetCache]:
        """Remove the targets of the worker at a URL but those that are `kept`. Return their caches."""
        removed = [cache for cache in self if cache.target.worker == worker and cache.target not in kept]
        for cache in removed:
            cache.removed = True
            del self._caches[cache.target]
        return removed
