"""The rules of other routers, for comparison: over the same exact index of caches as the default policy.

Each rule is written from its public description. A comment names the source of its constants: repository, file and
commit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.policy.pair_rivals import dynamo_pairs, llm_d_pairs, mooncake_pairs
from indexer import Target
from router.load.target_load import LoadTable
from router.policies import NamedPolicy, PolicySpec, made
from router.policies.linear import Line, LinearPolicy
from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision, Policy, Request, Source, cheapest, known_usage
from router.prediction.learned import Learned
from router.settings import PolicyName
from simulator.fleet.simulated_router import Side

# ai-dynamo/dynamo, lib/kv-router/src/scheduling/config.rs at c2f2e1aa8069: the defaults of host_cache_hit_weight and
# disk_cache_hit_weight.
_DYNAMO_HOST_CREDIT = 0.75
_DYNAMO_DISK_CREDIT = 0.25
# ai-dynamo/dynamo, the default of --shared-cache-multiplier.
_DYNAMO_SHARED_CREDIT = 0.5
# llm-d/llm-d, guides/precise-prefix-cache-aware/gaie-kv-events/values.yaml at bf8659b23aa1: the weights of
# queue-scorer, kv-cache-utilization-scorer and precise-prefix-cache-scorer. Later versions have other weights.
_LLM_D_QUEUE = 2.0
_LLM_D_KV_FREE = 2.0
_LLM_D_PREFIX = 3.0
# llm-d/llm-d-kv-cache, the weight of the tier shared_storage in kvCacheBackendConfig's defaults.
_LLM_D_SHARED = 0.4
# WukLab/preble, multi_node/global_scheduler_with_time.py at 0c962c4cfdb8: the window of the load, in seconds.
_PREBLE_WINDOW: Final = 180.0
# More seconds than any load: targets with a shorter match are not chosen while Preble exploits a match.
_SHORTER_MATCH: Final = 1e6


class Dynamo(LinearPolicy):
    """NVIDIA Dynamo's policy: the prefill a target would have to do, and the tokens that its requests would hold.

    A cached token in CPU memory or on disk counts as part of an uncached one.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random, 1 - _DYNAMO_HOST_CREDIT, 1 - _DYNAMO_DISK_CREDIT, least_uncached=0)

    def line(self, candidate: Candidate) -> Line:
        return float(candidate.pending + candidate.context), 1.0, 0.0

    def cost_with(self, candidate: Candidate, source: Source, request: Request) -> float:
        return self.cost_after(candidate, candidate.overlap, request) - _dynamo_credit(source)

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        away = self.cpu_token * candidate.cpu + self.disk_token * candidate.disk
        if candidate.source is not None:
            away -= _dynamo_credit(candidate.source)
        prefill = candidate.pending + max(request.tokens - candidate.overlap, 0) + away
        return {"prefill": prefill, "decode": candidate.context + request.tokens}


def _dynamo_credit(source: Source) -> float:
    """Return the computed tokens that a pool counts for. Peers count nothing."""
    return _DYNAMO_SHARED_CREDIT * source.tokens if source.peer is None else 0.0


def llm_d(random: Random) -> Policy:
    """Return llm-d's weighted scores, as costs: twice the queue, twice the KV memory in use, thrice the uncached share.

    The queue is scaled to 0 for the shortest and 1 for the longest, as in llm-d's scorer.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        queues = [candidate.waiting for candidate in candidates]
        shortest, spread = min(queues), max(queues) - min(queues)
        assumed = known_usage(candidates)

        def terms(candidate: Candidate) -> dict[str, float]:
            usage = assumed if candidate.kv_usage is None else candidate.kv_usage
            return {
                "queue": _LLM_D_QUEUE * (candidate.waiting - shortest) / spread if spread else 0.0,
                "memory": _LLM_D_KV_FREE * usage,
                "uncached": _LLM_D_PREFIX * (1 - _llm_d_overlap(candidate) / max(request.tokens, 1)),
            }

        return cheapest(candidates, terms, random, unit=CostUnit.SCORE)

    return choose


def _llm_d_overlap(candidate: Candidate) -> float:
    """Return the overlap, with the pool's tokens at the weight of their tier. Pulls are decided after the choice."""
    source = candidate.source
    return candidate.overlap + (_LLM_D_SHARED * source.tokens if source is not None and source.peer is None else 0.0)


