"""The demand for prefixes: how many sessions asked for each prefix within the last minutes.

A prompt that extends the last prompt of a session is the session's next turn. Any other prompt with a known prefix is
a new session, which forks from earlier ones where its known prefix ends. A token was asked for by its first session,
and by the sessions that forked after it.
"""

from __future__ import annotations

from array import array
from math import exp
from typing import Final

# A session counts 1/e after this many seconds.
HORIZON: Final = 300.0


class PrefixDemand:
    """The sessions that asked for each prefix. Of a prompt, some hashes are read, `tokens` tokens apart."""

    def __init__(self, tokens: int, remembered: int) -> None:
        """Create an empty demand. `remembered`: the maximum number of sessions, of which the latest are kept."""
        self._tokens = tokens
        self._remembered = remembered
        # By the last hash that was read of a session's prompt: the number of all its hashes, and the last of all.
        self._ends: dict[int, tuple[int, int]] = {}
        # By the last hash that sessions share: where it ends, the number of sessions, and when the last was counted.
        self._forks: dict[int, tuple[int, float, float]] = {}

    def routed(self, hashes: array[int], read: array[int], known: int, now: float) -> None:
        """Record a routed prompt by its hashes. `known`: how many of those that are `read` were routed before."""
        if known and not self._next_turn(hashes, read[known - 1]):
            end, sessions, at = self._forks.pop(read[known - 1], (known * self._tokens, 0.0, now))
            self._forks[read[known - 1]] = end, sessions * exp((at - now) / HORIZON) + 1, now
            if len(self._forks) > self._remembered:
                del self._forks[next(iter(self._forks))]
        self._ends.pop(read[-1], None)
        self._ends[read[-1]] = len(hashes), hashes[-1]
        if len(self._ends) > self._remembered:
            del self._ends[next(iter(self._ends))]

    def _next_turn(self, hashes: array[int], known: int) -> bool:
        """Return whether a prompt extends the last one of a session, which ended near the hash `known`."""
        end = self._ends.get(known)
        if end is None or end[0] >= len(hashes) or hashes[end[0] - 1] != end[1]:
            return False
        del self._ends[known]
        return True

    def asked(self, read: array[int], held: int, now: float) -> list[tuple[int, float]]:
        """Return the parts of a prompt that several sessions asked for: where each ends in tokens, and how many did.

        `held`: the most tokens of the prompt that a target holds. The last part ends there if no read hash is between.
        """
        asked: list[tuple[int, float]] = []
        forks, sessions = self._forks, 1.0
        for each in reversed([*filter(forks.__contains__, read)]):
            end, counted, at = forks[each]
            sessions += counted * exp((at - now) / HORIZON)
            if not asked and end < held < end + self._tokens:
                end = held
            asked.append((end, sessions))
        asked.reverse()
        return asked
