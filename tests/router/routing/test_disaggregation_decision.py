"""Which workers compute and answer a prompt, where there are some for each: the default's cost, and peers' rules."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from benchmarks.policy.rivals.pairs import dynamo_pairs, fewest_requests, llm_d_pairs, mooncake_pairs, netkv_pairs
from indexer import Target
from router.policies import Candidate, Request, policy_named
from router.policies.kv_aware import KvWeights, SecondsWeights, kv_cost
from router.policies.pairs import PairChoice, PairCost, PairOptions, PairRule, PairTerms
from router.policies.rates import Rates
from router.policies.records import CostUnit
from router.policies.shared_tokens import SharedTokens
from router.settings import PolicyName, PolicySettings

WEIGHTS = KvWeights()
COMPUTED = 4e-5  # seconds of a token


def worker(name: str, **load: Any) -> Candidate:
    return Candidate(Target(f"http://{name}", 0, "m"), **{"kv_usage": 0.1, **load})


def options(
    decodes: list[Candidate],
    prefills: list[Candidate],
    seconds: dict[tuple[str, str], float] | None = None,
    alone: bool = True,
    integrated: tuple[Candidate, ...] = (),
) -> PairOptions:
    def move(prefill: Target, decode: Target, tokens: float) -> float:
        return tokens * (seconds or {}).get((prefill.worker[7:], decode.worker[7:]), 0.2 * COMPUTED)

    both = frozenset(each.target for each in integrated)
    return PairOptions([*decodes, *integrated], prefills, both, alone, move, COMPUTED)


def chosen(
    decodes: list[Candidate],
    prefills: list[Candidate],
    tokens: int = 10_000,
    rule: PairRule | None = None,
    alone: bool = True,
    seconds: dict[tuple[str, str], float] | None = None,
    integrated: tuple[Candidate, ...] = (),
) -> PairChoice:
    return (rule or PairCost(WEIGHTS, Random(1)))(
        options(decodes, prefills, seconds, alone, integrated), Request(tokens, 200.0)
    )


def names(choice: PairChoice) -> tuple[str, str | None]:
    prefill = choice.prefill and choice.prefill.chosen.target.worker[7:]
    return choice.decode.chosen.target.worker[7:], prefill


def total(choice: PairChoice) -> float:
    (cost,) = [each.total for each in choice.decode.costs if each.candidate is choice.decode.chosen]
    return cost


def test_cost_of_a_pair_is_the_prefill_its_move_and_the_load_of_decode() -> None:
    decode = worker("d", overlap=6000, requests=9, context=50_000, pending=700)
    prefill = worker("p", overlap=8000, pending=300)
    choice = chosen([decode], [prefill], alone=False)
    terms = choice.prefill.costs[0].terms
    computing = kv_cost(prefill, Request(10_000), KvWeights(interference_per_request=0.06))
    assert computing.pop("memory") == 0
    assert terms | computing == terms
    assert terms["move"] == pytest.approx(0.2 * 4000)
    assert terms["decode"] == pytest.approx(700 + 3 * 0.05 * 50_000)  # it decodes all the time
    assert total(choice) == pytest.approx(sum(terms.values()))


@pytest.mark.parametrize("in_seconds", [False, True])
def test_each_role_shares_the_price_of_the_copies_among_its_own_workers(in_seconds: bool) -> None:
    rates = Rates(attention=0.0) if in_seconds else None
    decode, prefill = worker("d", rates=rates), worker("p", rates=rates)
    plain = options([decode], [prefill])
    of_prefills, of_decodes = (SharedTokens(array("I", [8000]), array("d", [share])) for share in (0.5, 0.25))
    request, divided = Request(10_000), replace(plain, shared=of_prefills)
    usual = PairTerms(plain, request, WEIGHTS, SecondsWeights())
    terms = PairTerms(divided, replace(request, shared=of_decodes), WEIGHTS, SecondsWeights())
    whole = usual.alone(decode)["prefill"]
    assert terms.alone(decode)["prefill"] == pytest.approx(0.8 * whole)
    assert terms.pair(prefill, decode)["prefill"] == pytest.approx(0.6 * whole)


def test_no_pair_and_no_decode_worker_alone_costs_less_than_the_choice() -> None:
    random = Random(4)
    for _ in range(200):
        decodes, prefills = (
            [
                worker(
                    f"{role}{number}",
                    overlap=random.randrange(0, 9999),
                    requests=random.randrange(20),
                    pending=random.choice([0, 0, 5000, 40_000]),
                    context=random.randrange(300_000),
                    eviction=random.choice([0.0, 0.1]),
                )
                for number in range(3)
            ]
            for role in "dp"
        )
        seconds = {(p, d): random.random() * 3e-5 for p in ("p0", "p1", "p2") for d in ("d0", "d1", "d2")}
        choice = chosen(decodes, prefills, seconds=seconds)
        mine = options(decodes, prefills, seconds)
        terms = PairTerms(mine, Request(10_000, 200.0), WEIGHTS, SecondsWeights())
        alone = [terms.alone(decode) for decode in decodes]
        pairs = [terms.pair(prefill, decode) for prefill in prefills for decode in decodes]
        assert total(choice) == pytest.approx(min(sum(each.values()) for each in alone + pairs))


def test_pair_with_the_cheap_link_is_chosen() -> None:
    seconds = {("p", "near"): 3e-6, ("p", "far"): 3e-5}
    near, far = worker("near", requests=6, context=60_000), worker("far", requests=6, context=30_000)
    assert names(chosen([near, far], [worker("p")], tokens=40_000, seconds=seconds)) == ("near", "p")
    assert names(chosen([near, far], [worker("p")], tokens=1000, seconds=seconds, alone=False)) == ("far", "p")


def test_decode_worker_computes_a_short_rest_and_a_prefill_worker_a_long_one() -> None:
    decode = worker("d", overlap=9900, requests=10)
    prefill = worker("p", overlap=8000)
    assert names(chosen([decode], [prefill])) == ("d", None)
    assert chosen([decode], [prefill]).reason == "it costs less alone"
    assert names(chosen([decode], [prefill], tokens=30_000)) == ("d", "p")


def test_long_prompt_leaves_an_idle_decode_worker_whose_fleet_decodes() -> None:
    idle, others = worker("idle"), [worker(f"d{number}", requests=12, context=100_000) for number in range(3)]
    assert names(chosen([idle, *others], [worker("p")], tokens=30_000)) == ("idle", "p")


def test_decode_worker_helps_when_prefill_workers_are_late() -> None:
    decode = worker("d", requests=4)
    assert names(chosen([decode], [worker("p")]))[1] == "p"
    assert names(chosen([decode], [worker("p", pending=60_000)]))[1] is None
    assert names(chosen([decode], [worker("p", pending=60_000)], alone=False))[1] == "p"


def test_blocks_of_a_decode_worker_with_full_memory_do_not_count() -> None:
    prefill = worker("p", overlap=8000)
    full = worker("full", overlap=9900, requests=10, kv_usage=0.95)
    assert names(chosen([replace(full, kv_usage=0.9)], [prefill])) == ("full", None)
    assert names(chosen([full], [prefill])) == ("full", "p")
    assert names(chosen([replace(full, kv_usage=None)], [prefill])) == ("full", None)
    assert names(chosen([replace(full, cpu=9900)], [prefill])) == ("full", None)  # the host's memory keeps them
    pair = chosen([full], [prefill]).prefill
    assert pair is not None
    assert pair.costs[0].terms["move"] == pytest.approx(0.2 * 10_000)
    other = worker("other", requests=10)
    seconds = {("p", "full"): 1e-5, ("p", "other"): 0.9e-5}
    assert names(chosen([full, other], [prefill], seconds=seconds)) == ("other", "p")
    assert names(chosen([replace(full, kv_usage=0.5), other], [prefill], seconds=seconds))[0] == "full"


def test_decode_worker_that_computes_prompts_is_left() -> None:
    busy, free = worker("busy", pending=20_000), worker("free", context=100_000)
    assert names(chosen([busy, free], [worker("p")], alone=False))[0] == "free"


def test_missed_slos_count_in_every_option() -> None:
    queued, free = worker("queued", overlap=9000, pending=20_000), worker("free")
    usual = options([worker("d", requests=4)], [queued, free])
    rule, request = PairCost(WEIGHTS, Random(1)), Request(10_000, 200.0)
    assert names(rule(usual, request)) == ("d", "free")
    missed = {"queued": 0.0, "free": 15_000.0}
    slos = replace(usual, slo_cost=lambda prefill, _: missed[prefill.target.worker[7:]] if prefill else 1e6)
    choice = rule(slos, request)
    assert names(choice) == ("d", "queued")
    assert choice.decode.terms(choice.decode.chosen)["slo"] == 0.0
    assert choice.prefill is not None
    assert {each.candidate.target.worker[7:]: each.terms["slo"] for each in choice.prefill.costs} == missed


def test_integrated_worker_computes_and_answers_alone() -> None:
    both = worker("both", overlap=9900)
    choice = chosen([worker("d", requests=3)], [worker("p")], integrated=(both,))
    assert names(choice) == ("both", None)
    assert names(chosen([worker("d")], [worker("p")], integrated=(worker("busy", pending=50_000),), alone=False)) == (
        "d",
        "p",
    )


def test_without_prefill_workers_decode_computes() -> None:
    choice = chosen([worker("d", requests=50)], [], alone=True)
    assert (names(choice), choice.reason) == (("d", None), "no prefill worker is left")


def test_cost_is_in_seconds_if_speeds_differ() -> None:
    slow, fast = Rates(token=8e-5), Rates(token=2e-5)
    decode = worker("d", rates=fast, requests=5)
    choice = chosen([decode], [worker("slow", rates=slow), worker("fast", rates=fast)], tokens=30_000)
    assert choice.decode.unit is CostUnit.SECONDS
    assert names(choice) == ("d", "fast")


@pytest.mark.parametrize("name", PolicyName)
def test_every_policy_chooses_pairs(name: PolicyName) -> None:
    policy = policy_named(PolicySettings(name=name), Random(1))
    decodes, prefills = ([worker(f"{role}{number}") for number in range(4)] for role in "dp")
    assert policy.choose_pair is not None
    pairs = {names(chosen(decodes, prefills, rule=policy.choose_pair, alone=False)) for _ in range(60)}
    assert {prefill for _, prefill in pairs} <= {"p0", "p1", "p2", "p3"}
    if name in (PolicyName.ROUND_ROBIN, PolicyName.RANDOM, PolicyName.LEAST_LOADED):
        assert len({prefill for _, prefill in pairs}) == len({decode for decode, _ in pairs}) == 4


def test_dynamo_sends_to_the_least_context_unless_a_warm_worker_has_little_to_compute() -> None:
    warm, free = worker("warm", overlap=9000, context=500), worker("free")
    queued, cold = worker("queued", pending=8000, overlap=9000), worker("cold")
    always = dynamo_pairs(Random(1), conditional=False)
    assert names(chosen([warm, free], [queued, cold], rule=always)) == ("free", "queued")
    assert names(chosen([warm, free], [queued, cold], rule=dynamo_pairs(Random(1)))) == ("warm", None)
    assert names(chosen([warm, free], [cold], tokens=12_000, rule=dynamo_pairs(Random(1)))) == ("free", "cold")


def test_llm_d_keeps_prefixes_together_until_their_workers_are_18_seconds_late() -> None:
    rule = llm_d_pairs(Random(1))
    decodes = [worker("busy", requests=5, overlap=10_000), worker("free", requests=1)]
    warm, cold = worker("warm", overlap=9000, pending=50_000), worker("cold")
    assert names(chosen(decodes, [warm, cold], rule=rule)) == ("free", "warm")
    late = worker("warm", overlap=9000, pending=500_000)
    assert names(chosen(decodes, [late, cold], rule=rule)) == ("free", "cold")
    assert names(chosen([worker("d", overlap=9990)], [cold], rule=rule)) == ("d", "cold")


def test_mooncake_takes_the_least_time_to_first_token_and_between_tokens() -> None:
    long, many = worker("long", requests=2, context=400_000), worker("many", requests=20, context=30_000)
    queued, cold = worker("queued", pending=8000, overlap=9000), worker("cold", pending=500)
    assert names(chosen([long, many], [queued, cold], rule=mooncake_pairs(Random(1)))) == ("many", "queued")


def test_netkv_takes_the_decode_worker_nearest_to_the_prefill_worker() -> None:
    seconds = {("p", "near"): 3e-6, ("p", "far"): 3e-5}
    decodes = [worker("near", requests=9), worker("far")]
    assert names(chosen(decodes, [worker("p")], rule=netkv_pairs(Random(1)), seconds=seconds)) == ("near", "p")
    told = netkv_pairs(
        Random(1), lambda _, decode, tokens: tokens * 1e-6 if decode.worker.endswith("far") else tokens * 1e-5
    )
    assert names(chosen(decodes, [worker("p")], rule=told, seconds=seconds)) == ("far", "p")


def test_fewest_requests_computes_a_short_rest_on_a_free_decode_worker() -> None:
    rule = fewest_requests(Random(1))
    assert names(chosen([worker("d", overlap=9000), worker("e", requests=1)], [worker("p")], rule=rule)) == ("d", None)
    busy = worker("d", overlap=9000, waiting=1)
    assert names(chosen([busy], [worker("p")], rule=rule)) == ("d", "p")
    assert names(chosen([worker("d")], [worker("p", pending=70_000)], rule=rule)) == ("d", None)
