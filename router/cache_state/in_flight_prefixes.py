"""The prefixes of prompts in flight, which count as cached soon.

An engine's events arrive around a request's first byte, or later. Until then, prompts with the same prefix would
scatter over targets. So every routed prompt is held for its target, as hashes of its prefixes. It is released once its
request has ended and its events have had the time to arrive. If events have removed blocks of its target since the end,
it does not count any longer: the events that report the prompt were sent earlier.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from indexer import DEFAULT_TENANT, Target
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.index import TreeRows
from indexer.shared_prefixes import make_shared_prefixes

# The tokens of a chunk: fewer than most engines' blocks have, so that rounding down to blocks loses no tokens.
CHUNK_TOKENS: Final = 16
# The seconds for which ended prompts without events are held, and the most prefixes of ended prompts.
LASTING_SECONDS: Final = 600.0
MAX_ENDED = 1 << 20
# Targets without prompts are dropped once this many are known.
_FEWEST_TARGETS: Final = 1024
# Seconds that the prefix of an ended request counts as cached, until the events of its blocks arrive.
LINGER_SECONDS: Final = 2.0


def prompt_hashes(
    model: str, adapter: str | None, cache_salt: str | None, token_ids: Sequence[int] | PackedPrompt
) -> array[int]:
    """Return a hash for each prefix of whole chunks. Without a secret, these are the index's for equal block sizes."""
    return PackedPrompt.of(token_ids).all_hashes(chunk_root(model, adapter, cache_salt), CHUNK_TOKENS)


def chunk_root(model: str, adapter: str | None, cache_salt: str | None) -> int:
    """Return the hash before a prompt's first chunk."""
    return namespace_hash(Namespace(model, DEFAULT_TENANT, adapter, cache_salt, CHUNK_TOKENS))


