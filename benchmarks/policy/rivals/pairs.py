"""The rules by which other routers choose a prefill and a decode worker, under their policies' names.

Each is written from its public description. A comment names the source of its constants. SGLang's gateway uses its
policy `cache_aware` for both roles, and vLLM's example proxy uses round robin: `router.policies.pairs.apart`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from benchmarks.policy.rivals.llm_d import least_queued, llm_d_affinity
from indexer import Target
from router.policies.pairs import IN_PAIR, INTEGRATED, NO_PREFILL, PairChoice, PairOptions, PairRule
from router.policies.rates import Rates
from router.policies.records import Candidate, CostUnit, Decision, Request, cheapest

# ai-dynamo/dynamo, lib/kv-router/src/conditional_disagg.rs: DEFAULT_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD and
# DEFAULT_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD.
_DYNAMO_TOKENS: Final = 2048
_DYNAMO_RATIO: Final = 0.7
# Before this rule chose pairs together, the default did so with these constants.
_FEWEST_SKIP: Final = 2048
_FEWEST_RATIO: Final = 0.7
_FEWEST_SATURATED: Final = 65_536
_TIE: Final = 0.4


def dynamo_pairs(random: Random, conditional: bool = True) -> PairRule:
    """Return the rule of Dynamo's prefill router.

    - The prefill worker has the fewest tokens to compute. The decode worker has the fewest tokens of requests.
    - `conditional`: the decode worker with the least prefill and decode cost computes a prompt alone, if little of it
      is not cached there.
    """
    prefill_policy = least_queued(random)

    def choose(options: PairOptions, request: Request) -> PairChoice:
        def warm(candidate: Candidate) -> dict[str, float]:
            prefill = candidate.pending + max(request.tokens - candidate.overlap, 0)
            return {"prefill": float(prefill), "decode": float(candidate.context + request.tokens)}

        if conditional and options.alone:
            warmest = cheapest(options.decodes, warm, random)
            uncached = max(request.tokens - warmest.chosen.overlap, 0)
            if uncached < _DYNAMO_TOKENS and uncached < _DYNAMO_RATIO * max(request.tokens, 1):
                return PairChoice(warmest, None, "little is left to compute")
        least = cheapest(options.decodes, lambda each: {"decode": float(each.context + request.tokens)}, random)
        return _paired(options, request, least, prefill_policy)

    return choose


def llm_d_pairs(random: Random) -> PairRule:
    """Return the rule of llm-d's guide for prefill and decode workers (`always-disagg-pd-decider`).

    The decode worker has the fewest requests. The prefill worker is chosen by the affinity filter (`llm_d_affinity`).
    """
    prefill_policy = llm_d_affinity(random)

    def choose(options: PairOptions, request: Request) -> PairChoice:
        decode = cheapest(options.decodes, lambda each: {"requests": each.requests}, random, unit=CostUnit.REQUESTS)
        return _paired(options, request, decode, prefill_policy)

    return choose


def mooncake_pairs(random: Random) -> PairRule:
    """Return the rule of Mooncake's conductor: the least estimated TTFT, and the least time between tokens.

    https://arxiv.org/abs/2407.00079, algorithm 1. Prefixes are copied between prefill workers only if these can pull.
    """
    prefill_policy = least_queued(random)

    def choose(options: PairOptions, request: Request) -> PairChoice:
        decode = cheapest(options.decodes, lambda each: _step(each, request), random, unit=CostUnit.SECONDS)
        return _paired(options, request, decode, prefill_policy)

    return choose


def _step(candidate: Candidate, request: Request) -> dict[str, float]:
    """Return the time between tokens on a decode worker, by its rates or by those that are assumed."""
    rates = candidate.rates or Rates()
    return {
        "requests": rates.token * (candidate.requests + 1),
        "context": rates.context_token * (candidate.context + request.tokens),
    }


def netkv_pairs(random: Random, seconds: Callable[[Target, Target, float], float] | None = None) -> PairRule:
    """Return NetKV's rule: https://arxiv.org/abs/2606.03910

    The prefill worker has the least estimated TTFT. The decode worker then has the least sum of three times: the
    transfer of the tokens that it lacks, the wait for memory, and the time between tokens.

    `seconds`: the seconds in which tokens move between a pair, as the network's operator knows; None: as learned.
    """
    prefill_policy = least_queued(random)

    def choose(options: PairOptions, request: Request) -> PairChoice:
        if not options.prefills:
            decode = cheapest(options.decodes, lambda each: _step(each, request), random, unit=CostUnit.SECONDS)
            return _paired(options, request, decode, prefill_policy)
        prefill = prefill_policy(options.prefills, request)
        sender, move_seconds = prefill.chosen.target, seconds or options.move_seconds

        def terms(candidate: Candidate) -> dict[str, float]:
            moved = max(request.tokens - candidate.overlap, 0)
            step = _step(candidate, request)
            moves = candidate.target not in options.integrated
            transfer = move_seconds(sender, candidate.target, moved) if moves else 0.0
            return {"transfer": transfer, "waiting": candidate.waiting * sum(step.values()), **step}

        decode = cheapest(options.decodes, terms, random, unit=CostUnit.SECONDS)
        if options.needs_alone(decode.chosen):
            return PairChoice(decode, None, INTEGRATED)
        return PairChoice(decode, prefill, IN_PAIR)

    return choose


def fewest_requests(random: Random) -> PairRule:
    """Return the rule that this project had before it chose pairs together.

    - The decode worker has the fewest requests. Its cached tokens decide only between equal ones.
    - A free one computes a prompt alone if little of it is not cached there, or if all prefill workers are saturated.
    - The prefill worker has the fewest tokens to compute.
    """
    prefill_policy = least_queued(random)

    def choose(options: PairOptions, request: Request) -> PairChoice:
        most = max(candidate.context for candidate in options.decodes) + 1

        def terms(candidate: Candidate) -> dict[str, float]:
            return {
                "requests": float(candidate.requests),
                "context": _TIE * candidate.context / most,
                "uncached": _TIE * (candidate.work(request.tokens) + 1) / (request.tokens + 1),
            }

        decode = cheapest(options.decodes, terms, random, unit=CostUnit.REQUESTS)
        chosen = decode.chosen
        uncached = round(chosen.work(request.tokens))
        if options.alone and chosen.kv_usage is not None and not chosen.waiting and chosen.pending < _FEWEST_SKIP:
            if uncached < _FEWEST_SKIP and uncached < _FEWEST_RATIO * max(request.tokens, 1):
                return PairChoice(decode, None, "little is left to compute")
            if all(candidate.pending >= _FEWEST_SATURATED for candidate in options.prefills):
                return PairChoice(decode, None, "all prefill workers are saturated")
        return _paired(options, request, decode, prefill_policy)

    return choose


def _paired(
    options: PairOptions,
    request: Request,
    decode: Decision,
    prefill_policy: Callable[[list[Candidate], Request], Decision],
) -> PairChoice:
    """Return the choice of a decode worker with a prefill worker, unless it needs none."""
    if options.needs_alone(decode.chosen):
        return PairChoice(decode, None, INTEGRATED if options.prefills else NO_PREFILL)
    return PairChoice(decode, prefill_policy(options.prefills, request), IN_PAIR)
