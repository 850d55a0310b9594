"""The rules of llm-d's endpoint picker: its built-in scorers, and the filter of its guide for precise prefixes.

Sources: llm-d/llm-d-router, pkg/epp at ebab6879: config/loader/defaults.go, and the plugins scorer/queuedepth,
scorer/kvcacheutilization, scorer/tokenload and filter/prefixcacheaffinity. Metrics are read every 50 ms
(pkg/epp/server/options.go).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from benchmarks.policy.rivals.rule import Parts
from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision, Policy, Request, cheapest, known_usage

METRICS_INTERVAL: Final = 0.05
# The weights of queue-scorer, kv-cache-utilization-scorer and prefix-cache-scorer.
_QUEUE, _KV_FREE, _PREFIX = 2.0, 2.0, 3.0
# llm-d/llm-d-kv-cache, the weight of the tier shared_storage in kvCacheBackendConfig's defaults.
_SHARED: Final = 0.4
# affinityThreshold, maxTTFTPenaltyMs and queueThresholdTokens.
_AFFINITY: Final = 0.8
_PENALTY: Final = 18.0
_MOST_TOKENS: Final = 4_194_304
# peakPrefillThroughput is measured with one chunk of this many tokens on an idle worker.
_CHUNK: Final = 8192


def llm_d(parts: Parts) -> Policy:
    """Return llm-d's weighted scores, as costs: twice the queue, twice the KV memory in use, thrice the uncached share.

    The queue is the engine's. It is scaled to 0 for the shortest and 1 for the longest.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        engines = {each.target: parts.load.of(each.target.worker, each.target.dp_rank).engine for each in candidates}
        queues = {
            each.target: each.waiting if engines[each.target].queue is None else engines[each.target].queue or 0
            for each in candidates
        }
        shortest, longest = min(queues.values()), max(queues.values())
        assumed = known_usage(candidates)

        def terms(candidate: Candidate) -> dict[str, float]:
            usage = engines[candidate.target].kv_usage
            if usage is None:
                usage = assumed if candidate.kv_usage is None else candidate.kv_usage
            queue = queues[candidate.target]
            return {
                "queue": _QUEUE * (queue - shortest) / (longest - shortest) if longest > shortest else 0.0,
                "memory": _KV_FREE * usage,
                "uncached": _PREFIX * (1 - _overlap(candidate) / max(request.tokens, 1)),
            }

        return cheapest(candidates, terms, parts.random, unit=CostUnit.SCORE)

    return choose


def _overlap(candidate: Candidate) -> float:
    """Return the overlap, with the pool's tokens at the weight of their tier. Pulls are decided after the choice."""
    source = candidate.source
    return candidate.overlap + (_SHARED * source.tokens if source is not None and source.peer is None else 0.0)


def llm_d_affinity(random: Random) -> Callable[[list[Candidate], Request], Decision]:
    """Return the policy of llm-d's affinity filter and token-load scorer.

    The candidates that hold 0.8 of the prompt are left, if any do, unless their queues exceed the others' by 18 s. Of
    these, the one with the fewest tokens to compute wins, the prompt's included.
    """
    least, throughput = least_queued(random, _MOST_TOKENS), _CHUNK / prefill_seconds(Rates(), _CHUNK, 0, 0, 0)

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        enough = _AFFINITY * request.tokens
        warm = [each for each in candidates if each.overlap >= enough]
        others = [each for each in candidates if each.overlap < enough]
        if warm and others:
            later = min(each.pending for each in warm) - min(each.pending for each in others)
            if later > _PENALTY * throughput:
                return least(candidates, request)
        return least(warm or candidates, request)

    return choose


def least_queued(random: Random, most: float = float("inf")) -> Callable[[list[Candidate], Request], Decision]:
    """Return the policy of the fewest tokens to compute, this prompt's included. More than `most` count as `most`."""

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        def terms(candidate: Candidate) -> dict[str, float]:
            load = {} if candidate.source is None else {"load": candidate.source.load}
            uncached = max(request.tokens - candidate.reused, 0)
            queued = min(float(candidate.pending + uncached), most) - uncached
            return {"queued": queued, "prefill": float(uncached), **load}

        return cheapest(candidates, terms, random)

    return choose
