"""The queue of requests that cannot be sent yet, and the order in which they are sent.

A request waits for one of four reasons:

    saturated     every target that may receive it is at its limits (`limits`), or refused a request as full
    late binding  its target is busy with other prompts, so it should choose again later (`late_binding`)
    no worker     its model has no worker now, but one may start (`cold_start_timeout`)
    working set   its session has no room beside the contexts of live sessions (`router.programs`)

All requests wait in one queue (`fair_queue`). The first requests of the queue choose again after each of these events:
a request ends, a prefill ends, a worker changes, an engine reports its load. Nothing is polled. A saturated request
that finds no capacity keeps the requests behind it waiting, so that a large prompt is not overtaken for ever.

After `timeout` seconds a request is refused if all its targets are full or at their limits. Otherwise it is sent to its
target, however busy that is. A request that waits for a worker is refused after `cold_start_timeout` seconds. Requests
without a worker fill at most half of the queue. They include requests whose connection was refused, and requests whose
last worker stops while they wait for capacity. A worker that starts again may receive the request.

A request whose TTFT objective can no longer be met is served late: while its target is busy, all other requests go
first, for `LATE_TIMEOUTS` times the timeout. If it were sent after the timeout, it would delay requests that can still
meet their objectives. Under overload every request would then miss its objective.

One file, because every rule decides about the same waiting requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from http_api.errors import RequestError
from router.admission.fair_queue import FairQueue
from router.admission.pace import Pace
from router.admission.refusals import Refusals
from router.admission.room import ROOM_SECONDS, ROOM_TRIES, Room, SeenSession, places_ahead
from router.admission.ticket import Ticket, WaitingRequest, WaitReason, queue_order
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.prediction.slo import SLO
from router.programs import Gate
from router.routing.assignment import Assignment, Selection
from router.routing.late_binding import PREFILL_WEIGHT
from router.routing.placement import Placement
from router.routing.ranks import Limits, RoutableRank
from router.routing.selector import TargetSelector
from router.settings import AdmissionSettings

LATE_TIMEOUTS = 10
# The most waiting requests that choose again after one event: each choice costs a walk through the index.
TRIES = 16
# The most waiting requests that are looked at after one event: most wait for a target that is still busy.
LOOKS = 128
# The most of these in one group whose SLO is missed: each of their choices predicts the latency of all candidates.
LATE_TRIES = 2
# The seconds before the server's end in which the refusals of requests that still wait are written.
_REFUSED_BEFORE = 1.0


@dataclass(frozen=True, slots=True)
class _Held:
    """The verdict on a request that has to wait: why, whether its selection missed the SLO's TTFT, and its target."""

    reason: WaitReason
    ttft_missed: bool = False
    target: RoutableRank | None = None


_SATURATED = _Held(WaitReason.SATURATED)
_NO_ROOM = _Held(WaitReason.WORKING_SET)


