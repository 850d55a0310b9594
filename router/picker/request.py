"""One request that passes through Envoy, as Envoy's call to the picker reports it.

A `ProxiedRequest` serves the request, as in the proxy. For it, Envoy is both the client and the transport:

- As the client, Envoy sends the request's body in messages, and receives the router's own responses as
  `ImmediateResponse`.
- As the transport, Envoy receives the worker's endpoint, and reports the worker's response.

    HEADERS ──▶ BODY ──▶ ROUTING ──▶ ROUTED ──▶ RESPONDING ──▶ OVER
        └──────────┴────────┴──────────┴──── an error ──────────▲

If Envoy does not show the response's body, the response ends with the call.
"""

from __future__ import annotations

import asyncio
import re
from enum import IntEnum
from functools import lru_cache
from typing import Final

import structlog

from http_api.errors import RequestError
from router.auth import too_large, too_slow
from router.fleet.worker import Worker
from router.forwarding.exchange import ResponseWriter, RoutingHeaders
from router.forwarding.proxied_request import ProxiedRequest
from router.forwarding.request_context import RequestContext, RequestHead
from router.http.headers import Headers, are_headers, with_id
from router.picker import endpoints, process_requests, process_responses
from router.picker import ext_proc_pb2 as pb
from router.picker.grpc_server import Call
from router.picker.request_body import RequestBody, check_expected
from router.picker.response import Observation, PickedResponse
from router.picker.state import PickerState
from router.upstream import Origin, ResponseHandler, ResponseHead, UnreachableError, UpstreamError, UpstreamTimeoutError

log = structlog.get_logger()

_Mode = pb.ProcessingMode
_DUPLEX: Final = _Mode.FULL_DUPLEX_STREAMED
# Seconds to wait for the end of an observed response after the end of Envoy's call.
_OBSERVED_SECONDS: Final = 0.5
_AUTHORIZATION: Final = b"authorization"
_STATUS: Final = re.compile(r"[1-5][0-9]{2}", re.ASCII)
_LATE: Final = ("timeout", "response_timeout", "per_try_timeout")


class Phase(IntEnum):
    """Progress of a request."""

    HEADERS = 0  # its headers have not arrived
    BODY = 1  # its body is arriving
    ROUTING = 2  # it is complete and has no worker yet
    ROUTED = 3  # Envoy has received the endpoint
    RESPONDING = 4  # the worker's head has arrived
    OVER = 5  # Envoy has received a response of the picker, or ended the call


