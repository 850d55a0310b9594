"""The choice of a pair: the decode worker, the prefill worker, and whether there is one, by one cost.

    alone       J(d), with η·N in place of γ·n, and 3·φ in place of φ   the decode worker d computes the prompt
    in a pair   J(p) + m · (τ + θ·μ_d) + pending_d + 3·φ·ctx_d          the prefill worker p computes it, d fetches it

    J           the default policy's cost of computing the prompt on a worker (`router.policies.kv_aware`), with γ 0.06,
                φ 0.05, and no wait for memory
    N, η        answers that the prompt delays: those on d, at least the mean of the decode workers, and at least 0.15;
                the charge for each of them, in computed tokens for each token of the prompt
    m           tokens of the prompt that d lacks, which are moved
    τ           the price of moving a token from p to d, in computed tokens; learned for each pair
    μ_d, θ      the later cost of evicting for one of these tokens on d
    pending_d   tokens that d computes itself, for which the first token waits
    ctx_d, φ    the tokens that the requests on d hold, which slow its decoding: φ counts three times, because d
                decodes all the time

If the cheapest option would miss an SLO, the cost of missed SLOs is added to each option, and the choice is made again
(`router.prediction.slo`).

The lowest cost of all pairs and of all decode workers alone wins. If workers have different speeds and their rates are
known, J is in seconds, and τ the seconds of a token.

A prompt on a decode worker delays every answer there. So a decode worker computes what is short, what it holds most of,
and what prefill workers would begin too late. An idle decode worker is charged for the answers that it will receive.

On a decode worker with full memory a prompt waits, and its blocks there are evicted meanwhile. So they do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from indexer import Target
from router.policies.kv_aware import KvWeights, SecondsWeights, kv_cost, seconds_cost
from router.policies.records import Candidate, CostUnit, Decision, Policy, Request, cheapest, one_of_lowest
from router.policies.shared_tokens import SharedTokens

# γ on workers of pairs: the requests there are prompts in the queue rather than answers.
_QUEUED: Final = 0.06
# φ: the charge for each token that the requests on a worker hold.
_CONTEXT: Final = 0.05
# η: an answer on d waits as long as the prompt is computed, which is 1. Lower values leave TPOT behind other rules.
_DELAYED_ANSWER: Final = 1.5
# The answers that an idle decode worker is expected to receive meanwhile. It computes short prompts.
_EXPECTED_ANSWERS: Final = 0.15
# The factor of φ on decode workers. At 1, sessions stay on decode workers whose context slows every token.
_DECODING: Final = 3.0
# The share of KV memory in use from which new prompts wait for memory.
_FULL: Final = 0.9
NO_PREFILL: Final = "no prefill worker is left"
IN_PAIR: Final = "remote"
INTEGRATED: Final = "the worker does both"


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The workers that can serve a request.

    - `decodes`: those that answer it.
    - `prefills`: those that compute its prompt for a decode worker.
    - `integrated`: the targets of `decodes` that fetch from no other worker.
    - `alone`: whether decode workers can compute a prompt.
    - `move_seconds`: returns the seconds in which a number of tokens moves from a prefill to a decode worker.
    - `token_seconds`: the mean seconds in which workers compute a token.
    - `shared`: the parts of the prompt that several sessions asked for, by what prefill workers hold. Those by what
      decode workers hold are in the request.
    - `unpaired`: the URLs of a prefill and a decode worker that are not paired.
    - `slo_cost`: returns the cost of the SLOs that a prefill worker, or None, and a decode worker would miss. None: the
      request is chosen without SLOs.
    """

    decodes: list[Candidate]
    prefills: list[Candidate]
    integrated: frozenset[Target]
    alone: bool
    move_seconds: Callable[[Target, Target, float], float]
    token_seconds: float
    shared: SharedTokens | None = None
    slo_cost: Callable[[Candidate | None, Candidate], float] | None = None
    unpaired: frozenset[tuple[str, str]] = frozenset()

    def pairs(self, prefill: Candidate, decode: Candidate) -> bool:
        """Return whether two workers may be a pair."""
        return not self.unpaired or (prefill.target.worker, decode.target.worker) not in self.unpaired

    def prefills_of(self, decode: Candidate) -> list[Candidate]:
        """Return the prefill workers that a decode worker may fetch from."""
        return [each for each in self.prefills if self.pairs(each, decode)] if self.unpaired else self.prefills

    def needs_alone(self, decode: Candidate) -> bool:
        """Return whether a worker must compute the prompt itself, because it can fetch it from no other worker."""
        return decode.target in self.integrated or not self.prefills_of(decode)

    def may_alone(self, decode: Candidate) -> bool:
        """Return whether a worker can compute the prompt itself."""
        return self.alone or decode.target in self.integrated


