"""The workers that one request is sent to: one after the other, until one answers.

    send_next ──▶ the worker answers
       ▲  │
    leave ◀┘   it cannot be reached, refuses the request as overloaded, or hangs

A request whose prompt is computed by another worker is sent to both as one (`disaggregated_request`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from http_api.errors import RequestError
from router.admission.ticket import Ticket
from router.apis.endpoints import RESPONSES
from router.apis.response_owners import asks_to_store
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.disaggregated_request import DisaggregatedRequest, PrefillFailedError
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.routing_headers import RoutingHeaders
from router.http.headers import RANK_HEADER, Headers, forwarded_lines
from router.observability.spans import Span
from router.routing.assignment import Assignment
from router.routing.disaggregation.adapters import WorkerEndpoint
from router.routing.routed_prompt import RoutedPrompt
from router.upstream import ResponseHandler
from router.upstream.transport import SentRequest, Transport

_now: Final = time.monotonic
# A worker that answers so did not take the request: bad gateway, unavailable, gateway timeout.
_NOT_TAKEN: Final = (502, 503, 504)
# So many workers break off over one request at most: it may be what kills them.
_MOST_BROKEN: Final = 2


class AttemptHandler(ResponseHandler):
    """Who sends a request: gets the answer, and hears when the worker is ejected as hung before there is one."""

    def give_up(self) -> None:
        """The worker hangs: the request may be sent to another."""
        raise NotImplementedError

    def give_up_prefill(self) -> None:
        """The worker that computes the prompt hangs: the same."""
        raise NotImplementedError


class Attempts:
    """The attempts of one request. `assignment`: where it is; None before the first, between two and at the end.

    `tried`: the workers it was sent to, the latest last. `others`: there is another one that could take it.
    """

    # What most requests never change stands here, so that it is not made for each.
    assignment: Assignment | None = None
    others = False
    _span: Span | None = None  # of what is done now: the choice, or the request to the worker
    _many_ranks = False
    _hung = False  # a worker hung with it
    _sends = 0  # workers that may have got it
    _broken = 0  # those of them that broke off before they answered
    _not_stored = False  # it is a response of which the worker keeps nothing

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        prompt: RoutedPrompt,
        ticket: Ticket,
        body: bytes,
        transport: Transport | None,
        without: Collection[Worker],
    ) -> None:
        """`without`: workers it may not go to. `transport`: who sends it, if not the router itself: once."""
        self._services = services
        self._context = context
        self.prompt = prompt
        self._ticket = ticket
        self._body = body
        self._transport = transport
        self._without = without
        self._most = services.attempts if transport is None else 1
        self.tried: list[Worker] = []
        self.sent: SentRequest | None = None  # above, mypyc would leave it unset, because its type is a Protocol
        if context.head.path == RESPONSES:
            self._not_stored = not asks_to_store(body)

    def of_the_rest(self, prompt: RoutedPrompt, body: bytes) -> Attempts:
        """Those of the request for the rest of an answer, which go to none of these workers."""
        without = [*self._without, *self.tried]
        return Attempts(self._services, self._context, prompt, self._ticket, body, self._transport, without)

    @property
    def _repeatable(self) -> bool:
        """Whether another worker may be sent it although one was."""
        return self._context.admitted.route.generates or self._not_stored

    @property
    def _once(self) -> bool:
        """Whether no worker may get it twice."""
        return not (self._context.admitted.route.pure or self._not_stored)

    # The next attempt

    def send_next(self, handler: AttemptHandler, arrived: float, now: float | None = None) -> bool:
        """Send the request to the next worker; false when it must `wait` for one.

        `arrived`: when it came; `now`: the time, where it was just read. Raises RequestError when there is no worker.
        """
        if self._sends >= self._most:
            raise self.exhausted()
        self._span = span = self._context.trace and self._context.trace.span("decide")
        excluded = self._excluded() if self._without else self.tried
        try:
            assignment = self._services.admission.place(self.prompt, excluded, self._ticket, now)
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        if assignment is None:
            return False
        self.send(assignment, handler, arrived)
        return True

    async def wait(self) -> Assignment:
        """The worker to `send` to, once one has capacity. Raises RequestError when there is none, or not in time."""
        try:
            return await self._services.admission.wait(self.prompt, self._excluded(), self._ticket)
        except RequestError as error:
            if self._span is not None:
                self._span.end(type(error).__name__)
            raise

    def _excluded(self) -> Collection[Worker]:
        """Where the request does not go again, or may not."""
        return [*self.tried, *self._without] if self._without else self.tried

    def exhausted(self) -> RequestError:
        """What a client gets when no further attempt is allowed."""
        if not self._repeatable:
            return broken_off()
        return RequestError(
            f"{len(self.tried)} workers could not be reached. Try again later.",
            status=503,
            type="service_unavailable",
            code="no_worker_available",
        )

    def send(self, assignment: Assignment, handler: AttemptHandler, arrived: float) -> None:
        """Send the request to this worker. `arrived`: when it came.

        Raises RequestError where two workers should take it and its body cannot be changed for them.
        """
        services, prompt, tried, worker = self._services, self.prompt, self.tried, assignment.worker
        context = self._context
        self.assignment = assignment
        self._many_ranks = len(worker.ranks()) > 1
        if (span := self._span) is not None:
            span.set(worker=worker.name, overlap_tokens=assignment.overlap)
            span.end()
        now = _now()
        tried.append(worker)
        self._sends += 1
        self._span = span = context.trace and context.trace.span("upstream")
        if span is not None:
            span.set(worker=worker.name)
        if assignment.prefill is not None:
            self._send_to_pair(assignment, assignment.prefill, handler)
        elif self._transport is not None:
            self.sent = self._transport.send(worker, handler, self._headers_to(assignment), self._body)
        else:
            head = context.head
            if span is not None or self._many_ranks:
                lines, request_id = forwarded_lines(self._headers_to(assignment)), b""
            else:
                lines, request_id = context.lines_for_workers(), context.id
            upstream = services.upstreams.of(worker.url)
            add_worker_key = context.admitted.add_worker_key
            self.sent = upstream.send(
                handler, head.method, head.target, lines, self._body, request_id, now, self._once, add_worker_key
            )
        if assignment is not self.assignment:
            return  # it went wrong at once
        # The rest must not hold it up.
        services.placement.record_in_flight(prompt, assignment, now)
        services.metrics.placed(prompt.name or "", now - arrived, assignment.decision, assignment.cache_prediction)
        self.others = self._sends < self._most and self._repeatable and services.selector.has_others(prompt, tried)
        # A request that hung one worker may be why; it does not get to hang them all.
        if self.others and not self._hung and assignment.prefill is None:
            assignment.attempt.give_up = handler.give_up

    def _headers_to(self, assignment: Assignment) -> Headers:
        headers = self._context.headers_for_workers()
        if self._many_ranks:
            headers = [header for header in headers if header[0] != RANK_HEADER]
            headers.append((RANK_HEADER, b"%d" % assignment.worker.rank_in_requests(assignment.target.dp_rank)))
        return headers if self._span is None else self._span.inject(headers)

    def _send_to_pair(self, assignment: Assignment, prefill: Assignment, handler: AttemptHandler) -> None:
        """Have the prompt computed by one worker and answered by another. Raises RequestError."""
        services, head = self._services, self._context.head
        adapter = services.selector.adapter_of(assignment.worker)
        assert adapter is not None
        endpoints = [WorkerEndpoint.of(each.worker, each.target.dp_rank) for each in (prefill, assignment)]
        requests = adapter.of(head.path, self._body, *endpoints)
        others = self._repeatable and services.selector.has_others(
            self.prompt, [*self.tried, prefill.worker], prefill=True
        )
        if others and not self._hung:
            prefill.attempt.give_up = handler.give_up_prefill

        def on_prefilled() -> None:
            assignment.attempt.waits_from_now()
            if self.others and not self._hung:
                assignment.attempt.give_up = handler.give_up

        self.sent = pair = DisaggregatedRequest(
            handler,
            services.upstreams,
            assignment,
            requests,
            head.target,
            self._headers_to(assignment),
            on_prefilled,
            self._context.admitted.add_worker_key,
            self._transport,
        )
        pair.start()

    def moved(self, worker: Worker) -> None:
        """The transport went on to this worker, because the first did not take the request. Raises RequestError."""
        assignment, services = self.assignment, self._services
        assert assignment is not None
        assignment.attempt.end(Outcome.FAILED, "not taken")
        assignment.release()
        services.metrics.retried.labels(assignment.worker.name).inc()
        services.fleet.probe_soon(assignment.worker)
        self.tried.append(worker)
        others = [each for each in services.fleet.workers if each is not worker]
        self.assignment = assignment = services.placement.place(self.prompt, others)
        self._many_ranks = len(assignment.worker.ranks()) > 1

    def routing_headers(self) -> RoutingHeaders:
        """What an answer says of where it came from."""
        assignment = self.assignment
        assert assignment is not None
        headers = RoutingHeaders(assignment.worker, assignment.overlap)
        if len(self.tried) > 1:
            headers.add(b"x-kvrouter-attempts", b"%d" % len(self.tried))
        if assignment.prefill is not None:
            headers.add(b"x-kvrouter-prefill-worker", assignment.prefill.worker.name.encode())
        if self._many_ranks:
            headers.add(b"x-kvrouter-dp-rank", b"%d" % assignment.target.dp_rank)
        if self._context.head.wants_explanation:
            headers.add(b"x-kvrouter-explain", assignment.decision.summary().encode())
        return headers

    # The end of an attempt

    def retries_status(self, status: int) -> Outcome | None:
        """How the attempt ended, where the request goes elsewhere because of this status; None where it does not.

        That it does takes from the retry budget.
        """
        budget = self._services.budget
        if status in _NOT_TAKEN and self.others and budget.take():
            return Outcome.FAILED
        if self._repeatable and self._exclude_pair() and budget.take():
            return Outcome.NEITHER
        return None

    def not_reached(self) -> None:
        """No connection to the worker could be made: nothing was sent. Another transport tries where it can itself."""
        if self._transport is None:
            self._sends -= 1

    def ends_with_break(self) -> bool:
        """A worker had the request, and broke off: whether no other may get it. It may be why."""
        self._broken += 1
        return not self._repeatable or self._broken >= _MOST_BROKEN

    def exclude_prefill(self, error: PrefillFailedError) -> None:
        """A prefill failed before its decode worker did: the next attempt is another pair."""
        assignment = self.assignment
        assert assignment is not None
        assert assignment.prefill is not None
        if not (error.answered and error.together and self._exclude_pair()):
            self.tried[-1] = assignment.prefill.worker  # the decode worker is not to blame

    def exclude_hung(self, prefill_hangs: bool) -> None:
        """The worker hangs, or the one that computes the prompt does."""
        assignment = self.assignment
        self._hung = True
        if prefill_hangs and assignment is not None and assignment.prefill is not None:
            self.tried[-1] = assignment.prefill.worker  # the decode worker is not to blame

    def _exclude_pair(self) -> bool:
        """One worker of a pair failed and perhaps the other is why: exclude both, as far as there are others, or the
        prefill worker, where the decode worker can do without.

        False, and nothing changes, when there is no other way, or it is no pair.
        """
        assignment = self.assignment
        if assignment is None or assignment.prefill is None:
            return False
        prefill = assignment.prefill.worker
        known = [*self._excluded(), prefill]
        other_prefill = self._sends < self._most and self._services.selector.has_others(
            self.prompt, known, prefill=True
        )
        # What the decode worker could not fetch of the prefill worker may be why: then it computes the prompt itself.
        other_way = other_prefill or (not self.others and self._sends < self._most and self._decodes_alone(assignment))
        if other_way:
            self._without = [*self._without, prefill]
            if not self.others:
                self.tried[-1] = prefill
        return self.others or other_way

    def _decodes_alone(self, assignment: Assignment) -> bool:
        adapter = self._services.selector.adapter_of(assignment.worker)
        return adapter is not None and adapter.decodes_alone

    def leave(self, problem: str) -> None:
        """The attempt failed before anything of an answer was passed on: let go of its worker."""
        assignment, sent = self.assignment, self.sent
        assert assignment is not None
        self.assignment = self.sent = None
        if sent is not None:
            sent.abort()
        assignment.release()
        if self._span is not None:
            self._span.end(problem)
        self._services.metrics.retried.labels(assignment.worker.name).inc()

    def end(self, problem: str | None) -> None:
        """The request is over: let go of all that it holds. `problem`: why it failed, if it did."""
        assignment, sent = self.assignment, self.sent
        self.assignment = self.sent = None
        if sent is not None:
            sent.abort()
        if assignment is not None:
            assignment.attempt.give_up = None
            assignment.release()
        if self._span is not None:
            self._span.end(problem)


def broken_off() -> RequestError:
    """What a client gets whose worker had the request and did not answer to the end."""
    return RequestError("The worker broke off its answer.", status=502, type="upstream_error")
