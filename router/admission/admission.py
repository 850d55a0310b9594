"""Which requests wait in the router, and when they go on.

A request waits for one of three reasons:

    saturated     every target that could take it is at its limits (`limits`)
    late binding  its target is busy with the prompts of others, and it better chooses again (`late_binding`)
    no worker     its model is known and has no worker, but one may come (`cold_start_timeout`)

All wait in one queue (`fair_queue`). Whenever a request ends, or a prefill that others are held for, a worker changes
or an engine reports its load, the first of the queue choose again; nothing is polled. Something in flight is what they
wait for, or a worker that comes, so there is always a next time. A saturated one that finds no capacity keeps those
behind it waiting: a large prompt is not overtaken for ever.

A request that has waited for `timeout` seconds is sent to its target, however busy, or refused where all are at their
limits. One that waits for a worker is refused after `cold_start_timeout`; such may take half of the queue.

One that has lost what it was promised is served late: while its target is busy it lets all others go first, for
`LATE_TIMEOUTS` times that long. What comes faster than the fleet can answer makes somebody late. Were it sent after
`timeout` all the same, it would take the place of one that can still be in time, and soon everybody would be late.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from http_api.errors import RequestError
from router.admission.drain_rate import DrainRate
from router.admission.fair_queue import FairQueue, Waiting
from router.admission.refusals import slo_not_met, too_many
from router.admission.ticket import Ticket, deadline_error
from router.admission.wait_reason import WaitReason
from router.fleet.worker import Worker
from router.prediction.slo import SLO, Prediction
from router.routing.assignment import Assignment
from router.routing.capacity import Limits
from router.routing.late_binding import held_order, slo_order
from router.routing.placement import Placement
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import Selection
from router.routing.selector import Selector
from router.routing.target_directory import unavailable
from router.settings import AdmissionSettings

LATE_TIMEOUTS = 10
# Waiting requests that choose again at one time, at most: each choice costs a walk through the index.
TRIES = 16
# And those of a tenant and name that are late: these look at what all candidates would take, and have time.
LATE_TRIES = 2


@dataclass(slots=True, eq=False)
class _Request(Waiting):
    """A waiting request, and the future that its proxy waits on. `prefill`: seconds that its prompt would take."""

    prompt: RoutedPrompt = field(kw_only=True)
    tried: Collection[Worker] = field(kw_only=True)
    ticket: Ticket = field(kw_only=True)
    reason: WaitReason = field(kw_only=True)
    assignment: asyncio.Future[Assignment] = field(kw_only=True)
    since: float = field(kw_only=True)
    prefill: float = field(kw_only=True)
    timer: asyncio.TimerHandle | None = None
    until_deadline: bool = False
    ttft_missed: bool = False

    def is_over(self, now: float) -> bool:
        """Whether its deadline has come."""
        return self.ticket.place_by is not None and now >= self.ticket.place_by


@dataclass(frozen=True, slots=True)
class _Held:
    """The verdict on a request that has to wait: why, and whether its selection missed the SLO's TTFT."""

    reason: WaitReason
    ttft_missed: bool = False


_SATURATED = _Held(WaitReason.SATURATED)
_BUSY = _Held(WaitReason.LATE_BINDING)
_TTFT_MISSED = _Held(WaitReason.LATE_BINDING, ttft_missed=True)


