"""A proxied request: parsed, placed, sent, and its response forwarded. It has callbacks and no transport of its own.

    READING ──▶ WAITING ──▶ SENT ──▶ ANSWERING ──▶ ENDED
                   ▲          │           └── broken off ──▲
                   └─ retry ──┴── refused ─────────────────┘

    READING     its body and its prompt are parsed (`reading`)
    WAITING     it waits for a worker with capacity; `attempts` knows which workers were tried
    SENT        it was sent, or its media are being encoded. No byte of a response was forwarded, so it can still be
                sent to another worker
    ANSWERING   `response` forwards what is received and learns from it
    ENDED       everything is released

Retries: a request that reached no worker is sent to another one. Before any byte is forwarded, a request for generation
is also retried in two cases. The first is that its worker breaks off, at most twice; a 500 of a worker that leaves or
closes the connection is a break. The second is that its worker refuses it as overloaded or hangs, within the retry
budget.

A refusal of a full worker is no failure. The request returns to its place in the queue. The worker receives no other
request until one of its requests ends or has its first byte.

The client can disconnect at any time. The load is released on every path. A request waits in a task only while its
prompt is tokenized aside or no worker has capacity.

One file, because the phases are one state machine: each callback depends on what the others did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine
from enum import Enum, auto
from functools import partial
from typing import Final

import structlog

from http_api.errors import RequestError
from router.admission.ticket import Flow, deadline_error, read_ticket
from router.apis.abilities import needed_abilities
from router.apis.endpoints import read_request
from router.apis.media_items import MediaChat, may_have_media, media_chat
from router.apis.requests import RoutedRequest, Sender
from router.apis.stream_errors import StreamBeginning
from router.apis.usage import HiddenUsage, with_include_usage
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.answer_report import answer_of
from router.forwarding.attempts import RANK_ERROR, AttemptHandler, Attempts
from router.forwarding.client_routing import follow_client
from router.forwarding.disaggregated_request import PrefillFailedError
from router.forwarding.encode_stage import EncodeStage
from router.forwarding.exchange import ResponseWriter, ServedRequest
from router.forwarding.keepalive import KeepaliveWriter
from router.forwarding.proxy_services import LONG_BODY, ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.response import ProxiedResponse
from router.forwarding.retries import broken_off
from router.http.compression import Decompressor
from router.http.headers import Headers
from router.observability.gen_ai import describe_request
from router.observability.request_recorder import RecordingRequest
from router.observability.spans import Span
from router.routing.assignment import Assignment
from router.upstream import ResponseHead, UnreachableError, UpstreamError, UpstreamRequest, UpstreamTimeoutError
from router.upstream.request import RequestConnection, Transport

log = structlog.get_logger()

_now: Final = time.monotonic
_OK: Final = 200
_ERROR: Final = 400
_SERVER_ERROR: Final = 500
# A worker that ends closes its connections this soon after its last answers.
_CLOSING_SECONDS: Final = 0.25
_UNSEEN_JSON: Final = b"{}"
# Bytes of a body whose media items are found in a thread: a part can be as short as three bytes.
_LONG_MEDIA: Final = 16 * 1024


class Phase(Enum):
    """The phase of a request; the module's drawing shows the order."""

    READING = auto()
    WAITING = auto()
    SENT = auto()
    ANSWERING = auto()
    ENDED = auto()


# Constants, because the lookup of an enumeration's member is slow.
_READING: Final = Phase.READING
_SENT: Final = Phase.SENT
_ANSWERING: Final = Phase.ANSWERING
_ENDED: Final = Phase.ENDED


