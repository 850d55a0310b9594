"""One request that passes through Envoy, as its call to the picker tells of it.

The exchange is the router's own. Envoy is both ends of it: the client, whose body comes in messages and whose answer
goes back as an `ImmediateResponse` where the router gives it; and the transport, which is told where to send the
request and tells of the answer.

    HEADERS ──▶ BODY ──▶ ROUTING ──▶ ROUTED ──▶ RESPONDING ──▶ OVER
        └──────────┴────────┴──────────┴──── an error ──────────▲

Where Envoy does not show the answer's body, the answer is over when the call is.
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
from router.http.headers import Headers, with_id
from router.picker import endpoints, gateway_headers, process_requests, process_responses
from router.picker import ext_proc_pb2 as pb
from router.picker.grpc_server import Call
from router.picker.request_body import RequestBody, check_expected
from router.picker.response import Observation, PickedResponse
from router.picker.state import PickerState
from router.upstream import Origin, ResponseHandler, ResponseHead, UnreachableError, UpstreamError, UpstreamTimeoutError

log = structlog.get_logger()

_Mode = pb.ProcessingMode
_DUPLEX: Final = _Mode.FULL_DUPLEX_STREAMED
# How long the end of an answer that was to be observed is waited for, once Envoy is done with the request.
_OBSERVED_SECONDS: Final = 0.5
# What is routed by where the body does not come: any worker will do.
_UNSEEN_BODY: Final = b"{}"
_AUTHORIZATION: Final = b"authorization"
_STATUS: Final = re.compile(r"[1-5][0-9]{2}", re.ASCII)
_LATE: Final = ("timeout", "response_timeout", "per_try_timeout")


class Phase(IntEnum):
    """How far a request is."""

    HEADERS = 0  # they are awaited
    BODY = 1  # it is coming
    ROUTING = 2  # the request is complete; its worker is looked for
    ROUTED = 3  # Envoy knows where to send it
    RESPONDING = 4  # the worker's head has come
    OVER = 5  # Envoy has an answer of ours, or is gone


class PickedRequest(ResponseWriter):
    """A request between Envoy and its worker: the client and the transport of its exchange."""

    def __init__(self, state: PickerState, call: Call) -> None:
        self._state = state
        self._call = call
        self._send = call.send
        self._number = str(next(state.numbers))
        self._phase = Phase.HEADERS
        self._lingering: asyncio.TimerHandle | None = None  # for what is observed in the end
        self._resolving: asyncio.Task[None] | None = None
        self._context: RequestContext
        # The request.
        self._mode = _DUPLEX
        self._came: Headers = []
        self._path = ""
        self._rewrite: bytes | None = None
        self._subset: set[str] | None = None
        self._body: RequestBody | None = None
        # The answer.
        self._address = ""
        self._response: PickedResponse | None = None  # from when it is known what is asked, until nothing is left of it

    def received(self, message: pb.ProcessingRequest) -> None:
        """Envoy tells something."""
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
        """The call is over: so is the request, however it went."""
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
        if unanswered and not self._state.told:
            self._state.told = False
            response.proxied.ended_unseen()
        expected = response.observation is Observation.SOME or (
            self._state.observed and response.observation is Observation.NOTHING
        )
        if response.ends_unseen and expected:  # what is shown beside may come a bit later
            self._lingering = asyncio.get_running_loop().call_later(_OBSERVED_SECONDS, self._end, response)
        else:
            self._end(response)

    def _end(self, response: PickedResponse) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        if response.ends_unseen and response.observation is not Observation.SOME:
            response.more(b"", True)
        response.proxied.client_disconnected()  # if there is anything left of it
        self._state.requests.pop(self._number, None)
        self._context.end()
        # They know each other: as long as they did, all that there was of the request would stay, with its body.
        self._response = self._lingering = None

    # The request

    def _request_headers(self, message: pb.ProcessingRequest) -> None:
        state, head = self._state, message.request_headers
        answer_mode = _Mode.NONE
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            answer_mode = message.protocol_config.response_body_mode
        pseudo, self._came = process_requests.read_headers(head.headers)
        said = gateway_headers.read(self._came, state.objectives)
        self._rewrite = said.model
        target = pseudo.get(":path", "/")
        path = target.partition("?")[0]
        request = RequestHead(pseudo.get(":method", "GET"), path, target.encode("latin-1"), said.headers)
        self._phase = Phase.BODY
        self._context = context = state.proxy_context.contexts.begin(request)
        try:
            context.admit()
            if (own := state.own_answers.to(context)) is not None:
                self.begin(ResponseHead(200, [(b"content-type", b"application/json")]), None, own, True)
                return
            if context.admitted.route.own:
                raise _of_the_picker(path)
            if not head.end_of_stream:
                check_expected(self._mode, self._came, state.proxy_context, context.admitted)
        except RequestError as error:
            refusal, body = context.refusal(error)
            self.begin(ResponseHead(error.status, refusal), None, body, True)
            return
        self._path = target
        self._subset = process_requests.read_subset(message)
        outside = endpoints.outside(state, self._subset)
        proxied = ProxiedRequest(state.proxy_context.services, context, self, self, outside)
        self._response = PickedResponse(proxied, answer_mode)
        if head.end_of_stream or self._mode == _Mode.NONE:
            self._start(proxied, b"" if head.end_of_stream else _UNSEEN_BODY)
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
        """All of the request is here that comes."""
        if self._body is not None:
            self._body.end_arrival()
        self._phase = Phase.ROUTING
        self._state.body_deadlines.drop(self._number)
        if self._rewrite is not None and body:
            try:
                body = gateway_headers.with_model(body, self._rewrite)
            except RequestError as error:
                proxied.refuse(error)
                return
        proxied.start(body)

    # The transport

    def send(self, worker: Worker, answer: ResponseHandler, headers: Headers, body: bytes) -> PickedRequest:
        """The exchange has found a worker."""
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
        """Tell Envoy where to send the request."""
        response, body = self._response, self._body
        assert response is not None
        if not endpoints.within(address, self._subset):
            response.proxied.refuse(endpoints.none_allowed())  # it was added while the request waited
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
        said = response.proxied.routing_headers()
        routed = process_responses.Routed(named, self._number, self._came, headers, path, said)
        if self._state.told is False:
            response.untold()
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
        """The answer is not wanted: Envoy is told by the end of the call."""

    def pause(self) -> None:
        """Envoy sees to it."""

    def resume(self) -> None:
        """Envoy sees to it."""

    # The answer

    def _response_headers(self, response: PickedResponse, message: pb.ProcessingRequest) -> None:
        self._state.told = True
        if response.handler is None or self._phase is not Phase.ROUTED or response.proxied.assignment is None:
            self._send(process_responses.KEEP_RESPONSE_HEADERS)  # Envoy's own, before there was a worker
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
        self._phase = Phase.RESPONDING
        response.begin(ResponseHead(int(status), headers), message.response_headers.end_of_stream)

    def _served_by(self, proxied: ProxiedRequest, address: str) -> None:
        """Envoy went on to a fallback."""
        worker = self._state.worker_at(address)
        if worker is None:
            return
        self._address = address
        try:
            proxied.moved(worker)
        except RequestError as error:
            log.warning("served by a worker that is not used", worker=worker.name, reason=str(error))

    def _response_body(self, response: PickedResponse, part: pb.HttpBody) -> None:
        response.more(part.body, part.end_of_stream)
        if response.mode == _Mode.NONE:  # an Envoy that did not say; the Inference Extension wants this one
            response.mode = _DUPLEX
        if response.mode == _DUPLEX:
            self._send(*process_responses.response_chunks(part.body, part.end_of_stream))
        else:
            self._send(process_responses.KEEP_RESPONSE_BODY)

    def observed(self, data: bytes, ended: bool) -> bool:
        """Bytes of the answer are shown beside. Whether more of them are wanted."""
        response = self._response
        if response is None:
            return False
        wanted = response.observed(data, ended, self._wants_usage)
        if self._phase is Phase.OVER and not wanted:
            self._end(response)
        return wanted

    def _wants_usage(self) -> bool:
        """Whether an answer is looked at to its end."""
        head = self._response.head if self._response is not None else None
        streamed = head is not None and head.is_stream
        limited = self._context.tenant is not None
        return not streamed or limited or self._state.random.random() < self._state.settings.read_usage

    # The client

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:  # noqa: ARG002
        """The exchange passes on a worker's head, or answers itself."""
        said = ours.headers() if ours is not None else []
        self._context.answered(head.status, said)
        headers = with_id([*head.passed_on, *said], self._context.id)
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
        """Envoy has these bytes already, unless they are the router's: then the answer ends here."""
        if self._response is not None and self._response.proxied.over:
            self.break_off()
        else:
            self._context.passed(len(data))

    def break_off(self) -> None:
        """The answer will not be finished: Envoy resets the client's stream."""
        self._answer(500, [], b"")

    def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer the request at once. The call ends when whoever answers is done."""
        if self._phase is not Phase.OVER:
            self._phase = Phase.OVER
            self._send(process_responses.immediate(status, headers, body, "kvrouter"))
            asyncio.get_running_loop().call_soon(self._call.end)


@lru_cache(maxsize=4096)
def _path_of(url: str) -> str:
    """What comes before the path of every request to a worker."""
    return Origin.of(url).path.decode("latin-1")


def _of_the_picker(path: str) -> RequestError:
    return RequestError(
        f"{path} is not served here. Ask the picker's HTTP port, or Envoy's.", status=404, type="not_found_error"
    )
