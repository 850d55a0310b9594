"""The speed of workers: the coefficients of an engine's step, learned from the timing of responses.

A step that computes `m` prompt tokens and one token for each of `n` decoding requests, over `ctx` tokens of context,
takes

    seconds = step + token · (m + n) + attention · Σ u·(c + u/2) + context_token · ctx

for `u` tokens of a prompt that are computed after `c` earlier ones. (The literature names the coefficients t0, a, q and
d.) Two durations are measured, both in seconds of one request.

    prefill   the time to its first byte, if its worker had no other prompt until then
    decode    the mean time between the bytes of its answer

Each is a linear regression in two unknowns, with

    a prior       the configured rates are the result without samples. After a few samples the prior is a multiple of
                  them, so that samples only have to separate the two coefficients
    forgetting    a sample's weight halves in `HALF_LIFE` seconds
    robustness    a sample far from the prediction counts less (Huber's weights), so that a stall changes little
    bounds        a coefficient stays within a factor `BOUND` of the configured one
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final

CHUNK: Final = 8192  # tokens an engine computes in one step, at most
HALF_LIFE: Final = 300.0
BOUND: Final = 100.0
# Workers whose seconds for a mean prompt differ by less than this factor are alike, and costs are counted in tokens.
UNLIKE: Final = 1.25
# Few samples make equal workers differ. So the factor is raised by this many standard errors of both workers' seconds.
_DOUBTS: Final = 2.0
# The weight of a new prompt in the mean prompt of a worker, once there are many.
_PROMPT_WEIGHT: Final = 0.02

# The weight of the prior, in samples that one coefficient explains alone.
_PRIOR: Final = 0.3
# After this many samples, the prior is scaled by the square root of the samples' common factor.
_HALFWAY: Final = 3.0
_ENOUGH_SAMPLES = 20.0
_OUTLIER: Final = 1.5  # times the usual relative error
_LEAST_ERROR: Final = 0.02
# A prefill that lasts less than this multiple of its steps' other work says little of the price of a token.
_LEAST_SHARE: Final = 2.0
_COMPARE_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 1e-6
_LOW: Final = 1 / BOUND
_LOG_2: Final = log(2)


@dataclass(slots=True, init=False)
class Rates:
    """A worker's speed in seconds.

    - `step`: one engine step (t0).
    - `token`: one computed token (a).
    - `attention`: one pair of tokens in attention (q).
    - `context_token`: one token of context read in a step (d).
    """

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

    def step_seconds(self, requests: int, context: float) -> float:
        """Return the seconds of a step that generates a token for each of `requests`, which hold `context` tokens."""
        return self.step + self.token * requests + self.context_token * context


def prefill_seconds(rates: Rates, tokens: int, cached: int, requests: int, context: int) -> float:
    """Return the duration of a prompt's prefill while `requests` with `context` tokens decode on the same worker."""
    uncached = max(tokens - cached, 1)
    steps = -(-uncached // CHUNK)
    return (
        rates.token * uncached
        + rates.attention * uncached * (cached + uncached / 2)
        + steps * (rates.step + rates.context_token * context + rates.token * requests)
    )


class BoundedRegression:
    """A regression y = k0·x0 + k1·x1 over a stream of samples, with a prior, forgetting, robustness and bounds.

    Errors are relative to the larger of prediction and measurement. `expected` are the coefficients of the prior, both
    above 0.
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
        """The number of samples, where old ones count less."""
        return self._samples

    @property
    def doubt(self) -> float:
        """The relative standard error of the seconds that the coefficients explain; 1 without samples."""
        return self._error / sqrt(max(self._samples, 1.0))

    def add(self, x0: float, x1: float, known: float, seconds: float, now: float) -> None:
        """Add a sample that was measured at `now`.

        - `x0`, `x1`: the two variables.
        - `known`: seconds that the model explains without these coefficients.
        - `seconds`: the measured duration. A sample without a plausible duration is ignored.
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
        # The usual error is a moving average, which a single sample changes little.
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
        """Return the multiple of the expected coefficients, assuming that it is equal for both."""
        both = self._s00 + 2 * self._s01 + self._s11
        seconds = self._s0y + self._s1y
        if both <= 0 or seconds <= 0:
            return 1.0
        trust = self._samples**2 / (self._samples**2 + _HALFWAY**2)
        return float(_clipped(seconds / both) ** trust)

    def _solve(self) -> tuple[float, float]:
        """Return the least squares solution within the bounds: the free minimum, or else the best point on an edge."""
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
    """The learned rates of one worker for one model.

    - `mean_prompt`: the tokens and the pairs in attention of the prompts that it learned from, on average.
    """

    def __init__(self, start: Rates) -> None:
        self.mean_prompt = 0.0, 0.0
        self._prefill = BoundedRegression((start.token, start.attention))
        self._decode = BoundedRegression((start.step, start.context_token))
        self.rates = start

    def _solved(self) -> None:
        token, attention = self._prefill.coefficients
        step, context_token = self._decode.coefficients
        self.rates = Rates(step, token, attention, context_token)

    @property
    def prefills(self) -> float:
        """The number of prefills that were measured, where old ones count less."""
        return self._prefill.samples

    @property
    def learned(self) -> bool:
        """True if enough prefills were measured to rely on the price of a token."""
        return self._prefill.samples >= _ENOUGH_SAMPLES

    @property
    def doubt(self) -> float:
        """The relative standard error of the seconds of a mean prompt."""
        return self._prefill.doubt

    def decoding_with(self, other: Rates) -> Rates:
        """Return `other`'s prices of computing with this worker's prices of decoding, if it has a few answers."""
        if self._decode.samples < _HALFWAY:
            return other
        step, context_token = self._decode.coefficients
        return Rates(step, other.token, other.attention, context_token)

    def seconds(self, prompt: tuple[float, float]) -> float:
        """Return the seconds of a prompt in steps without other work. `prompt`: its tokens and pairs in attention."""
        token, attention = self._prefill.coefficients
        return token * prompt[0] + attention * prompt[1]

    def prefill_seen(self, tokens: int, cached: int, requests: int, context: int, seconds: float, now: float) -> None:
        """Learn from a prefill that lasted `seconds`.

        - `tokens`, `cached`: tokens of the prompt, and those among them that were cached.
        - `requests`, `context`: requests that decoded meanwhile, and the tokens they held.
        """
        uncached = max(tokens - cached, 1)
        step, context_token = self._decode.coefficients
        steps = -(-uncached // CHUNK)
        # The first step begins when the step under way ends: on average after half of it.
        known = (steps + (0.5 if requests else 0.0)) * (step + context_token * context)
        if seconds < _LEAST_SHARE * known:
            return
        tokens_computed, pairs = uncached + steps * requests, uncached * (cached + uncached / 2)
        self._prefill.add(tokens_computed, pairs, known, seconds, now)
        weight, (mean_tokens, mean_pairs) = max(1 / max(self.prefills, 1.0), _PROMPT_WEIGHT), self.mean_prompt
        self.mean_prompt = (
            mean_tokens + weight * (tokens_computed - mean_tokens),
            mean_pairs + weight * (pairs - mean_pairs),
        )
        self._solved()

    def decode_seen(self, output_tokens: int, requests: int, context: int, seconds: float, now: float) -> None:
        """Learn from an answer with `output_tokens` after its first one.

        - `requests`, `context`: requests that decoded meanwhile, this one included, and the tokens they held.
        """
        if output_tokens > 0:
            known = self._prefill.coefficients[0] * requests
            self._decode.add(1.0, context, known, seconds / output_tokens, now)
            self._solved()


class RateTable:
    """The rates of every worker for every model; `start` has the configured rates."""

    def __init__(self, start: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self.start = start
        self._clock = clock
        self._learners: dict[str, dict[str, RateLearner]] = {}  # by model and worker
        self._leading: dict[str, RateLearner] = {}  # by model: the learner with the most prefills
        self._compared: dict[str, tuple[float, Rates | None]] = {}

    def learner(self, worker: str, model: str) -> RateLearner:
        """Return the learner of a worker and model; create it if needed."""
        workers = self._learners.get(model)
        if workers is None:
            workers = self._learners[model] = {}
        learner = workers.get(worker)
        if learner is None:
            learner = workers[worker] = RateLearner(self.start)
        return learner

    def likely(self, worker: str, model: str) -> Rates:
        """Return a worker's rates for a model.

        Until it has a few prefills, it computes like the worker with the most. A decode worker may never have any.
        """
        learner = self.learner(worker, model)
        if learner.prefills < _HALFWAY:
            return learner.decoding_with(self._leading.get(model, learner).rates)
        return learner.rates

    def prefill_seconds(self, worker: str, model: str, tokens: int, cached: int, requests: int, context: int) -> float:
        """Return the duration of a prompt's prefill, as `prefill_seconds` does, by a worker's likely rates."""
        return prefill_seconds(self.likely(worker, model), tokens, cached, requests, context)

    def prefill_seen(
        self, worker: str, model: str, tokens: int, cached: int, requests: int, context: int, seconds: float, now: float
    ) -> None:
        """Add a measured prefill to the worker's learner."""
        learner = self.learner(worker, model)
        learner.prefill_seen(tokens, cached, requests, context, seconds, now)
        if learner.prefills >= self._leading.get(model, learner).prefills:
            self._leading[model] = learner

    def mean_token(self) -> float:
        """Return the mean seconds per computed token over learned rates; without any, the configured value."""
        known = [each.rates.token for workers in self._learners.values() for each in workers.values() if each.learned]
        return sum(known) / len(known) if known else self.start.token

    def forget(self, worker: str) -> None:
        """Drop the rates of a removed worker."""
        for workers in self._learners.values():
            workers.pop(worker, None)

    def slowest_if_unlike(self, model: str, now: float | None = None) -> Rates | None:
        """Return the slowest worker's rates for a model; None if its workers are alike or unknown."""
        if now is None:
            now = self._clock()
        compared = self._compared.get(model)
        if compared is None or now - compared[0] >= _COMPARE_SECONDS:
            known = [learner for learner in self._learners.get(model, {}).values() if learner.learned]
            compared = self._compared[model] = (now, _slowest_if_unlike(known))
        return compared[1]

    def learned_or(self, worker: str, model: str, otherwise: Rates) -> Rates:
        """Return a worker's rates. Until enough prefills were measured, it computes at the prices of `otherwise`."""
        learner = self._learners.get(model, {}).get(worker)
        if learner is None:
            return otherwise
        return learner.rates if learner.learned else learner.decoding_with(otherwise)


def _slowest_if_unlike(learners: list[RateLearner]) -> Rates | None:
    """Return the rates of the slowest learner if it and the fastest differ by more than their doubts; otherwise None.

    All are compared by the same prompt. Its seconds are known well, while a worker with prompts of one length can take
    tokens for attention.
    """
    if len(learners) < 2:
        return None
    count = len(learners)
    prompt = (
        sum(each.mean_prompt[0] for each in learners) / count,
        sum(each.mean_prompt[1] for each in learners) / count,
    )
    ordered = sorted(learners, key=lambda each: each.seconds(prompt))
    fastest, slowest = ordered[0], ordered[-1]
    factor = UNLIKE + _DOUBTS * (fastest.doubt + slowest.doubt)
    return slowest.rates if slowest.seconds(prompt) >= factor * fastest.seconds(prompt) else None
