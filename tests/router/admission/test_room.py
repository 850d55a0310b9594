"""Calls of sessions that wait for room: their order, the bounds of their waits, and their ends, in virtual time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_api.errors import RequestError
from indexer import Target
from router.admission.admission import Admission
from router.admission.room import OVERTAKING_SECONDS, ROOM_SECONDS, ROOM_TRIES, SeenSession, reachable
from router.admission.ticket import Ticket, WaitReason
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.observability.session_figures import SessionFigures, SessionObserver
from router.policies import Candidate
from router.policies.records import Source
from router.programs.sessions import LONGEST_IDLE
from router.routing.selector import TargetSelector
from router.settings import AdmissionSettings, Role
from simulator.fleet.simulated_router import OURS, build_router
from simulator.fleet.trace import TracedRequest, prompt_of
from simulator.fleet.virtual_time import VirtualTimeLoop
from simulator.fleet.workers import MODEL, EventIndex, SimulatedWorkers

BLOCK = 512
CAPACITY = 100  # blocks of a worker's cache, of which 80 are room
TIMEOUT = AdmissionSettings().timeout


@dataclass(slots=True)
class Sent:
    """A call, and what became of it."""

    session: str
    blocks: int
    arrived: float
    tenant: str
    time: float | None = None
    sent: float = inf
    ended: float = inf
    error: RequestError | None = None
    cancelled: bool = False


class Workers(SimulatedWorkers):
    """Workers that may all leave."""

    gone = False

    def leave(self) -> None:
        self.gone, self.version = True, self.version + 1

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        return () if self.gone else super().able(name, prefill)


class Fleet:
    """A router whose workers lose each context at once, so that every return is cold. Time is virtual."""

    def __init__(
        self,
        workers: int = 1,
        queue: int = 1000,
        events: bool = True,
        roles: Sequence[Role] | None = None,
        requests: Literal["auto"] | None = None,
    ) -> None:
        self.loop = VirtualTimeLoop()
        now = self.loop.time
        roles = roles or [Role.BOTH] * workers
        self.workers = Workers(roles, CAPACITY, BLOCK, now)
        index = EventIndex(self.workers.registrations, events, now)
        router = build_router(self.workers, index, replace(OURS, requests=requests), Random(1), now)
        self.selector, self.placement, self.gate = router.selector, router.placement, router.state.gate
        settings = AdmissionSettings(requests=requests, queue=queue)
        self.admission = Admission(router.selector, router.placement, settings, True, now, self.gate)
        router.state.load.on_ended.append(self.admission.wake)
        self.calls: list[Sent] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = count()

    def close(self, at: float = 0.0) -> None:
        """Close the gate: a session returns that lost its context, and ends."""
        self.at(at, "lost", 20, 0.1)
        self.at(at + 5, "lost", 20, 0.1)
        self.loop.call_at(at + 5.5, self.gate.sessions.finish, "lost")

    def clear(self) -> None:
        """Clear the caches of all workers, as an update of their weights does."""
        for worker in self.workers.workers:
            self.placement.forget(worker)

    def lose_workers(self) -> None:
        """Let every worker leave."""
        self.workers.leave()

    def assert_nothing_is_left(self) -> None:
        """Check that no call waits, and that no session is charged or known once its time is over."""
        sessions = self.gate.sessions
        assert self.admission.queue.length == 0
        assert not self.admission.waiting_for()
        assert sessions.live().total() == len(sessions) == 0
        assert not any(each.tokens for each in sessions.working_sets.values())

    def at(
        self,
        arrival: float,
        session: str,
        blocks: int,
        seconds: float,
        *,
        tenant: str = "",
        leaves: float | None = None,
        time: float | None = None,
        program: str | None = None,
    ) -> Sent:
        """Let a call arrive that a worker answers in `seconds`.

        - `leaves`: its client leaves after these seconds.
        - `time`: the seconds that its client waits at most.
        """
        sent = Sent(session, blocks, arrival, tenant, time)
        self.calls.append(sent)

        def begin() -> None:
            task = self.loop.create_task(self._call(sent, seconds, time, program))
            self._tasks.append(task)
            if leaves is not None:
                self.loop.call_later(leaves, task.cancel)

        self.loop.call_at(arrival, begin)
        return sent

    def run(self, until: float = 10_000.0) -> None:
        self.loop.run_until_complete(asyncio.sleep(until))
        assert all(task.done() for task in self._tasks)
        self.gate.sessions.expire()
        self.loop.close()

    def prompt(self, session: str, blocks: int, program: str | None = None) -> RoutedRequest:
        ids = tuple(hash((session, number)) % 2**31 for number in range(blocks))
        traced = TracedRequest(0.0, BLOCK * blocks, 1, ids, ids, session)
        prompt = RoutedRequest(MODEL, streamed=True, identity=Identity(session, program), path="/v1/chat/completions")
        return prompt.tokenized([prompt_of(traced, next(self._numbers), BLOCK)])

    async def _call(self, sent: Sent, seconds: float, time: float | None, program: str | None) -> None:
        prompt = self.prompt(sent.session, sent.blocks, program)
        now = self.loop.time()
        place_by = None if time is None else now + time
        ticket = Ticket(tenant=sent.tenant, tokens=prompt.tokens, arrived=now, place_by=place_by)
        try:
            assignment = self.admission.place(prompt, (), ticket) or await self.admission.wait(prompt, (), ticket)
        except RequestError as error:
            sent.error, sent.ended = error, self.loop.time()
            return
        except asyncio.CancelledError:
            sent.cancelled = True
            return
        sent.sent = self.loop.time()
        self.placement.record_in_flight(prompt, assignment)
        if (prefill := assignment.prefill) is not None:
            prefill.attempt.heard()
            prefill.attempt.end(Outcome.SUCCEEDED)
            prefill.first_byte()
            prefill.release()
            assignment.prefilled()
        assignment.attempt.heard()
        assignment.first_byte()
        try:
            await asyncio.sleep(seconds)
        finally:
            assignment.attempt.end(Outcome.SUCCEEDED)
            self.placement.answered(assignment, Usage(prompt.tokens, 1, 0))
            assignment.release()
            sent.ended = self.loop.time()


CALLS = st.lists(
    st.tuples(
        st.floats(5, 300),  # arrival
        st.integers(0, 5),  # session
        st.integers(4, 110),  # blocks
        st.floats(0.1, 200),  # seconds of the answer
        st.sampled_from(["", "", "other"]),  # tenant
        st.none() | st.floats(1, 400),  # when its client leaves
        st.none() | st.floats(10, 700),  # the client's time
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(CALLS)
def test_every_call_ends_and_nothing_overtakes_one_that_has_waited_for_its_bound(
    calls: list[tuple[float, int, int, float, str, float | None, float | None]],
) -> None:
    fleet = Fleet(workers=2)
    fleet.close()
    for number, (arrival, session, blocks, seconds, tenant, leaves, time) in enumerate(calls):
        # A session's later calls are longer. All others are sessions of one call.
        name = f"{tenant} {session}" if session < 3 else f"one {number}"
        fleet.at(arrival, name, blocks, seconds, tenant=tenant, leaves=leaves, time=time)
    fleet.run()
    began = defaultdict[tuple[str, str], float](lambda: inf)
    for call in fleet.calls:
        assert call.sent < inf or call.error is not None or call.cancelled
        if call.sent < inf:
            assert call.sent <= call.arrived + ROOM_SECONDS + TIMEOUT + 1
            began[call.tenant, call.session] = min(began[call.tenant, call.session], call.sent)
    for first in fleet.calls:
        for later in fleet.calls:
            if later.arrived <= first.arrived or later.tenant != first.tenant or later.sent == inf:
                continue
            begins = began[later.tenant, later.session] == later.sent
            # The hold ends after half of its client's time.
            held = later.time is None or later.sent - later.arrived < later.time / 2
            if begins and held and later.sent < first.sent < inf:
                assert later.sent <= first.arrived + OVERTAKING_SECONDS + 1e-6
    fleet.assert_nothing_is_left()


def test_sessions_that_begin_while_caches_are_full_wait_and_leave_nothing() -> None:
    fleet = Fleet()
    fleet.close()
    for number in range(30):
        fleet.at(6.0 + number, f"{number}", 30, 20.0, leaves=3.0 if number % 3 == 0 else None)
    fleet.run()
    assert any(call.sent > call.arrived + 5 for call in fleet.calls)
    assert any(call.cancelled for call in fleet.calls)
    fleet.assert_nothing_is_left()


def test_a_new_session_is_refused_after_its_time_and_told_when_calls_find_room() -> None:
    fleet = Fleet()
    fleet.close()
    for number in range(8):  # one after the other fits, for its answer and its time as a live session
        fleet.at(6.0 + number, f"{number}", 60, 100.0 - LONGEST_IDLE)
    fleet.run()
    refused = [call for call in fleet.calls if call.error is not None]
    assert refused
    for call in refused:
        assert call.error is not None
        assert (call.error.status, call.error.code) == (429, "working_set")
    # One call finds room each 100 seconds. The last one is behind none.
    last = refused[-1].error
    assert last is not None
    assert last.retry_after is not None
    assert 100 < last.retry_after < 250


def test_calls_that_still_wait_are_refused_a_second_before_the_server_ends() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "first", 60, 50.0)
    waits, leaves = fleet.at(7.0, "waits", 60, 1.0), fleet.at(8.0, "leaves", 60, 1.0, leaves=20.0)
    fleet.loop.call_at(10.0, fleet.admission.stop, 30.0)
    late = fleet.at(39.5, "late", 60, 1.0)
    fleet.run()
    assert leaves.cancelled
    for call, ended in ((waits, 39.0), (late, 39.5)):
        assert call.ended == pytest.approx(ended)
        assert call.error is not None
        assert (call.error.status, call.error.code, call.error.retry_after) == (503, "stopping", 1)
    fleet.assert_nothing_is_left()


def test_a_session_that_has_begun_is_sent_after_its_time() -> None:
    fleet = Fleet()
    fleet.at(0.0, "begun", 60, 1.0)
    fleet.close(70.0)
    fleet.at(76.0, "long", 70, 1000.0)
    returns = fleet.at(78.0, "begun", 60, 1.0)
    fleet.run()
    assert returns.sent == pytest.approx(78.0 + ROOM_SECONDS)


def test_a_context_that_fits_beside_no_other_is_sent_after_its_time() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "long", 50, 1000.0)
    huge = fleet.at(8.0, "huge", 90, 1.0)
    fleet.run()
    assert huge.sent == pytest.approx(8.0 + ROOM_SECONDS)


def test_a_hold_ends_after_half_of_the_clients_time() -> None:
    fleet = Fleet()
    fleet.at(0.0, "begun", 60, 1.0)
    fleet.close(70.0)
    fleet.at(76.0, "long", 70, 1000.0)
    returns = fleet.at(78.0, "begun", 60, 1.0, time=60.0)
    new = fleet.at(78.0, "new", 60, 1.0, time=60.0)
    fleet.run()
    assert returns.sent == pytest.approx(78.0 + 30)
    assert new.error is not None
    assert new.error.code == "working_set"


def test_a_subagent_goes_before_new_sessions_that_came_earlier() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "parent", 60, 50.0, program="run")
    new = [fleet.at(7.0 + number, f"{number}", 60, 1.0) for number in range(3)]
    child = fleet.at(11.0, "child", 18, 1.0, program="run")
    other = fleet.at(11.0, "other", 18, 1.0)
    fleet.run()
    assert child.sent < min(call.sent for call in [*new, other])


def test_calls_of_pairs_wait_only_while_prefill_workers_have_no_time_to_spare() -> None:
    fleet = Fleet(roles=[Role.PREFILL, Role.DECODE])
    fleet.close()
    fleet.at(6.0, "first", 60, 200.0)
    early = fleet.at(7.0, "early", 60, 1.0)
    for second in range(8, 100, 4):
        fleet.at(second, f"idle {second}", 1, 0.1)
    late = fleet.at(100.0, "late", 60, 1.0)
    fleet.run()
    assert fleet.gate.closed
    assert early.sent > early.arrived + 5
    assert late.sent == late.arrived


def test_calls_that_wait_for_room_do_not_slow_down_a_fleet_with_capacity() -> None:
    fleet = Fleet(requests="auto")
    fleet.close()
    fleet.at(6.0, "first", 60, 1.0)  # its session stays live, and its memory is free
    waiting = [fleet.at(7.0 + number, f"{number}", 60, 1.0) for number in range(5)]
    paced = list[bool]()
    fleet.loop.call_at(15.0, lambda: paced.append(fleet.admission.limits.paced))
    fleet.run()
    assert min(call.sent for call in waiting) > 15
    assert paced == [False]


def test_many_sessions_of_a_tenant_leave_places_and_room_to_others() -> None:
    fleet = Fleet(queue=40)
    fleet.close()
    crowd = [fleet.at(6.0 + number / 100, f"{number}", 30, 5.0, tenant="crowd") for number in range(500)]
    others = [fleet.at(12.0 + number, f"other {number}", 30, 5.0, tenant="other") for number in range(3)]
    fleet.run()
    assert sum(call.error is not None for call in crowd) > 400
    assert all(call.sent < inf for call in others)
    behind = [call for call in crowd if call.arrived < 12 and call.sent > others[0].sent]
    assert len(behind) > 10


@pytest.mark.derives
def test_an_event_costs_no_more_while_many_calls_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    has_capacity = TargetSelector.any_has_capacity

    def counting(selector: TargetSelector, *args: Any, **named: Any) -> bool:
        asked.append(fleet.loop.time())
        return has_capacity(selector, *args, **named)

    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "long", 70, 1000.0)
    for number in range(200):
        fleet.at(8.0, f"{number}", 60, 1.0)
    fleet.loop.call_at(20.5, monkeypatch.setattr, TargetSelector, "any_has_capacity", counting)
    fleet.loop.call_at(40.5, monkeypatch.undo)
    fleet.run()
    assert 20 <= len(asked) <= 20 * (ROOM_TRIES + 1)  # the calls are tried again once a second


def test_calls_that_wait_when_the_last_worker_leaves_are_refused_soon() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "long", 70, 1000.0)
    held = fleet.at(8.0, "held", 60, 1.0)
    fleet.loop.call_at(10.0, fleet.lose_workers)
    fleet.run()
    assert held.error is not None
    assert held.error.status == 503


@pytest.mark.parametrize("events", [True, False], ids=["events", "no events"])
def test_sessions_wait_only_where_events_show_what_workers_hold(events: bool) -> None:
    fleet = Fleet(events=events)
    fleet.close()
    fleet.at(6.0, "long", 70, 1000.0)
    new = fleet.at(8.0, "new", 60, 1.0)
    fleet.run()
    assert (new.error is None) is not events


def test_workers_that_lose_every_cache_at_once_compute_what_fits_first() -> None:
    fleet = Fleet(workers=2)
    for number in range(12):
        fleet.at(0.0, f"{number}", 20, 1.0)
    fleet.loop.call_at(5.0, fleet.clear)
    returns = [fleet.at(6.0 + number / 100, f"{number}", 20, 10.0) for number in range(12)]
    fleet.run()
    at_once = [call for call in returns if call.sent < call.arrived + 1]
    assert 6 <= len(at_once) < 10  # four contexts of 20 blocks fit into 80, on each worker
    assert all(call.error is None for call in returns)


def test_what_a_pool_holds_counts_less_the_cost_of_its_load() -> None:
    def held(price: float) -> int:
        target = Target("http://a", 0, MODEL)
        return reachable(1000, Candidate(target, overlap=500, source=Source("pool", 20_000, price)))

    assert held(0.25) == 500 + 15_000
    assert held(2.0) == 1000  # computing is cheaper, so the context is cold


def test_a_request_that_would_wait_for_room_is_explained_and_changes_nothing() -> None:
    fleet = Fleet()
    fleet.close()
    fleet.at(6.0, "live", 60, 100.0)
    seen = list[object]()

    def look() -> None:
        prompt = fleet.prompt("new", 40)
        seen.append(fleet.admission.preview(prompt))
        selection = fleet.selector.choose(prompt)
        assert selection is not None
        seen.append(fleet.admission.session(prompt, selection, ""))

    fleet.loop.call_at(10.0, look)
    fleet.loop.call_at(11.0, look)
    fleet.run()
    assert seen[0] is seen[2] is WaitReason.WORKING_SET
    assert isinstance(seen[1], SeenSession)
    assert (seen[1].state, seen[1].charged, seen[1].closed, seen[1].waiting) == ("new", None, True, 0)
    assert list(seen[1].rooms.values()) == [pytest.approx(-20 * BLOCK, abs=BLOCK)]
    assert seen[1] == seen[3]


def test_figures_of_sessions_say_how_many_came_and_how_many_are_missing() -> None:
    fleet = Fleet(workers=2)
    fleet.close()
    observer = SessionObserver(fleet.workers, fleet.gate, fleet.admission, fleet.loop.time)
    for number in range(8):
        fleet.at(6.0 + number, f"{number}", 40, 100.0)
    seen = list[tuple[dict[str, SessionFigures], list[dict[str, Any]]]]()

    def look() -> None:
        seen.append((observer.figures(), observer.findings()))

    fleet.loop.call_at(16.0, look)
    fleet.loop.call_at(30.0, look)
    fleet.run()
    (figures, none), (_, found) = seen
    assert figures[MODEL] == SessionFigures(live=2, waiting=6, more=0, targets=2)
    assert figures[MODEL].load == 4
    assert none == []
    assert [each["finding"] for each in found] == ["sessions_wait"]
    assert found[0]["detail"] == (
        "2 sessions are live, and 6 calls wait for room. The KV caches hold 2 sessions of this size. "
        "6 more workers or DP ranks like these would hold all."
    )
