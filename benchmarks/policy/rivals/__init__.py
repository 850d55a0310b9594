"""The rules of other routers, for comparison: over the same exact index of caches as the default policy.

Each rule is written from its public source. A comment names repository, file and commit. docs/policy-benchmarks.md
lists them, and what each of them reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.policy.rivals.dynamo import AGENTIC, AGENTIC_WITHOUT_FLOOR, Dynamo, PrefillQueue
from benchmarks.policy.rivals.llm_d import METRICS_INTERVAL, llm_d, llm_d_affinity
from benchmarks.policy.rivals.others import Lmetric, aibrix, mooncake, smg
from benchmarks.policy.rivals.pairs import dynamo_pairs, llm_d_pairs, mooncake_pairs
from benchmarks.policy.rivals.preble import Preble
from benchmarks.policy.rivals.rule import Parts, Rule
from router.admission.admission import Admission
from router.load.target_load import LoadTable
from router.policies import NamedPolicy, PolicySpec
from router.policies.pairs import apart
from router.prediction.learned import Learned
from router.settings import PolicyName
from simulator.fleet.simulated_router import Side

RIVALS: dict[str, Rule] = {
    "dynamo": Rule(Dynamo, "NVIDIA Dynamo, ai-dynamo/dynamo 07a6c9ce", dynamo_pairs, queues=True),
    "dynamo, agentic": Rule(lambda parts: Dynamo(parts, AGENTIC), "NVIDIA Dynamo's agentic preset", queues=True),
    "dynamo, agentic without floor": Rule(
        lambda parts: Dynamo(parts, AGENTIC_WITHOUT_FLOOR), "NVIDIA Dynamo's agentic preset", queues=True
    ),
    "llm_d": Rule(llm_d, "llm-d, llm-d/llm-d-router ebab6879", llm_d_pairs, METRICS_INTERVAL),
    "llm_d, affinity": Rule(lambda parts: llm_d_affinity(parts.random), "llm-d, llm-d/llm-d-router ebab6879"),
    "mooncake": Rule(mooncake, "Mooncake, arXiv 2407.00079", mooncake_pairs),
    "preble": Rule(Preble, "Preble, WukLab/preble 8e7906a3"),
    "lmetric": Rule(lambda parts: Lmetric(parts.random), "LMetric, arXiv 2603.15202"),
    "lmetric, own": Rule(lambda parts: Lmetric(parts.random, own=True), "SGLang, sgl-project/sglang acaa759a"),
    "smg": Rule(lambda parts: smg(parts.random), "smg, lightseekorg/smg 73da68ca"),
    "aibrix": Rule(lambda parts: aibrix(parts.random), "AIBrix, vllm-project/aibrix e3e10f9e"),
}


@dataclass(frozen=True, slots=True)
class RivalSide(Side):
    """A router with the rule of another one, by its name in `RIVALS`."""

    rule: str = "dynamo"

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:
        rule = RIVALS[self.rule]
        choose = rule.make(Parts(random, learned, load))
        pairs = apart(rule.make(Parts(random, learned, load)), choose) if rule.pairs is None else rule.pairs(random)
        return NamedPolicy(PolicySpec(lambda *_: choose, rule.source), choose, choose_pair=pairs)

    def make_admission(self, policy: NamedPolicy, make: Callable[[type[Admission]], Admission]) -> Admission:
        admission = make(PrefillQueue if RIVALS[self.rule].queues else Admission)
        if isinstance(admission, PrefillQueue) and isinstance(policy.choose, Dynamo):
            admission.watch(policy.choose)
        return admission


def rival(rule: str, name: str = "", sources: bool = False) -> RivalSide:
    """Return the router with a rule of `RIVALS`."""
    interval = RIVALS[rule].metrics_interval
    return RivalSide(name or rule, PolicyName.KV_AWARE, sources=sources, metrics_interval=interval, rule=rule)
