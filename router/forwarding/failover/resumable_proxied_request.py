"""A proxied request whose stream continues on another worker when its worker fails.

    ANSWERING ──▶ broken off ──▶ WAITING ──▶ SENT ──▶ ANSWERING
                      └──▶ ENDED, if it cannot be continued exactly

It is used only if the settings enable it, so that other requests have no cost.
"""

from __future__ import annotations

from http_api.errors import RequestError
from router.apis.endpoints import error_event
from router.apis.requests import RoutedRequest
from router.apis.usage import HiddenUsage, UsageTail
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.attempts import Attempts
from router.forwarding.exchange import ResponseWriter, RoutingHeaders
from router.forwarding.failover.resumable_stream import ResumableStream
from router.forwarding.failover.stream_failover import StreamFailover
from router.forwarding.proxied_request import Phase, ProxiedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.response import ProxiedResponse
from router.forwarding.retries import broken_off
from router.routing.assignment import Assignment
from router.upstream import ResponseHead
from router.upstream.request import SentRequest


class ResumableResponse(ProxiedResponse):
    """One worker's part of a resumable stream. Each worker's part has its own statistics."""

    stream: ResumableStream

    def follow(self, stream: ResumableStream) -> None:
        """Set the stream. Called once, before any byte."""
        self.resumed = stream.begun
        self.stream = stream
        self._tail = UsageTail()

    @staticmethod
    def fits(head: ResponseHead) -> bool:
        """Return whether a response with this head is a stream that can be parsed."""
        return head.status == 200 and HiddenUsage.applies_to(head.headers)

    def start(
        self,
        headers: RoutingHeaders,
        hidden: HiddenUsage | None,  # noqa: ARG002 - the stream itself hides usage
        recorded: bool,  # noqa: ARG002
        data: bytes,
        ended: bool,
    ) -> None:
        passed = self.stream.filter(data, ended)
        ended = ended and self.stream.problem is None
        if self.resumed:
            self._client.more(passed, ended)
        else:
            self._client.begin(self.head, headers, passed, ended)
            self._count()
        self._learn(data, ended)

    def pass_on(self, data: bytes, ended: bool) -> None:
        passed = self.stream.filter(data, ended)
        ended = ended and self.stream.problem is None
        self._client.more(passed, ended)
        self._learn(data, ended)

    def forward_chunks(self, sent: SentRequest | None) -> None:
        """Keep parsing every event."""

    def break_off(self, error: RequestError) -> None:
        self._client.more(self.stream.error or error_event(self._context.head.path, error), True)


class ResumableProxiedRequest(ProxiedRequest):
    """A request and its response from one or more workers."""

    _stream: ResumableStream | None = None  # if another worker could continue it
    _prompt: RoutedRequest | None = None  # the original prompt
    _died: Worker | None = None  # the failed worker whose stream is to be continued
    _failovers = 0

    def __init__(
        self, services: ProxyServices, context: RequestContext, client: ResponseWriter, failover: StreamFailover
    ) -> None:
        super().__init__(services, context, client)
        self._failover = failover

    @property
    def answering(self) -> bool:
        return super().answering or self._begun

    @property
    def _begun(self) -> bool:
        return self._stream is not None and self._stream.begun

    def refuse(self, error: RequestError) -> None:
        """Answer with an error: inside the stream if it has begun."""
        if not self._begun:
            super().refuse(error)
            return
        if self._died is not None:
            self._failover.ended(self._died)
        self._finish(error.type)
        self._client.more(error_event(self._context.head.path, error), True)

    def _asking(self, body: bytes) -> bytes:
        self._stream = self._failover.stream(self._context.head.path, body)
        return super()._asking(body) if self._stream is None else self._stream.request.body

    def _answer(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        attempts = self._attempts
        assert attempts is not None
        assignment = attempts.assignment
        if not self._begun or assignment is None or ResumableResponse.fits(head):
            super()._answer(head, data, ended)
            return
        problem = f"status {head.status}"
        if attempts.returns_to_queue(assignment, head.status, head.first(b"retry-after")):
            self._queue_again(attempts, problem)
            return
        outcome = attempts.retries_status(head.status, data, head.closes) if head.status >= 400 else None
        assignment.attempt.end(outcome or (Outcome.NEITHER if head.status >= 500 else Outcome.REFUSED), problem)
        if outcome is not None:
            self._retry(attempts, problem)
        else:
            self.refuse(broken_off())  # the worker refuses the rest

    def _new_response(self, attempts: Attempts, assignment: Assignment, head: ResponseHead) -> ProxiedResponse:
        stream = self._stream
        if stream is None or not ResumableResponse.fits(head):
            return super()._new_response(attempts, assignment, head)
        if self._died is not None:
            self._failover.resumed(self._died)
            self._died = None
            self._client.more(stream.comment(attempts.routing_headers().worker), False)
            if self._stall is not None and attempts.sent is not None:
                attempts.sent.pause()  # the client is not reading
        response = ResumableResponse(
            self._services, self._context, self._client, assignment, attempts.prompt, head, self._arrived
        )
        response.follow(stream)
        return response

    def _passed_on(self, attempts: Attempts, response: ProxiedResponse, data: bytes, ended: bool) -> None:
        problem = response.stream.problem if isinstance(response, ResumableResponse) else None
        if problem is None:
            super()._passed_on(attempts, response, data, ended)
        else:
            self._break_off(response, problem)

    def _break_off(self, response: ProxiedResponse, reason: str) -> None:
        attempts, stream = self._attempts, self._stream
        if not isinstance(response, ResumableResponse) or attempts is None or stream is None:
            super()._break_off(response, reason)
            return
        assignment = attempts.assignment
        assert assignment is not None
        ending = stream.ending()
        if ending is not None:
            response.failed(reason)
            self._failover.resumed(assignment.worker)
            self._finish(reason)
            self._client.more(ending, True)
        elif stream.can_go_on and self._failovers < self._failover.most:
            self._failovers += 1
            response.failed(reason)
            self._died = assignment.worker
            self._response = self._head = None
            self._beginning = None
            self._phase = Phase.WAITING
            attempts.leave(reason)
            self._continue_in_task(self._go_on(attempts, stream, response))
        else:
            self._failover.ended(assignment.worker)
            super()._break_off(response, reason)

    async def _go_on(self, attempts: Attempts, stream: ResumableStream, response: ResumableResponse) -> None:
        """Send the request for the rest to another worker. Raises RequestError."""
        original = self._prompt = self._prompt or attempts.prompt
        resumption = await self._failover.resumption(self._context, stream, original)
        if resumption is None:
            assert self._died is not None
            self._failover.ended(self._died)
            self._finish("answer broken off")
            response.break_off(broken_off())
            return
        tenant = self._context.tenant
        if tenant is not None and resumption.given:
            tenant.spend(resumption.given - stream.tokens_before)
        stream.goes_on(resumption.given)
        self._attempts = attempts = attempts.for_rest(resumption.prompt, resumption.body)
        self._send_next(attempts)


def new_proxied_request(services: ProxyServices, context: RequestContext, client: ResponseWriter) -> ProxiedRequest:
    """Return the proxied request for a received request."""
    failover = services.stream_failover
    if failover is None:
        return ProxiedRequest(services, context, client)
    return ResumableProxiedRequest(services, context, client, failover)
