"""A proxied request whose stream goes on elsewhere when its worker dies.

    ANSWERING ──▶ broken off ──▶ WAITING ──▶ SENT ──▶ ANSWERING
                      └──▶ ENDED, where it cannot go on exactly

Used only where the settings want it: no other request pays for it.
"""

from __future__ import annotations

from http_api.errors import RequestError
from router.apis.endpoints import error_event
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.attempts import Attempts, broken_off
from router.forwarding.failover.resumable_response import ResumableResponse
from router.forwarding.failover.resumable_stream import ResumableStream
from router.forwarding.failover.stream_failover import StreamFailover
from router.forwarding.proxied_request import Phase, ProxiedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.response import ProxiedResponse
from router.forwarding.response_writer import ResponseWriter
from router.routing.assignment import Assignment
from router.routing.routed_prompt import RoutedPrompt
from router.upstream import ResponseHead


class ResumableProxiedRequest(ProxiedRequest):
    """A request and its answer, of several workers if need be."""

    _stream: ResumableStream | None = None  # of a request that could go on elsewhere
    _prompt: RoutedPrompt | None = None  # as it was asked
    _died: Worker | None = None  # the worker after which the stream is to go on
    _failovers = 0

    def __init__(
        self, services: ProxyServices, context: RequestContext, client: ResponseWriter, failover: StreamFailover
    ) -> None:
        super().__init__(services, context, client)
        self._failover = failover

    @property
    def answering(self) -> bool:
        return self._response is not None or self._begun

    @property
    def _begun(self) -> bool:
        return self._stream is not None and self._stream.begun

    def refuse(self, error: RequestError) -> None:
        """The same; once the stream has begun, in the stream."""
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
        outcome = attempts.retries_status(head.status) if head.status >= 500 else None
        assignment.attempt.end(outcome or Outcome.NEITHER, problem)
        if outcome is not None:
            self._retry(attempts, problem)
        else:
            self.refuse(broken_off())  # it does not take the rest

    def _new_response(self, attempts: Attempts, assignment: Assignment, head: ResponseHead) -> ProxiedResponse:
        stream = self._stream
        if stream is None or not ResumableResponse.fits(head):
            return super()._new_response(attempts, assignment, head)
        if self._died is not None:
            self._failover.resumed(self._died)
            self._died = None
            self._client.more(stream.comment(attempts.routing_headers().worker), False)
            if self._stall is not None and attempts.sent is not None:
                attempts.sent.pause()  # its client does not read
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
            self._phase = Phase.WAITING
            attempts.leave(reason)
            self._continue_in_task(self._go_on(attempts, stream, response))
        else:
            self._failover.ended(assignment.worker)
            super()._break_off(response, reason)

    async def _go_on(self, attempts: Attempts, stream: ResumableStream, response: ResumableResponse) -> None:
        """Send the rest elsewhere. Raises RequestError."""
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
        self._attempts = attempts = attempts.of_the_rest(resumption.prompt, resumption.body)
        self._send_next(attempts)


def new_proxied_request(services: ProxyServices, context: RequestContext, client: ResponseWriter) -> ProxiedRequest:
    """A request that came, and is to be sent to a worker."""
    failover = services.stream_failover
    if failover is None:
        return ProxiedRequest(services, context, client)
    return ResumableProxiedRequest(services, context, client, failover)
