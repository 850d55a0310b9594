"""The cost of answers on a target, in computed tokens, by learned rates.

    context_token   output · d / a
    memory          lacking / used · output · (t0 + a·n + d·ctx) / a

    output     expected tokens of an answer
    n, ctx     requests in flight to the target, and the tokens they hold
    a, t0, d   the target's seconds for a computed token, a step, and a token of context in a step
    used       the share of its KV memory that requests use, as the engine reports it
    lacking    the share that is missing when all requests have their prompts, and half of their answers

Each step of an answer reads the context of all requests there. Near saturation, other prompts are computed between two
tokens, and `d` learns a part of their time. So d / a counts at most as at the start, before anything is learned.

Requests release their memory when they end, so all of it is released once in the time of an answer. A prompt waits
until what is missing was released.
"""

from __future__ import annotations

from typing import Final

from router.policies.rates import Rates

# The least share of memory in use, by which the wait is divided. Engines round what they report.
_LEAST_USED: Final = 0.05


def context_token(rates: Rates, start: Rates, output: float) -> float:
    """Return the time in which the steps of an answer read a token of context. `start`: the assumed rates."""
    return output * min(rates.context_token / rates.token, start.context_token / start.token)


def memory_wait(
    rates: Rates, output: float, requests: int, pending: int, context: int, used: float, capacity: int
) -> float:
    """Return the expected wait for KV memory.

    - `pending`: the prompt tokens that were sent to the target and not computed yet.
    - `used`: the share of its memory in use.
    - `capacity`: the tokens that its memory holds.
    """
    lacking = used + (pending + (requests + 1) * output / 2) / capacity - 1
    if lacking <= 0:
        return 0.0
    return lacking / max(used, _LEAST_USED) * output * rates.step_seconds(requests, context) / rates.token
