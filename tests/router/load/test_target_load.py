"""Load in flight on each target, and the journal of its changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.fleet.engine_metrics import EngineView
from router.load.target_load import PREFILL_SHARE, LoadTable, ReservedLoad, TargetLoad


def test_every_rank_of_a_worker_has_a_load_of_its_own() -> None:
    table = LoadTable()
    ReservedLoad(table.of("w", 0), 1, 1)
    assert table.of("w", 0).requests == 1
    assert table.of("w", 1).requests == 0
    assert table.of("v", 0).requests == 0


def test_backlog_is_expected_prefill_less_elapsed_time() -> None:
    now = 50.0
    load = TargetLoad(clock=lambda: now)
    first = ReservedLoad(load, 10, 10, prefill_seconds=2.0)
    second = ReservedLoad(load, 10, 10, prefill_seconds=1.0)
    now = 51.5
    assert (load.waiting, load.backlog) == (2, 1.5)
    first.first_byte()
    assert (load.waiting, load.backlog) == (1, 1.0)
    now = 60.0
    assert load.backlog == 0
    second.release()
    assert (load.waiting, load.backlog) == (0, 0)


def test_oldest_prefill_is_running() -> None:
    now = 50.0
    load = TargetLoad(clock=lambda: now)
    assert load.under_way == (0, 0.0, 0.0)
    first = ReservedLoad(load, 10, 10, prefill_seconds=2.0, streamed=True)
    second = ReservedLoad(load, 20, 10, prefill_seconds=1.0)
    now = 51.5
    assert load.under_way == (10, 1.5, 2.0)
    first.first_byte()
    now = 51.75
    assert load.under_way == (0, 0.25, 1.0)  # its end cannot be observed
    second.release()
    assert load.under_way == (0, 0.0, 0.0)


def test_loads_are_in_flight_until_the_first_byte() -> None:
    load = TargetLoad()
    ReservedLoad(load, 10, 10)
    first, second = ReservedLoad(load, 10, 10, loads=True), ReservedLoad(load, 10, 10, loads=True)
    assert load.loads == 2
    first.first_byte()
    second.release()
    first.release()
    assert load.loads == 0


def test_listeners_are_called_once_for_each_event() -> None:
    table, seen = LoadTable(), list[object]()
    table.on_change.append(lambda worker, dp_rank: seen.append((worker, dp_rank)))
    table.on_first_byte.append(lambda: seen.append("first byte"))
    table.on_ended.append(lambda: seen.append("ended"))
    reservation = ReservedLoad(table.of("w", 1), 30, 100)
    reservation.first_byte()
    reservation.first_byte()
    reservation.release()
    reservation.release()
    assert seen == [("w", 1), ("w", 1), "first byte", ("w", 1), "ended"]
    seen.clear()
    unanswered = ReservedLoad(table.of("w", 1), 30, 100)
    unanswered.release()
    assert seen == [("w", 1), ("w", 1), "ended"]


def test_load_of_a_removed_worker_wakes_only_waiting_requests() -> None:
    table, changed, ended = LoadTable(), list[str](), list[bool]()
    table.on_change.append(lambda worker, _: changed.append(worker))
    table.on_ended.append(lambda: ended.append(True))
    reservation = ReservedLoad(table.of("w", 0), 30, 100)
    table.forget("w")
    reservation.release()
    assert (changed, ended) == (["w"], [True])
    assert table.of("w", 0).requests == 0


tokens = st.integers(0, 10_000)
requests_lists = st.lists(st.tuples(tokens, tokens, st.lists(st.sampled_from(["first byte", "release"]))), max_size=8)


@given(requests_lists, st.randoms(use_true_random=False))
def test_load_is_the_sum_over_unended_requests(requests: list[tuple[int, int, list[str]]], random: object) -> None:
    """Whatever is called how often, in any order."""
    load = TargetLoad()
    reservations = [ReservedLoad(load, uncached, context) for uncached, context, _ in requests]
    calls = [(number, call) for number, (_, _, calls) in enumerate(requests) for call in calls]
    random.shuffle(calls)  # type: ignore[attr-defined]
    assert load.requests == len(requests)
    begun: set[int] = set()
    ended: set[int] = set()
    for number, call in calls:
        if call == "release":
            reservations[number].release()
            ended.add(number)
        else:
            reservations[number].first_byte()
            begun.add(number)
        context = sum(context for number, (_, context, _) in enumerate(requests) if number not in ended)
        assert load == TargetLoad(
            sum(number not in ended for number in range(len(requests))),
            sum(uncached for number, (uncached, _, _) in enumerate(requests) if number not in begun | ended),
            context,
            unshared=context,
        )


def test_journal_has_the_changes_in_their_order() -> None:
    table = LoadTable()
    first, second = table.of("a", 0), table.of("b", 0)
    end = table.journal.end
    ReservedLoad(second, 1, 1).release()
    assert (table.journal.end - end, table.journal.slots) == (2, [second.slot, second.slot])
    table.peers_changed("a", 0)
    assert (table.journal.end - end, table.journal.slots) == (3, [second.slot, second.slot, first.slot])


def test_journal_counts_all_changes_and_keeps_the_last() -> None:
    table = LoadTable()
    load = table.of("a", 0)
    for _ in range(100_000):
        table.peers_changed("a", 0)
    assert table.journal.end == 100_000
    ReservedLoad(load, 1, 1)
    assert table.journal.end == 100_001
    assert table.journal.slots[-1] == load.slot
    assert len(table.journal.slots) < 10_000


def test_target_has_no_room_while_its_engine_queues_prompts_whose_end_is_not_visible() -> None:
    load = TargetLoad(engine=EngineView(queue=2, running=9))
    streamed = ReservedLoad(load, 100, 100, streamed=True)
    assert load.fits(1, 10, 10)
    whole = ReservedLoad(load, 100, 100)
    assert not load.fits(2, 10, 10)
    load.engine = EngineView(unseen=2, waiting=2, queue=2, running=9)  # of other clients
    assert load.fits(2, 10, 10)
    load.engine = EngineView(queue=2, running=9)
    whole.release()
    streamed.release()
    assert load.fits(0, 10, 10)


def test_pace_is_slower_than_predicted_while_an_engine_queues_such_prompts() -> None:
    clock = Clock()
    table = LoadTable(clock)
    load = table.of("a", 0)
    ReservedLoad(load, 100, 100, PREFILL_SHARE)
    assert load.paced_until == clock.now + 1.0
    for queue in (3, 3, 0):
        table.scraped("a", 0, EngineView(queue=queue, running=9))
    ReservedLoad(load, 100, 100, PREFILL_SHARE)
    assert clock.now + 1.3 < load.paced_until < clock.now + 1.6


def test_memory_of_a_load_counts_answers_until_they_end() -> None:
    load = TargetLoad()
    ReservedLoad(load, 100, 100, output=50)
    assert load.memory == 100  # no limit needs it
    load.limit.memory = 1000
    ReservedLoad(load, 100, 100, output=20)
    assert load.memory == 240  # when the short answer ends, each has 20 tokens


def test_late_first_byte_shows_that_a_worker_is_full_if_it_reports_nothing() -> None:
    clock = Clock()
    load = TargetLoad(clock=clock)
    first, second = [ReservedLoad(load, 100, 100, 0.8, streamed=True) for _ in range(2)]
    clock.now += 1.5
    first.first_byte()
    clock.now += 1.6  # less than twice the prediction for both prompts
    assert load.fits(2, 10, 10)
    clock.now += 0.2
    assert not load.fits(2, 10, 10)
    load.engine = EngineView(queue=0, running=2)
    assert load.fits(2, 10, 10)
    load.engine = EngineView()
    second.first_byte()
    assert load.fits(2, 10, 10)
    ReservedLoad(load, 100, 100, 0.8, streamed=True)
    assert not load.fits(2, 10, 10), "one request may wait there"