@dataclass(frozen=True, slots=True)
class PairChoice:
    """The chosen decode worker, and the chosen prefill worker or the reason for none.

    - `inputs`: the values that the verdict depends on, for logs and explanations.
    """

    decode: Decision
    prefill: Decision | None
    reason: str
    inputs: dict[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> tuple[Candidate | None, Candidate]:
        """The prefill worker, or None, and the decode worker."""
        return None if self.prefill is None else self.prefill.chosen, self.decode.chosen


PairRule = Callable[[PairOptions, Request], PairChoice]


class PairCost:
    """The default rule."""

    def __init__(self, weights: KvWeights, random: Random) -> None:
        self._weights = weights
        self._random = random
        self._in_seconds = SecondsWeights(interference=weights.interference, eviction=weights.eviction)

    def __call__(self, options: PairOptions, request: Request) -> PairChoice:
        terms = PairTerms(options, request, self._weights, self._in_seconds)
        totals = [terms.lowest(decode) for decode in options.decodes]
        near = self._weights.near
        decode = one_of_lowest(options.decodes, totals, self._random, near)
        chosen = Decision(decode, options.decodes, terms.best, unit=terms.unit)
        in_pair = not options.needs_alone(decode)
        prefill = None
        if in_pair:
            prefill = cheapest(
                options.prefills_of(decode), lambda each: terms.pair(each, decode), self._random, near, terms.unit
            )
        inputs = {"tokens": float(request.tokens), "uncached": float(max(request.tokens - decode.overlap, 0))}
        if not options.may_alone(decode):
            return PairChoice(chosen, prefill, IN_PAIR if in_pair else NO_PREFILL, inputs)
        alone = sum(terms.alone(decode).values())
        inputs["alone"] = alone
        if prefill is None:
            return PairChoice(chosen, None, NO_PREFILL if not options.prefills else INTEGRATED, inputs)
        together = sum(terms.pair(prefill.chosen, decode).values())
        inputs["in_pair"] = together
        if alone <= together:
            return PairChoice(chosen, None, "it costs less alone", inputs)
        return PairChoice(chosen, prefill, IN_PAIR, inputs)


class PairTerms:
    """The terms of all options for one request. `unit`: seconds if the candidates have rates, else prefill tokens."""

    def __init__(self, options: PairOptions, request: Request, weights: KvWeights, in_seconds: SecondsWeights) -> None:
        self._options = options
        self._request = request
        self._prefill_request = replace(request, shared=options.shared)
        self._weights = weights
        self._seconds_weights = in_seconds
        self._mean_requests = sum(each.requests for each in options.decodes) / len(options.decodes)
        everything = [*options.decodes, *options.prefills]
        self._in_seconds = all(candidate.rates is not None for candidate in everything)
        self.unit = CostUnit.SECONDS if self._in_seconds else CostUnit.TOKENS
        prefilling = self._prefill_request
        prefills = [(sum(self._computing(prefill, prefilling).values()), prefill) for prefill in options.prefills]
        self._prefills = sorted(prefills, key=lambda each: each[0])

    def alone(self, decode: Candidate) -> dict[str, float]:
        """Return the terms of a decode worker that computes the prompt itself."""
        if decode.target in self._options.integrated:
            return self._computing(decode, self._request) | self._missing(None, decode)
        at_begin = decode
        if (kept := _kept(decode)) < decode.overlap:
            at_begin = decode.copy()
            at_begin.overlap = kept
        terms = self._computing(at_begin, self._request)
        answers = max(decode.requests, self._mean_requests, _EXPECTED_ANSWERS)
        terms["interference"] = terms["prefill"] * (self._weights.interference + _DELAYED_ANSWER * answers)
        if not self._in_seconds:
            terms["context"] = _DECODING * _CONTEXT * decode.context
        return terms | self._missing(None, decode)

    def pair(self, prefill: Candidate, decode: Candidate) -> dict[str, float]:
        """Return the terms of a pair."""
        moved, evicting, decoding = self._receiving(decode)
        move = self._moving(prefill, decode, moved)
        computing = self._computing(prefill, self._prefill_request)
        terms = {**computing, "move": move, "move_eviction": evicting, "decode": decoding}
        return terms | self._missing(prefill, decode)

    def best(self, decode: Candidate) -> dict[str, float]:
        """Return the terms of the cheapest option with a decode worker."""
        prefill = self._cheapest(decode)[1]
        return self.alone(decode) if prefill is None else self.pair(prefill, decode)

    def lowest(self, decode: Candidate) -> float:
        """Return the cost of the cheapest option with a decode worker."""
        return self._cheapest(decode)[0]

    def _cheapest(self, decode: Candidate) -> tuple[float, Candidate | None]:
        options = self._options
        best: tuple[float, Candidate | None] = (float("inf"), None)
        if options.may_alone(decode):
            best = (sum(self.alone(decode).values()), None)
        if options.needs_alone(decode):
            return best
        moved, evicting, decoding = self._receiving(decode)
        fixed = evicting + decoding
        for computing, prefill in self._prefills:
            if computing + fixed >= best[0]:
                break  # the others cost more, even if moving costs nothing
            if not options.pairs(prefill, decode):
                continue
            total = computing + fixed + self._moving(prefill, decode, moved)
            if total < best[0]:
                total += sum(self._missing(prefill, decode).values())
            if total < best[0]:
                best = (total, prefill)
        return best

    def _computing(self, candidate: Candidate, request: Request) -> dict[str, float]:
        if self._in_seconds:
            return seconds_cost(candidate, request, self._seconds_weights)
        terms = kv_cost(candidate, request, self._weights)
        del terms["memory"]
        harm = self._weights.interference + _QUEUED * candidate.requests + candidate.loads
        terms["interference"] = terms["prefill"] * harm
        terms["context"] = _CONTEXT * candidate.context
        return terms

    def _receiving(self, decode: Candidate) -> tuple[float, float, float]:
        """Return the tokens that a decode worker fetches, what evicting for them costs, and the slower decoding."""
        moved, weights, rates = max(self._request.tokens - _kept(decode), 0), self._weights, decode.rates
        evicting = weights.eviction * decode.eviction * moved
        if not self._in_seconds or rates is None:
            return moved, evicting, decode.pending + _DECODING * _CONTEXT * decode.context
        slower = self._seconds_weights.slowed_by_others * (
            rates.token * decode.requests + rates.context_token * decode.context
        )
        return moved, evicting * rates.token, decode.backlog + self._request.output_tokens * slower

    def _missing(self, prefill: Candidate | None, decode: Candidate) -> dict[str, float]:
        """Return the term of missed SLOs; empty if the request is chosen without SLOs."""
        slo_cost = self._options.slo_cost
        return {} if slo_cost is None else {"slo": slo_cost(prefill, decode)}

    def _moving(self, prefill: Candidate, decode: Candidate, tokens: float) -> float:
        """Return the price of moving tokens: in computed tokens, or in seconds."""
        seconds = self._options.move_seconds(prefill.target, decode.target, tokens)
        return seconds if self._in_seconds else seconds / self._options.token_seconds


def _kept(decode: Candidate) -> int:
    """Return the tokens of the prompt that a decode worker still holds when the prompt begins there.

    If its memory is full, the prompt waits, and its blocks on the device are evicted meanwhile.
    """
    full = decode.kv_usage is not None and decode.kv_usage > _FULL
    return decode.cpu + decode.disk if full else decode.overlap


def apart(prefill: Policy, decode: Policy) -> PairRule:
    """Return the rule that chooses both workers apart, each by a policy, and never a decode worker alone."""

    def choose(options: PairOptions, request: Request) -> PairChoice:
        usable = [each for each in options.decodes if options.may_alone(each) or not options.needs_alone(each)]
        chosen = decode(usable or options.decodes, request)
        if options.needs_alone(chosen.chosen):
            return PairChoice(chosen, None, INTEGRATED if options.prefills else NO_PREFILL)
        return PairChoice(chosen, prefill(options.prefills_of(chosen.chosen), request), IN_PAIR)

    return choose
