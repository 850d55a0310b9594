"""One request on its way: read, placed, sent, and its answer passed on as it comes. Callbacks, and no transport.

    READING ──▶ WAITING ──▶ SENT ──▶ ANSWERING ──▶ ENDED
                   ▲          │           └── broken off ──▲
                   └─ retry ──┴── refused ─────────────────┘

    READING     its body, its prompt and its urgency (`reading`)
    WAITING     for a worker that can take it; `attempts` knows where it was tried
    SENT        to a worker, of whose answer nothing was passed on: it can still go elsewhere
    ANSWERING   `response` passes on what comes, and learns from it
    ENDED       it holds nothing any more

A request that reached no worker goes to another. As long as nothing of an answer has been passed on, one that asks for
generation also does when its worker breaks off, twice at most, and, while the retry budget lasts, when its worker
refuses it as overloaded or hangs. At any time its client may leave. Its load is released on every path. It waits in a
task only while its prompt is tokenized or no worker has capacity for it.

One file, because the phases are one machine: what one callback leaves, another finds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Final

import structlog

from http_api.errors import RequestError
from router.admission.ticket import deadline_error, read_ticket
from router.apis.requests import RoutedRequest
from router.apis.usage import HiddenUsage, with_include_usage
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.attempts import AttemptHandler, Attempts, broken_off
from router.forwarding.disaggregated_request import PrefillFailedError
from router.forwarding.long_bodies import LONG_BODY
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.reading import prompt_now, read_prompt_aside, read_request
from router.forwarding.request_context import RequestContext
from router.forwarding.response import ProxiedResponse
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.taken_request import TakenRequest
from router.http.headers import Headers
from router.observability.request_recorder import RecordingRequest
from router.observability.spans import Span
from router.routing.assignment import Assignment
from router.routing.routed_prompt import RoutedPrompt
from router.upstream import ResponseHead, UnreachableError, UpstreamError, UpstreamTimeoutError
from router.upstream.transport import Transport

log = structlog.get_logger()

_now: Final = time.monotonic
_OK: Final = 200


class Phase(Enum):
    """How far a request has come; the drawing above says what is done in each."""

    READING = auto()
    WAITING = auto()
    SENT = auto()
    ANSWERING = auto()
    ENDED = auto()


# Members of an enumeration are looked up in it each time.
_READING: Final = Phase.READING
_SENT: Final = Phase.SENT
_ANSWERING: Final = Phase.ANSWERING
_ENDED: Final = Phase.ENDED


class ProxiedRequest(AttemptHandler, TakenRequest):
    """A request and its answer. `start` begins it; afterwards the client hears of it, unless it left."""

    # What most requests never change stands here, so that it is not made for each.
    _phase: Phase = _READING
    _arrived = 0.0
    _hidden: HiddenUsage | None = None
    _recorded: RecordingRequest | None = None  # while somebody records
    _attempts: Attempts | None = None  # once its prompt is known
    _head: ResponseHead | None = None  # of an answer of which nothing else came
    _response: ProxiedResponse | None = None  # once something of an answer is passed on
    _task: asyncio.Task[None] | None = None  # in which it waits
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        client: ResponseWriter,
        transport: Transport | None = None,
        without: Collection[Worker] = (),
    ) -> None:
        """`transport`: who sends it, if not the router itself. `without`: workers it may not go to."""
        self._services = services
        self._context = context
        self._client = client
        self._transport = transport
        self._without = without

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
        """Where it is; None before it is placed, between two attempts and once it is over."""
        return None if self._attempts is None else self._attempts.assignment

    def routing_headers(self) -> Headers:
        """What its answer says of where it came from, once it is placed."""
        attempts = self._attempts
        return [] if attempts is None or attempts.assignment is None else attempts.routing_headers().headers()

    @property
    def answering(self) -> bool:
        """Whether something of an answer was passed on."""
        return self._response is not None

    @property
    def over(self) -> bool:
        """Whether it holds nothing any more."""
        return self._phase is _ENDED

    def moved(self, worker: Worker) -> None:
        """Its transport has sent it to another worker, because the first did not take it. Raises RequestError."""
        assert self._attempts is not None
        self._attempts.moved(worker)

    # The client

    def client_left(self) -> None:
        """The answer is not wanted any more."""
        if self._phase is not _ENDED:
            self._services.metrics.abandoned.inc()
            self._finish("client left")

    def ended_unseen(self) -> None:
        """It is over, and its transport tells nothing of answers."""
        if self._phase is not _ENDED:
            self._finish()

    def pause(self) -> None:
        """The client does not read: nor is the worker read, and the client has a time to go on."""
        if self._attempts is not None and self._attempts.sent is not None:
            self._attempts.sent.pause()
        if self._stall is None and self._phase is not _ENDED:
            seconds = self._services.settings.client_timeout
            self._stall = self._services.loop.call_later(seconds, self._client_stalled)

    def resume(self) -> None:
        """The client reads again."""
        if self._attempts is not None and self._attempts.sent is not None:
            self._attempts.sent.resume()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _client_stalled(self) -> None:
        """The client has not read for too long: what it holds of the worker is for others."""
        if self._phase is not _ENDED:
            self._services.metrics.abandoned.inc()
            self._finish("client does not read")
            self._client.break_off()

    def _deadline_passed(self) -> None:
        """The client's deadline: the answer ends here, whatever there is of it."""
        if self._phase is _ENDED:
            return
        if self._response is None:
            self.refuse(deadline_error())
        else:
            self._finish("deadline")
            self._response.break_off(deadline_error())

    # READING

    def _read(self, body: bytes) -> None:
        if len(body) > LONG_BODY:
            self._continue_in_task(self._read_long(body))
            return
        services, context = self._services, self._context
        span = context.trace and context.trace.span("tokenize")
        body, request = self._decoded(body, span)
        prompt = prompt_now(services, request, body, span)
        if prompt is None:
            self._continue_in_task(self._read_aside(request, body, span))
        else:
            self._admit(prompt, body)

    async def _read_long(self, body: bytes) -> None:
        services, context = self._services, self._context
        span = context.trace and context.trace.span("tokenize")
        body, request = await services.long_bodies.read(len(body), partial(self._decoded, body, span))
        prompt = prompt_now(services, request, body, span)
        if prompt is None:
            prompt = await read_prompt_aside(services, request, body, span)
        self._admit(prompt, body)

    def _decoded(self, body: bytes, span: Span | None) -> tuple[bytes, RoutedRequest]:
        body, model_body = self._context.checked(body)
        body = self._asking(body)
        return body, read_request(self._services, self._context, body, model_body, span)

    def _asking(self, body: bytes) -> bytes:
        """The body that is sent, asking for what we want to know of the answer."""
        services = self._services
        # With another transport the answer's bytes are not ours to change.
        asks = self._transport is None and (services.ask_usage or services.passing.listening)
        if asks and (asking := with_include_usage(self._context.head.path, body)):
            body, self._hidden = asking, HiddenUsage()
        return body

    async def _read_aside(self, request: RoutedRequest, body: bytes, span: Span | None) -> None:
        prompt = await read_prompt_aside(self._services, request, body, span)
        self._admit(prompt, body)

    def _admit(self, prompt: RoutedPrompt, body: bytes) -> None:
        """What is asked is known: whether it is allowed, and until when it is of use. Raises RequestError."""
        services, context = self._services, self._context
        tenant = context.tenant
        if services.fleet.disaggregated:
            prompt = replace(prompt, path=context.head.path)
        if services.passing.listening:
            self._recorded = services.passing.began(prompt, self._arrived)
        ticket = read_ticket(
            context.head.urgency,
            prompt.priority,
            tenant=tenant.name if tenant else "",
            best_priority=tenant.priority if tenant else None,
            tokens=prompt.tokens,
            size=len(body),
            service_levels=services.service_levels,
            model=prompt.name,
            arrived=self._arrived,
        )
        if ticket.hints is not None:
            prompt.hints = ticket.hints.before(prompt.hints)
        if tenant is not None:
            tenant.admit(prompt.name, prompt.tokens)
        if ticket.deadline is not None:
            seconds = max(ticket.deadline - ticket.arrived, 0.0)
            self._deadline = services.loop.call_later(seconds, self._deadline_passed)
        services.budget.request(ticket.arrived)
        self._attempts = attempts = Attempts(services, context, prompt, ticket, body, self._transport, self._without)
        self._send_next(attempts, ticket.arrived)

    # WAITING, and SENT

    def _send_next(self, attempts: Attempts, now: float | None = None) -> None:
        """Send the request to the next worker. Raises RequestError when there is none."""
        self._phase = _SENT
        if not attempts.send_next(self, self._arrived, now):
            self._phase = Phase.WAITING
            self._continue_in_task(self._wait(attempts))

    async def _wait(self, attempts: Attempts) -> None:
        assignment = await attempts.wait()
        self._phase = _SENT
        attempts.send(assignment, self, self._arrived)

    def _continue_in_task(self, work: Coroutine[None, None, None]) -> None:
        """Go on in a task. What it raises ends the request."""

        async def working() -> None:
            try:
                with self._context.logging():
                    await work
            except RequestError as error:
                self.refuse(error)
            except Exception:
                self._crash()

        self._task = self._services.loop.create_task(working())

    def give_up(self) -> None:
        if self._services.budget.take():
            self._services.loop.call_soon(self._leave_hung, self.assignment, False)

    def give_up_prefill(self) -> None:
        if self._services.budget.take():
            self._services.loop.call_soon(self._leave_hung, self.assignment, True)

    def _leave_hung(self, assignment: Assignment | None, prefill_hangs: bool) -> None:
        """The worker was ejected as hung: try elsewhere, unless it has answered meanwhile."""
        attempts = self._attempts
        if attempts is not None and assignment is attempts.assignment and self._phase is _SENT:
            attempts.exclude_hung(prefill_hangs)
            self._retry(attempts, "worker hangs")

    def _retry(
        self, attempts: Attempts, problem: str, unreachable: Worker | None = None, takes_budget: bool = False
    ) -> None:
        """The attempt failed before anything was passed on: go elsewhere.

        `unreachable`: the worker that could not be reached, or broke off. `takes_budget`: that it goes on is still
        to be allowed.
        """
        self._phase, self._head = Phase.WAITING, None
        attempts.leave(problem)
        try:
            if unreachable is not None:
                self._services.fleet.report_failure(unreachable, problem)
            if takes_budget and not self._services.budget.take():
                raise attempts.exhausted()
            self._send_next(attempts)
        except RequestError as error:
            self.refuse(error)

    # What the worker answers

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """The answer begins. Engines send the head of a stream at once. It is worth nothing: until the first event the
        request can still go elsewhere."""
        try:
            if data or ended or self._transport is not None or not head.is_stream:
                self._answer(head, data, ended)
            else:
                self._head = head
        except Exception:
            self._crash()

    def on_body(self, data: bytes, ended: bool) -> None:
        """More of it came."""
        try:
            response, attempts = self._response, self._attempts
            if response is None or attempts is None:
                assert self._head is not None
                self._answer(self._head, data, ended)
                return
            response.pass_on(data, ended)
            self._passed_on(attempts, response, data, ended)
        except Exception:
            self._crash()

    def on_failed(self, error: UpstreamError) -> None:
        """It did not come, or not to its end."""
        try:
            attempts, response = self._attempts, self._response
            assert attempts is not None
            assignment, attempts.sent = attempts.assignment, None
            if assignment is None:
                return  # it is over: some transports tell late
            if response is not None:
                self._break_off(response, str(error))
            elif isinstance(error, PrefillFailedError) and assignment.prefill is not None:
                prefill = assignment.prefill.worker
                attempts.exclude_prefill(error)
                if error.answered:
                    self._retry(attempts, str(error), takes_budget=True)
                else:
                    self._retry_if_safe(attempts, prefill, error)
            elif isinstance(error, UpstreamTimeoutError):
                seconds = self._services.settings.idle_timeout
                assignment.attempt.end(Outcome.FAILED, f"no answer within {seconds} s")
                message = f"The worker did not answer within {seconds} s."
                self.refuse(RequestError(message, status=504, type="timeout_error"))
            else:
                assignment.attempt.end(Outcome.FAILED, str(error))
                self._retry_if_safe(attempts, assignment.worker, error)
        except Exception:
            self._crash()

    def _retry_if_safe(self, attempts: Attempts, worker: Worker, error: UpstreamError) -> None:
        """A worker could not be reached, or broke off before it answered: go elsewhere where another may get it."""
        if isinstance(error, UnreachableError):
            attempts.not_reached()
        elif attempts.ends_with_break():
            self._services.fleet.report_failure(worker, str(error))
            self.refuse(attempts.exhausted())
            return
        self._retry(attempts, str(error), worker)

    # ANSWERING

    def _answer(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Pass on the beginning of an answer, unless the worker says that it did not take the request."""
        attempts = self._attempts
        assert attempts is not None
        assignment = attempts.assignment
        assert assignment is not None
        assignment.attempt.give_up = None
        if head.status >= 500 and (outcome := attempts.retries_status(head.status)) is not None:
            assignment.attempt.end(outcome, f"status {head.status}")
            self._retry(attempts, f"status {head.status}")
            return
        self._phase = _ANSWERING
        headers = attempts.routing_headers()
        self._response = response = self._new_response(attempts, assignment, head)
        response.start(headers, self._hidden, self._recorded is not None, data, ended)
        self._passed_on(attempts, response, data, ended)

    def _new_response(self, attempts: Attempts, assignment: Assignment, head: ResponseHead) -> ProxiedResponse:
        return ProxiedResponse(
            self._services, self._context, self._client, assignment, attempts.prompt, head, self._arrived
        )

    def _passed_on(self, attempts: Attempts, response: ProxiedResponse, data: bytes, ended: bool) -> None:
        """This was passed on; more may come."""
        if ended:
            attempts.sent = None
            self._finish()
        elif data:
            response.forward_chunks(attempts.sent)

    def _break_off(self, response: ProxiedResponse, reason: str) -> None:
        """The worker broke off its answer: so the client's ends here."""
        response.failed(reason)
        self._finish(reason)
        response.break_off(broken_off())

    # ENDED

    def _finish(self, problem: str | None = None) -> None:
        """Let go of all that is held. `problem`: why it failed, if it did."""
        self._phase = _ENDED
        if self._recorded is not None:
            self._record(self._recorded, problem)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stall is not None:
            self._stall.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._attempts is not None:
            self._attempts.end(problem)

    def _record(self, recorded: RecordingRequest, problem: str | None) -> None:
        self._recorded = None
        response, attempts = self._response, self._attempts
        if response is None or attempts is None:
            recorded.ended(None, None, None, failed=True)
            return
        failed = problem is not None or response.head.status != _OK
        recorded.ended(attempts.tried[-1].name, response.first_byte_at or None, response.usage, failed)

    def _crash(self) -> None:
        """Something went wrong that was not foreseen: the request ends, and nothing of it stays."""
        with self._context.logging():
            log.exception("request failed")
        self._finish("error")
        if self._response is not None:
            self._client.break_off()
        else:
            self.refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))
