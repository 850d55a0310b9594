"""The order in which waiting requests go on, and how many may wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission.fair_queue import FairQueue, Waiting

MOST, BYTES = 12, 100
numbers = count(1_000_000)


def waiting(tenant: str = "a", priority: int = 0, name: str | None = "m", **more: Any) -> Waiting:
    return Waiting(priority, tenant, name, **({"order": 0.0, "tokens": 1, "size": 0, "slo_missed": False} | more))


def queue_of(*requests: Waiting) -> FairQueue[Waiting]:
    queue: FairQueue[Waiting] = FairQueue(1000, 1000)
    for request in requests:
        queue.add(request)
    return queue


def serve(queue: FairQueue[Waiting], times: int) -> list[Waiting]:
    """Serve requests one after the other, `times` times. Return them in order."""
    served = []
    for _ in range(times):
        request = next(queue.in_order())
        queue.served(request.tenant, request.tokens, request.program)
        queue.remove(request)
        served.append(request)
    return served


def test_lower_priority_number_is_sooner_and_ties_keep_their_order() -> None:
    second, first, urgent = waiting(order=2.0), waiting(order=1.0), waiting(priority=-1, order=9.0)
    queue = queue_of(second, first, urgent)
    assert list(queue.in_order()) == [urgent, first, second]
    assert queue.last() is second


def test_clocks_of_many_short_flows_are_dropped() -> None:
    queue = queue_of(waiting("kept"))
    for number in range(10_000):
        queue.served(f"flow-{number}", 1)
        queue.served("kept", 1)
    assert len(queue._tenants.at) < 3000


def test_late_request_is_last_within_its_priority() -> None:
    low = waiting(priority=1, order=0.0)
    mine, other, another_tenant = waiting(order=1.0), waiting(order=2.0), waiting("b", order=9.0, tokens=1000)
    queue = queue_of(low, mine, other, another_tenant)
    queue.let_others_first(mine, 0.0)
    assert serve(queue, 4) == [other, another_tenant, mine, low]


def test_tenant_with_large_requests_waits_longer() -> None:
    queue = queue_of(*(waiting("big", order=place, tokens=100) for place in range(20)))
    for place in range(20):
        queue.add(waiting("small", order=100 + place, tokens=10))
    shares = Counter(request.tenant for request in serve(queue, 11))
    assert shares["small"] >= 8


def test_idle_tenant_accumulates_no_credit() -> None:
    queue = queue_of(*(waiting("busy", order=place, tokens=10) for place in range(100)))
    serve(queue, 50)
    for place in range(50):
        queue.add(waiting("new", order=1000 + place, tokens=10))
    shares = Counter(request.tenant for request in serve(queue, 20))
    assert abs(shares["new"] - shares["busy"]) <= 1


def test_tokens_granted_without_waiting_count() -> None:
    queue = queue_of(*(waiting(tenant, order=place, tokens=10) for tenant in "ab" for place in range(20)))
    queue.served("a", 100)
    assert {request.tenant for request in serve(queue, 10)} == {"b"}


def test_empty_queue_resets_debts() -> None:
    queue = queue_of(waiting("a", tokens=1000))
    serve(queue, 1)
    for tenant in "ab":
        queue.add(waiting(tenant, order=1.0 if tenant == "a" else 2.0))
    assert next(queue.in_order()).tenant == "a"


def test_iteration_in_order_is_lazy() -> None:
    queue = queue_of(*(waiting(order=place) for place in range(5)))
    assert [request.order for request in islice(queue.in_order(), 2)] == [0, 1]


def test_models_can_be_excluded_during_iteration() -> None:
    queue = queue_of(waiting(name="m", order=0), waiting(name="m", order=1), waiting(name="n", order=2))
    without: set[str | None] = set()
    seen = []
    for request in queue.in_order(without):
        seen.append(request.name)
        without.add(request.name)
    assert seen == ["m", "n"]


def test_late_requests_end_a_turn_when_enough_stay() -> None:
    late = [waiting(order=place, slo_missed=True) for place in range(5)]
    other, low = waiting("b", order=9.0, slo_missed=True), waiting(priority=1)
    in_time = [waiting(order=place) for place in range(3)]
    queue = queue_of(*late, other, low, *in_time)
    assert list(queue.in_order(most_missed=2)) == [*in_time, *late[:2], other, low]
    seen = []
    for request in queue.in_order(most_missed=2):
        seen.append(request)
        if request in late[:2]:
            queue.remove(request)
    assert seen == [*in_time, *late[:4], other, low]


requests = st.builds(
    waiting,
    tenant=st.sampled_from("abc"),
    priority=st.integers(-1, 1),
    order=st.floats(0, 10),
    tokens=st.integers(1, 50),
    name=st.sampled_from(["m", "n", None]),
    size=st.integers(0, 30),
    slo_missed=st.booleans(),
    program=st.sampled_from(["", "p", "q"]),
)


@given(st.lists(st.lists(st.integers(1, 50), min_size=40, max_size=40), min_size=2, max_size=4), st.integers(1, 40))
def test_waiting_tenants_get_equal_shares(tokens: list[list[int]], times: int) -> None:
    """The shares of tenants differ by at most the largest request of each, whatever the sizes of requests."""
    queue = queue_of(
        *(waiting(str(t), order=place, tokens=n) for t, each in enumerate(tokens) for place, n in enumerate(each))
    )
    got = dict.fromkeys(map(str, range(len(tokens))), 0)
    for request in serve(queue, times):
        got[request.tenant] += request.tokens
    assert max(got.values()) - min(got.values()) <= 2 * max(map(max, tokens))


@given(st.lists(st.lists(st.integers(1, 50), min_size=10, max_size=10), min_size=2, max_size=4), st.integers(1, 10))
@settings(max_examples=30, deadline=None)
def test_waiting_programs_of_a_tenant_get_equal_shares(tokens: list[list[int]], times: int) -> None:
    """A program with larger requests gets no more than another one. Another tenant gets as much as all of them."""
    queue = queue_of(*(waiting("other", order=place, tokens=10) for place in range(50)))
    for number, each in enumerate(tokens):
        for place, size in enumerate(each):
            queue.add(waiting(program=f"p{number}", order=place, tokens=size))
    got = Counter({f"p{number}": 0 for number in range(len(tokens))})
    others = 0
    for request in serve(queue, times):
        got[request.program] += request.tokens if request.program else 0
        others += 0 if request.program else request.tokens
    largest = max(10, *map(max, tokens))
    assert max(got[each] for each in got if each) - min(got[each] for each in got if each) <= 2 * largest
    assert abs(others - got.total()) <= 2 * largest


def test_new_programs_do_not_starve_an_old_one_and_requests_without_a_program_share_by_their_number() -> None:
    queue = queue_of(*(waiting(program="run", order=place, tokens=100) for place in range(20)))
    for place in range(3):
        queue.add(waiting(order=100 + place, tokens=100))
    served: Counter[str] = Counter()
    for place in range(16):
        [request] = serve(queue, 1)
        served[request.program] += 1
        if not request.program:  # three of them wait all the time
            queue.add(waiting(order=200 + place, tokens=100))
    assert served == {"": 12, "run": 4}


def test_next_turn_of_a_session_is_not_behind_new_sessions_that_arrive_later() -> None:
    queue = queue_of(*(waiting(program=f"new {number}", order=10 + number) for number in range(3)))
    for turn in range(5):
        queue.add(waiting(program="session", order=turn, tokens=10_000))
        assert [request.program for request in serve(queue, 1)] == ["session"]
        queue.served("a", 10_000, "session")  # placed at once, while requests for another name wait
        queue.add(waiting(program=f"newer {turn}", order=20 + turn))


def test_order_within_a_program_and_without_programs_is_that_of_the_requests() -> None:
    queue = queue_of(*(waiting(order=order, tokens=1000) for order in (3.0, 1.0, 2.0)))
    assert [request.order for request in serve(queue, 3)] == [1.0, 2.0, 3.0]
    queue = queue_of(*(waiting(program="p", order=order, tokens=1000) for order in (3.0, 1.0, 2.0)))
    assert [request.order for request in serve(queue, 3)] == [1.0, 2.0, 3.0]


def test_groups_without_capacity_are_skipped_without_a_look_at_their_programs() -> None:
    queue = queue_of(*(waiting(program=f"p{number}") for number in range(100)))
    full: set[str | None] = set()
    seen = 0
    for request in queue.in_order(full):
        full.add(request.name)
        seen += 1
    assert seen == 1


class FairQueueMachine(RuleBasedStateMachine):
    """Requests come, go on, and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Waiting] = FairQueue(MOST, BYTES)
        self.there: list[Waiting] = []

    @rule(request=requests)
    def come(self, request: Waiting) -> None:
        fits = len(self.there) < MOST and sum(each.size for each in self.there) + request.size <= BYTES
        assert self.queue.fits(request.size) is fits
        kept = [each.size for each in self.there if each.sort_key <= request.sort_key]
        could = len(kept) < MOST and sum(kept) + request.size <= BYTES
        assert self.queue.can_fit(request) is could
        if fits:
            request = replace(request, number=next(numbers))  # hypothesis may give the same one twice
            self.queue.add(request)
            self.there.append(request)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.there))
        self.queue.remove(request)
        self.queue.remove(request)
        self.there.remove(request)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), order=st.floats(0, 10))
    def be_late(self, data: st.DataObject, order: float) -> None:
        request = data.draw(st.sampled_from(self.there))
        self.queue.let_others_first(request, order)
        assert (request.slo_missed, request.order) == (True, order)

    @precondition(lambda self: self.there)
    @rule(taken=st.lists(st.booleans(), min_size=1, max_size=MOST))
    def go_on(self, taken: list[bool]) -> None:
        """Some of those that are looked at in turn go on, the others stay."""
        seen: list[Waiting] = []
        for request, goes_on in zip(self.queue.in_order(), taken, strict=False):
            seen.append(request)
            if goes_on:
                self.queue.served(request.tenant, request.tokens, request.program)
                self.queue.remove(request)
                self.there.remove(request)
        assert len(set(map(id, seen))) == len(seen)
        assert [request.sort_key for request in seen] == sorted(request.sort_key for request in seen)

    @rule(tenant=st.sampled_from("abcd"), tokens=st.integers(1, 100), program=st.sampled_from(["", "p", "q", "r"]))
    def go_past(self, tenant: str, tokens: int, program: str) -> None:
        self.queue.served(tenant, tokens, program)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == len(self.there)
        assert self.queue.size == sum(request.size for request in self.there)
        assert self.queue.lengths() == Counter(request.priority for request in self.there)
        seen = list(self.queue.in_order())
        assert sorted(map(id, seen)) == sorted(map(id, self.there))
        for group in {(*each.sort_key, each.tenant, each.name, each.program) for each in self.there}:
            orders = [each.order for each in seen if (*each.sort_key, each.tenant, each.name, each.program) == group]
            assert orders == sorted(orders)

    @invariant()
    def the_last_is_one_of_the_lowest_standing(self) -> None:
        last = self.queue.last()
        assert (last is None) == (not self.there)
        if last:
            assert last.sort_key == max(request.sort_key for request in self.there)

    @invariant()
    def priorities_of_names(self) -> None:
        for name in ("m", "n", None):
            known = [request.priority for request in self.there if request.name == name]
            assert self.queue.best_priority(name) == min(known, default=None)
        assert self.queue.ahead_of(0) == sum(request.priority <= 0 for request in self.there)


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
