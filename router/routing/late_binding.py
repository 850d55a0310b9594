"""Late binding: when the best worker is busy with prefills, a request waits in the router and chooses again later.

A request that is bound too early waits behind a long prefill although another worker becomes free. So one whose target
has a prefill waiting, and more to compute than an engine step takes, is held (`admission`). At every first byte
and every end the held ones choose again, those with little to compute first, and older ones before younger:

    order = arrival + 2 · P      P: seconds that the prefill would take

Waiting counts as much as being short, so nothing starves. At low load hardly anything is held. A request that was
promised a first token comes where its slack ends:

    order = first token due - P

Of a prefill under way only what is left counts, at least a step: whose turn comes in a moment need not wait for it in
the router. One that takes twice as long as expected counts whole. So do all where more requests are held than there are
targets, since then it is the order that matters.

While the fleet has time to spare, nobody waits for one worker while others have nothing to do, neither here nor behind
a prefill that is nearly done. Whose choice has more than a step to compute, all of it counted, goes to the cheapest
that is free, if so it has less before it:

    pending' + u' < (1 - prefilling / 0.45) · (pending + u)

    u           uncached tokens of its prompt, at most a step's more there
    prefilling  share of the targets that compute prompts, of late (`prefill_share`)

What it has to compute more is then paid with time that nobody needs. At 0.45 and above nobody is let go, and a long
prefix is worth the wait.
"""

from __future__ import annotations

from typing import Final

from router.load.target_load import TargetLoad
from router.policies import Candidate

# One engine step's budget of prompt tokens.
STEP_TOKENS: Final = 8192
# Of a prefill that has taken so many times as long as expected nobody knows when it ends.
_LATE: Final = 2.0
# With so much of its time spent on prefills a fleet has none to spare: they come in bursts.
NO_TIME_TO_SPARE: Final = 0.45


def should_hold(pending: float, step_tokens: int = STEP_TOKENS) -> bool:
    """Whether a request is held rather than sent to a target that has `pending` tokens to compute for others."""
    return pending > step_tokens


def is_busy(load: TargetLoad, crowded: bool, others: int = 0, weight: float = 1.0) -> bool:
    """Whether requests are held for a target with this load. Only prefills count whose end will be seen.

    `crowded`: more requests are held than there are targets; `others`: tokens that other routers have it compute;
    `weight`: its share of load, 1 being the usual one.
    """
    pending = (load.streamed + others) / weight
    if not crowded and should_hold(pending):
        pending -= _done(*load.under_way) / weight
    return should_hold(pending)


def _done(under_way: int, elapsed: float, expected: float) -> float:
    """How much of a prefill of so many tokens does not count any more, `elapsed` of `expected` seconds after its
    start."""
    if not 0 <= elapsed < _LATE * expected:
        return 0.0
    return min(under_way * elapsed / expected, max(under_way - STEP_TOKENS, 0))


def is_sooner(there: Candidate, here: Candidate, tokens: int, prefilling: float) -> bool:
    """Whether a request with a prompt of `tokens` goes to a free target instead of being held for its choice, which is
    `here`. `prefilling`: see above."""
    if here.overlap - there.overlap > STEP_TOKENS:
        return False
    before_there, before_here = (each.pending + tokens - each.overlap for each in (there, here))
    return before_there < (1 - prefilling / NO_TIME_TO_SPARE) * before_here


def slo_order(first_token_by: float, prefill_seconds: float) -> float:
    """The same for a request with a promise: when it has to begin at the latest, by the same clock."""
    return first_token_by - prefill_seconds


def held_order(arrival: float, prefill_seconds: float) -> float:
    """Held requests choose in this order, the lowest first. `arrival` in seconds of any clock."""
    return arrival + 2 * prefill_seconds
