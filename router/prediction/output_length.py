"""How long answers are expected to be: a running mean for each model, bounded by what the request allows."""

from __future__ import annotations

_FIRST_GUESS = 256.0
# An answer's weight in the mean, once there are many.
_WEIGHT = 0.01


class OutputLengths:
    """The mean tokens of an answer, by model."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}

    def seen(self, model: str, tokens: int) -> None:
        """An answer had `tokens`."""
        mean, count = self._means.get(model, (_FIRST_GUESS, 0))
        count += 1
        self._means[model] = (mean + max(1 / (count + 1), _WEIGHT) * (tokens - mean), count)

    def expected(self, model: str, max_tokens: int | None, told: int | None = None) -> float:
        """Tokens to expect of an answer that may have `max_tokens`. `told`: what its agent expects."""
        mean = self._means.get(model, (_FIRST_GUESS, 0))[0] if told is None else told
        return mean if max_tokens is None else min(mean, max_tokens)