class Admission:
    """Places requests at once, or queues them. One event loop uses it; all timers are of that loop.

    - `on_waited`: called with the reason and the seconds of each wait that ended with a place.
    """

    def __init__(
        self,
        selector: TargetSelector,
        placement: Placement,
        settings: AdmissionSettings,
        late_binding: bool,
        clock: Callable[[], float] = time.monotonic,
        gate: Gate | None = None,
    ) -> None:
        """Create the queue.

        - `late_binding`: whether the policy uses it, unless the settings turn it off.
        - `gate`: holds calls of sessions that have no room; None: nothing does.
        """
        requests = None if settings.requests == "auto" else settings.requests
        self.limits = Limits(requests, settings.tokens, computed=settings.requests == "auto")
        self.queue: FairQueue[WaitingRequest] = FairQueue(settings.queue, settings.queue_bytes)
        self.late_binding = self.limits.late_binding = settings.late_binding and late_binding
        self.on_waited: list[Callable[[WaitReason, float], None]] = []
        self.refusals = Refusals(settings.timeout, clock)
        self._selector = selector
        self._placement = placement
        self._timeout = settings.timeout
        self._late_timeout = LATE_TIMEOUTS * settings.timeout
        self._cold_start_timeout = settings.cold_start_timeout
        self._most_cold = max(settings.queue // 2, 1)
        self._clock = clock
        self._full: set[str | None] = set()  # names whose first request found no capacity
        self._planned: asyncio.Handle | None = None
        self._stopped = False
        self._gate = gate
        self._room = None if gate is None or settings.programs == "off" else Room(gate, selector, self.wake, clock)
        self._pace = Pace(self.limits, settings.timeout, self.wake, clock)

    def place(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        """Return a request's assignment; None if the request has to `wait` for one.

        Raises RequestError: 503 if no worker is left, 504 if its deadline has passed.
        """
        if ticket.place_by is not None and self._clock() >= ticket.place_by:
            raise self.refusals.deadline()
        if self._gate is not None and ticket.call is None and prompt.identity is not None:
            ticket.call = self._gate.sessions.call_of(prompt, ticket.tenant)
        if self._full and prompt.name in self._full:
            first = self.queue.best_priority(prompt.name)
            if first is not None and first <= ticket.priority:
                return None
        if self.queue.length and self._makes_way(prompt, tried, ticket.priority):
            return None
        self.limits.lenient = not self._for_capacity
        try:
            placed = self._try(prompt, tried, ticket, now, behind=True)
        except RequestError:
            if self._awaits_worker(prompt, ticket):
                return None
            raise
        if isinstance(placed, _Held):
            return None
        ticket.charged = bool(self.queue.length)
        if ticket.charged:
            self.queue.served(ticket.tenant, ticket.tokens, _program(prompt, ticket))
        return placed

    def returned(self, prompt: RoutedRequest, ticket: Ticket) -> None:
        """Take back the charge for a place at a worker that refused the request as full."""
        if ticket.charged:
            self.queue.not_served(ticket.tenant, ticket.tokens, _program(prompt, ticket))

    async def wait(self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        """Queue a request, and return its assignment once it is placed. Cancelling removes it.

        Raises RequestError: 429 if the queue is full, the wait too long or the request sheddable, and as `place` does.
        """
        has_capacity = self._selector.any_has_capacity(prompt, tried, self.limits)
        cold = self._awaits_worker(prompt, ticket)
        if cold:
            tried = ()  # all of these have stopped: one that answers again was restarted
        if ticket.sheddable and not cold and (self._for_capacity or not has_capacity):
            ahead = self.queue.ahead_of(ticket.priority)
            raise self.refusals.too_many("shed", prompt.name, ticket, self.queue.length, ahead)
        if cold and self.waiting_for()[WaitReason.NO_WORKER] >= self._most_cold:
            raise self.refusals.no_worker(prompt.name)
        if self._stopped:
            raise self.refusals.stopping()
        now, loop = self._clock(), asyncio.get_running_loop()
        slo, prefill = ticket.slo, self._selector.prefill_seconds(prompt)
        ttft_missed = slo is not None and self._misses_ttft(prompt, tried, slo)
        request = WaitingRequest(
            ticket.priority,
            ticket.tenant,
            prompt.name,
            queue_order(prefill, ticket, ttft_missed, now, self._weight(prompt, tried)) - places_ahead(ticket.call),
            max(ticket.tokens, 1),
            ticket.size,
            ttft_missed,
            _program(prompt, ticket),
            prompt=prompt,
            tried=tuple(tried),
            ticket=ticket,
            reason=_reason(has_capacity, cold),
            assignment=loop.create_future(),
            since=now,
            prefill=prefill,
            ttft_missed=ttft_missed,
        )
        room = self._room if ticket.call is not None and ticket.call.held and has_capacity and not cold else None
        if room is not None and not room.may_queue(request, self.queue.free):
            raise self._no_room(room, request)
        if not self._free_queue_space(request):
            if assignment := self._force(request, though_late=False):
                return assignment
            raise self._too_many("queue_full", request)
        self.queue.add(request)
        until = self._cold_until(ticket) if cold else now + max(self._timeout - ticket.waited, 0.0)
        if slo is not None and slo.first_token_by is not None and not cold:
            until = slo.first_token_by if slo.refuses_late else max(until, slo.first_token_by)
        if room is not None:
            self._set_reason(request, WaitReason.WORKING_SET)
            until = min(until, room.until(request))
        self._wait_until(request, until)
        # The event that it waits for may have happened between `place` and now.
        self.wake()
        try:
            return await request.assignment
        except asyncio.CancelledError:
            if request.assignment.done() and not request.assignment.cancelled() and not request.assignment.exception():
                request.assignment.result().release()
            elif request.queued and request.until_deadline and request.is_over(self._clock()):
                self.refusals.count("deadline")  # the proxy has a timer of its own for it
            raise
        finally:
            if self._room is not None:
                self._room.left(request)
            ticket.waited += self._clock() - now
            if request.timer is not None:
                request.timer.cancel()
            if request.queued:  # its client disconnected
                self.queue.remove(request)
                self.wake()

    def _wait_until(self, request: WaitingRequest, until: float) -> None:
        """Set the timer of a request to `until`, or to its deadline if that is sooner."""
        place_by = request.ticket.place_by
        if place_by is not None and place_by < until:
            until, request.until_deadline = place_by, True
        if request.timer is not None:
            request.timer.cancel()
        seconds = max(until - self._clock(), 0.0)
        request.timer = asyncio.get_running_loop().call_later(seconds, self._time_over, request)

    def _misses_ttft(self, prompt: RoutedRequest, tried: Collection[Worker], slo: SLO) -> bool:
        try:
            selection = self._selector.choose(prompt, tried, self.limits, slo=slo)
        except RequestError:
            return False
        return selection is not None and _is_ttft_missed(selection)

    def preview(self, prompt: RoutedRequest, slo: SLO | None = None, tenant: str = "") -> Selection | WaitReason:
        """Return the selection that a request would get now, or why it would wait. Raises RequestError (503)."""
        ticket = Ticket(tenant=tenant, slo=slo)
        ticket.call = None if self._room is None else self._room.seen(prompt, tenant)
        chosen = self._choose(prompt, (), ticket, None, behind=True)
        if isinstance(chosen, _Held):
            return chosen.reason
        return self._bind(prompt, (), *chosen) or WaitReason.LATE_BINDING

    def session(self, prompt: RoutedRequest, selection: Selection, tenant: str) -> SeenSession | None:
        """Return the session of a request; None if it is no call of one, or if sessions are not followed."""
        call = None if self._room is None else self._room.seen(prompt, tenant)
        if call is None or self._room is None:
            return None
        return self._room.explained(call, selection.hashes, prompt)

    def held(self) -> list[WaitingRequest]:
        """Return the calls of sessions that wait for room, the oldest first."""
        return [] if self._room is None else self._room.in_order()

    def saturated(self, worker: Worker, dp_rank: int) -> bool:
        """Return whether a DP rank is at its limits."""
        return self._selector.at_limits(worker, dp_rank, self.limits)

    def wake(self) -> None:
        """Let waiting requests choose again soon, once for all events until then."""
        if self._planned is None and self.queue.length:
            self._planned = asyncio.get_running_loop().call_soon(self._choose_again)

    def stop(self, seconds: float) -> None:
        """Refuse the requests that still wait `_REFUSED_BEFORE` seconds before the server breaks off what is left.

        `seconds`: until then.
        """
        asyncio.get_running_loop().call_later(max(seconds - _REFUSED_BEFORE, 0.0), self._refuse_all)

    def waiting_for(self) -> Counter[WaitReason]:
        """Return the number of waiting requests by reason."""
        return Counter(request.reason for request in self.queue.in_order())

    def _choose_again(self) -> None:
        self._planned, self._full, self.limits.lenient = None, set(), False
        tries = room_tries = looks = 0
        overdue = {} if self._room is None else self._room.overdue()
        missed: list[WaitingRequest] = []
        if self.limits.computed:
            first = next(self.queue.in_order(), None)
            self._pace.see(first is not None and self._is_crowded(first))
        closed: dict[tuple[str | None, int], bool] = {}
        for request in self.queue.in_order(self._full, LATE_TRIES):
            if self.limits.computed:
                key = request.name, request.priority
                if key not in closed:
                    closed[key] = self._makes_way(request.prompt, request.tried, request.priority)
                if closed[key]:
                    self._full.add(request.name)
                    continue
            first = overdue.get((request.priority, request.tenant))
            behind = room_tries >= ROOM_TRIES or first not in (None, request)
            if behind and self._waits_for_room(request):
                if room_tries >= ROOM_TRIES and self._room is not None and len(self._room) == self.queue.length:
                    break
                continue
            looks += 1
            if looks > LOOKS:
                break
            if self._is_held(request):
                continue
            waiting = self._for_capacity if self.late_binding else None
            if not self._selector.any_has_capacity(request.prompt, request.tried, self.limits, waiting):
                if not request.tried:
                    self._full.add(request.name)
                continue
            if tries == TRIES:
                break
            tries += 1
            try:
                placed = self._try(request.prompt, request.tried, request.ticket, behind=behind)
            except RequestError as error:
                if not self._awaits_worker(request.prompt, request.ticket):
                    self._fail(request, error)
                continue
            if isinstance(placed, Assignment):
                self._give(request, placed)
                continue
            self._set_reason(request, placed.reason)
            request.held_for = placed.target
            if placed.reason is WaitReason.WORKING_SET:
                room_tries += 1 if first is None else ROOM_TRIES
                continue
            if placed.reason is not WaitReason.SATURATED:
                request.ttft_missed = placed.ttft_missed
            elif not request.tried and not request.prompt.stored and self._selector.fits_all(request.prompt):
                self._full.add(request.name)
            if request.ttft_missed:
                missed.append(request)
        for request in missed:
            if request.queued:
                self._let_others_first(request)
        if self.limits.paced:
            first = next(self.queue.in_order(), None)
            self._pace.plan(None if first is None else self._selector.opens_at(first.prompt))

    def _weight(self, prompt: RoutedRequest, tried: Collection[Worker]) -> float:
        """Return the weight of a request's prefill in its place in the queue.

        Each second of a prefill delays every request that waits for the target. So the fuller the queue, the sooner
        requests are sent whose prompts are cached, and fewer cached prompts are evicted while they wait.
        """
        if not self.limits.computed:
            return PREFILL_WEIGHT
        return max(self._selector.waiting_per_target(prompt, tried, self._for_capacity), PREFILL_WEIGHT)

    @property
    def _for_capacity(self) -> int:
        """The number of waiting requests without the calls that wait for room, which need no capacity meanwhile."""
        return self.queue.length - (0 if self._room is None else len(self._room))

    def _is_crowded(self, request: WaitingRequest) -> bool:
        """Return whether more requests wait than a request has targets. Without computed limits it is never known."""
        waiting = self._for_capacity
        return self.limits.computed and self._selector.waiting_per_target(request.prompt, request.tried, waiting) > 1

    def _makes_way(self, prompt: RoutedRequest, tried: Collection[Worker], priority: int) -> bool:
        """Return whether a request waits because more requests of higher priorities wait than there are targets.

        Fewer of them may all wait for a target that holds their prompts. Then lower priorities use the others.
        """
        if not self.limits.computed:
            return False
        above = self.queue.above(priority, prompt.name)
        if above and self._room is not None:  # targets without room for one session can have room for other requests
            above -= self._room.above(priority, prompt.name)
        return above > 0 and self._selector.waiting_per_target(prompt, tried, above) > 1

    def _is_held(self, request: WaitingRequest) -> bool:
        """Return whether the target that late binding held a request for is still busy, so that it need not choose."""
        target = request.held_for
        if target is None or request.ticket.slo is not None or not self._is_crowded(request):
            return False
        return self._selector.is_held_for(target, self.limits)

    def _let_others_first(self, request: WaitingRequest) -> None:
        """Move a request whose TTFT is missed behind the other late requests of its group, so that each is tried."""
        order = queue_order(request.prefill, request.ticket, ttft_missed=True, now=self._clock())
        self.queue.let_others_first(request, order)

    def _try(
        self,
        prompt: RoutedRequest,
        tried: Collection[Worker],
        ticket: Ticket,
        now: float | None = None,
        behind: bool = False,
    ) -> Assignment | _Held:
        """Choose and reserve in one step, or return why the request has to wait. Raises RequestError."""
        chosen = self._choose(prompt, tried, ticket, now, behind)
        if isinstance(chosen, _Held):
            return chosen
        selection, limits = chosen
        self._refuse_late(selection)
        bound = self._bind(prompt, tried, selection, limits)
        if bound is None:
            target = (selection.prefill or selection).rank
            return _Held(WaitReason.LATE_BINDING, _is_ttft_missed(selection), target)
        return self._reserve(prompt, bound, ticket, now)

    def _choose(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None, behind: bool
    ) -> tuple[Selection, Limits] | _Held:
        """Return a selection among the targets with room, and the limits that leave out the others.

        `behind`: calls that wait for room go first.
        """
        limits = self.limits
        selection = self._selector.choose(prompt, tried, limits, now, ticket.slo)
        if selection is None:
            return _SATURATED
        call, room = ticket.call, self._room
        if call is None or room is None or room.passes(call, prompt, selection):
            return selection, limits
        closed = room.closed(call, prompt, selection, behind)
        if closed:
            limits = limits.without(closed)
            selection = self._selector.choose(prompt, tried, limits, now, ticket.slo)
        return _NO_ROOM if closed is None or selection is None else (selection, limits)

    def _reserve(
        self, prompt: RoutedRequest, selection: Selection, ticket: Ticket, now: float | None = None
    ) -> Assignment:
        assignment = self._placement.reserve(prompt, selection, now, ticket.call)
        self.refusals.rate.count(ticket.priority)
        return assignment

    def _set_reason(self, request: WaitingRequest, reason: WaitReason) -> None:
        """Set why a request waits. Its timeout restarts when it stops waiting for room."""
        if self._room is None:
            request.reason = reason
        elif self._room.set_reason(request, reason):
            self._wait_until(request, self._clock() + self._timeout)

    def _waits_for_room(self, request: WaitingRequest) -> bool:
        return request.reason is WaitReason.WORKING_SET

    def _bind(
        self, prompt: RoutedRequest, tried: Collection[Worker], selection: Selection, limits: Limits
    ) -> Selection | None:
        """Return the selection to send a request by; None if late binding holds it."""
        if not self.late_binding:
            return selection
        return self._selector.bind(prompt, selection, tried, limits, self._for_capacity)

    def _refuse_late(self, selection: Selection) -> None:
        """Raise RequestError for a request that would miss its SLO, if its SLO refuses it then."""
        slo = selection.slo
        if slo is not None and slo.refuses_late and selection.slo_missed:
            model, prediction = selection.rank.target.model, selection.prediction
            raise self.refusals.slo_missed(slo, model, selection.slo_missed_by, prediction)

    def _force(self, request: WaitingRequest, though_late: bool = True) -> Assignment | None:
        """Return an assignment however busy its target is; None if none has capacity or room, or if it is too late.

        `though_late`: place it even if it misses its TTFT. Raises RequestError if its SLO then refuses it.
        """
        if self._waits_for_room(request):
            return None
        chosen = self._choose(request.prompt, request.tried, request.ticket, None, behind=True)
        if isinstance(chosen, _Held):
            if request.queued and chosen.reason is WaitReason.WORKING_SET:
                self._set_reason(request, chosen.reason)
            return None
        selection, limits = chosen
        self._refuse_late(selection)
        if not though_late and _is_ttft_missed(selection):
            return None
        if self._is_crowded(request) and (
            self._makes_way(request.prompt, request.tried, request.priority)
            or self._bind(request.prompt, request.tried, selection, limits) is None
        ):
            return None  # in an engine's own queue its priority would not count, nor that of those that follow
        return self._reserve(request.prompt, selection, request.ticket)

    def _give(self, request: WaitingRequest, assignment: Assignment) -> None:
        self.queue.served(request.tenant, request.tokens, request.program)
        request.ticket.charged = True
        self.queue.remove(request)
        for on_waited in self.on_waited:
            on_waited(request.reason, self._clock() - request.since)
        if self._room is not None:
            self._room.left(request, placed=True)
        if request.assignment.done():  # its client disconnected in this step
            assignment.release()
        else:
            self._placement.record_in_flight(request.prompt, assignment)  # other requests choose before it is sent
            request.assignment.set_result(assignment)

    def _fail(self, request: WaitingRequest, error: RequestError) -> None:
        self.queue.remove(request)
        if self._room is not None:
            self._room.left(request)
        if not request.assignment.done():
            request.assignment.set_exception(error)

    def _refuse_all(self) -> None:
        self._stopped = True
        for request in list(self.queue.in_order()):
            self._fail(request, self.refusals.stopping())

    def _time_over(self, request: WaitingRequest) -> None:
        """Place or refuse a request that has waited too long, or whose deadline has passed."""
        if not request.queued:
            return
        try:
            if request.until_deadline:
                raise self.refusals.deadline()
            if self._selector.awaits_worker(request.prompt):
                if not self._awaits_worker(request.prompt, request.ticket):
                    raise self.refusals.no_worker(request.name)
                request.tried = ()
                self._set_reason(request, WaitReason.NO_WORKER)
                self._wait_until(request, self._cold_until(request.ticket))
                return
            if self._may_wait_for_room(request):
                return
            slo = request.ticket.slo
            if slo is not None and slo.first_token_by is not None and self._may_be_later(request, slo):
                return
            assignment = self._force(request)
            if assignment is None and self._may_wait_for_room(request):
                return
            if assignment is None and slo is not None and slo.refuses_late:
                raise self.refusals.slo_missed(slo, request.name or "", self._clock() - request.since, None)
            if assignment is None:
                if self.limits.computed:
                    self._pace.refused()
                raise self._too_many("queue_timeout", request)
        except RequestError as error:
            self._fail(request, error)
        else:
            self._give(request, assignment)
        self.wake()

    def _may_wait_for_room(self, request: WaitingRequest) -> bool:
        """Let a call wait longer for room. If its hold is over, it waits for its target, or it is refused.

        Raises RequestError for a new session then.
        """
        room = self._room
        if room is None or request not in room:
            return False
        now, until = self._clock(), room.until(request)
        if now < until:
            self._wait_until(request, min(until, now + self._timeout))  # its workers may have stopped by then
        elif room.may_go(request):
            self._set_reason(request, WaitReason.LATE_BINDING)
            self.wake()
        else:
            raise self._no_room(room, request)
        return True

    def _no_room(self, room: Room, request: WaitingRequest) -> RequestError:
        waiting = len(room)
        retry_after = room.rate.seconds_for(request.priority, waiting, otherwise=ROOM_SECONDS)
        return self.refusals.no_room(request.name, request.ticket.slo, waiting, retry_after)

    def _may_be_later(self, request: WaitingRequest, slo: SLO) -> bool:
        """Let a request wait longer, if it misses its SLO anyway and its target is busy. Raises RequestError."""
        if slo.refuses_late or self._clock() >= request.since + self._late_timeout:
            return False
        selection = self._selector.choose(request.prompt, request.tried, self.limits, slo=slo)
        if selection is None or self._bind(request.prompt, request.tried, selection, self.limits) is not None:
            return False
        request.ttft_missed = selection.slo_missed
        if not request.ttft_missed:
            return False
        if not request.slo_missed:
            self._let_others_first(request)
        self._wait_until(request, request.since + self._late_timeout)
        return True

    def _awaits_worker(self, prompt: RoutedRequest, ticket: Ticket) -> bool:
        """Return whether a request may still wait for a worker of its model, because no worker serves it now."""
        if not self._selector.awaits_worker(prompt):
            return False
        return ticket.cold_until is None or self._clock() < ticket.cold_until

    def _cold_until(self, ticket: Ticket) -> float:
        """Return when a request has waited long enough for a worker. Later waits of the request end then, too."""
        if ticket.cold_until is None:
            ticket.cold_until = self._clock() + self._cold_start_timeout
        return ticket.cold_until

    def _free_queue_space(self, request: WaitingRequest) -> bool:
        """Return whether the queue has space for a request, after placing or refusing the last requests if needed."""
        if not self.queue.can_fit(request):
            return False
        while not self.queue.fits(request.size):
            last = self.queue.last()
            if last is None or last.sort_key <= request.sort_key:
                return False
            try:
                assignment = self._force(last, though_late=False)
            except RequestError as error:
                self._fail(last, error)
                continue
            if assignment is None:
                self._fail(last, self._too_many("queue_full", last))
            else:
                self._give(last, assignment)
        return True

    def _too_many(self, code: str, request: WaitingRequest) -> RequestError:
        ahead = self.queue.ahead_of(request.priority)
        return self.refusals.too_many(code, request.name, request.ticket, self.queue.length, ahead)


def _is_ttft_missed(selection: Selection) -> bool:
    slo = selection.slo
    return slo is not None and slo.ttft is not None and selection.slo_missed


def _program(prompt: RoutedRequest, ticket: Ticket) -> str:
    """Return the program that takes turns with others of its tenant; "" without one, and for requests with an SLO."""
    return "" if prompt.identity is None or ticket.slo is not None else prompt.identity.program


def _reason(has_capacity: bool, cold: bool) -> WaitReason:
    if cold:
        return WaitReason.NO_WORKER
    return WaitReason.LATE_BINDING if has_capacity else WaitReason.SATURATED
