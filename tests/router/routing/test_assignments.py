"""Candidates from request to request: a real router over workers that receive no requests."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.make_routing import MODEL, make_fleet, make_routing
from indexer import Indexer
from indexer.hashing import MediaSpan, PackedPrompt
from kvevents import BlockRemoved, BlockStored, EventBatch
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.load.load_messages import Kind, Message, RankLoad
from router.policies import Candidate
from router.prediction.slo import SLO
from router.routing.assignment import Selection
from router.routing.build import Routing
from router.routing.ranks import NO_LIMITS
from router.settings import PolicyName, PolicySettings, Settings, WorkerSettings
from router.sharing import PeerLoad

URLS = ["http://a:1", "http://b:1"]
SHARED = 8 * CHUNK_TOKENS


def prompt(last: int) -> RoutedRequest:
    packed = PackedPrompt.of(array("I", [*range(SHARED), *[last] * CHUNK_TOKENS]))
    return RoutedRequest(MODEL).tokenized([packed])


@pytest.fixture
def peer_load() -> PeerLoad:
    return PeerLoad(5.0, 2.0)


@pytest.fixture
async def fleet(indexer: Indexer, request: pytest.FixtureRequest) -> Fleet:
    """Two workers. The parameter is their weight."""
    weight = getattr(request, "param", 1.0)
    return make_fleet([WorkerSettings(url=url, weight=weight) for url in URLS], indexer)


@pytest.fixture
async def routing(fleet: Fleet, indexer: Indexer, peer_load: PeerLoad, request: pytest.FixtureRequest) -> Routing:
    """The routing over `fleet`. The parameter is its policy."""
    policy = PolicySettings(name=getattr(request, "param", PolicyName.KV_AWARE))
    return make_routing(fleet, indexer, Settings(policy=policy), peer_load=peer_load)


def described(worker: Worker, *models: str, ranks: tuple[int, ...] = (0,)) -> None:
    served = {name: ServedModel(name, name) for name in models or (MODEL,)}
    worker.describe(WorkerDescription(Engine.VLLM, served, block_size=16, ranks=ranks))


def choose(
    routing: Routing, asked: RoutedRequest, excluded: Sequence[Worker] = (), slo: SLO | None = None
) -> Selection:
    selection = routing.selector.choose(asked, excluded, slo=slo)
    assert selection is not None
    return selection


def candidates(routing: Routing, asked: RoutedRequest) -> dict[str, Candidate]:
    return {each.target.worker: each for each in choose(routing, asked).decision.candidates}


def long_prompt(tokens: int) -> RoutedRequest:
    """Prompts of which a longer one begins with a shorter one."""
    packed = PackedPrompt.of(array("I", range(100_000, 100_000 + tokens)))
    return RoutedRequest(MODEL, streamed=True).tokenized([packed])


def nobody_comes(routing: Routing, fleet: Fleet, seconds: float) -> None:
    """Choose before and after `seconds` seconds without requests, while the fleet changes."""
    now = time.monotonic()
    for later in (0, seconds):
        routing.selector.choose(prompt(1), now=now + later)
    for drains in (True, False):  # it is still the same one
        fleet.drain(fleet.workers[1], drains)
        routing.selector.choose(prompt(1))


@pytest.mark.parametrize("idle_seconds", [5, 600])
async def test_request_is_not_held_for_a_busy_worker_while_another_is_idle(
    routing: Routing, fleet: Fleet, idle_seconds: int
) -> None:
    first, second = fleet.workers
    nobody_comes(routing, fleet, idle_seconds)
    routing.placement.place(long_prompt(8192), excluded=[second]).first_byte()
    asked, other_prompt = long_prompt(8704), RoutedRequest(MODEL, streamed=True).estimated(4600)
    for busy in (False, True):
        routing.placement.place(other_prompt, excluded=[second])
        selection = choose(routing, asked)
        assert selection.worker is first
        assert (routing.selector.bind(asked, selection, (), NO_LIMITS, waiting=0) is not selection) is busy
    other = routing.selector.bind(asked, selection, (), NO_LIMITS, waiting=0)
    if idle_seconds < 10:
        assert other is None  # for all that is known, it has none
    else:
        assert (other.worker, other.decision.chosen.overlap) == (second, 0)
        assert [each.target.worker for each in other.decision.candidates] == [second.url]
        routing.placement.place(other_prompt, excluded=[first])
        routing.placement.place(other_prompt, excluded=[first])
        assert routing.selector.bind(asked, selection, (), NO_LIMITS, waiting=0) is None  # it is busy, too


@pytest.mark.parametrize(("idle_seconds", "goes_to"), [(5, 0), (600, 1)])
async def test_idle_worker_is_preferred_to_a_prefill_that_ends_soon(
    routing: Routing, fleet: Fleet, idle_seconds: int, goes_to: int
) -> None:
    first, second = fleet.workers
    nobody_comes(routing, fleet, idle_seconds)
    routing.placement.place(long_prompt(8192), excluded=[second]).first_byte()
    busy = RoutedRequest(MODEL, streamed=True).estimated(12_000)
    there = choose(routing, busy, excluded=[second])
    begun = time.monotonic() - 1.4 * routing.selector.prefill_seconds(busy)
    routing.placement.record_in_flight(busy, routing.placement.reserve(busy, there, now=begun))
    asked = long_prompt(8704)
    selection = choose(routing, asked)
    assert selection.worker is first
    placed = routing.selector.bind(asked, selection, (), NO_LIMITS, waiting=0)
    assert placed.worker is fleet.workers[goes_to]


@pytest.mark.parametrize(("cached", "goes_to"), [(False, 0), (True, 1)])
async def test_session_with_many_turns_leaves_its_prefix_for_its_slos(
    routing: Routing, fleet: Fleet, cached: bool, goes_to: int
) -> None:
    """A hundred concurrent answers have an SLO of 25 ms a token, and about this latency.

    The new tokens of the session slow them a little at each turn. `cached` prompts imply sessions with many turns.
    """

    second = fleet.workers[1]
    routing.placement.place(long_prompt(20_032), excluded=[second]).first_byte()
    beside = long_prompt(600) if cached else RoutedRequest(MODEL, streamed=True).estimated(600)
    for _ in range(100):
        there = choose(routing, beside, excluded=[second], slo=SLO(None, 0.025, time.monotonic()))
        routing.placement.reserve(beside, there).first_byte()
    selection = choose(routing, long_prompt(20_288), slo=SLO(None, 1.0, time.monotonic()))
    assert selection.worker is fleet.workers[goes_to]


@pytest.mark.parametrize("has_peers", [False, True])
async def test_ended_prompt_is_expected_until_events_report_an_eviction(
    routing: Routing, indexer: Indexer, peer_load: PeerLoad, has_peers: bool
) -> None:
    ended = routing.placement.place(prompt(1))
    here = ended.target
    if has_peers:
        peer_load.prompts.hold(here, array("Q", range(8)))
    indexer.index.add(here)
    indexer.index.apply(here, EventBatch(0.0, [BlockStored([9], None, [5] * CHUNK_TOKENS, CHUNK_TOKENS)]))
    indexer.index.apply(here, EventBatch(0.0, [BlockRemoved([9])]))
    ended.release()
    assert candidates(routing, prompt(2))[here.worker].overlap == SHARED
    indexer.index.apply(here, EventBatch(0.0, [BlockStored([9], None, [5] * CHUNK_TOKENS, CHUNK_TOKENS)]))
    assert candidates(routing, prompt(2))[here.worker].overlap == SHARED
    indexer.index.apply(here, EventBatch(0.0, [BlockRemoved([9])]))
    assert candidates(routing, prompt(2))[here.worker].overlap == 0
    placed = routing.placement.place(prompt(1))
    indexer.index.apply(placed.target, EventBatch(0.0, [BlockRemoved([9])]))
    assert candidates(routing, prompt(2))[placed.worker.url].overlap == SHARED, "it is in flight"


async def test_sent_prefix_is_expected_until_its_request_fails(routing: Routing) -> None:
    ended, failed = routing.placement.place(prompt(1)), routing.placement.place(prompt(1))
    assert failed.worker is ended.worker
    failed.attempt.end(Outcome.FAILED, "no answer")
    failed.release()
    assert candidates(routing, prompt(2))[ended.worker.url].overlap == SHARED
    ended.release()
    assert candidates(routing, prompt(2))[ended.worker.url].overlap == SHARED
    other = PackedPrompt.of(range(900, 964))
    alone = routing.placement.place(RoutedRequest(MODEL).tokenized([other], [other]))
    alone.attempt.end(Outcome.FAILED, "no answer")
    alone.release()
    again = candidates(routing, RoutedRequest(MODEL).tokenized([other], [other]))
    assert not any(candidate.overlap for candidate in again.values())


async def test_recomputed_block_is_not_predicted(routing: Routing) -> None:
    sent = routing.placement.place(prompt(1))
    audit, cache = routing.state.audit, sent.selection.rank.cache
    cache.draft_block.tokens = 16
    audit.shortened.add(cache)
    assert candidates(routing, prompt(2))[sent.worker.url].overlap == SHARED - 16


async def test_decision_keeps_its_candidates(routing: Routing) -> None:
    first = routing.placement.place(prompt(1))
    made = first.decision
    assert [candidate.requests for candidate in made.candidates] == [0, 0]
    now = candidates(routing, prompt(2))
    assert now[first.worker.url].requests == 1
    assert [candidate.requests for candidate in made.candidates] == [0, 0]
    assert [candidate.overlap for candidate in made.candidates] == [0, 0]
    first.release()
    after = candidates(routing, prompt(3))
    assert [candidate.requests for candidate in after.values()] == [0, 0]
    assert now[first.worker.url].requests == 1


@pytest.mark.parametrize("fleet", [2.0], indirect=True)
async def test_load_is_scaled_by_weight(routing: Routing) -> None:
    for _number in range(4):
        routing.placement.place(prompt(1))
    requests = {url: candidate.requests for url, candidate in candidates(routing, prompt(1)).items()}
    assert sorted(requests.values()) == [0, 2]


async def test_overlap_counts_if_other_workers_are_excluded(routing: Routing, fleet: Fleet) -> None:
    held = {worker: 16 * (number + 1) for number, worker in enumerate(fleet.workers)}
    for worker, tokens in held.items():
        packed = PackedPrompt.of(range(tokens))
        others = [each for each in fleet.workers if each is not worker]
        assignment = routing.placement.place(RoutedRequest(MODEL).tokenized([packed], [packed]), others)
        assert assignment.worker is worker
    asked = PackedPrompt.of(range(64))
    for left_out in [[], *([worker] for worker in fleet.workers)]:
        choice = choose(routing, RoutedRequest(MODEL).tokenized([asked], [asked]), left_out)
        overlaps = {candidate.target.worker: candidate.overlap for candidate in choice.decision.candidates}
        assert overlaps == {worker.url: tokens for worker, tokens in held.items() if worker not in left_out}
        assert choice.best_overlap == max(overlaps.values())


async def test_added_and_removed_workers_change_candidates_at_once(routing: Routing, fleet: Fleet) -> None:
    assert set(candidates(routing, prompt(1))) == set(URLS)
    fleet.report_failure(fleet.workers[0], "gone")
    assert set(candidates(routing, prompt(1))) == {URLS[1]}
    fleet.assign("config", [WorkerSettings(url=url) for url in [*URLS, "http://c:1"]])
    new = fleet.workers[2]
    assert set(candidates(routing, prompt(1))) == {URLS[1]}
    described(new)
    new.problem = None
    fleet.drain(new, False)
    assert set(candidates(routing, prompt(1))) == {URLS[1], new.url}


async def test_peer_load_counts_at_once(routing: Routing, peer_load: PeerLoad) -> None:
    assert candidates(routing, prompt(1))[URLS[0]].requests == 0
    peer_load.apply(Message("other", 1, Kind.NEWS, [RankLoad(URLS[0], 0, 3, 40, 50, 1, 0, 0.0)]))
    now = candidates(routing, prompt(1))
    assert (now[URLS[0]].requests, now[URLS[0]].pending, now[URLS[0]].context) == (3, 40, 50)
    assert now[URLS[1]].requests == 0
    peer_load.forget("other")
    assert candidates(routing, prompt(1))[URLS[0]].requests == 0


async def test_failed_worker_is_chosen_if_it_is_the_only_one(routing: Routing, fleet: Fleet) -> None:
    fleet.workers[0].health.circuit.open("it fails")
    assert set(candidates(routing, prompt(1))) == {URLS[1]}
    assert routing.selector.has_others(prompt(1), [fleet.workers[1]])
    fleet.workers[1].health.circuit.open("it fails")
    assert set(candidates(routing, prompt(1))) == set(URLS)
    fleet.report_failure(fleet.workers[1], "gone")
    assert set(candidates(routing, prompt(1))) == {URLS[0]}
    assert not routing.selector.has_others(prompt(1), [fleet.workers[0]])


async def test_only_the_hanging_rank_is_ejected(routing: Routing, fleet: Fleet) -> None:
    for worker in fleet.workers:
        described(worker, ranks=(0, 1))
    fleet.drain(fleet.workers[1], True)
    placed = [routing.placement.place(prompt(1)) for _ in range(8)]
    assert {assignment.target.dp_rank for assignment in placed} == {0, 1}
    fleet.workers[0].health.ranks[0].circuit.open("it hangs")
    choice = choose(routing, prompt(1))
    assert [candidate.target.dp_rank for candidate in choice.decision.candidates] == [1]
    for assignment in placed:
        assignment.release()


async def test_prompts_in_flight_are_the_same_where_their_images_are(routing: Routing) -> None:
    packed = prompt(1).token_ids[0]

    def about(*names: str) -> RoutedRequest:
        """Return a prompt whose halves are the tokens of one image each."""
        half = len(packed) // 2
        spans = [MediaSpan(number * half, (number + 1) * half, name) for number, name in enumerate(names)]
        tokens = PackedPrompt(packed.tokens, tuple(spans))
        return RoutedRequest(MODEL).tokenized([tokens])

    placed = routing.placement.place(about("red", "green"))
    assert (placed.cache_prediction.media, placed.cache_prediction.comparable) == (True, True)
    for names, chunks in ((("red", "green"), 9), (("red", "blue"), 4), (("blue", "green"), 0)):
        overlap = candidates(routing, about(*names))[placed.worker.url].overlap
        assert overlap // CHUNK_TOKENS == min(chunks, 8), names
    placed.release()


@pytest.mark.parametrize("routing", [PolicyName.LEAST_LOADED], indirect=True)
async def test_prompts_are_placed_by_load_after_the_end_of_a_recording(routing: Routing) -> None:
    assert not routing.state.needs_prompts
    routing.reader.require_prompts(True)
    assert routing.state.needs_prompts
    routing.reader.require_prompts(False)
    placed = routing.placement.place(prompt(1))
    assert placed.cache_prediction is None
    placed.release()


async def test_changed_model_or_weight_of_a_worker_counts_at_once(routing: Routing, fleet: Fleet) -> None:
    placed = [routing.placement.place(prompt(1)) for _ in range(4)]
    assert sorted(each.requests for each in candidates(routing, prompt(1)).values()) == [0, 4]
    busy = placed[0].worker
    given = [WorkerSettings(url=url, weight=2) for url in URLS]
    fleet.assign("config", given)
    assert candidates(routing, prompt(1))[busy.url].requests == 2
    described(busy, "other")
    fleet.drain(busy, False)
    assert busy.url not in candidates(routing, prompt(1))
    asked = RoutedRequest("other").estimated(40)
    assert candidates(routing, asked)[busy.url].target == busy.target(0, "other")
    assert candidates(routing, asked)[busy.url].requests == 2
    for assignment in placed:
        assignment.release()
    assert candidates(routing, asked)[busy.url].requests == 0


async def test_loads_before_the_first_request_of_a_model_count(
    routing: Routing, fleet: Fleet, peer_load: PeerLoad
) -> None:
    for worker in fleet.workers:
        described(worker, MODEL, "other")
    names = RoutedRequest(MODEL).estimated(40), RoutedRequest("other").estimated(40)
    assert [candidates(routing, each)[URLS[0]].requests for each in names] == [0, 0]
    fleet.drain(fleet.workers[1], True)
    peer_load.apply(Message("a", 1, Kind.NEWS, [RankLoad(URLS[0], 0, 3, 40, 50, 1, 0, 0.0)]))
    assert [candidates(routing, each)[URLS[0]].requests for each in names] == [3, 3]


async def test_requests_in_engine_metrics_count_at_once(routing: Routing, fleet: Fleet) -> None:
    assert candidates(routing, prompt(1))[URLS[0]].requests == 0
    worker = fleet.workers[0]
    worker.metrics.read('vllm:num_requests_running{engine="0"} 5\nvllm:num_requests_waiting{engine="0"} 2\n', {})
    for told in fleet.on_scrape:
        told(worker)
    now = candidates(routing, prompt(1))[URLS[0]]
    assert (now.requests, now.waiting) == (7, 2)


def chosen(routing: Routing, times: int) -> Counter[str]:
    """Return the number of selections of each worker."""
    choices = [routing.selector.choose(prompt(number)) for number in range(times)]
    return Counter(choice.worker.url for choice in choices if choice is not None)


@pytest.mark.parametrize("routing", [PolicyName.ROUND_ROBIN, PolicyName.RANDOM], indirect=True)
async def test_turns_skip_workers_that_are_down_draining_or_ejected(routing: Routing, fleet: Fleet) -> None:
    first, second = fleet.workers
    assert set(chosen(routing, 100)) == set(URLS)
    fleet.report_failure(first, "does not answer")
    assert set(chosen(routing, 10)) == {second.url}
    first.problem = None
    fleet.drain(first, True)
    assert set(chosen(routing, 10)) == {second.url}
    fleet.drain(first, False)
    assert set(chosen(routing, 100)) == set(URLS)
    first.health.circuit.open("it fails")
    assert set(chosen(routing, 10)) == {second.url}


@pytest.mark.parametrize("routing", [PolicyName.ROUND_ROBIN], indirect=True)
async def test_round_robin_is_even_and_uses_an_added_worker(routing: Routing, fleet: Fleet) -> None:
    assert set(chosen(routing, 12).values()) == {6}
    urls = [*URLS, "http://c:1"]
    fleet.assign("config", [WorkerSettings(url=url) for url in urls])
    for worker in fleet.workers:
        if worker.description is None:
            described(worker)
            worker.problem = None
    assert chosen(routing, 12) == dict.fromkeys(urls, 4)


@pytest.mark.parametrize("routing", [PolicyName.ROUND_ROBIN], indirect=True)
async def test_round_robin_sends_a_warming_worker_its_share(routing: Routing, fleet: Fleet) -> None:
    first = fleet.workers[0]
    first.slow_start, first.warming_since = 1000.0, first.health.clock()
    assert 0 < chosen(routing, 400)[first.url] < 60


async def test_prompt_of_a_list_overlaps_with_the_prompts_before_it(routing: Routing) -> None:
    packed = [prompt(last).identities[0] for last in (1, 2)]
    other = PackedPrompt.of(array("I", range(500, 600)))
    for prompts, expected in ((packed, SHARED), ([packed[0], packed[0]], SHARED), ([other, packed[0]], 0)):
        asked = RoutedRequest(MODEL).tokenized(prompts)
        assert {each.overlap for each in candidates(routing, asked).values()} == {expected}
