"""How many turns sessions have, by how much of the prompts is known.

A turn's prompt is what was said before and something new. So where a share h of what is asked is cached already, about
1 / (1 - h) requests come for each one that begins anew.
"""

from __future__ import annotations

from typing import Final

# A prompt's weight in the mean, once there are many.
_WEIGHT: Final = 0.002
_MOST: Final = 8.0


class SessionTurns:
    """The mean turns of a session, by model: at least 1, and 8 at most."""

    def __init__(self) -> None:
        self._shares: dict[str, tuple[float, int]] = {}

    def seen(self, model: str, cached: int, tokens: int) -> None:
        """A prompt of `tokens` was sent, of which some worker had `cached`."""
        mean, count = self._shares.get(model, (0.0, 0))
        count += 1
        share = cached / max(tokens, 1)
        self._shares[model] = (mean + max(1 / count, _WEIGHT) * (share - mean), count)

    def expected(self, model: str) -> float:
        """Turns to expect of a session that begins."""
        share, _ = self._shares.get(model, (0.0, 0))
        return 1 / max(1 - share, 1 / _MOST)
