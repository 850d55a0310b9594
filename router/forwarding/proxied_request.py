"""One request on its way: read, placed, sent, and its answer passed on as it comes. Callbacks, and no transport.

    read ──▶ placed ──▶ sent ──▶ head, first bytes ──▶ passed on ──▶ ended
              ▲           │             │                  └──▶ broken off
              └── retried elsewhere ◀───┘

A request that reached no worker goes to another. As long as nothing of an answer has been passed on, one that asks for
generation also does when its worker breaks off, twice at most, and, while the retry budget lasts, when its worker
refuses it as overloaded or hangs. At any time its client may leave. Its load is released on
every path. It waits in a task only while its prompt is tokenized or no worker has room for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine
from dataclasses import replace
from typing import Final, NoReturn
from urllib.parse import urlsplit

import structlog

from indexer.errors import RequestError
from router.admission.admission import Admission
from router.admission.ticket import Ticket, deadline_error, read_ticket
from router.apis.endpoints import RESPONSES, Call, error_event, read_call
from router.apis.requests import RoutedRequest
from router.apis.response_owners import SEARCHED_BYTES, asks_to_store
from router.apis.stream_usage import HiddenUsage, asking_for_usage
from router.apis.usage import Usage, UsageTail
from router.disaggregation.adapters import WorkerEndpoint
from router.fleet.fleet import Fleet, Worker
from router.fleet.health import Outcome
from router.fleet.retry_budget import RetryBudget
from router.forwarding.disaggregated_request import DisaggregatedRequest, PrefillFailedError
from router.forwarding.event_stream import EventStream
from router.forwarding.request_context import RequestContext
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.routing_headers import RoutingHeaders
from router.http.headers import Headers, forwarded_lines
from router.http.origin import without_credentials
from router.live.request_stream import PassingRequest, RequestStream
from router.routing.assignment import Assignment
from router.routing.routed_prompt import RoutedPrompt
from router.routing.router import Router
from router.settings import ProxySettings
from router.telemetry.metrics import RequestMetrics
from router.telemetry.spans import Span
from router.upstream import (
    ResponseHandler,
    ResponseHead,
    UnreachableError,
    UpstreamError,
    UpstreamRequest,
    Upstreams,
    UpstreamTimeoutError,
)
from router.upstream.transport import SentRequest, Transport

log = structlog.get_logger()

_RANK_HEADER: Final = b"x-data-parallel-rank"  # vLLM and SGLang read it

_now: Final = time.monotonic
_OK: Final = 200
# A worker that answers so did not take the request: bad gateway, unavailable, gateway timeout.
_NOT_TAKEN: Final = (502, 503, 504)
# So many workers break off over one request at most: it may be what kills them.
_MOST_BROKEN: Final = 2

# Looking one up in its class costs more than all that is done with it.
_SUCCEEDED: Final = Outcome.SUCCEEDED
_FAILED: Final = Outcome.FAILED
_NEITHER: Final = Outcome.NEITHER


class ProxyServices:
    """What exchanges need: where requests may go, how they get there, and what is counted."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        fleet: Fleet,
        upstreams: Upstreams,
        settings: ProxySettings,
        metrics: RequestMetrics,
        passing: RequestStream,
    ) -> None:
        self.router = router
        self.admission = admission
        self.fleet = fleet
        self.upstreams = upstreams
        self.settings = settings
        self.metrics = metrics
        self.passing = passing
        self.budget = RetryBudget(settings.retry_share, settings.retry_minimum)
        self.attempts = settings.attempts
        self.ask_usage = settings.ask_usage
        self.loop = asyncio.get_running_loop()


