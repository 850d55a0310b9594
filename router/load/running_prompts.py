"""The prompts of running requests by target, of which each shared prefix counts once, as it does in an engine's memory.

`InFlightPrefixes` also has prompts whose requests ended, because these count as cached. They need no memory.
"""

from __future__ import annotations

from array import array

from indexer import Target
from indexer.shared_prefixes import make_shared_prefixes
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, ReleaseCallback
from router.load.target_load import ReservedLoad, TargetLoad


class RunningPrompts:
    """The known prompts of running requests. Their tokens are the `shared` tokens of their targets' loads."""

    def __init__(self) -> None:
        self._prefixes = make_shared_prefixes()
        self._holders: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}  # by holder
        self._prompts: dict[int, int] = {}  # by holder

    def hold(self, load: TargetLoad, target: Target, hashes: array[int], reservation: ReservedLoad) -> ReleaseCallback:
        """Count a prompt whose request has this reservation. Return the callback for the end of the request."""
        holder = self._holders.get(target)
        if holder is None:
            holder = self._holders[target] = self._prefixes.add()
            self._targets[holder], self._prompts[holder] = target, 0
        self._prompts[holder] += 1
        before = self._prefixes.chunks(holder)
        edge = self._prefixes.hold(holder, hashes)
        load.shared += CHUNK_TOKENS * (self._prefixes.chunks(holder) - before)
        reservation.counts_elsewhere(CHUNK_TOKENS * len(hashes))
        return _RunningPrompt(self, load, target, holder, edge)

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """Return the leading tokens of a prompt that running requests have in memory, by target, if any."""
        if not self._targets:
            return {}
        found = self._prefixes.longest(hashes)
        return {self._targets[holder]: CHUNK_TOKENS * chunks for holder, chunks in found.items()}

    def release(self, load: TargetLoad, target: Target, holder: int, edge: int) -> None:
        """Stop counting a prompt, because its request ended."""
        before = self._prefixes.chunks(holder)
        self._prefixes.release(holder, edge)
        load.shared -= CHUNK_TOKENS * (before - self._prefixes.chunks(holder))
        self._prompts[holder] -= 1
        if not self._prompts[holder]:
            self._prefixes.remove(holder)
            del self._prompts[holder], self._targets[holder], self._holders[target]


class _RunningPrompt:
    """The end of a running prompt."""

    __slots__ = ("_edge", "_holder", "_load", "_prompts", "_target")

    def __init__(self, prompts: RunningPrompts, load: TargetLoad, target: Target, holder: int, edge: int) -> None:
        self._prompts = prompts
        self._load = load
        self._target = target
        self._holder = holder
        self._edge = edge

    def __call__(self, failed: bool = False) -> None:  # noqa: ARG002
        self._prompts.release(self._load, self._target, self._holder, self._edge)
