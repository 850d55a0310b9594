"""How fast workers are: the coefficients of an engine's step, learned from what the router sees of its requests.

A step that computes `m` tokens of prompts and one for each of `n` requests that decode, over `ctx` tokens of context:

    seconds = step + token · (m + n) + attention · Σ u·(c + u/2) + context_token · ctx

with `u` tokens of a prompt computed after `c` that are there already. (In the literature on cost models these are t0,
a, q and d.) Two things are seen: the time to the first byte of a request that found nothing waiting before it, and the
mean time between the bytes of an answer. Each is a linear regression in two unknowns, with

    a prior       the configured rates: without samples they are the answer. After a few it is a multiple of them, by
                  which samples as a whole are faster or slower, and they only have to tell one coefficient from another
    forgetting    a sample's weight falls by half in `HALF_LIFE`
    robustness    a sample far from what is expected counts less (Huber's weights), so that a stall moves little
    bounds        a coefficient stays within a factor `BOUND` of what is configured
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from typing import Final

CHUNK: Final = 8192  # tokens an engine computes in one step, at most
HALF_LIFE: Final = 300.0
BOUND: Final = 100.0
# Workers whose prices of a token differ by less than this are alike: counting in tokens is right then.
UNLIKE: Final = 1.25

# The weight of the prior, in samples that one coefficient explains alone.
_PRIOR: Final = 0.3
# After so many samples the prior is halfway to what they say as a whole, counted in factors.
_HALFWAY: Final = 3.0
_ENOUGH_SAMPLES = 20.0
_OUTLIER: Final = 1.5  # times the usual relative error
_LEAST_ERROR: Final = 0.02
_COMPARE_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 1e-6
_LOW: Final = 1 / BOUND
_LOG_2: Final = log(2)


@dataclass(slots=True, init=False)
class Rates:
    """Seconds: a step, a token computed (a), a pair of tokens attending (q), a token of context read in a step (d)."""

    step: float
    token: float
    attention: float
    context_token: float

    def __init__(
        self, step: float = 0.01, token: float = 4e-5, attention: float = 1e-9, context_token: float = 3e-8
    ) -> None:
        self.step = step
        self.token = token
        self.attention = attention
        self.context_token = context_token


def prefill_seconds(rates: Rates, tokens: int, cached: int, requests: int, context: int) -> float:
    """How long the prefill of a prompt of `tokens` takes, when `requests` with `context` tokens decode beside."""
    uncached = max(tokens - cached, 1)
    steps = -(-uncached // CHUNK)
    return (
        rates.token * uncached
        + rates.attention * uncached * (cached + uncached / 2)
        + steps * (rates.step + rates.context_token * context + rates.token * requests)
    )


class BoundedRegression:
    """y = k0·x0 + k1·x1 for samples that come one by one, with a prior, forgetting, robustness and bounds.

    Errors count relative to what is predicted or seen. `expected` are the
    prior's coefficients, all above 0.
    """

    def __init__(self, expected: tuple[float, float]) -> None:
        self._expected = expected
        # Σ x0², x0·x1, x1², x0·y, x1·y, in units of the expected coefficients.
        self._s00 = self._s01 = self._s11 = self._s0y = self._s1y = 0.0
        self._error = 1.0
        self._samples = 0.0
        self._last = 0.0
        self.coefficients = expected

    @property
    def samples(self) -> float:
        """How many samples count, the old ones less."""
        return self._samples

    def add(self, x0: float, x1: float, known: float, seconds: float, now: float) -> None:
        """A sample seen at a time: `seconds`, of which the model explains `known` without these coefficients.

        Nothing is learned from what is no duration.
        """
        if seconds < _LEAST_SECONDS or x0 < 0 or x1 < 0:
            return
        kept = exp(-_LOG_2 * max(now - self._last, 0.0) / HALF_LIFE) if self._samples else 1.0
        self._last = max(now, self._last)
        predicted = known + self.coefficients[0] * x0 + self.coefficients[1] * x1
        scale = max(predicted, seconds)
        error = abs(seconds - predicted) / scale
        limit = _OUTLIER * max(self._error, _LEAST_ERROR)
        weight = min(1.0, limit / error) if error else 1.0
        # The usual error is an average that a single sample moves little.
        self._error += 0.05 * (min(error, 2 * limit) - self._error)
        u0, u1 = x0 * self._expected[0] / scale, x1 * self._expected[1] / scale
        y = (seconds - known) / scale
        self._s00 = kept * self._s00 + weight * u0 * u0
        self._s01 = kept * self._s01 + weight * u0 * u1
        self._s11 = kept * self._s11 + weight * u1 * u1
        self._s0y = kept * self._s0y + weight * u0 * y
        self._s1y = kept * self._s1y + weight * u1 * y
        self._samples = kept * self._samples + 1
        k0, k1 = self._solve()
        self.coefficients = _bounded(k0, self._expected[0]), _bounded(k1, self._expected[1])

    def _prior(self) -> float:
        """How many times the expected coefficients both are, as long as nothing tells them apart."""
        both = self._s00 + 2 * self._s01 + self._s11
        seconds = self._s0y + self._s1y
        if both <= 0 or seconds <= 0:
            return 1.0
        trust = self._samples**2 / (self._samples**2 + _HALFWAY**2)
        return float(_clipped(seconds / both) ** trust)

    def _solve(self) -> tuple[float, float]:
        """The least squares within the bounds: the free minimum, or else the best on an edge."""
        prior = self._prior()
        weight = _PRIOR / prior**2
        a, b, c = self._s00 + weight, self._s01, self._s11 + weight
        e, f = self._s0y + weight * prior, self._s1y + weight * prior
        determinant = a * c - b * b
        if determinant > 1e-12 * a * c:
            k0, k1 = (e * c - f * b) / determinant, (a * f - b * e) / determinant
            if _LOW <= k0 <= BOUND and _LOW <= k1 <= BOUND:
                return k0, k1
        edges = [(k, _clipped((f - b * k) / c)) for k in (_LOW, BOUND)]
        edges += [(_clipped((e - b * k) / a), k) for k in (_LOW, BOUND)]
        return min(edges, key=lambda k: a * k[0] ** 2 + 2 * b * k[0] * k[1] + c * k[1] ** 2 - 2 * (e * k[0] + f * k[1]))


def _clipped(k: float) -> float:
    return min(max(k, _LOW), BOUND)


def _bounded(k: float, expected: float) -> float:
    return min(max(k * expected, expected / BOUND), expected * BOUND)


class RateLearner:
    """The rates of one worker for one model, in the light of what has been seen."""

    def __init__(self, start: Rates) -> None:
        self._prefill = BoundedRegression((start.token, start.attention))
        self._decode = BoundedRegression((start.step, start.context_token))
        self.rates = start

    def _solved(self) -> None:
        token, attention = self._prefill.coefficients
        step, context_token = self._decode.coefficients
        self.rates = Rates(step, token, attention, context_token)

    @property
    def prefills(self) -> float:
        """How many were seen, the old ones less."""
        return self._prefill.samples

    @property
    def learned(self) -> bool:
        """Whether the price of a token rests on enough samples."""
        return self._prefill.samples >= _ENOUGH_SAMPLES

    def prefill_seen(self, tokens: int, cached: int, requests: int, context: int, seconds: float, now: float) -> None:
        """A prompt of `tokens` was prefilled, `cached` of them from the cache, beside others that decoded."""
        uncached = max(tokens - cached, 1)
        step, context_token = self._decode.coefficients
        steps = -(-uncached // CHUNK)
        known = steps * (step + context_token * context)
        self._prefill.add(uncached + steps * requests, uncached * (cached + uncached / 2), known, seconds, now)
        self._solved()

    def decode_seen(self, output_tokens: int, requests: int, context: int, seconds: float, now: float) -> None:
        """An answer had `output_tokens` after its first, beside `requests` in all that held `context` tokens."""
        if output_tokens > 0:
            known = self._prefill.coefficients[0] * requests
            self._decode.add(1.0, context, known, seconds / output_tokens, now)
            self._solved()


class RateTable:
    """The rates of every worker for every model. `start` is the configured beginning."""

    def __init__(self, start: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self.start = start
        self._clock = clock
        self._learners: dict[str, dict[str, RateLearner]] = {}  # by model and worker
        self._leading: dict[str, RateLearner] = {}  # by model: who has shown most prefills
        self._compared: dict[str, tuple[float, Rates | None]] = {}

    def learner(self, worker: str, model: str) -> RateLearner:
        """A worker's rates for a model."""
        workers = self._learners.get(model)
        if workers is None:
            workers = self._learners[model] = {}
        learner = workers.get(worker)
        if learner is None:
            learner = workers[worker] = RateLearner(self.start)
        return learner

    def likely(self, worker: str, model: str) -> Rates:
        """A worker's rates for a model; until it has shown a few prefills, those of the worker that had shown most."""
        learner = self.learner(worker, model)
        if learner.prefills < _HALFWAY:
            return self._leading.get(model, learner).rates
        return learner.rates

    def prefill_seen(
        self, worker: str, model: str, tokens: int, cached: int, requests: int, context: int, seconds: float, now: float
    ) -> None:
        """As of the worker's learner."""
        learner = self.learner(worker, model)
        learner.prefill_seen(tokens, cached, requests, context, seconds, now)
        if learner.prefills >= self._leading.get(model, learner).prefills:
            self._leading[model] = learner

    def mean_token(self) -> float:
        """Seconds for a token computed, the mean of the workers that are known well; else as configured."""
        known = [each.rates.token for workers in self._learners.values() for each in workers.values() if each.learned]
        return sum(known) / len(known) if known else self.start.token

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        for workers in self._learners.values():
            workers.pop(worker, None)

    def slowest_if_unlike(self, model: str, now: float | None = None) -> Rates | None:
        """None while the workers of a model are alike or not known well; else the rates of the slowest of them. `now`:
        the time by the clock, where it was just read."""
        if now is None:
            now = self._clock()
        compared = self._compared.get(model)
        if compared is None or now - compared[0] >= _COMPARE_SECONDS:
            known = [learner.rates for learner in self._learners.get(model, {}).values() if learner.learned]
            slowest = max(known, key=lambda rates: rates.token, default=None)
            if slowest and slowest.token < UNLIKE * min(rates.token for rates in known):
                slowest = None
            compared = self._compared[model] = (now, slowest)
        return compared[1]

    def of(self, worker: str, model: str, otherwise: Rates) -> Rates:
        """A worker's rates, or `otherwise` while they are not known well."""
        learner = self._learners.get(model, {}).get(worker)
        return learner.rates if learner and learner.learned else otherwise