class Admission:
    """Places requests at once, or lets them wait. Used by one event loop.

    `late_binding`: whether the router's policy is one that requests are held for; the settings can still say no.
    `on_waited` is called with why a request waited and for how long; `on_refused` with why one was turned away;
    `on_slo_refused` with the model and the promise of one that was promised something.
    """

    def __init__(
        self,
        selector: Selector,
        placement: Placement,
        settings: AdmissionSettings,
        late_binding: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = Limits(settings.requests, settings.tokens)
        self.queue: FairQueue[_Request] = FairQueue(settings.queue, settings.queue_bytes)
        self.on_waited: list[Callable[[WaitReason, float], None]] = []
        self.on_refused: list[Callable[[str], None]] = []
        self.on_slo_refused: list[Callable[[str, SLO], None]] = []
        self._selector = selector
        self._placement = placement
        self.late_binding = settings.late_binding and late_binding
        self._timeout = settings.timeout
        self._late_timeout = LATE_TIMEOUTS * settings.timeout
        self._cold_start_timeout = settings.cold_start_timeout
        self._most_cold = max(settings.queue // 2, 1)
        self._clock = clock
        self._full: set[str | None] = set()  # names whose first request has found no capacity
        self._rate = DrainRate(clock)
        self._planned: asyncio.Handle | None = None

    def place(
        self, prompt: RoutedPrompt, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        """A place now; None when the request must `wait` for one. `now`: the time, where it was just read.

        Raises RequestError: 503 when no worker is left, 504 when its deadline has passed.
        """
        if ticket.place_by is not None:
            self._in_time(ticket.place_by)
        if self._full and prompt.name in self._full:
            first = self.queue.best_priority(prompt.name)
            if first is not None and first <= ticket.priority:
                return None
        try:
            placed = self._try(prompt, tried, ticket.slo, now)
        except RequestError:
            if self._awaits_worker(prompt, tried):
                return None
            raise
        if isinstance(placed, _Held):
            return None
        if self.queue.length:
            self.queue.served(ticket.tenant, ticket.tokens)
        return placed

    async def wait(self, prompt: RoutedPrompt, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        """The place that a request gets in its turn. Cancelling gives it up.

        Raises RequestError: 429 when the queue is full or the wait too long, 503 when no worker is left, 504 when its
        deadline has passed.
        """
        has_capacity = self._selector.any_has_capacity(prompt, tried, self.limits)
        cold = self._awaits_worker(prompt, tried)
        if cold and self.waiting_for()[WaitReason.NO_WORKER] >= self._most_cold:
            raise self._no_worker(prompt.name)
        now, loop = self._clock(), asyncio.get_running_loop()
        slo, prefill = ticket.slo, self._selector.prefill_seconds(prompt)
        slo_missed = slo is not None and self._misses_ttft(prompt, tried, slo)
        request = _Request(
            ticket.priority,
            ticket.tenant,
            prompt.name,
            self._order(prefill, ticket, slo_missed),
            max(ticket.tokens, 1),
            ticket.size,
            slo_missed,
            prompt=prompt,
            tried=tuple(tried),
            ticket=ticket,
            reason=_reason(has_capacity, cold),
            assignment=loop.create_future(),
            since=now,
            prefill=prefill,
            ttft_missed=slo_missed,
        )
        if not self._free_queue_space(request):
            if assignment := self._force(request, though_late=False):
                return assignment
            raise self._too_many("queue_full", request)
        self.queue.add(request)
        until = now + (self._cold_start_timeout if cold else self._timeout)
        if slo is not None and slo.first_token_by is not None and not cold:
            until = slo.first_token_by if slo.refuses_late else max(until, slo.first_token_by)
        self._wait_until(request, until)
        # What it waits for may have happened between `place` and now.
        self.wake()
        try:
            return await request.assignment
        except asyncio.CancelledError:
            if request.assignment.done() and not request.assignment.cancelled() and not request.assignment.exception():
                request.assignment.result().release()
            elif request.queued and request.until_deadline and request.is_over(self._clock()):
                self._count_refused("deadline")  # the proxy looks at the clock too
            raise
        finally:
            if request.timer is not None:
                request.timer.cancel()
            if request.queued:  # its client left
                self.queue.remove(request)
                self.wake()

    def _wait_until(self, request: _Request, until: float) -> None:
        """A request's time is over then, or at its deadline."""
        place_by = request.ticket.place_by
        if place_by is not None and place_by < until:
            until, request.until_deadline = place_by, True
        seconds = max(until - self._clock(), 0.0)
        request.timer = asyncio.get_running_loop().call_later(seconds, self._time_over, request)

    def _misses_ttft(self, prompt: RoutedPrompt, tried: Collection[Worker], slo: SLO) -> bool:
        """Return whether no target with capacity can give a request its first token in time."""
        try:
            selection = self._selector.choose(prompt, tried, self.limits, slo=slo)
        except RequestError:
            return False
        return selection is not None and _is_ttft_missed(selection)

    def _order(self, prefill: float, ticket: Ticket, slo_missed: bool) -> float:
        """Return the position of a request among those of its tenant and sort key: the lowest is next."""
        slo = ticket.slo
        if slo is None or slo.first_token_by is None:
            return held_order(ticket.arrived or self._clock(), prefill)
        return held_order(self._clock(), prefill) if slo_missed else slo_order(slo.first_token_by, prefill)

    def preview(self, prompt: RoutedPrompt, slo: SLO | None = None) -> Selection | WaitReason:
        """What a request would get now, or why it would have to wait. Raises RequestError (503)."""
        selection = self._selector.choose(prompt, limits=self.limits, slo=slo)
        if selection is None:
            return WaitReason.SATURATED
        return self._unless_held(prompt, (), selection) or WaitReason.LATE_BINDING

    def saturated(self, worker: Worker, dp_rank: int) -> bool:
        """Whether a rank is at its limits."""
        return not self._selector.has_capacity(worker, dp_rank, self.limits, 1)

    def freed(self) -> None:
        """A request ended."""
        self._rate.count()
        if self.queue.length:
            self.wake()

    def wake(self) -> None:
        """Something changed: let those that wait choose again, soon, and once for all that changes meanwhile."""
        if self._planned is None and self.queue.length:
            self._planned = asyncio.get_running_loop().call_soon(self._choose_again)

    def waiting_for(self) -> Counter[WaitReason]:
        """How many requests wait for which reason."""
        return Counter(request.reason for request in self.queue.in_order())

    def _choose_again(self) -> None:
        self._planned = None
        self._full = set()
        tries = 0
        late: list[_Request] = []
        for request in self.queue.in_order(self._full, LATE_TRIES):
            held = self.queue.length if self.late_binding else None
            if not self._selector.any_has_capacity(request.prompt, request.tried, self.limits, held):
                if not request.tried:
                    self._full.add(request.name)
                continue
            if tries == TRIES:
                break
            tries += 1
            try:
                placed = self._try(request.prompt, request.tried, request.ticket.slo)
            except RequestError as error:
                self._fail(request, error)
                continue
            if isinstance(placed, _Held):
                request.reason = placed.reason
                if placed.reason is not WaitReason.SATURATED:
                    request.ttft_missed = placed.ttft_missed
                elif not request.tried and not request.prompt.stored:
                    self._full.add(request.name)
                if request.ttft_missed:
                    late.append(request)
                continue
            self._give(request, placed)
        for request in late:
            if request.queued:
                self._let_others_first(request)

    def _let_others_first(self, request: _Request) -> None:
        """It will be late. Of those that are, each gets its turn."""
        self.queue.let_others_first(request, self._order(request.prefill, request.ticket, slo_missed=True))

    def _try(
        self, prompt: RoutedPrompt, tried: Collection[Worker], slo: SLO | None, now: float | None = None
    ) -> Assignment | _Held:
        selection = self._selector.choose(prompt, tried, self.limits, now, slo)
        if selection is None:
            return _SATURATED
        self._refuse_late(selection)
        placed = self._unless_held(prompt, tried, selection)
        if placed is None:
            return _TTFT_MISSED if _is_ttft_missed(selection) else _BUSY
        return self._placement.reserve(prompt, placed, now)

    def _unless_held(self, prompt: RoutedPrompt, tried: Collection[Worker], selection: Selection) -> Selection | None:
        """The selection, or another by which the request is answered sooner; None where it better waits."""
        if not self.late_binding:
            return selection
        return self._selector.bind(prompt, selection, tried, self.limits, self.queue.length)

    def _refuse_late(self, selection: Selection) -> None:
        """Raise RequestError for a request that would miss its SLO, if its SLO refuses it then."""
        slo = selection.slo
        if slo is not None and slo.refuses_late and selection.slo_missed:
            raise self._cannot_keep(slo, selection.rank.target.model, selection.slo_missed_by, selection.prediction)

    def _force(self, request: _Request, though_late: bool = True) -> Assignment | None:
        """A place, however busy; None when all targets are at their limits, or where it would be late and only make
        others late. Raises RequestError where the request is refused rather than served late."""
        slo = request.ticket.slo
        selection = self._selector.choose(request.prompt, request.tried, self.limits, slo=slo)
        if selection is None:
            return None
        self._refuse_late(selection)
        if not though_late and _is_ttft_missed(selection):
            return None
        return self._placement.reserve(request.prompt, selection)

    def _give(self, request: _Request, assignment: Assignment) -> None:
        self.queue.served(request.tenant, request.tokens)
        self.queue.remove(request)
        for on_waited in self.on_waited:
            on_waited(request.reason, self._clock() - request.since)
        if request.assignment.done():  # its client has left in this moment
            assignment.release()
        else:
            self._placement.record_in_flight(request.prompt, assignment)  # others are placed before it is sent
            request.assignment.set_result(assignment)

    def _fail(self, request: _Request, error: RequestError) -> None:
        self.queue.remove(request)
        if not request.assignment.done():
            request.assignment.set_exception(error)

    def _time_over(self, request: _Request) -> None:
        """A request has waited too long, or its deadline has come."""
        if not request.queued:
            return
        try:
            if request.until_deadline:
                self._count_refused("deadline")
                raise deadline_error()
            if self._awaits_worker(request.prompt, request.tried):
                raise self._no_worker(request.name)
            slo = request.ticket.slo
            if slo is not None and slo.first_token_by is not None and self._may_be_later(request, slo):
                return
            assignment = self._force(request)
            if assignment is None and slo is not None and slo.refuses_late:
                raise self._cannot_keep(slo, request.name or "", self._clock() - request.since, None)
            if assignment is None:
                raise self._too_many("queue_timeout", request)
        except RequestError as error:
            self._fail(request, error)
        else:
            self._give(request, assignment)
        self.wake()

    def _may_be_later(self, request: _Request, slo: SLO) -> bool:
        """Whether a request goes on waiting, since it is late already and its target is busy. Raises RequestError."""
        if slo.refuses_late or self._clock() >= request.since + self._late_timeout:
            return False
        selection = self._selector.choose(request.prompt, request.tried, self.limits, slo=slo)
        if selection is None or self._unless_held(request.prompt, request.tried, selection) is not None:
            return False
        request.ttft_missed = selection.slo_missed
        if not selection.slo_missed:
            return False
        if not request.slo_missed:
            self._let_others_first(request)
        self._wait_until(request, request.since + self._late_timeout)
        return True

    def _awaits_worker(self, prompt: RoutedPrompt, tried: Collection[Worker]) -> bool:
        return not tried and self._selector.awaits_worker(prompt)

    def _no_worker(self, name: str | None) -> RequestError:
        self._count_refused("no_worker")
        return unavailable(f"No worker for model {name!r} has come, and no more requests wait for one.")

    def _in_time(self, place_by: float) -> None:
        if self._clock() >= place_by:
            self._count_refused("deadline")
            raise deadline_error()

    def _free_queue_space(self, request: _Request) -> bool:
        """Whether the queue has space for a request, those that come last giving way if need be."""
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

    def _cannot_keep(self, slo: SLO, model: str, late: float, prediction: Prediction | None) -> RequestError:
        """What a request is refused with that would be so late everywhere."""
        self._count_refused("promise")
        self._count_broken(model, slo)
        return slo_not_met(slo, late, prediction)

    def _too_many(self, code: str, request: _Request) -> RequestError:
        self._count_refused(code)
        if request.ticket.slo is not None:
            self._count_broken(request.name or "", request.ticket.slo)
        seconds = self._rate.seconds_for(self.queue.ahead_of(request.priority) + 1, otherwise=self._timeout)
        return too_many(code, len(self.queue), seconds)

    def _count_broken(self, model: str, slo: SLO) -> None:
        for on_broken in self.on_slo_refused:
            on_broken(model, slo)

    def _count_refused(self, reason: str) -> None:
        for on_refused in self.on_refused:
            on_refused(reason)


def _is_ttft_missed(selection: Selection) -> bool:
    """Return whether a selection misses an SLO that has a time to the first token."""
    slo = selection.slo
    return slo is not None and slo.ttft is not None and selection.slo_missed


def _reason(has_capacity: bool, cold: bool) -> WaitReason:
    if cold:
        return WaitReason.NO_WORKER
    return WaitReason.LATE_BINDING if has_capacity else WaitReason.SATURATED
