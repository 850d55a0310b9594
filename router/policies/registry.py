"""The policies that settings can name: their constructors, their needs and their sources.

A new policy is a function of candidates, or a `LinearPolicy`; a name in `PolicyName`; and an entry in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from router.policies.custom import CustomFunction, CustomPolicy
from router.policies.kv_aware import KvWeights, kv_aware
from router.policies.pairs import PairCost, PairRule, apart
from router.policies.plain import AtRandom, LeastLoaded, RoundRobin, cache_aware, session_affinity
from router.policies.records import Policy
from router.settings import PolicyName, PolicySettings
from router.settings.own_code import function_named


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The description of one policy.

    - `source`: where its rule and its constants come from.
    - `pairs`: makes its choice of a prefill and a decode worker; None: each of them by the policy.
    - `reads_prompts`: it uses overlaps or the beginnings of prompts. Otherwise no prompt is tokenized or matched.
    - `uses_rates`: it uses the speed of workers once that is learned.
    - `late_binding`: requests wait in the router while their selection is busy with prefills.
    """

    make: Callable[[PolicySettings, Random], Policy]
    source: str
    pairs: Callable[[PolicySettings, Random], PairRule] | None = None
    reads_prompts: bool = True
    uses_rates: bool = False
    late_binding: bool = False


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy and its description.

    - `custom`: the functions of one's own that replace its costs, or add to them; None without any.
    - `choose_pair`: its choice of a prefill and a decode worker; None if it chooses each of them by `choose`.
    """

    spec: PolicySpec
    choose: Policy
    custom: CustomPolicy | None = None
    choose_pair: PairRule | None = None


def _kv_weights(settings: PolicySettings) -> KvWeights:
    return KvWeights(
        settings.interference,
        settings.interference_per_request,
        settings.eviction,
        settings.cpu_token,
        settings.disk_token,
        settings.near,
    )


POLICIES: dict[PolicyName, PolicySpec] = {
    PolicyName.KV_AWARE: PolicySpec(
        lambda settings, random: kv_aware(_kv_weights(settings), random),
        "this project: docs/policy.md",
        lambda settings, random: PairCost(_kv_weights(settings), random),
        uses_rates=True,
        late_binding=True,
    ),
    PolicyName.ROUND_ROBIN: PolicySpec(lambda _, __: RoundRobin(), "everywhere", reads_prompts=False),
    PolicyName.RANDOM: PolicySpec(lambda _, random: AtRandom(random), "everywhere", reads_prompts=False),
    PolicyName.LEAST_LOADED: PolicySpec(lambda _, random: LeastLoaded(random), "everywhere", reads_prompts=False),
    PolicyName.SESSION_AFFINITY: PolicySpec(
        lambda _, random: session_affinity(random), "consistent hashing with bounded loads, arXiv 1608.01350"
    ),
    PolicyName.CACHE_AWARE: PolicySpec(lambda _, random: cache_aware(random), "SGLang, sgl-project/sglang"),
}


def policy_named(settings: PolicySettings, random: Random) -> NamedPolicy:
    """Return the policy that the settings name. `random` breaks its ties.

    The default policy decides where a function of one's own fails.
    """
    replaces = not isinstance(settings.name, PolicyName)
    spec = POLICIES[PolicyName.KV_AWARE if replaces else PolicyName(settings.name)]
    names = [settings.name] if replaces else list(settings.extra)
    if replaces:  # a choice that its own costs make needs no queue
        spec = replace(spec, source="one's own", late_binding=False)
    custom = None
    if names:
        functions = [CustomFunction(name, function_named(name)) for name in names]
        custom = CustomPolicy(functions, replaces, random, settings.near)
    return replace(made(spec, settings, random), custom=custom)


def made(spec: PolicySpec, settings: PolicySettings, random: Random) -> NamedPolicy:
    """Return the policy that a description makes."""
    policy = spec.make(settings, random)
    pairs = apart(spec.make(settings, random), policy) if spec.pairs is None else spec.pairs(settings, random)
    return NamedPolicy(spec, policy, None, pairs)