def reusable_hashes(hashes: array[int], tokens: int) -> array[int]:
    """Return the chunk hashes of a prompt that end before its last token, because engines always compute that token."""
    return hashes[: max(tokens - 1, 0) // CHUNK_TOKENS]


class ReleaseCallback(Protocol):
    """A callback for the end of a request. `failed`: its worker did not compute the prompt."""

    def __call__(self, failed: bool = False) -> None: ...


class HolderRows:
    """A caller's row of each holder in a tree of prefixes: -1 for holders without a row, -2 for those not known yet."""

    __slots__ = ("removals", "rows")

    def __init__(self) -> None:
        self.rows = array("i")
        self.removals = 0

    def place(self, holder: int, row: int) -> None:
        """Record a holder's row."""
        while len(self.rows) <= holder:
            self.rows.append(-2)
        self.rows[holder] = row

    def follow(self, removals: int) -> array[int]:
        """Return the rows. They are forgotten if the tree has another number of `removals`: holders are reused."""
        if self.removals != removals:
            self.removals, self.rows = removals, array("i")
        return self.rows


class InFlightPrefixes:
    """The prompts in flight by target. Each is released some time after its request ended, or at once if it failed.

    - `prompts`: the number of held prompts.
    - `evictions`: returns how many blocks of a target events have removed so far.
    """

    def __init__(
        self, linger: float = LINGER_SECONDS, clock: Callable[[], float] = time.monotonic, stride: int = 1
    ) -> None:
        """Create the prefixes of no prompts. One in `stride` is held, until `linger` seconds after its request."""
        self._linger = linger
        self._clock = clock
        self._stride = stride
        self._prefixes = make_shared_prefixes()
        self._targets: dict[Target, _Target] = {}
        self._holders: dict[int, _Target] = {}
        self._most_targets = _FEWEST_TARGETS
        self._removals = 0  # counts what invalidates the rows of holders
        self.prompts = 0
        self.evictions: Callable[[Target], int] = _no_evictions
        self._ended: deque[_Ended] = deque()
        self._ended_lasting: deque[_Ended] = deque()
        self._ended_prefixes = 0

    def hold(self, target: Target, hashes: array[int], *, lasting: bool = False) -> ReleaseCallback:
        """Hold a prompt, longer if `lasting`: no event will report it. Return the callback for its request's end."""
        holder = self._targets.get(target)
        if holder is None:
            holder = self._add(target)
        holder.prompts += 1
        self.prompts += 1
        return _Prompt(self, holder, self._prefixes.hold(holder.number, hashes), lasting)

    def overlaps(self, hashes: array[int], now: float | None = None) -> dict[Target, int]:
        """Return the tokens of the longest prefix that a prompt shares with prompts in flight, by target, if any."""
        if not self.prompts:
            return {}
        self._expire(self._clock() if now is None else now)
        if self._stride > 1:
            hashes = hashes[self._stride - 1 :: self._stride]
        tokens = CHUNK_TOKENS * self._stride
        found: dict[Target, int] = {}
        for number, chunks in self._prefixes.longest(hashes).items():
            holder = self._holders[number]
            if not holder.forgotten:
                found[holder.target] = tokens * chunks
        return found

    def tree(self, rows: HolderRows, now: float) -> TreeRows:
        """Return the tree of the held prompts, with a caller's row of each holder."""
        self._expire(now)
        return self._prefixes, rows.follow(self._removals), self._stride

    def target_of(self, holder: int) -> Target | None:
        """Return the target of a holder in the tree; None if the target was forgotten."""
        found = self._holders[holder]
        return None if found.forgotten else found.target

    def resumable(self, target: Target, hashes: array[int], window: int) -> int:
        """Return the tokens of a prompt that a target will reuse, if its groups keep only the last `window` tokens."""
        holder = self._targets.get(target)
        if holder is None or self._stride > 1:
            return 0
        return CHUNK_TOKENS * self._prefixes.resumable(holder.number, hashes, window // CHUNK_TOKENS)

    def forget(self, target: Target) -> None:
        """Forget all prompts of a target, because its cache was reset."""
        holder = self._targets.pop(target, None)
        if holder is not None:
            holder.forgotten = True
            self._removals += 1
            self._remove_unused(holder)

    def forget_ended(self, target: Target) -> None:
        """Release the ended prompts of a target whose cache was cleared, and keep those in flight."""
        holder = self._targets.get(target)
        for ended in (self._ended, self._ended_lasting):
            for each in ended:
                if each.holder is holder:
                    self._release_ended(each)
            kept = [each for each in ended if not each.released]
            ended.clear()
            ended.extend(kept)

    def forget_evicted(self, target: Target) -> bool:
        """Release the prompts of a target that ended before its last evictions. Return whether there were any."""
        holder = self._targets.get(target)
        if holder is None or not holder.ended:
            return False
        evictions, before = self.evictions(target), self.prompts
        while holder.ended and holder.ended[0].evictions != evictions:
            self._release_ended(holder.ended.popleft())
        return self.prompts < before

    def __len__(self) -> int:
        self._expire(self._clock())
        return sum(self._prefixes.chunks(holder.number) for holder in self._targets.values())

    def ended(self, holder: _Target, edge: int, lasting: bool, failed: bool) -> None:
        """Start the time until the release of a prompt whose request ended. A failed prompt is released at once."""
        if failed:
            self._release(holder, edge)
            return
        now = self._clock()
        ended = _Ended(now, holder, edge, 0 if lasting else self.evictions(holder.target))
        if lasting:
            self._ended_lasting.append(ended)
        else:
            self._ended.append(ended)
            holder.ended.append(ended)
        self._ended_prefixes += self._prefixes.end(edge)
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._ended and self._ended[0].at + self._linger <= now:
            self._release_first(self._ended)
        while self._ended_lasting and self._ended_lasting[0].at + max(self._linger, LASTING_SECONDS) <= now:
            self._release_first(self._ended_lasting)
        while self._ended_prefixes > MAX_ENDED:
            self._release_first(min(filter(None, (self._ended, self._ended_lasting)), key=lambda ended: ended[0].at))

    def _release_first(self, ended: deque[_Ended]) -> None:
        first = ended.popleft()
        of_holder = first.holder.ended
        if of_holder and of_holder[0] is first:
            of_holder.popleft()
        self._release_ended(first)

    def _release_ended(self, ended: _Ended) -> None:
        """Release an ended prompt, if it is not released yet."""
        if not ended.released:
            ended.released = True
            self._ended_prefixes -= self._prefixes.end(ended.edge)
            self._release(ended.holder, ended.edge)

    def _release(self, holder: _Target, edge: int) -> None:
        self._prefixes.release(holder.number, edge)
        holder.prompts -= 1
        self.prompts -= 1
        self._remove_unused(holder)

    def _add(self, target: Target) -> _Target:
        if len(self._targets) >= self._most_targets:  # most of them may never receive a prompt again
            for unused in [each for each in self._targets.values() if not each.prompts]:
                self.forget(unused.target)
            self._most_targets = max(2 * len(self._targets), _FEWEST_TARGETS)
        holder = self._targets[target] = _Target(target, self._prefixes.add())
        self._holders[holder.number] = holder
        return holder

    def _remove_unused(self, holder: _Target) -> None:
        """Remove the holder of a forgotten target whose prompts have all ended."""
        if holder.forgotten and not holder.prompts:
            self._prefixes.remove(holder.number)
            del self._holders[holder.number]
            self._removals += 1


class _Target:
    """The holder for a target, by its `number` in the tree, with its number of prompts, and the `ended` ones in order.

    If the target is `forgotten`, some of its prompts may still be in flight.
    """

    __slots__ = ("ended", "forgotten", "number", "prompts", "target")

    def __init__(self, target: Target, number: int) -> None:
        self.target = target
        self.number = number
        self.prompts = 0
        self.ended: deque[_Ended] = deque()
        self.forgotten = False


class _Prompt:
    """A prompt in flight: its edge in the tree and its holder. It is a `ReleaseCallback`."""

    __slots__ = ("_edge", "_holder", "_in_flight", "_lasting")

    def __init__(self, in_flight: InFlightPrefixes, holder: _Target, edge: int, lasting: bool) -> None:
        self._in_flight = in_flight
        self._holder = holder
        self._edge = edge
        self._lasting = lasting

    def __call__(self, failed: bool = False) -> None:
        self._in_flight.ended(self._holder, self._edge, self._lasting, failed)


class _Ended:
    """A prompt that ended: its time, holder and edge in the tree, and the evictions of its target until then."""

    __slots__ = ("at", "edge", "evictions", "holder", "released")

    def __init__(self, at: float, holder: _Target, edge: int, evictions: int) -> None:
        self.at = at
        self.holder = holder
        self.edge = edge
        self.evictions = evictions
        self.released = False


def _no_evictions(_: Target) -> int:
    return 0
