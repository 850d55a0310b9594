"""The demand for prefixes: how many sessions asked for each prefix within the last minutes.

A prompt that extends the last prompt of a session is the session's next turn. Any other prompt with a known prefix is
a new session, which forks from earlier ones where its known prefix ends. A token was asked for by its first session,
and by the sessions that forked after it.
"""

from __future__ import annotations

from array import array
from math import exp
from typing import Final, NamedTuple

from indexer import Target

# A session counts 1/e after this many seconds.
HORIZON: Final = 300.0


class _End(NamedTuple):
    """The end of a session's latest prompt: the number of its hashes, the last of them, and the computing target."""

    hashes: int
    last: int
    target: Target | None


class PrefixDemand:
    """The sessions that asked for each prefix. It reads one hash of a prompt for every `tokens` tokens.

    - `forks`: by the last hash that sessions share: its end, the number of sessions, and the time of the last.
    """

    def __init__(self, tokens: int, remembered: int) -> None:
        """Create an empty demand. `remembered`: the maximum number of sessions, of which the latest are kept."""
        self._tokens = tokens
        self._remembered = remembered
        self._ends: dict[int, _End] = {}  # by the last hash that was read of a session's prompt
        self._turns = self._moved = 0.0
        self._counted_at = 0.0
        self.forks: dict[int, tuple[int, float, float]] = {}

    def routed(
        self,
        hashes: array[int],
        read: array[int],
        known: int,
        now: float,
        target: Target | None = None,
        overlap: int = 0,
    ) -> None:
        """Record a routed prompt by its hashes.

        - `known`: how many of those that are `read` were routed before.
        - `target`: the one that computes it, which holds `overlap` tokens of it; `None` if there is no single one.
        """
        before = self._last_turn(hashes, read[known - 1]) if known else None
        if before is not None:
            self._count_turn(before.target, target, known * self._tokens - overlap, now)
        elif known:
            end, sessions, at = self.forks.pop(read[known - 1], (known * self._tokens, 0.0, now))
            self.forks[read[known - 1]] = end, sessions * exp((at - now) / HORIZON) + 1, now
            if len(self.forks) > self._remembered:
                del self.forks[next(iter(self.forks))]
        self._ends.pop(read[-1], None)
        self._ends[read[-1]] = _End(len(hashes), hashes[-1], target)
        if len(self._ends) > self._remembered:
            del self._ends[next(iter(self._ends))]

    def _last_turn(self, hashes: array[int], known: int) -> _End | None:
        """Return the last prompt of the session that a prompt extends, which ended near the hash `known`, if any."""
        end = self._ends.get(known)
        if end is None or end.hashes >= len(hashes) or hashes[end.hashes - 1] != end.last:
            return None
        del self._ends[known]
        return end

    def _count_turn(self, before: Target | None, target: Target | None, computed: int, now: float) -> None:
        """Count a session's next turn, of whose former prompt its target computes `computed` tokens again."""
        if before is None or target is None:
            return
        factor = exp((self._counted_at - now) / HORIZON)
        self._turns = self._turns * factor + 1
        self._moved = self._moved * factor + (before != target and computed >= self._tokens)
        self._counted_at = now

    def moved(self, now: float) -> tuple[float, float]:
        """Return the turns of the last minutes that followed others, and how many of them were computed elsewhere."""
        factor = exp((self._counted_at - now) / HORIZON)
        return self._turns * factor, self._moved * factor

    def asked(self, read: array[int], held: int, now: float) -> list[tuple[int, float]]:
        """Return the parts of a prompt that several sessions asked for: where each ends in tokens, and how many did.

        `held`: the most tokens of the prompt that a target holds. The last part ends there if no read hash is between.
        """
        asked: list[tuple[int, float]] = []
        forks, sessions = self.forks, 1.0
        for each in reversed([*filter(forks.__contains__, read)]):
            end, counted, at = forks[each]
            sessions += counted * exp((at - now) / HORIZON)
            if not asked and end < held < end + self._tokens:
                end = held
            asked.append((end, sessions))
        asked.reverse()
        return asked
