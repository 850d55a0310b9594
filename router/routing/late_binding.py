"""Late binding: if the best target is busy with prefills, a request waits in the router and chooses again later.

A request that is bound too early waits behind a long prefill, although another worker becomes idle. So a request is
held (`admission`) if its target has a prefill waiting and more tokens to compute than one engine step. After every
first byte and every end, held requests choose again, in this order:

    order = arrival + w · P      P: the predicted seconds of the request's prefill
                                 w: 2, or with computed limits the number of held requests a target if that is more

No request that arrives more than w · P later is placed first. A request with a TTFT objective is ordered by its
slack:

    order = first token due - P

Only the remaining part of a running prefill counts, and at least one step: a request need not be held for a prefill
that ends soon. A prefill that exceeds twice its expected duration counts in full, because its remaining time is
unknown. All prefills count in full while more requests are held than there are targets, because then the order matters.

While the fleet has spare capacity, a request never queues behind a busy worker if an idle worker exists. A request
whose target has more than one step to compute is sent to the cheapest idle target, if that has less to compute:

    pending' + u' < (1 - prefilling / 0.45) · (pending + u)

    u           uncached tokens of its prompt, loaded ones at their price: on the idle target at most one step more
    prefilling  average share of the targets that compute prompts (`PrefillShare`)

The idle target pays for the additional prefill with time that no other request needs. From a share of 0.45 on, requests
wait for their target, and a long prefix is worth the wait.
"""

from __future__ import annotations

from typing import Final

from router.load.target_load import TargetLoad
from router.policies import Candidate

# The prompt tokens of one engine step.
STEP_TOKENS: Final = 8192
# The least weight of a prefill in a held request's position.
PREFILL_WEIGHT: Final = 2.0
# A prefill that exceeds its expected duration by this factor counts in full, because its remaining time is unknown.
_LATE: Final = 2.0
# The share of prefilling targets from which a fleet has no spare capacity, because prefills arrive in bursts.
NO_TIME_TO_SPARE: Final = 0.45


def should_hold(pending: float) -> bool:
    """Return whether a request is held for a target that has `pending` tokens of other prompts to compute."""
    return pending > STEP_TOKENS


def is_busy(load: TargetLoad, crowded: bool, others: int = 0, weight: float = 1.0) -> bool:
    """Return whether requests are held for a target. Only prefills of streamed answers count, whose end is visible.

    - `crowded`: whether more requests are held than there are targets.
    - `others`: the tokens that other routers have it compute.
    """
    pending = (load.streamed + others) / weight
    if not crowded and should_hold(pending):
        pending -= _done(*load.under_way) / weight
    return should_hold(pending)


def _done(under_way: int, elapsed: float, expected: float) -> float:
    """Return how many of a running prefill's tokens count as done, after `elapsed` of `expected` seconds."""
    if not 0 <= elapsed < _LATE * expected:
        return 0.0
    return min(under_way * elapsed / expected, max(under_way - STEP_TOKENS, 0))


def is_sooner(there: Candidate, here: Candidate, tokens: int, prefilling: float) -> bool:
    """Return whether a request is sent to the idle target `there` instead of waiting for its target `here`.

    - `prefilling`: the average share of the targets that compute prompts.
    """
    work_there, work_here = there.work(tokens), here.work(tokens)
    if work_there - work_here > STEP_TOKENS:
        return False
    return there.pending + work_there < (1 - prefilling / NO_TIME_TO_SPARE) * (here.pending + work_here)


def slo_order(first_token_by: float, prefill_seconds: float) -> float:
    """Return the position of a held request with a TTFT objective: the latest time to start its prefill."""
    return first_token_by - prefill_seconds


def held_order(arrival: float, prefill_seconds: float, weight: float = PREFILL_WEIGHT) -> float:
    """Return the position of a held request, where the lowest chooses first.

    - `arrival`: in seconds of any clock.
    - `weight`: the seconds of waiting that count as much as a second of prefill.
    """
    return arrival + weight * prefill_seconds