class ProxiedRequest(ResponseHandler):
    """A request and its answer. `start` begins it; afterwards the client hears of it, unless it left."""

    # What most requests never change stands here, so that it is not made for each.
    _body = b""
    _hidden: HiddenUsage | None = None
    _waiting: asyncio.Task[None] | None = None
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _prompt: RoutedPrompt
    _ticket: Ticket
    _hung = False
    _not_stored = False  # it is a response of which the worker keeps nothing
    _sends = 0  # workers that may have got it
    _broken = 0  # those of them that broke off before they answered
    _others = False
    _many_ranks = False
    _assignment: Assignment | None = None
    _head: ResponseHead | None = None
    _begun = False
    _over = False
    _streams = False
    _arrived = 0.0
    _first_byte_at = 0.0
    _beginning: bytes | None = None
    _tail: UsageTail | None = None
    _usage: Usage | None = None
    _passing: PassingRequest | None = None  # while somebody records

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        client: ResponseWriter,
        transport: Transport | None = None,
        without: Collection[Worker] = (),
    ) -> None:
        """`without`: workers it may not go to."""
        self._services = services
        self._transport = transport
        self._without = without
        self._context = context
        self._client = client
        self._tried: list[Worker] = []
        self._sent: SentRequest | None = None
        self._span: Span | None = None  # of the attempt
        if context.head.path == RESPONSES:
            self._beginning = b""

    def start(self, body: bytes) -> None:
        """The request is complete."""
        self._arrived = _now()
        try:
            self._read(body)
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self._crash()

    def refuse(self, error: RequestError) -> None:
        """Answer with an error. Nothing of an answer was passed on yet."""
        headers, body = self._context.refusal(error)
        self._finish(error.type)
        self._client.begin(ResponseHead(error.status, headers), None, body, True)

    @property
    def assignment(self) -> Assignment | None:
        """Where it is; None before it is placed, and between two attempts."""
        return self._assignment

    @property
    def over(self) -> bool:
        """Whether it holds nothing any more."""
        return self._over

    def moved(self, worker: Worker) -> None:
        """Its carrier has sent it to another worker, because the first did not take it. Raises RequestError."""
        assignment = self._assignment
        assert assignment is not None
        assignment.attempt.end(_FAILED, "not taken")
        assignment.release()
        self._services.metrics.retried.labels(assignment.worker.url).inc()
        self._services.fleet.look_soon(assignment.worker)
        self._tried.append(worker)
        others = [each for each in self._services.fleet.workers if each is not worker]
        self._assignment = assignment = self._services.router.place(self._prompt, others)
        self._many_ranks = len(assignment.worker.ranks()) > 1

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        if not self._over:
            self._services.metrics.abandoned.inc()
            self._finish("client left")

    def pause(self) -> None:
        """The client does not read: nor is the worker read, and it is not waited for without end."""
        if self._sent is not None:
            self._sent.pause()
        if self._stall is None and not self._over:
            seconds = self._services.settings.client_timeout
            self._stall = self._services.loop.call_later(seconds, self._client_stalled)

    def resume(self) -> None:
        """The client reads again."""
        if self._sent is not None:
            self._sent.resume()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _client_stalled(self) -> None:
        """The client has not read for too long: what it holds of the worker is others'."""
        if not self._over:
            self._services.metrics.abandoned.inc()
            self._finish("client does not read")
            self._client.break_off()

    # Reading and placing

    def _read(self, body: bytes) -> None:
        context, services = self._context, self._services
        body = context.checked(body)
        # With a carrier the answer's bytes are not ours to change.
        asks = self._transport is None and (services.ask_usage or services.passing.listening)
        if asks and (asking := asking_for_usage(context.head.path, body)):
            body, self._hidden = asking, HiddenUsage()
        self._body = body
        if context.head.path == RESPONSES:
            self._not_stored = not asks_to_store(body)
        span = context.span("tokenize")
        try:
            head = context.head
            call = Call(head.method, head.path, head.headers, body, head.naming)
            router = services.router
            request = read_call(call, with_prompt=router.needs_prompts, seen=router.seen)
            prompt = router.read_now(request, len(body))
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        if prompt is None:
            self._wait_in(self._read_aside(request, span))
        else:
            self._go(prompt, span)

    async def _read_aside(self, request: RoutedRequest, span: Span | None) -> None:
        try:
            prompt = await self._services.router.read_aside(request, len(self._body))
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        self._go(prompt, span)

    def _wait_in(self, work: Coroutine[None, None, None]) -> None:
        """Go on in a task. What it raises ends the request."""

        async def waiting() -> None:
            try:
                with self._context.logging():
                    await work
            except RequestError as error:
                self.refuse(error)
            except Exception:
                self._crash()

        self._waiting = self._services.loop.create_task(waiting())

    def _go(self, prompt: RoutedPrompt, span: Span | None) -> None:
        """What is asked is known. Raises RequestError."""
        if span is not None:
            span.set(model=prompt.name or "", prompt_tokens=prompt.tokens)
            span.end()
        if self._services.fleet.disaggregated:
            prompt = replace(prompt, path=self._context.head.path)
        self._prompt = prompt
        services, tenant = self._services, self._context.tenant
        if services.passing.listening:
            self._passing = services.passing.began(prompt, self._arrived)
        self._ticket = ticket = read_ticket(
            self._context.head.urgency,
            prompt.priority,
            tenant=tenant.name if tenant else "",
            best_priority=tenant.priority if tenant else None,
            tokens=prompt.tokens,
            size=len(self._body),
        )
        if tenant is not None:
            tenant.admit(prompt.name, prompt.tokens)
        now = ticket.arrived
        if ticket.deadline is not None:
            left = max(ticket.deadline - now, 0.0)
            self._deadline = services.loop.call_later(left, self._deadline_passed)
        services.budget.request(now)
        self._try_next(now)

    def _try_next(self, now: float | None = None) -> None:
        """Send the request to another worker. Raises RequestError when there is none."""
        if self._sends >= self._attempts:
            self._give_in()
        span = self._context.span("decide")
        try:
            assignment = self._services.admission.place(self._prompt, self._excluded, self._ticket, now)
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        if assignment is None:
            self._wait_in(self._place_later(span))
        else:
            self._send(assignment, span)

    @property
    def _repeatable(self) -> bool:
        """Whether another worker may be sent it although one was."""
        return self._context.admitted.route.generates or self._not_stored

    @property
    def _once(self) -> bool:
        """Whether no worker may get it twice."""
        return not (self._context.admitted.route.pure or self._not_stored)

    @property
    def _attempts(self) -> int:
        return self._services.attempts if self._transport is None else 1

    @property
    def _excluded(self) -> Collection[Worker]:
        """Where it does not go any more, or may not."""
        return [*self._tried, *self._without] if self._without else self._tried

    async def _place_later(self, span: Span | None) -> None:
        try:
            assignment = await self._services.admission.wait(self._prompt, self._excluded, self._ticket)
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        self._send(assignment, span)

    def _send(self, assignment: Assignment, span: Span | None) -> None:
        services, prompt, tried, worker = self._services, self._prompt, self._tried, assignment.worker
        self._assignment = assignment
        self._many_ranks = len(worker.ranks()) > 1
        if span is not None:
            span.set(worker=worker.url, overlap_tokens=assignment.overlap)
            span.end()
        now = _now()
        tried.append(worker)
        self._sends += 1
        context = self._context
        self._span = span = context.span("upstream")
        if span is not None:
            span.set(worker=worker.url)
        if assignment.prefill is not None:
            self._send_pair(assignment, assignment.prefill)
        elif self._transport is not None:
            self._sent = self._transport.send(worker, self, self._headers_to(assignment), self._body)
        else:
            head, upstream = context.head, services.upstreams.of(worker.url)
            if span is not None or self._many_ranks:
                lines = forwarded_lines(self._headers_to(assignment))
                self._sent = upstream.send(self, head.method, head.target, lines, self._body, once=self._once)
            else:
                lines = context.lines_for_workers()
                self._sent = upstream.send(
                    self, head.method, head.target, lines, self._body, context.id, now, self._once
                )
        if assignment is not self._assignment or self._over:
            return  # it went wrong at once
        # The rest must not hold it up.
        services.router.record_in_flight(prompt, assignment, now)
        services.metrics.placed(prompt.name or "", now - self._arrived, assignment.decision, assignment.prediction)
        self._others = self._sends < self._attempts and self._repeatable and services.router.others(prompt, tried)
        if assignment.prefill is None:
            self._may_be_given_up(assignment)

    def _headers_to(self, assignment: Assignment) -> Headers:
        headers = self._context.headers_for_workers()
        if self._many_ranks:
            headers = [header for header in headers if header[0] != _RANK_HEADER]
            headers.append((_RANK_HEADER, b"%d" % assignment.target.dp_rank))
        return headers if self._span is None else self._span.inject(headers)

    def _may_be_given_up(self, assignment: Assignment) -> None:
        # A request that hung one worker may be why; it does not get to hang them all.
        if self._others and not self._hung:
            assignment.attempt.give_up = self._give_up

    def _send_pair(self, assignment: Assignment, prefill: Assignment) -> None:
        """Send the prompt to be computed on one worker and answered by another. Raises RequestError."""
        services = self._services
        adapter = services.router.adapter_of(assignment.worker)
        assert adapter is not None
        ends = (_end(each.worker, each.target.dp_rank) for each in (prefill, assignment))
        requests = adapter(self._context.head.path, self._body, *ends)
        if services.router.others(self._prompt, [*self._tried, prefill.worker], prefill=True) and not self._hung:
            prefill.attempt.give_up = self._give_up_prefill

        def prefilled() -> None:
            assignment.attempt.waits_from_now()
            self._may_be_given_up(assignment)

        target, headers = self._context.head.target, self._headers_to(assignment)
        pair = DisaggregatedRequest(
            self, services.upstreams, assignment, requests, target, headers, prefilled, self._transport
        )
        self._sent = pair
        pair.start()

    def _deadline_passed(self) -> None:
        """The client's deadline: the answer ends here, whatever there is of it."""
        if self._over:
            return
        if self._begun:
            self._finish("deadline")
            self._end_unfinished(deadline_error())
        else:
            self.refuse(deadline_error())

    def _give_in(self) -> NoReturn:
        raise self._out_of_tries()

    def _out_of_tries(self) -> RequestError:
        if not self._repeatable:
            return _broken_off()
        return RequestError(
            f"{len(self._tried)} workers could not be reached. Try again later.",
            status=503,
            type="service_unavailable",
            code="no_worker_available",
        )

    def _give_up(self) -> None:
        """The worker is left out as hung: try elsewhere, unless its answer begins."""
        if self._services.budget.take():
            self._services.loop.call_soon(self._move, self._assignment)

    def _give_up_prefill(self) -> None:
        """The same of the worker that computes the prompt."""
        if self._services.budget.take():
            self._services.loop.call_soon(self._move, self._assignment, True)

    def _move(self, assignment: Assignment | None, prefill_hangs: bool = False) -> None:
        if assignment is self._assignment and not self._begun and not self._over:
            self._hung = True
            if prefill_hangs and assignment is not None and assignment.prefill is not None:
                self._tried[-1] = assignment.prefill.worker  # the decode worker is not to blame
            self._peer_load("worker hangs")

    def _peer_load(self, problem: str, unreachable: Worker | None = None, retried: bool = False) -> None:
        """The attempt failed before anything was passed on. `retried`: that it goes on is still to be allowed."""
        assignment, sent = self._assignment, self._sent
        assert assignment is not None
        self._assignment = self._sent = self._head = None
        if sent is not None:
            sent.abort()
        assignment.release()
        if self._span is not None:
            self._span.end(problem)
        self._services.metrics.retried.labels(assignment.worker.url).inc()
        try:
            if unreachable is not None:
                self._services.fleet.report_failure(unreachable, problem)
            if retried and not self._services.budget.take():
                self._give_in()
            self._try_next()
        except RequestError as error:
            self.refuse(error)

    # What the worker answers

    def answered(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """The answer begins. Engines send the head of a stream at once. It is worth nothing: until the first event the
        request can still go elsewhere."""
        try:
            self._head = head
            if data or ended or self._transport is not None or not head.is_stream:
                self._begin(head, data, ended)
        except Exception:
            self._crash()

    def more(self, data: bytes, ended: bool) -> None:
        try:
            if not self._begun and self._head is not None:
                self._begin(self._head, data, ended)
            else:
                self._client.more(self._shown(data, ended), ended)
                self._learn(data, ended)
                if not ended:
                    self._let_events_pass()
        except Exception:
            self._crash()

    def _let_events_pass(self) -> None:
        """From here on chunks may pass as they come, unless the answer's id is still looked for."""
        if not self._streams or self._beginning is not None:
            return
        sent = self._sent.answering if isinstance(self._sent, DisaggregatedRequest) else self._sent
        assignment, tail, client = self._assignment, self._tail, self._client.chunks()
        if isinstance(sent, UpstreamRequest) and assignment is not None and tail is not None and client is not None:
            sent.forwarder = EventStream(client, assignment.attempt.health, tail, self._hidden)

    def failed(self, error: UpstreamError) -> None:
        try:
            self._sent = None
            assignment = self._assignment
            assert assignment is not None
            if isinstance(error, PrefillFailedError) and assignment.prefill is not None:
                self._leave_prefill(assignment, assignment.prefill.worker, error)
            elif self._begun:
                self._break_off(assignment, str(error))
            elif isinstance(error, UpstreamTimeoutError):
                seconds = self._services.settings.idle_timeout
                assignment.attempt.end(_FAILED, f"no answer within {seconds} s")
                message = f"The worker did not answer within {seconds} s."
                self.refuse(RequestError(message, status=504, type="timeout_error"))
            else:
                assignment.attempt.end(_FAILED, str(error))
                if isinstance(error, UnreachableError):
                    self._sends -= self._transport is None  # nothing was sent
                elif self._must_end():
                    self._services.fleet.report_failure(assignment.worker, str(error))
                    self.refuse(self._out_of_tries())
                    return
                self._peer_load(str(error), unreachable=assignment.worker)
        except Exception:
            self._crash()

    def _must_end(self) -> bool:
        """A worker had the request, and broke off: whether no other may get it. It may be why."""
        self._broken += 1
        return not self._repeatable or self._broken >= _MOST_BROKEN

    def _leave_prefill(self, assignment: Assignment, prefill: Worker, error: PrefillFailedError) -> None:
        """A prefill failed before its decode worker did: to another pair."""
        if not (error.answered and error.together and self._leave_pair(assignment)):
            self._tried[-1] = prefill  # the decode worker is not to blame
        if not error.answered and self._must_end():
            self._services.fleet.report_failure(prefill, str(error))
            self.refuse(self._out_of_tries())
            return
        self._peer_load(str(error), unreachable=None if error.answered else prefill, retried=error.answered)

    def _leave_pair(self, assignment: Assignment) -> bool:
        """One worker of a pair failed and perhaps the other is why: leave both, as far as there are others.

        False, and nothing changes, when there is no other pair, or it is no pair.
        """
        if assignment.prefill is None:
            return False
        prefill = assignment.prefill.worker
        known = [*self._excluded, prefill]
        other_prefill = self._sends < self._attempts and self._services.router.others(self._prompt, known, prefill=True)
        if other_prefill:
            self._without = [*self._without, prefill]
            if not self._others:
                self._tried[-1] = prefill
        return self._others or other_prefill

    def _begin(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Pass on the beginning of an answer, unless the worker says that it did not take the request."""
        assignment, services = self._assignment, self._services
        assert assignment is not None
        attempt = assignment.attempt
        attempt.give_up = None
        if head.status >= 500:
            if head.status in _NOT_TAKEN and self._others and services.budget.take():
                attempt.end(_FAILED, f"status {head.status}")
                self._peer_load(f"status {head.status}")
                return
            if self._leave_pair(assignment) and services.budget.take():
                attempt.end(_NEITHER, f"status {head.status}")
                self._peer_load(f"status {head.status}")
                return
        self._begun = True
        if self._hidden is not None and not HiddenUsage.hides(head.headers):
            self._hidden = None
        self._client.begin(head, self._routing_headers(assignment), self._shown(data, ended), ended)
        # The client does not wait for the rest.
        self._first_byte_at = self._arrived
        self._streams = head.is_stream
        if self._streams or assignment.wants_usage or self._context.tenant is not None or self._passing:
            self._tail = UsageTail()
        prompt = self._prompt
        services.metrics.begun(prompt.name or "", assignment.worker.url, head.status, prompt.tokens, assignment.overlap)
        self._learn(data, ended)
        if data and not ended:
            self._let_events_pass()

    def _learn(self, data: bytes, ended: bool) -> None:
        """Learn from what was passed on."""
        assignment = self._assignment
        assert assignment is not None
        now = _now()
        if data:
            assignment.attempt.heard(now)
            if self._first_byte_at == self._arrived:
                self._first_byte_at = now
                assignment.first_byte(now)
                self._services.metrics.first_byte_of(self._prompt.name or "", now - self._arrived)
            if self._beginning is not None:
                self._beginning += data
                learned = self._services.router.responses.learn(self._beginning, assignment.worker.url)
                if learned or len(self._beginning) >= SEARCHED_BYTES:
                    self._beginning = None
            if self._tail is not None:
                self._tail.feed(data)
        if ended:
            self._end(assignment, now)

    def _end(self, assignment: Assignment, now: float) -> None:
        """The answer is complete."""
        head = self._head
        assert head is not None
        self._sent = None
        if head.status < 400:
            assignment.attempt.end(_SUCCEEDED, now=now)
        else:
            assignment.attempt.end(_FAILED if head.status >= 500 else _NEITHER, f"status {head.status}", now)
        if head.status == _OK:
            self._usage = usage = self._tail.usage() if self._tail is not None else None
            self._services.router.answered(assignment, usage)
            if self._context.tenant is not None and usage is not None:
                self._context.tenant.spend(usage.completion)
            if self._streams:
                seconds = now - self._first_byte_at
                self._services.metrics.streamed(self._prompt.name or "", seconds, usage)
        self._finish()

    def _break_off(self, assignment: Assignment, reason: str) -> None:
        """Tell the client that its answer will not be finished."""
        assignment.attempt.end(_FAILED, f"answer broken off: {reason}")
        self._services.metrics.broken.labels(assignment.worker.url).inc()
        with self._context.logging():
            log.warning("answer broken off", worker=assignment.worker.url, reason=reason)
        self._services.fleet.look_soon(assignment.worker)
        self._finish(reason)
        self._end_unfinished(_broken_off())

    def _end_unfinished(self, failure: RequestError) -> None:
        """Tell the client that its answer will not be finished: in the stream, or by closing the connection."""
        head = self._head
        if head is not None and head.is_stream and not head.length:
            # What came last may have been half an event.
            self._client.more(self._shown(b"\n\n" + error_event(self._context.head.path, failure), True), True)
        else:
            self._client.break_off()

    def _routing_headers(self, assignment: Assignment) -> RoutingHeaders:
        """What an answer says of where it came from."""
        where = RoutingHeaders(assignment.target.worker, assignment.overlap)
        if len(self._tried) > 1:
            where.add(b"x-kvrouter-attempts", b"%d" % len(self._tried))
        if assignment.prefill is not None:
            prefill = without_credentials(assignment.prefill.target.worker)
            where.add(b"x-kvrouter-prefill-worker", prefill.encode())
        if self._many_ranks:
            where.add(b"x-kvrouter-dp-rank", b"%d" % assignment.target.dp_rank)
        if self._context.head.wants_explanation:
            where.add(b"x-kvrouter-explain", assignment.decision.summary().encode())
        return where

    def _shown(self, data: bytes, ended: bool) -> bytes:
        """What the client sees of it."""
        return data if self._hidden is None else self._hidden.passed(data, ended)

    # The end

    def _finish(self, problem: str | None = None) -> None:
        """Let go of all that is held."""
        self._over = True
        if self._passing is not None:
            self._tell_passing(problem)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stall is not None:
            self._stall.cancel()
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.abort()
        if self._assignment is not None:
            self._assignment.attempt.give_up = None
            self._assignment.release()
        if self._span is not None:
            self._span.end(problem)

    def _tell_passing(self, problem: str | None) -> None:
        passing, self._passing = self._passing, None
        assert passing is not None
        worker = self._tried[-1].url if self._begun else None
        began = self._first_byte_at if self._first_byte_at > self._arrived else None
        status = self._head.status if self._head is not None else None
        failed = problem is not None or status != _OK
        passing.ended(worker, began, self._usage, failed)

    def _crash(self) -> None:
        """Something went wrong that nobody foresaw: the request ends, and nothing of it stays."""
        with self._context.logging():
            log.exception("request failed")
        begun, self._begun = self._begun, True
        self._finish("error")
        if begun:
            self._client.break_off()
        else:
            self.refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))


def _broken_off() -> RequestError:
    return RequestError("The worker broke off its answer.", status=502, type="upstream_error")


def _end(worker: Worker, dp_rank: int) -> WorkerEndpoint:
    place = urlsplit(worker.url)
    port = place.port or (443 if place.scheme == "https" else 80)
    return WorkerEndpoint(place.hostname or "", port, dp_rank, len(worker.ranks()), worker.bootstrap_port)
