"""Shown requests, the prefixes that most requests share, and metric series."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock
from prometheus_client import CollectorRegistry, generate_latest

from indexer import Target
from indexer.hashing import PackedPrompt
from indexer.targets import WorkerNames
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, prompt_hashes
from router.cache_state.target_cache import TargetCache
from router.fleet.worker import Worker
from router.load.target_load import LoadTable, ReservedLoad, TargetLoad
from router.observability.counters import Counter, Histogram
from router.observability.fleet_snapshot import joined_points, percentile
from router.observability.metrics import MOST_MODELS, OTHER_MODELS, RequestMetrics
from router.observability.role_load import RoleLoad, role_loads
from router.observability.seen_requests import (
    HALF_LIFE,
    KEPT,
    MAX_PREFIXES,
    HotPrefixes,
    SampledTraffic,
    lengths,
)
from router.policies import Candidate, Decision, Request, policy_named
from router.routing.assignment import SAMPLES_PER_SECOND, Assignment, Samples, Selection
from router.routing.ranks import RoutableRank, ServedModel
from router.settings import PolicySettings, Role, WorkerSettings
from simulator.fleet.workers import SimulatedWorkers


def decided() -> Decision:
    candidates = [Candidate(Target(f"http://w{number}", 0, "m"), overlap=16 * number) for number in range(3)]
    return policy_named(PolicySettings(), Random(1)).choose(candidates, Request(100))


PROMPT = RoutedRequest("m").tokenized([PackedPrompt.of(range(100))], [PackedPrompt.of(range(100))])
RANK = RoutableRank(
    Worker(WorkerSettings.model_validate({"url": "http://w2"})),
    ServedModel("m", None),
    TargetCache(Target("http://w2", 0, "m")),
    TargetLoad(),
    False,
)


def place(samples: Samples, now: float) -> Assignment:
    """Place a request and sample it, if it is due."""
    attempt = RANK.worker.health.begin(0, 0, True, one_of_many=False, now=now)
    reservation = ReservedLoad(RANK.load, 1, 100, now=now)
    assignment = Assignment(Selection(decided(), RANK), reservation, attempt)
    if now >= samples.due:
        samples.keep(PROMPT, assignment, now)
    return assignment


def test_sampled_request_records_its_outcome() -> None:
    traffic = SampledTraffic(WorkerNames())
    requests, placed = traffic.requests, place(traffic.kept, 0.0)
    assert requests.since(0) == []  # nothing is computed on the path of a request
    traffic.read()
    (seen,) = requests.since(0)
    before = seen.changed
    placed.first_byte(0.25)
    traffic.read()
    assert requests.since(before) == [seen]
    before = seen.changed
    assert placed.sample is not None
    placed.sample.usage = Usage(100, 7, 32)
    placed.release(1.0)
    traffic.read()
    assert requests.since(before) == [seen]
    told = seen.as_json()
    assert (told["worker"], told["overlap"], told["best_overlap"], told["candidates"]) == ("http://w2", 32, 32, 3)
    assert (told["first_byte_ms"], told["whole_ms"], told["cached"], told["completion"]) == (250, 1000, 32, 7)
    assert told["terms"]
    traffic.read()
    assert requests.since(seen.changed) == []


def test_request_that_ended_before_it_was_read_is_shown_whole() -> None:
    traffic = SampledTraffic(WorkerNames())
    placed = place(traffic.kept, 0.0)
    placed.first_byte(0.5)
    placed.release(0.75)
    traffic.read()
    (seen,) = traffic.requests.since(0)
    told = seen.as_json()
    assert (told["first_byte_ms"], told["whole_ms"], seen.sample.placed) == (500, 750, None)


def test_sample_is_limited_in_rate_and_size() -> None:
    traffic = SampledTraffic(WorkerNames())
    sampled = [place(traffic.kept, tick / 400).sample is not None for tick in range(4000)]
    assert 9 * SAMPLES_PER_SECOND <= sum(sampled) <= 10 * SAMPLES_PER_SECOND + 1
    traffic.read()
    for tick in range(KEPT + 10):
        place(traffic.kept, 100.0 + tick)
        if tick % 100 == 0:
            traffic.read()
    traffic.read()
    assert len(traffic.requests.since(0)) == KEPT


def test_percentiles_lie_between_the_bounds() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({0.1: 0, 1.0: 0, float("inf"): 0}, 0.5) is None
    assert percentile({0.1: 0, 0.2: 10, float("inf"): 10}, 0.5) == 0.15
    assert percentile({0.1: 9, 0.2: 9, float("inf"): 10}, 0.99) == 0.2


HERE, THERE = (Candidate(Target(f"http://{name}", 0, "m")) for name in ("here", "there"))


def prompt(*parts: int) -> array[int]:
    """Return the hashes of a prompt. Each part becomes eight chunks."""
    tokens = [part for part in parts for _ in range(8 * CHUNK_TOKENS)]
    return prompt_hashes("m", None, None, array("I", tokens))


def every(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from every(node["longer"])


def test_shared_prefix_counts_longer_prefixes() -> None:
    prefixes = HotPrefixes()
    for last in (1, 2, 1):
        prefixes.seen(prompt(9, 9, last), [HERE])
    (shared,) = prefixes.tree()
    assert shared["share"] == 1
    assert shared["tokens"] == 13 * CHUNK_TOKENS  # the greatest length that is looked at of the 16 they share
    assert [round(longer["share"], 2) for longer in shared["longer"]] == [0.67, 0.33]


def test_holders_hold_the_whole_prefix() -> None:
    prefixes = HotPrefixes()
    part, whole = (Candidate(each.target, overlap=tokens) for each, tokens in ((HERE, 64), (THERE, 128)))
    prefixes.seen(prompt(1), [part, whole])
    prefixes.seen(prompt(2), [part])
    prefixes.seen(prompt(1), [part, whole])
    first, second = prefixes.tree()
    assert (first["tokens"], first["held_by"]) == (128, 1)
    assert first["holders"] == [{"worker": "http://there", "dp_rank": 0}]
    assert second["held_by"] == 0


def test_weights_of_prefixes_decay() -> None:
    now = 0.0
    prefixes = HotPrefixes(lambda: now)
    for _ in range(4):
        prefixes.seen(prompt(1), [])
    for _ in range(60):  # far enough that the weights are brought down on the way
        now += HALF_LIFE
        prefixes.seen(prompt(2), [])
    now += 2 * HALF_LIFE
    prefixes.seen(prompt(3), [])
    shares = [node["share"] for node in prefixes.tree()]
    assert shares[0] > 0.6
    assert len(shares) == 2


def test_number_of_prefixes_is_bounded() -> None:
    prefixes = HotPrefixes()
    for number in range(MAX_PREFIXES):
        prefixes.seen(prompt(0, 1 + number % 2**10, number), [])
    assert prefixes._known <= MAX_PREFIXES
    assert sum(1 for _ in every(prefixes.tree())) <= prefixes._known
    assert prefixes.tree()[0]["share"] == 1


@given(st.integers(0, 5000))
def test_lengths_grow_and_are_few(chunks: int) -> None:
    found = list(lengths(chunks))
    assert found == sorted(set(found))
    assert all(1 <= length <= chunks for length in found)
    assert len(found) <= 35
    assert not chunks or found[-1] * 4 // 3 >= chunks or found[-1] + 1 > chunks


BOUNDS = (0.0005, 0.25, 1.0, 2.5)
LABELS = ["model", "status"]


def _told(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


@given(
    st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.sampled_from(["a", 'b"\n']), st.integers(1, 3)))
)
def test_exposition_equals_that_of_prometheus_client(seen: list[tuple[float, str, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    their_counter = prometheus_client.Counter("answers", "Answers", LABELS, registry=theirs)
    their_histogram = prometheus_client.Histogram("seconds", "Time", LABELS, registry=theirs, buckets=BOUNDS)
    counter = Counter("answers", "Answers", LABELS, ours)
    histogram = Histogram("seconds", "Time", LABELS, ours, BOUNDS)
    for value, model, status in seen:
        their_counter.labels(model, str(status)).inc(value)
        their_histogram.labels(model, str(status)).observe(value)
        counter.labels(model, status).amount += value
        histogram.labels(model, status).observe(value)
    assert _told(ours) == _told(theirs)
    at_most = histogram.at_most()
    assert at_most == {bound: sum(value <= bound for value, _, _ in seen) for bound in at_most}
    assert set(at_most) == ({*BOUNDS, float("inf")} if seen else set())


def test_series_end() -> None:
    counter = Counter("answers", "Answers", LABELS, CollectorRegistry())
    counter.labels("a", 200).amount += 2
    counter.labels("b", 200).amount += 3
    counter.labels("b", 500).amount += 1
    assert counter.by("status") == {200: 5, 500: 1}
    counter.labels("b", 500).amount -= 1
    counter.forget("a")
    assert counter.total == 3


def test_models_beyond_a_number_count_together() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for number in range(MOST_MODELS + 5):
        model = f"m{number}"
        metrics.begun(model, "w", 200, 10, 0)
        metrics.first_byte_of(model, 0.1)
        metrics.completed(model, Usage(prompt=10, completion=3, cached=0))
        metrics.streamed(model, 1.0, Usage(prompt=10, completion=3, cached=0))
    told = generate_latest(registry).decode()
    assert f'kvrouter_requests_total{{model="{OTHER_MODELS}",status="200",worker="w"}} 5.0' in told
    for name in ("requests_total", "prompt_tokens_total", "time_per_output_token_seconds_count"):
        assert told.count(f"\nkvrouter_{name}{{") == MOST_MODELS + 1


def test_coarser_point_has_means_and_the_longest_times() -> None:
    points = [
        {"time": 2.0, "waiting": {"saturated": 3}, "requests": 1.0, "predicted": None, "ttft_p90": 0.1},
        {"time": 4.0, "waiting": {"saturated": 1}, "requests": 3.0, "predicted": 0.5, "ttft_p90": 0.4},
    ]
    assert joined_points(points) == {
        "time": 4.0,
        "waiting": {"saturated": 3},
        "requests": 2.0,
        "predicted": 0.5,
        "ttft_p90": 0.4,
    }


def test_load_of_roles_is_the_mean_of_their_ranks_by_model() -> None:
    clock = Clock()
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    workers, load = SimulatedWorkers(roles, 100, 16, clock).workers, LoadTable(clock)
    ReservedLoad(load.of(workers[0].url, 0), 4000, 4000, prefill_seconds=3.0)
    workers[2].metrics.read("vllm:kv_cache_usage_perc 0.5\n", {0: 0})
    assert list(role_loads(workers, load)) == [
        RoleLoad("simulated", Role.DECODE, 1, 0.0, 0.5),
        RoleLoad("simulated", Role.PREFILL, 2, 1.5, None),
    ]