class PickedRequest(ResponseWriter):
    """A request between Envoy and its worker: the client and the transport of its exchange."""

    def __init__(self, state: PickerState, call: Call) -> None:
        self._state = state
        self._call = call
        self._send = call.send
        self._number = str(next(state.numbers))
        self._phase = Phase.HEADERS
        self._lingering: asyncio.TimerHandle | None = None  # until the end of an observed response
        self._resolving: asyncio.Task[None] | None = None
        self._context: RequestContext
        # The request.
        self._mode = _DUPLEX
        self._received: Headers = []
        self._path = ""
        self._rewrite: bytes | None = None
        self._subset: set[str] | None = None
        self._body: RequestBody | None = None
        # The response.
        self._address = ""
        self._response: PickedResponse | None = None  # from the end of the request's headers to the end of the exchange

    def received(self, message: pb.ProcessingRequest) -> None:
        """Receive a message of Envoy."""
        if self._phase is Phase.OVER:
            return
        kind, response = message.WhichOneof("request"), self._response
        if response is None:
            if kind == "request_headers" and self._phase is Phase.HEADERS:
                self._request_headers(message)
        elif kind == "request_body":
            self._request_body(response.proxied, message.request_body)
        elif kind == "response_headers":
            self._response_headers(response, message)
        elif kind == "response_body":
            self._response_body(response, message.response_body)
        elif kind == "response_trailers":
            response.more(b"", True)
            self._send(process_responses.KEEP_RESPONSE_TRAILERS)
        elif kind == "request_trailers":
            self._request_trailers(response.proxied)

    def closed(self) -> None:
        """End the request, because its call has ended."""
        begun, unanswered = self._phase is not Phase.HEADERS, self._phase is Phase.ROUTED
        if self._body is not None:
            self._body.end_arrival()
        self._phase = Phase.OVER
        self._state.body_deadlines.drop(self._number)
        if self._resolving is not None:
            self._resolving.cancel()
        response = self._response
        if response is None:
            if begun:
                self._context.end()
            return
        response.forget_timer()
        if unanswered and not self._state.reports_heads:
            self._state.reports_heads = False
            response.proxied.ended_unseen()
        expected = response.observation is Observation.SOME or (
            self._state.observed and response.observation is Observation.NOTHING
        )
        if response.ends_unseen and expected:  # the second filter's messages may arrive later
            self._lingering = asyncio.get_running_loop().call_later(_OBSERVED_SECONDS, self._end, response)
        else:
            self._end(response)

    def _end(self, response: PickedResponse) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        if response.ends_unseen and response.observation is not Observation.SOME:
            response.more(b"", True)
        response.proxied.client_disconnected()  # has no effect on a finished request
        self._state.requests.pop(self._number, None)
        self._context.end()
        # Break the reference cycle, so that the request's memory is freed at once.
        self._response = self._lingering = None

    # The request

    def _request_headers(self, message: pb.ProcessingRequest) -> None:
        state, head = self._state, message.request_headers
        answer_mode = _Mode.NONE
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            answer_mode = message.protocol_config.response_body_mode
        pseudo, self._received = process_requests.read_headers(head.headers)
        valid = are_headers(self._received)
        if not valid:
            self._received = []
        gateway = process_requests.read_gateway_headers(self._received, state.objectives)
        self._rewrite = gateway.model
        target = pseudo.get(":path", "/")
        path = target.partition("?")[0]
        method, raw_target = pseudo.get(":method", "GET"), target.encode("latin-1")
        if head.end_of_stream:
            method = state.proxy_context.gate.method_without_body(method, raw_target)
        request = RequestHead(method, path, raw_target, gateway.headers)
        self._phase = Phase.BODY
        self._context = context = state.proxy_context.contexts.begin(request)
        try:
            if not valid:
                raise RequestError("A header's name is no token, or its value is more than one line.", code="head")
            context.admit()
            if (own := state.own_answers.to(context)) is not None:
                self.begin(ResponseHead(200, [(b"content-type", b"application/json")]), None, own, True)
                return
            if context.admitted.route.own:
                raise _of_the_picker(path)
            if not head.end_of_stream:
                check_expected(self._mode, self._received, state.proxy_context, context.admitted)
        except RequestError as error:
            refusal, body = context.refusal(error)
            self.begin(ResponseHead(error.status, refusal), None, body, True)
            return
        self._path = target
        self._subset = process_requests.read_subset(message)
        outside = endpoints.outside(state, self._subset)
        proxied = ProxiedRequest(state.proxy_context.services, context, self, self, outside, gateway.flow)
        self._response = PickedResponse(proxied, answer_mode)
        if head.end_of_stream or self._mode == _Mode.NONE:
            self._phase = Phase.ROUTING
            proxied.start_unseen()
            return
        self._body = RequestBody(state.proxy_context.contexts.gate.arrivals)
        state.body_deadlines.set(self._number, self._body_late)
        if self._mode == _Mode.BUFFERED:
            self._send(process_responses.KEEP_REQUEST_HEADERS)

    def _request_body(self, proxied: ProxiedRequest, part: pb.HttpBody) -> None:
        body = self._body
        if self._phase is not Phase.BODY or body is None:
            return
        try:
            body.add(part.body)
        except RequestError as error:
            body.end_arrival()
            proxied.refuse(error)
            return
        if body.size > self._state.proxy_context.settings.max_body_bytes:
            proxied.refuse(too_large(self._state.proxy_context.settings))
        elif part.end_of_stream or self._mode == _Mode.BUFFERED:  # then it is whole, whatever trailers follow
            self._start(proxied, body.whole())

    def _request_trailers(self, proxied: ProxiedRequest) -> None:
        if self._phase is Phase.BODY and self._body is not None:
            self._body.trailers = True
            self._start(proxied, self._body.whole())
        else:
            self._send(process_responses.KEEP_REQUEST_TRAILERS)

    def _body_late(self) -> None:
        if self._response is not None:
            self._response.proxied.refuse(too_slow(self._state.proxy_context.settings))

    def _start(self, proxied: ProxiedRequest, body: bytes) -> None:
        """Start routing with the complete body."""
        if self._body is not None:
            self._body.end_arrival()
        self._phase = Phase.ROUTING
        self._state.body_deadlines.drop(self._number)
        rewrite = self._rewrite
        if self._state.rewrites and body:
            rewrite = process_requests.model_by_rules(self._state.rewrites, self._context, body) or rewrite
        if rewrite is not None and body:
            try:
                body = process_requests.with_model(body, rewrite)
            except RequestError as error:
                proxied.refuse(error)
                return
        proxied.start(body)

    # The transport

    def send(self, worker: Worker, answer: ResponseHandler, headers: Headers, body: bytes) -> PickedRequest:
        """Send Envoy the endpoint of the chosen worker, after name resolution if necessary."""
        address = self._state.address_of(worker)
        if address is not None:
            self._route(worker, answer, address, headers, body)
        else:
            self._resolving = asyncio.create_task(self._route_by_name(worker, answer, headers, body))
        return self

    async def _route_by_name(self, worker: Worker, answer: ResponseHandler, headers: Headers, body: bytes) -> None:
        try:
            address = await self._state.addresses.found(worker.url)
        except OSError as error:
            answer.on_failed(UnreachableError(f"{worker.name}: {error.strerror}"))
        else:
            self._route(worker, answer, address, headers, body)

    def _route(self, worker: Worker, answer: ResponseHandler, address: str, headers: Headers, data: bytes) -> None:
        """Send Envoy the endpoint, and the headers and body to forward."""
        response, body = self._response, self._body
        assert response is not None
        if not endpoints.within(address, self._subset):
            response.proxied.refuse(endpoints.none_allowed())  # a worker that was added while the request waited
            return
        self._phase = Phase.ROUTED
        self._address, response.handler = address, answer
        self._state.requests[self._number] = self
        assignment = response.proxied.assignment
        named = ",".join([address, *endpoints.fallbacks(self._state, assignment, worker, self._subset)])
        prefix = _path_of(worker.url)
        if body is not None:
            headers = [header for header in headers if header[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(data)))
        key = worker.key.authorization
        if (
            key is not None
            and self._context.admitted.add_worker_key
            and not any(name == _AUTHORIZATION for name, _ in headers)
        ):
            headers = [*headers, (_AUTHORIZATION, key)]
        path = prefix + self._path if prefix else None
        reported = response.proxied.routing_headers()
        scores = endpoints.scores(self._state, assignment)
        routed = process_responses.Routed(named, self._number, self._received, headers, path, reported, scores)
        if self._state.reports_heads is False:
            response.expect_no_head()
        if body is None:
            self._send(routed.to_headers())
            return
        if self._mode == _Mode.BUFFERED:
            self._send(routed.to_body(None if data is body.whole() else data))
        else:
            self._send(routed.to_headers(), *process_responses.request_chunks(data, ends=not body.trailers))
        body.drop()
        if body.trailers:
            self._send(process_responses.KEEP_REQUEST_TRAILERS)

    def abort(self) -> None:
        """Leave the response to the end of the call, which cancels it."""

    def pause(self) -> None:
        """Leave flow control to Envoy."""

    def resume(self) -> None:
        """Leave flow control to Envoy."""

    # The response

    def _response_headers(self, response: PickedResponse, message: pb.ProcessingRequest) -> None:
        self._state.reports_heads = True
        if response.handler is None or self._phase is not Phase.ROUTED or response.proxied.assignment is None:
            self._send(process_responses.KEEP_RESPONSE_HEADERS)  # Envoy's own response, before a worker was chosen
            return
        pseudo, headers = process_requests.read_headers(message.response_headers.headers)
        served, problem = process_requests.read_served(message), process_requests.read_problem(message)
        if served and served != self._address:
            self._served_by(response.proxied, served)
        if problem is not None:
            late = any(word in problem for word in _LATE)
            response.handler.on_failed(UpstreamTimeoutError(problem) if late else UnreachableError(problem))
            return
        status = pseudo.get(":status", "")
        if _STATUS.fullmatch(status) is None:
            response.handler.on_failed(UpstreamError(f"its status is {status[:20]!r}"))
            return
        if not are_headers(headers):
            response.handler.on_failed(UpstreamError("its head has an invalid header"))
            return
        self._phase = Phase.RESPONDING
        response.begin(ResponseHead(int(status), headers), message.response_headers.end_of_stream)

    def _served_by(self, proxied: ProxiedRequest, address: str) -> None:
        """Move the request to the fallback that serves it."""
        worker = self._state.worker_at(address)
        if worker is None:
            return
        self._address = address
        try:
            proxied.moved(worker)
        except RequestError as error:
            log.warning("a fallback is not among the candidates", worker=worker.name, reason=str(error))

    def _response_body(self, response: PickedResponse, part: pb.HttpBody) -> None:
        response.more(part.body, part.end_of_stream)
        if response.mode == _Mode.NONE:  # Envoy did not report its mode; the Inference Extension requires this one
            response.mode = _DUPLEX
        if response.mode == _DUPLEX:
            self._send(*process_responses.response_chunks(part.body, part.end_of_stream))
        else:
            self._send(process_responses.KEEP_RESPONSE_BODY)

    def observed(self, data: bytes, ended: bool) -> bool:
        """Receive bytes of the response from the second filter. Return whether more are wanted."""
        response = self._response
        if response is None:
            return False
        wanted = response.observed(data, ended, self._wants_usage)
        if self._phase is Phase.OVER and not wanted:
            self._end(response)
        return wanted

    def _wants_usage(self) -> bool:
        """Return whether the response is read to its end, for its usage."""
        head = self._response.head if self._response is not None else None
        streamed = head is not None and head.is_stream
        services = self._state.proxy_context.services
        limited = self._context.tenant is not None or services.hooks_after is not None
        return not streamed or limited or self._state.random.random() < self._state.settings.read_usage

    # The client

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:  # noqa: ARG002
        """Forward a worker's head, or send the router's own response."""
        reported = ours.headers() if ours is not None else []
        self._context.answered(head.status, reported)
        headers = with_id([*head.passed_on, *reported], self._context.id)
        response = self._response
        if self._phase is not Phase.RESPONDING or ours is None or response is None:
            self._answer(head.status, headers, data)
            return
        assert response.head is not None
        mode = b""
        if response.mode == _Mode.STREAMED and self._mode != _DUPLEX and not self._wants_usage():
            mode, response.mode = process_responses.NO_RESPONSE_BODY, _Mode.NONE
        self._send(process_responses.response_headers(response.head.headers, headers, mode))

    def more(self, data: bytes, ended: bool) -> None:  # noqa: ARG002
        """Count bytes that Envoy forwards. Cancel the response instead if they are the router's own."""
        if self._response is not None and self._response.proxied.over:
            self.break_off()
        else:
            self._context.passed(len(data))

    def break_off(self) -> None:
        """Cancel the response: Envoy resets the client's stream."""
        self._answer(500, [], b"")

    def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a response in place of a worker's. The call ends after the current callback."""
        if self._phase is not Phase.OVER:
            self._phase = Phase.OVER
            self._send(process_responses.immediate(status, headers, body, "kvrouter"))
            asyncio.get_running_loop().call_soon(self._call.end)


@lru_cache(maxsize=4096)
def _path_of(url: str) -> str:
    return Origin.of(url).path.decode("latin-1")


def _of_the_picker(path: str) -> RequestError:
    return RequestError(
        f"{path} is not served here. Send the request to the router's HTTP port.", status=404, type="not_found_error"
    )