class Lmetric(LinearPolicy):
    """LMetric: the tokens to prefill times the requests on the target, this one included:
    https://arxiv.org/abs/2603.15202"""

    def __init__(self, random: Random) -> None:
        super().__init__(random, unit=CostUnit.TOKEN_REQUESTS)

    def line(self, candidate: Candidate) -> Line:
        requests = candidate.requests + 1
        return float(candidate.pending * requests), float(requests), 0.0

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        prefill = candidate.pending + max(request.tokens - candidate.overlap, 1)
        return {"prefill times requests": prefill * (candidate.requests + 1)}


class Mooncake(LinearPolicy):
    """The rule of Mooncake's conductor, the least estimated time to first token: https://arxiv.org/abs/2407.00079

    The time is counted in prefill tokens: the queued ones, those of the prompt, and those that are loaded.
    """

    def __init__(self, random: Random, cpu_token: float, disk_token: float) -> None:
        super().__init__(random, cpu_token, disk_token)

    def line(self, candidate: Candidate) -> Line:
        return float(candidate.pending), 1.0, 0.0

    def cost_with(self, candidate: Candidate, source: Source, request: Request) -> float:
        return self.cost_after(candidate, candidate.reused, request) + source.load

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        terms = {
            "pending": float(candidate.pending),
            "transfer": self.cpu_token * candidate.cpu + self.disk_token * candidate.disk,
            "prefill": float(max(request.tokens - candidate.reused, 1)),
        }
        if candidate.source is not None:
            terms["load"] = candidate.source.load
        return terms


class Preble:
    """Preble's E2 scheduling: https://arxiv.org/abs/2407.00023

    - Exploit: if most of the prompt is cached, the least loaded of the targets with the longest match wins.
    - Explore: otherwise, the least load + eviction + prefill wins.

    The load is the work that was sent to a target in the last three minutes. All terms are in seconds, by the rates
    that are assumed of every worker. Prefixes are not moved between targets, as in the published code.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._rates = Rates()
        self._sent: dict[Target, deque[tuple[float, float]]] = {}
        self._loads: dict[Target, float] = {}

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        self._forget_before(request.at - _PREBLE_WINDOW)
        loads = {candidate.target: self._loads.get(candidate.target, 0.0) for candidate in candidates}
        longest = max(candidate.overlap for candidate in candidates)
        exploits = 2 * longest > request.tokens

        def terms(candidate: Candidate) -> dict[str, float]:
            load = loads[candidate.target]
            if exploits:
                return {"shorter match": _SHORTER_MATCH * (candidate.overlap < longest), "load": load}
            prefill = self._prefill(candidate, request)
            return {"load": load, "eviction": prefill * candidate.eviction, "prefill": prefill}

        decision = cheapest(candidates, terms, self._random, unit=CostUnit.SECONDS)
        self._send(decision.chosen, request)
        return decision

    def _prefill(self, candidate: Candidate, request: Request) -> float:
        return prefill_seconds(self._rates, request.tokens, candidate.overlap, 0, 0)

    def _send(self, chosen: Candidate, request: Request) -> None:
        seconds = self._prefill(chosen, request) + self._rates.step * request.output_tokens
        self._sent.setdefault(chosen.target, deque()).append((request.at, seconds))
        self._loads[chosen.target] = self._loads.get(chosen.target, 0.0) + seconds

    def _forget_before(self, at: float) -> None:
        for target, sent in self._sent.items():
            while sent and sent[0][0] < at:
                self._loads[target] -= sent.popleft()[1]


RIVALS: dict[str, PolicySpec] = {
    "dynamo": PolicySpec(
        lambda _, random: Dynamo(random), "NVIDIA Dynamo, ai-dynamo/dynamo", lambda _, random: dynamo_pairs(random)
    ),
    "llm_d": PolicySpec(lambda _, random: llm_d(random), "llm-d, llm-d/llm-d", lambda _, random: llm_d_pairs(random)),
    "mooncake": PolicySpec(
        lambda settings, random: Mooncake(random, settings.cpu_token, settings.disk_token),
        "Mooncake, arXiv 2407.00079",
        lambda _, random: mooncake_pairs(random),
    ),
    "preble": PolicySpec(lambda _, random: Preble(random), "Preble, arXiv 2407.00023"),
    "lmetric": PolicySpec(lambda _, random: Lmetric(random), "LMetric, arXiv 2603.15202"),
}


@dataclass(frozen=True, slots=True)
class RivalSide(Side):
    """A router with the rule of another one, by its name in `RIVALS`."""

    rule: str = "dynamo"

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:  # noqa: ARG002
        return made(RIVALS[self.rule], self.settings, random)


def rival(rule: str, name: str = "", sources: bool = False) -> RivalSide:
    """Return the router with a rule of `RIVALS`."""
    return RivalSide(name or rule, PolicyName.KV_AWARE, sources=sources, rule=rule)