class ProxiedRequest(AttemptHandler, ServedRequest):
    """A request and its response. After `start`, the client receives a response unless it disconnects."""

    # Defaults on the class, because most requests never change them.
    _phase: Phase = _READING
    _arrived = 0.0
    _hidden: HiddenUsage | None = None
    _recorded: RecordingRequest | None = None  # while the recorder has listeners
    _media: MediaChat | None = None  # of a chat with media, while encode workers exist
    _reading: Span | None = None  # while its body and its prompt are read, with tracing
    _attempts: Attempts | None = None  # after its prompt was read
    _head: ResponseHead | None = None  # a received head that is not forwarded yet
    _beginning: StreamBeginning | None = None  # the events without content that are not forwarded yet
    _response: ProxiedResponse | None = None  # after a part of it was forwarded
    _task: asyncio.Task[None] | None = None  # while it waits
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _keepalive: KeepaliveWriter | None = None  # if comments fill the silence of its stream

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        client: ResponseWriter,
        transport: Transport | None = None,
        without: Collection[Worker] = (),
        flow: Flow | None = None,
    ) -> None:
        self._services = services
        self._context = context
        self._client = client
        self._transport = transport
        self._without = without
        self._flow = flow

    def start(self, body: bytes) -> None:
        self._arrived = _now()
        try:
            if self._context.hooks is not None:
                self._continue_in_task(self._pass_hooks(body))
            else:
                self._read(body)
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self._crash()

    def start_unseen(self) -> None:
        """Place a request by load, because it has no body or its transport does not show it."""
        self._arrived = _now()
        try:
            if self._context.hooks is not None:
                self._continue_in_task(self._pass_hooks(None))
            else:
                self._admit_unseen()
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self._crash()

    def refuse(self, error: RequestError) -> None:
        """Answer with an error, before any byte of a response was forwarded."""
        if self._reading is not None:
            self._reading.end(type(error).__name__)
            self._reading = None
        headers, body = self._context.refusal(error)
        if self._services.gen_ai is not None and self._phase is not _ENDED:
            model = None if self._attempts is None else self._attempts.prompt.name
            self._services.gen_ai.ended(self._context.head.path, model, None, _now() - self._arrived, str(error.status))
        self._finish(error.type, error.status)
        self._client.begin(ResponseHead(error.status, headers), None, body, True)

    @property
    def assignment(self) -> Assignment | None:
        """The current assignment; None before the request is placed, between attempts, and after the end."""
        return None if self._attempts is None else self._attempts.assignment

    def routing_headers(self) -> Headers:
        """Return the routing headers of the response; empty before the request is placed."""
        attempts = self._attempts
        return [] if attempts is None or attempts.assignment is None else attempts.routing_headers().headers()

    @property
    def answering(self) -> bool:
        return self._response is not None or (self._keepalive is not None and self._keepalive.begun)

    @property
    def over(self) -> bool:
        """True if everything is released."""
        return self._phase is _ENDED

    def moved(self, worker: Worker) -> None:
        """Record that the transport sent the request to another worker; the first refused it. Raises RequestError."""
        assert self._attempts is not None
        self._attempts.moved(worker)

    # The client

    def client_disconnected(self) -> None:
        if self._phase is not _ENDED:
            self._services.metrics.abandoned.inc()
            self._finish("client left")

    def ended_unseen(self) -> None:
        """End a request whose transport does not report responses."""
        if self._phase is not _ENDED:
            self._finish()

    def pause(self) -> None:
        """Pause reading from the worker while the client is not reading, and start `proxy.client_timeout`."""
        if self._attempts is not None and self._attempts.sent is not None:
            self._attempts.sent.pause()
        if self._stall is None and self._phase is not _ENDED:
            seconds = self._services.settings.client_timeout
            self._stall = self._services.loop.call_later(seconds, self._client_stalled)

    def resume(self) -> None:
        if self._attempts is not None and self._attempts.sent is not None:
            self._attempts.sent.resume()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _client_stalled(self) -> None:
        """End a request whose client has not read for `proxy.client_timeout` seconds."""
        if self._phase is not _ENDED:
            self._services.metrics.abandoned.inc()
            self._finish("client does not read")
            self._client.break_off()

    def _deadline_passed(self) -> None:
        """End a request at the client's deadline, even in the middle of the response."""
        if self._phase is _ENDED:
            return
        if self._response is None:
            self.refuse(deadline_error())
        else:
            self._finish("deadline")
            self._response.break_off(deadline_error())

    # READING

    async def _pass_hooks(self, body: bytes | None) -> None:
        """Read the request after its hooks. `body`: None if it is unseen."""
        changed = await self._context.pass_hooks(body or b"")
        if body is None:
            self._admit_unseen()
        else:
            self._read(changed)

    def _admit_unseen(self) -> None:
        context, head = self._context, self._context.head
        body, _ = context.checked(_UNSEEN_JSON if context.admitted.route.json else b"")
        self._admit(read_request("", head.path, head.headers, b"", context.identity_headers), body)

    def _read(self, body: bytes) -> None:
        context = self._context
        self._reading = context.trace and context.trace.span("tokenize")
        if len(body) > LONG_BODY or (
            len(body) > _LONG_MEDIA and self._services.fleet.encodes and may_have_media(context.head.path, body)
        ):
            self._continue_in_task(self._read_long(body))
            return
        body, request = self._decoded(body)
        if self._services.reader.read_now(request, len(body)):
            self._admit(request, body)
        else:
            self._continue_in_task(self._read_aside(request, body))

    async def _read_long(self, body: bytes) -> None:
        services = self._services
        body, request = await services.long_bodies.read(len(body), partial(self._decoded, body))
        await services.reader.read(request, len(body))
        self._admit(request, body)

    async def _read_aside(self, request: RoutedRequest, body: bytes) -> None:
        await self._services.reader.read_aside(request, len(body))
        self._admit(request, body)

    def _decoded(self, body: bytes) -> tuple[bytes, RoutedRequest]:
        context, head = self._context, self._context.head
        with_prompt = self._services.reader.state.needs_prompts
        checked, known = context.checked(body, with_prompt)
        body, billing_line = self._services.billing_lines.body_to_send(head.path, checked, known)
        read = known if body is checked else None
        body = self._asking(body)
        if self._services.fleet.encodes:
            self._media = media_chat(head.path, body)
        request = read_request(head.method, head.path, head.headers, body, context.identity_headers, read, with_prompt)
        request.billing_line = billing_line
        if self._services.fleet.unlike or len(body) > LONG_BODY:
            request.needs = needed_abilities(body)
        return body, request

    def _asking(self, body: bytes) -> bytes:
        """Return the body to send, with usage requested if the router needs it."""
        services = self._services
        # With another transport, the router cannot change the response.
        asks = self._transport is None and (services.ask_usage or services.recorder.listening)
        return self._with_usage(body) if asks else body

    def _with_usage(self, body: bytes) -> bytes:
        """Return the body with usage requested, which is hidden from a client that did not ask for it."""
        asking = with_include_usage(self._context.head.path, body)
        if asking is None:
            return body
        self._hidden = HiddenUsage()
        return asking

    def _admit(self, request: RoutedRequest, body: bytes) -> None:
        """Check a parsed request against its tenant and its deadline, and send it. Raises RequestError."""
        services, context = self._services, self._context
        tenant = context.tenant
        if self._reading is not None:
            self._reading.set(model=request.name or "", prompt_tokens=request.tokens)
            self._reading.end()
            self._reading = None
        services.shared_users.check(request)
        if context.trace is not None:
            describe_request(context.trace, context.head.path, request)
        if services.reads_senders:
            request.sender = Sender(tenant.name if tenant else "", context.head.headers)
        if services.recorder.listening:
            self._recorded = services.recorder.began(request, self._arrived)
        ticket = read_ticket(
            context.head.urgency,
            request.priority,
            tenant=tenant.name if tenant else "",
            best_priority=tenant.priority if tenant else None,
            tokens=request.tokens,
            size=len(body),
            service_levels=services.service_levels,
            model=request.name,
            arrived=self._arrived,
        )
        if self._flow is not None:
            ticket.sheddable = self._flow.sheddable
            if tenant is None:  # tenants take turns by themselves, whatever their requests claim
                ticket.tenant = self._flow.name
        if ticket.hints is not None:
            request.hints = ticket.hints.before(request.hints)
        if tenant is not None:
            tenant.admit(request.name, request.tokens)
        if ticket.deadline is not None:
            seconds = max(ticket.deadline - ticket.arrived, 0.0)
            self._deadline = services.loop.call_later(seconds, self._deadline_passed)
        read_at = _now()
        services.metrics.tokenized(request.name or "", read_at - self._arrived)
        services.budget.request(ticket.arrived)
        if services.keepalive_interval and request.streamed and self._transport is None:
            self._keep_alive(services.keepalive_interval)
        offer = None
        if services.token_forwarding is not None:
            by_gateway = self._transport is not None
            offer = services.token_forwarding.offer(context.head.path, body, request, by_gateway)
            if offer is not None and not by_gateway:  # the router cannot hide usage in a gateway's response
                body = self._with_usage(body)
        encoding = None
        if self._media is not None and request.name is not None:
            encoding = EncodeStage(services, context, request, self._media)
            request.encoding = encoding.seconds()
        request.prompt = None  # its texts are no longer needed
        without = [*self._without, *services.fleet.declared] if services.fleet.declared else self._without
        if services.settings.client_routing and tenant is None:
            without = [*without, *follow_client(request, context.head.headers, services.fleet)]
        self._attempts = attempts = Attempts(services, context, request, ticket, body, self._transport, without)
        attempts.offer = offer
        attempts.encoding = encoding
        self._send_next(attempts, read_at)

    def _keep_alive(self, interval: float) -> None:
        """Write comments to the client while nothing else is written, now that the request is accepted."""
        loop = self._services.loop
        arrived = loop.time() - (_now() - self._arrived)
        self._client = self._keepalive = KeepaliveWriter(self._client, self._context.head.path, interval, loop, arrived)

    # WAITING, and SENT

    def _send_next(self, attempts: Attempts, now: float | None = None) -> None:
        """Send the request to the next worker, or wait for one. Raises RequestError if no worker can serve it."""
        self._phase = _SENT
        if not attempts.send_next(self, self._arrived, now):
            self._phase = Phase.WAITING
            self._continue_in_task(self._wait(attempts))

    async def _wait(self, attempts: Attempts) -> None:
        assignment = await attempts.wait()
        self._phase = _SENT
        attempts.send(assignment, self, self._arrived)

    def _continue_in_task(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` in a task. An error that it raises ends the request."""

        async def working() -> None:
            try:
                with self._context.logging():
                    await work
            except RequestError as error:
                self.refuse(error)
            except Exception:
                self._crash()

        self._task = self._services.loop.create_task(working())

    def on_encoded(self, problem: RequestError | None) -> None:
        try:
            assert self._attempts is not None
            if problem is not None:
                raise problem
            self._attempts.send_encoded(self)
        except RequestError as error:
            self.refuse(error)
        except Exception:
            self._crash()

    def give_up(self) -> bool:
        if self._attempts is None or not self._attempts.has_other or not self._services.budget.take():
            return False
        self._services.loop.call_soon(self._leave_hung, self.assignment, False)
        return True

    def give_up_prefill(self) -> bool:
        if not self._services.budget.take():
            return False
        self._services.loop.call_soon(self._leave_hung, self.assignment, True)
        return True

    def _leave_hung(self, assignment: Assignment | None, prefill_hangs: bool) -> None:
        """Retry after the worker was ejected as hung, unless it has answered meanwhile."""
        attempts = self._attempts
        if attempts is not None and assignment is attempts.assignment and self._phase is _SENT:
            attempts.exclude_hung(prefill_hangs)
            self._retry(attempts, "worker hangs")

    def _retry(
        self, attempts: Attempts, problem: str, unreachable: Worker | None = None, takes_budget: bool = False
    ) -> None:
        """Try another worker after an attempt that failed before any byte was forwarded."""
        self._phase, self._head, self._beginning = Phase.WAITING, None, None
        attempts.leave(problem)
        try:
            if unreachable is not None:
                self._services.fleet.report_failure(unreachable, problem)
            if takes_budget and not self._services.budget.take():
                raise attempts.exhausted()
            self._send_next(attempts)
        except RequestError as error:
            self.refuse(error)

    def _queue_again(self, attempts: Attempts, problem: str) -> None:
        """Return the request to its place in the queue, because a worker is full."""
        self._phase, self._head, self._beginning = Phase.WAITING, None, None
        attempts.leave_full(problem)
        try:
            self._send_next(attempts)
        except RequestError as error:
            self.refuse(error)

    # Called with the worker's response

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Called when the head of the response is received.

        Engines send a stream's head before they do any work. Until its first event with content, the request can still
        be retried.
        """
        try:
            attempts = self._attempts
            if self._transport is None and head.is_stream and head.status < _ERROR:
                self._head = head
                self._begin_stream(head, data, ended)
                return
            waits = head.status >= _ERROR and attempts is not None and attempts.needs_error(head.status)
            if data or ended or self._transport is not None or not (head.is_stream or waits):
                self._answer(head, data, ended)
            else:
                self._head = head
        except Exception:
            self._crash()

    def _begin_stream(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Keep events without content. The first one with content begins the answer; an error may lead to a retry."""
        beginning = self._beginning
        if beginning is None:
            beginning = self._beginning = StreamBeginning(head.compressed)
        status = beginning.add(data, ended) if data or ended else None
        attempts = self._attempts
        if status is None and not ended:
            if data and attempts is not None and attempts.assignment is not None:
                attempts.assignment.attempt.health.heard()
            return
        if status and attempts is not None and attempts.assignment is not None:
            problem = f"error event {status}"
            if attempts.returns_to_queue(attempts.assignment, status, head.first(b"retry-after")):
                self._queue_again(attempts, problem)
                return
            if (outcome := attempts.retries_status(status, bytes(beginning.plain))) is not None:
                attempts.assignment.attempt.give_up = None
                attempts.assignment.attempt.end(outcome, problem)
                self._retry(attempts, problem)
                return
        self._beginning = None
        self._answer(head, bytes(beginning.received), ended)

    def on_body(self, data: bytes, ended: bool) -> None:
        try:
            response, attempts = self._response, self._attempts
            if response is None or attempts is None:
                assert self._head is not None
                if self._transport is None and self._head.is_stream and self._head.status < _ERROR:
                    self._begin_stream(self._head, data, ended)
                else:
                    self._answer(self._head, data, ended)
                return
            response.pass_on(data, ended)
            self._passed_on(attempts, response, data, ended)
        except Exception:
            self._crash()

    def on_failed(self, error: UpstreamError) -> None:
        """Called when the response fails before its end: retry, refuse, or break off."""
        try:
            attempts, response = self._attempts, self._response
            assert attempts is not None
            assignment, attempts.sent = attempts.assignment, None
            if assignment is None:
                return  # the request is over; some transports report late
            if response is not None:
                self._break_off(response, str(error))
            elif isinstance(error, PrefillFailedError) and assignment.prefill is not None:
                if error.full:
                    self._queue_again(attempts, str(error))
                    return
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
        """Try another worker if the request may be sent again; otherwise refuse it."""
        if isinstance(error, UnreachableError):
            attempts.not_reached()
            worker.note_refusal()
        elif attempts.ends_with_break(worker):
            self._services.fleet.report_failure(worker, str(error))
            self.refuse(attempts.exhausted())
            return
        self._retry(attempts, str(error), worker)

    # ANSWERING

    def _answer(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Forward the beginning of a response, or retry if the worker did not process the request."""
        attempts = self._attempts
        assert attempts is not None
        assignment = attempts.assignment
        assert assignment is not None
        assignment.attempt.give_up = None
        error = data
        if head.status >= 400:
            error = Decompressor().read(data) if head.compressed else data
            if attempts.returns_to_queue(assignment, head.status, head.first(b"retry-after")):
                self._queue_again(attempts, f"status {head.status}")
                return
        attempts.settle(head.status)
        if head.status >= 400:
            if (outcome := attempts.retries_status(head.status, error, head.closes)) is not None:
                assignment.attempt.end(outcome, f"status {head.status}")
                self._retry(attempts, f"status {head.status}")
                return
            if head.status == _SERVER_ERROR and ended and attempts.may_break:
                sent, attempts.sent = attempts.sent, None
                if isinstance(sent, UpstreamRequest) and sent.answered_on is not None:
                    self._phase = Phase.WAITING
                    self._continue_in_task(self._watch_closing(sent.answered_on, head, data))
                    return
        if head.status == 400 and ended and RANK_ERROR in error and attempts.may_lack_rank(head.status):
            attempts.sent = None
            self._phase = Phase.WAITING
            self._continue_in_task(self._check_rank(attempts, head, data))
            return
        self._begin_answer(attempts, assignment, head, data, ended)

    async def _watch_closing(self, connection: RequestConnection, head: ResponseHead, data: bytes) -> None:
        """Forward a worker's 500, unless the worker closes the connection, too, because it ends."""
        await asyncio.sleep(_CLOSING_SECONDS)
        head.closes = connection.closed
        self._answer(head, data, True)

    async def _check_rank(self, attempts: Attempts, head: ResponseHead, data: bytes) -> None:
        """Retry if the worker no longer has the request's DP rank; otherwise forward its error."""
        if await attempts.lacks_rank():
            self._head = None
            if (left := attempts.assignment) is not None:
                left.attempt.end(Outcome.REFUSED)
            attempts.leave("its rank was removed")
            attempts.allow_again()
            self._send_next(attempts)
        elif (assignment := attempts.assignment) is not None:
            self._begin_answer(attempts, assignment, head, data, True)

    def _begin_answer(
        self, attempts: Attempts, assignment: Assignment, head: ResponseHead, data: bytes, ended: bool
    ) -> None:
        self._phase = _ANSWERING
        if head.status < _ERROR:
            attempts.answered_by_pair()
        headers = attempts.routing_headers()
        self._response = response = self._new_response(attempts, assignment, head)
        needs_usage = self._recorded is not None or attempts.offer is not None or self._services.hooks_after is not None
        response.start(headers, self._hidden, needs_usage, data, ended)
        self._passed_on(attempts, response, data, ended)

    def _new_response(self, attempts: Attempts, assignment: Assignment, head: ResponseHead) -> ProxiedResponse:
        return ProxiedResponse(
            self._services, self._context, self._client, assignment, attempts.prompt, head, self._arrived
        )

    def _passed_on(self, attempts: Attempts, response: ProxiedResponse, data: bytes, ended: bool) -> None:
        """Continue after bytes were forwarded: end the request, or let chunks bypass this object."""
        if ended:
            attempts.sent = None
            if attempts.offer is not None:
                attempts.offer.answered(response.usage)
            self._finish()
        elif data:
            response.forward_chunks(attempts.sent)

    def _break_off(self, response: ProxiedResponse, reason: str) -> None:
        """End the client's response, because the worker broke off."""
        response.failed(reason)
        self._finish(reason)
        response.break_off(broken_off())

    # ENDED

    def _finish(self, problem: str | None = None, status: int = 0) -> None:
        """Release everything. `problem` is the reason of a failure; None after success. `status`: of a refusal."""
        hooks = self._services.hooks_after
        if hooks is not None and self._phase is not _ENDED:
            hooks.after(answer_of(self._context, self._attempts, self._response, self._arrived, problem, status))
        self._phase = _ENDED
        if self._recorded is not None:
            self._record(self._recorded, problem)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stall is not None:
            self._stall.cancel()
        if self._keepalive is not None:
            self._keepalive.stop()
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
        with self._context.logging():
            log.exception("request failed")
        self._finish("error", 500 if self._response is None else 0)
        if self._response is not None:
            self._client.break_off()
        else:
            self.refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))
