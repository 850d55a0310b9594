"""What a request was promised, what is predicted for it, and which candidate keeps the promise.

    late = max(TTFT - time left, 0) + output · max(TPOT - promised, 0)      in seconds, of an answer of `output` tokens

A candidate that is not late keeps the promise. Among those that keep it the policy chooses as ever; where none does, the
least late one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, Policy, Request, one_of_tied


class Promise:
    """When a request's tokens are to come. Times in seconds.

    `service_level`: the class that it comes from, "" where the request said it all. `ttft`: from the arrival of the
    request to its first token; `first_token_by`: the same by `time.monotonic`. `tpot`: for each token after it. None:
    nothing is promised of it. `refuses_late`: whether it is refused once no candidate keeps it; else it is served late.
    """

    __slots__ = ("first_token_by", "refuses_late", "service_level", "tpot", "ttft")

    def __init__(
        self,
        ttft: float | None,
        tpot: float | None,
        arrived: float,
        service_level: str = "",
        refuses_late: bool = False,
    ) -> None:
        self.ttft = ttft
        self.first_token_by = None if ttft is None else arrived + ttft
        self.tpot = tpot
        self.service_level = service_level
        self.refuses_late = refuses_late


class Band:
    """A prediction in seconds: half of what comes is later than `expected`, and one in ten earlier than `low` or later
    than `high`."""

    __slots__ = ("expected", "high", "low")

    def __init__(self, low: float, expected: float, high: float) -> None:
        self.low = low
        self.expected = expected
        self.high = high


class Forecast:
    """What a candidate is predicted to take for a request: to its first token from now on, and for each one after it.

    `ttft_by_rates`, `tpot_by_rates`: as the rates alone have it, before what their errors have taught. `measured`:
    whether the band rests on enough errors.
    """

    __slots__ = ("measured", "tpot", "tpot_by_rates", "ttft", "ttft_by_rates")

    def __init__(self, ttft_by_rates: float, tpot_by_rates: float, ttft: Band, tpot: Band, measured: bool) -> None:
        self.ttft_by_rates = ttft_by_rates
        self.tpot_by_rates = tpot_by_rates
        self.ttft = ttft
        self.tpot = tpot
        self.measured = measured

    def late(self, promise: Promise, now: float, output_tokens: float) -> float:
        """Seconds by which a promise is expected to be missed; 0 where it is kept."""
        late = 0.0
        if promise.first_token_by is not None:
            late = max(self.ttft.expected - (promise.first_token_by - now), 0.0)
        if promise.tpot is not None and self.tpot.expected > promise.tpot:
            late += output_tokens * (self.tpot.expected - promise.tpot)
        return late


def ttft_by_rates(candidate: Candidate, rates: Rates, tokens: int, backlog: float, transfer_tokens: float) -> float:
    """Seconds to the first token of a prompt on a candidate whose earlier prefills take `backlog` more seconds.

    `transfer_tokens`: what loading cached tokens takes, as tokens computed.
    """
    decoding = max(candidate.requests - candidate.waiting, 0)
    prefill = prefill_seconds(rates, tokens, candidate.overlap, decoding, candidate.context)
    return backlog + prefill + rates.token * transfer_tokens


def tpot_by_rates(candidate: Candidate, rates: Rates, tokens: int, output_tokens: float) -> float:
    """Seconds for each token of an answer beside what a candidate has in flight."""
    context = candidate.context + tokens + output_tokens / 2
    return rates.step + rates.token * (candidate.requests + 1) + rates.context_token * context


def choose_for_promise(
    policy: Policy, candidates: list[Candidate], late: Callable[[Candidate], float], request: Request, random: Random
) -> tuple[Candidate, float]:
    """The candidate for a promised request, and by how much it is late: see above. `late`: of a candidate."""
    by_candidate = [late(candidate) for candidate in candidates]
    least = min(by_candidate)
    best = [candidate for candidate, each in zip(candidates, by_candidate, strict=True) if each <= least]
    if least > 0:
        return one_of_tied(best, random), least
    return policy(best, request).chosen, 0.0
