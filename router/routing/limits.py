"""What a target may have in flight at most. A target at its limits gets nothing more: requests wait in the router."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Limits:
    """Requests in flight on a target of weight 1, and the tokens of their prompts; None: any number."""

    requests: int | None = None
    tokens: int | None = None
    unlimited: bool = field(init=False)

    def __post_init__(self) -> None:
        self.unlimited = self.requests is None and self.tokens is None

    def has_capacity(self, requests: float, context: float, tokens: int) -> bool:
        """Whether a target with `requests`, which hold `context` tokens, may get one more of `tokens`.

        A prompt that is larger than the limit may go where nothing else is.
        """
        if self.requests is not None and requests >= self.requests:
            return False
        return self.tokens is None or requests <= 0 or context + tokens <= self.tokens


NO_LIMITS = Limits()
