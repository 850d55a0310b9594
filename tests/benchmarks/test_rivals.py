"""The rules of other routers, against the formulas of their sources."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from benchmarks.policy.rivals import RIVALS, rival
from benchmarks.policy.rivals.dynamo import AGENTIC, AGENTIC_WITHOUT_FLOOR, Dynamo
from benchmarks.policy.rivals.llm_d import llm_d, llm_d_affinity
from benchmarks.policy.rivals.others import Lmetric, aibrix, mooncake, smg
from benchmarks.policy.rivals.preble import Preble, PromptTree
from benchmarks.policy.rivals.rule import Parts
from benchmarks.policy.sessions import AGENTS, generated
from indexer import Target
from router.fleet.engine_metrics import EngineView
from router.load.target_load import LoadTable, ReservedLoad
from router.policies import Candidate, Policy, Request
from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Source
from router.prediction.learned import Learned
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Simulation
from simulator.fleet.trace import TracedRequest

BLOCK = 100


def parts() -> Parts:
    return Parts(Random(0), Learned(Rates(), lambda: 0.0, 0.1, 0.5), LoadTable(lambda: 0.0))


def target(name: str) -> Target:
    return Target(name, 0, "m")


def candidate(name: str, **loads: Any) -> Candidate:
    return Candidate(target(name), **loads)


def asked(*blocks: int, output: int = 10) -> TracedRequest:
    return TracedRequest(0.0, len(blocks) * BLOCK, output, blocks, blocks, "s")


def chosen(policy: Policy, candidates: list[Candidate], tokens: int = 1000) -> str:
    return policy(candidates, Request(tokens)).chosen.target.worker


def terms(policy: Policy, candidates: list[Candidate], tokens: int = 1000) -> list[dict[str, float]]:
    return [cost.terms for cost in policy(candidates, Request(tokens)).costs]


@pytest.mark.parametrize("rule", RIVALS)
def test_every_rule_explains_a_choice_among_the_candidates(rule: str) -> None:
    policy = RIVALS[rule].make(parts())
    candidates = [candidate("a", overlap=500, requests=2, context=2000), candidate("b", pending=100, requests=1)]
    for session in (None, "ann"):
        decision = policy(candidates, Request(1000, 200, session))
        totals = {cost.candidate.target: cost.total for cost in decision.costs}
        assert decision.chosen in candidates
        assert totals[decision.chosen.target] == min(totals.values())
    assert chosen(policy, [candidate("a")], tokens=0) == "a"


@pytest.mark.parametrize("rule", RIVALS)
def test_every_rule_serves_a_fleet(rule: str) -> None:
    requests = generated(AGENTS, 0.5, 30, BLOCK, Random(0))
    outcomes = Simulation(FleetSpec(LLAMA_70B, 2, 200_000, BLOCK), rival(rule), Random(0)).run(requests, until=30)
    assert len(outcomes) > len(requests)
    assert all(outcome.ended < float("inf") for outcome in outcomes)


def test_dynamo_counts_each_active_block_once_and_the_tokens_that_are_not_active() -> None:
    policy = Dynamo(parts())
    policy.start(BLOCK, 10_000)
    first, second = asked(1, 2, 3), asked(1, 2, 4, 5)
    for request in (first, second):
        policy.sent(request, target("a"))
    policy.arrives(asked(1, 2, 4, 9))
    both = [candidate("a", overlap=200, pending=700), candidate("b")]
    assert terms(policy, both, 400) == [
        {"prefill": 900.0, "decode": 600.0, "requests": 0.0},  # blocks 1 to 5, and 9
        {"prefill": 400.0, "decode": 400.0, "requests": 0.0},
    ]
    policy.ended(second, target("a"), 0.02)
    assert terms(policy, both, 400)[0]["decode"] == 500  # blocks 1 to 3, and 4 and 9


def test_dynamo_credits_slower_tiers_with_less() -> None:
    policy = Dynamo(parts())
    among = [candidate("disk", overlap=800, disk=800), candidate("host", overlap=800, cpu=800)]
    among.append(Candidate(target("pool"), source=Source("pool", 800, 0.1)))
    assert [each["prefill"] for each in terms(policy, among)] == [800, 400, 600]


def test_dynamos_agentic_preset_weighs_hits_twice_prefill_four_times_and_each_request_1024_tokens() -> None:
    warm = candidate("warm", overlap=900, requests=3, pending=100)
    assert terms(Dynamo(parts(), AGENTIC), [warm])[0] == {"prefill": 0, "decode": 1000, "requests": 3072}
    assert terms(Dynamo(parts(), AGENTIC_WITHOUT_FLOOR), [warm])[0]["prefill"] == 4 * (1100 - 1800)


def test_dynamo_holds_requests_while_every_worker_has_more_than_16_steps_to_compute() -> None:
    """Each prompt is 5 engine steps long, so a worker is sent four of them at once, and then one at a time."""
    prompt = 5 * 8192
    requests = [TracedRequest(0.01 * number, prompt, 1, (), (), str(number)) for number in range(12)]
    outcomes = Simulation(FleetSpec(LLAMA_70B, 2, 10_000_000), rival("dynamo"), Random(0)).run(requests)
    held = [outcome for outcome in outcomes if outcome.sent > outcome.request.arrival + 0.001]
    assert len(held) == 12 - 2 * 4
    assert [outcome.sent for outcome in held] == sorted(outcome.sent for outcome in held)


def test_llm_d_reads_the_queue_and_the_memory_that_engines_report() -> None:
    made = parts()
    for name, queue, usage in (("holder", 4, 0.9), ("idle", 0, 0.5)):
        made.load.of(name, 0).engine = EngineView(queue=queue, kv_usage=usage)
    holder, idle = candidate("holder", overlap=1000), candidate("idle", waiting=7)
    assert terms(llm_d(made), [holder, idle]) == [
        {"queue": 2.0, "memory": pytest.approx(1.8), "uncached": 0.0},
        {"queue": 0.0, "memory": pytest.approx(1.0), "uncached": 3.0},
    ]
    assert rival("llm_d").metrics_interval == 0.05


def test_unknown_kv_usage_counts_as_the_highest() -> None:
    full, free, silent = candidate("full", kv_usage=0.8), candidate("free", kv_usage=0.2), candidate("silent")
    assert [each["memory"] for each in terms(llm_d(parts()), [silent, full, free])] == [1.6, 1.6, 0.4]
    assert terms(llm_d(parts()), [silent])[0]["memory"] == 2.0


def test_llm_ds_filter_keeps_prefixes_together_until_their_queues_are_18_seconds_late() -> None:
    policy = llm_d_affinity(Random(0))
    throughput = 8192 / prefill_seconds(Rates(), 8192, 0, 0, 0)
    cold = candidate("cold", overlap=799)
    for seconds, expected in ((17, "warm"), (19, "cold")):
        assert chosen(policy, [candidate("warm", overlap=800, pending=int(seconds * throughput)), cold]) == expected
    assert chosen(policy, [candidate("a", overlap=700, pending=400), cold]) == "cold"  # none holds 0.8: fewest tokens


@pytest.mark.parametrize(("own", "cost"), [(False, 700 * 4), (True, 600 * 4)])
def test_lmetric_multiplies(own: bool, cost: float) -> None:
    policy = Lmetric(Random(0), own)
    decision = policy([candidate("a", overlap=400, pending=100, requests=3)], Request(1000))
    assert decision.costs[0].total == cost


def test_mooncake_adds_the_predicted_times_of_the_queue_the_load_and_the_prefill() -> None:
    made = parts()
    ReservedLoad(made.load.of("a", 0), 500, 1000, prefill_seconds=0.7)
    source = Source("pool", 300, 0.1, computed_seconds=0.001)
    loaded = candidate("a", overlap=400, requests=9, context=5000, source=source)
    assert terms(mooncake(made), [loaded])[0] == {
        "queued": 0.7,
        "load": pytest.approx(0.03),
        "prefill": prefill_seconds(Rates(), 1000, 700, 9, 5000),
    }


def test_smg_follows_the_longest_match_however_short_then_load_then_size() -> None:
    policy = smg(Random(0))
    assert chosen(policy, [candidate("match", overlap=16, requests=60), candidate("none")]) == "match"
    assert chosen(policy, [candidate("a", requests=2, fuller=0.0), candidate("b", requests=1, fuller=0.5)]) == "b"
    assert chosen(policy, [candidate("a", requests=1, fuller=0.5), candidate("b", requests=1, fuller=0.1)]) == "b"
    assert chosen(policy, [candidate("match", overlap=900, requests=66), candidate("none")]) == "none"


def test_aibrix_follows_matches_within_a_deviation_of_the_mean_load() -> None:
    policy = aibrix(Random(0))
    others = [candidate(name, requests=2) for name in "cd"]
    assert chosen(policy, [candidate("a", overlap=500, requests=8), candidate("b", overlap=200), *others]) == "b"
    assert chosen(policy, [candidate("a", overlap=500, requests=2), candidate("b"), *others]) == "a"
    assert chosen(policy, [candidate("a", overlap=500, requests=9), candidate("b", overlap=1)]) == "b"
    far = [candidate("a", overlap=500, requests=9), candidate("b", overlap=400, requests=1), candidate("c")]
    assert chosen(policy, far) == "c"  # loads differ by more than 8


def preble() -> tuple[Preble, Callable[..., str]]:
    policy, both = Preble(parts()), [candidate("a"), candidate("b")]
    policy.start(BLOCK, 100_000)

    def send(request: TracedRequest, at: float = 0.0) -> str:
        policy.arrives(request)
        decision = policy(both, Request(request.input_tokens, 10, at=at))
        return decision.chosen.target.worker

    return policy, send


def test_preble_exploits_long_matches_and_spreads_other_prompts_by_load() -> None:
    _, send = preble()
    first = send(asked(1, 2, 3))
    assert send(asked(1, 2, 3, 4)) == first
    other = send(asked(1, 7, 8, 9))
    assert other != first
    assert {send(asked(1, 7, 8, 9, number)) for number in range(20, 25)} == {other}


def test_preble_counts_answers_only_while_they_are_in_flight() -> None:
    policy, send = preble()
    request = asked(1, 2, 3, output=2)
    first = target(send(request))
    loads = policy._loads([target("a"), target("b")])
    prefill = prefill_seconds(Rates(), 300, 0, 0, 0)
    assert loads[first] == pytest.approx(prefill + 10 * 0.15)  # ten tokens, and the first median
    policy.ended(request, first, 0.05)
    assert policy._loads([first])[first] == pytest.approx(prefill)


def test_preble_forgets_load_after_three_minutes() -> None:
    policy, send = preble()
    request = asked(1, 2, 3)
    first = target(send(request))
    policy.ended(request, first, 0.02)
    assert policy._loads([first])[first] > 0
    send(asked(9), at=181.0)
    assert not policy._nodes.keys() & {node for node in policy._nodes if node.blocks == (1, 2, 3)}


def test_preble_moves_prefixes_from_a_target_with_much_more_load() -> None:
    policy, send = preble()
    for number in range(60):  # a hundred requests, all of prefixes on one target
        for prefix in (1, 2):
            request = asked(prefix * 1000, prefix * 1000 + 1, prefix * 1000 + 2, 5000 + number, output=2)
            policy.ended(request, target(send(request)), 0.02)
    hot = [node for node in policy._nodes if node.blocks[0] in (1000, 2000)]
    assert len({next(iter(node.targets)) for node in hot}) == 2
    policy._requests = 100
    for node in hot:
        node.targets = {target("a")}
    policy._rebalance([target("a"), target("b")])
    assert len({next(iter(node.targets)) for node in hot}) == 2


def test_prompt_tree_shares_prefixes_and_keeps_the_record_of_a_large_part() -> None:
    split: list[tuple[int, ...]] = []
    tree = PromptTree(1, lambda node, other: split.extend((node.blocks, other.blocks)))
    first, shared = tree.insert((1, 2, 3, 4))
    assert (first.own, first.before, shared) == (4, 0, 0)
    second, shared = tree.insert((1, 2, 3, 9, 9))
    assert (second.blocks, second.own, second.before, shared) == ((9, 9), 2, 3, 3)
    assert first.blocks == (1, 2, 3)
    assert first.large
    assert split == [(1, 2, 3), (4,)]
    assert tree.insert((1, 2, 3, 4))[1] == 4
    assert [node.blocks for node in tree.insert((1, 2, 3, 4))[0].above()] == [(4,), (1, 2, 3), ()]
