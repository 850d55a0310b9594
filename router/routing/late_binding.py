"""Late binding: when the best worker is busy with prefills, a request waits in the router and chooses again later.

A request that is bound too early waits behind a long prefill although another worker becomes free. So one whose target
has a prefill waiting, and more to compute than an engine step takes, is held (`admission`). At every first byte
and every end the held ones choose again, those with little to compute first, and older ones before younger:

    order = arrival + 2 · P      P: seconds that the prefill would take

Waiting counts as much as being short, so nothing starves. At low load nothing is ever held. A request that was promised
a first token comes where its slack ends:

    order = first token due - P
"""

from __future__ import annotations

from typing import Final

# One engine step's budget of prompt tokens.
STEP_TOKENS: Final = 8192


def should_hold(pending: float, step_tokens: int = STEP_TOKENS) -> bool:
    """Whether a request is held rather than sent to a target that has `pending` tokens to compute for others."""
    return pending > step_tokens


def promised_order(first_token_by: float, prefill_seconds: float) -> float:
    """The same for a request with a promise: when it has to begin at the latest, by the same clock."""
    return first_token_by - prefill_seconds


def held_order(arrival: float, prefill_seconds: float) -> float:
    """Held requests choose in this order, the lowest first. `arrival` in seconds of any clock."""
    return arrival + 2 * prefill_seconds
