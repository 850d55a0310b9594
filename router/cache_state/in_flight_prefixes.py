"""Prompts in flight count as cached soon: an engine's events arrive around a request's first byte, or later.

Until then prompts with the same prefix would scatter. So every routed prompt is held here for its target, as
hashes of its prefixes, until it ended and its events have had the time to arrive.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from indexer import DEFAULT_TENANT, Target
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from router.cache_state.shared_prefixes import Edge, PrefixHolder, SharedPrefixes

# Finer than most engines' blocks, so that rounding down to a block loses nothing.
CHUNK_TOKENS: Final = 16


def prompt_hashes(
    model: str, adapter: str | None, cache_salt: str | None, token_ids: Sequence[int] | PackedPrompt
) -> array[int]:
    """A hash for each prefix of a prompt that is a whole number of chunks.

    Where blocks are as large as chunks these are the index's hashes, unless those depend on a secret.
    """
    return chunk_hashes(chunk_root(model, adapter, cache_salt), PackedPrompt.of(token_ids))


def chunk_root(model: str, adapter: str | None, cache_salt: str | None) -> int:
    """The hash before a prompt's first chunk."""
    return namespace_hash(Namespace(model, DEFAULT_TENANT, adapter, cache_salt, CHUNK_TOKENS))


def reusable_hashes(hashes: array[int], tokens: int) -> array[int]:
    """Those of a prompt's chunk hashes that end before its last token, which is always computed."""
    return hashes[: max(tokens - 1, 0) // CHUNK_TOKENS]


def chunk_hashes(root: int, prompt: PackedPrompt) -> array[int]:
    """The hashes of a prompt's chunks."""
    return prompt.hashes(root, CHUNK_TOKENS, len(prompt) // CHUNK_TOKENS)


# How long prompts are held that no event reports, and the most prefixes of prompts that ended.
LASTING_SECONDS: Final = 600.0
MAX_ENDED = 1 << 20


class ReleaseCallback(Protocol):
    """To be called when a request ended. `failed`: its worker did not compute the prompt."""

    def __call__(self, failed: bool = False) -> None: ...


class InFlightPrefixes:
    """The prompts in flight, by target. A prompt is let go `linger` seconds after it ended, a lasting one later, and
    at once where it failed.

    `stride`: one of this many prefixes of a prompt is held.
    """

    def __init__(self, linger: float, clock: Callable[[], float] = time.monotonic, stride: int = 1) -> None:
        self._linger = linger
        self._clock = clock
        self._stride = stride
        self._prefixes: SharedPrefixes[_Target] = SharedPrefixes()
        self._targets: dict[Target, _Target] = {}
        self._ended: deque[_Ended] = deque()
        self._ended_lasting: deque[_Ended] = deque()
        self._ended_prefixes = 0

    def hold(self, target: Target, hashes: array[int], *, lasting: bool = False) -> ReleaseCallback:
        """Hold a prompt for a target. Returns what to call when the request ended."""
        holder = self._targets.get(target)
        if holder is None:
            holder = self._targets[target] = _Target(target)
        return _Prompt(self, holder, self._prefixes.hold(holder, hashes), lasting)

    def overlaps(self, hashes: array[int], now: float | None = None) -> dict[Target, int]:
        """How many tokens of a prompt, from its start on, other prompts in flight share, by target: those with any.

        `now`: the time by the clock, where it was just read. The dictionary is the caller's.
        """
        if not self._targets:
            return {}
        self._expire(self._clock() if now is None else now)
        if self._stride > 1:
            hashes = hashes[self._stride - 1 :: self._stride]
        tokens = CHUNK_TOKENS * self._stride
        found = self._prefixes.longest(hashes).items()
        return {holder.target: tokens * chunks for holder, chunks in found if not holder.forgotten}

    def resumable(self, target: Target, hashes: array[int], window: int) -> int:
        """How much of a prompt a target will reuse of those in flight, where groups keep but a `window` of each."""
        holder = self._targets.get(target)
        if holder is None or self._stride > 1:
            return 0
        return CHUNK_TOKENS * self._prefixes.resumable(holder, hashes, window // CHUNK_TOKENS)

    def forget(self, target: Target) -> None:
        """Nothing is expected of a target any more, because its cache was reset."""
        holder = self._targets.pop(target, None)
        if holder is not None:
            holder.forgotten = True

    def forget_ended(self, target: Target) -> None:
        """A target holds nothing any more; what is in flight to it now it will."""
        holder = self._targets.get(target)
        for ended in (self._ended, self._ended_lasting):
            kept = [each for each in ended if each[1] is not holder]
            for _, gone, edge in [each for each in ended if each[1] is holder]:
                self._ended_prefixes -= edge.end
                self._let_go(gone, edge)
            ended.clear()
            ended.extend(kept)

    def __len__(self) -> int:
        """The number of held prefixes."""
        self._expire(self._clock())
        return sum(holder.chunks for holder in self._targets.values())

    def ended(self, holder: _Target, edge: Edge[_Target], lasting: bool, failed: bool) -> None:
        """A prompt's request ended."""
        if failed:
            self._let_go(holder, edge)
            return
        now = self._clock()
        (self._ended_lasting if lasting else self._ended).append((now, holder, edge))
        self._ended_prefixes += edge.end
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._ended and self._ended[0][0] + self._linger <= now:
            self._let_go_first(self._ended)
        while self._ended_lasting and self._ended_lasting[0][0] + max(self._linger, LASTING_SECONDS) <= now:
            self._let_go_first(self._ended_lasting)
        while self._ended_prefixes > MAX_ENDED:
            self._let_go_first(min(filter(None, (self._ended, self._ended_lasting)), key=lambda ended: ended[0][0]))

    def _let_go_first(self, ended: deque[_Ended]) -> None:
        _, holder, edge = ended.popleft()
        self._ended_prefixes -= edge.end
        self._let_go(holder, edge)

    def _let_go(self, holder: _Target, edge: Edge[_Target]) -> None:
        self._prefixes.let_go(holder, edge)
        if not holder.chunks and not holder.forgotten:
            self.forget(holder.target)  # it may never come back


class _Target(PrefixHolder):
    """What a target holds until it is forgotten. What it held before may still be in flight then."""

    __slots__ = ("forgotten", "target")

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.forgotten = False


class _Prompt:
    """A prompt in flight: where in the tree it ends, and who holds it. To be called as an `ReleaseCallback`."""

    __slots__ = ("_edge", "_holder", "_holdings", "_lasting")

    def __init__(self, holdings: InFlightPrefixes, holder: _Target, edge: Edge[_Target], lasting: bool) -> None:
        self._holdings = holdings
        self._holder = holder
        self._edge = edge
        self._lasting = lasting

    def __call__(self, failed: bool = False) -> None:
        self._holdings.ended(self._holder, self._edge, self._lasting, failed)


# When a prompt ended, who holds it, and where in the tree it ends.
_Ended: TypeAlias = tuple[float, _Target, Edge[_Target]]
