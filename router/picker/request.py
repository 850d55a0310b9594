"""One request that passes through Envoy, as its stream to the picker tells of it.

The exchange is the router's own. Envoy is both ends of it: the client, whose body comes in messages and whose answer
goes back as an `ImmediateResponse` where the router gives it; and the carrier, which is told where to send the request
and tells of the answer's head and, where it is configured to, of its body.

    head ──▶ body ──▶ exchange ──▶ endpoint ──▶ answer's head ──▶ its body ──▶ the stream's end
                         └──▶ error

Where Envoy does not show the answer's body, the answer is over when the stream is. Then the end of the prefill is not
seen either. `observer` may tell of both; without it the prefill is taken to end when it was expected to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import structlog

from indexer.errors import RequestError
from router.access import too_large, too_slow
from router.fleet.fleet import Fleet, Worker
from router.forwarding.proxied_request import ProxiedRequest
from router.forwarding.proxy import ProxyContext
from router.forwarding.request_context import RequestContext
from router.forwarding.request_head import RequestHead
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.routing_headers import RoutingHeaders
from router.http.headers import Headers
from router.http.request_id import with_id
from router.picker import ext_proc_pb2 as pb
from router.picker import messages
from router.picker.addresses import Addresses
from router.picker.own_answers import OwnAnswers
from router.settings import PickerSettings
from router.upstream import Origin, ResponseHandler, ResponseHead, UnreachableError, UpstreamTimeoutError

log = structlog.get_logger()

_Mode = pb.ProcessingMode
# How long the end of an answer that was to be observed is waited for, once Envoy is done with the request.
_OBSERVED_SECONDS = 0.5
# Show no more of an answer; its end is seen by its stream's.
_NO_BODY = _Mode(response_body_mode=_Mode.NONE, response_trailer_mode=_Mode.SEND)
_LATE = ("timeout", "response_timeout", "per_try_timeout")


@dataclass(slots=True)
class PickerState:
    """What requests need, and those that are here: by the numbers their answers are observed under."""

    proxy_context: ProxyContext
    fleet: Fleet
    settings: PickerSettings
    own_answers: OwnAnswers
    addresses: Addresses = field(default_factory=Addresses)
    requests: dict[str, PickedRequest] = field(default_factory=dict)
    observed: bool = False  # answers are shown beside
    numbers: count[int] = field(default_factory=lambda: count(1))
    random: Random = field(default_factory=Random)

    def address_of(self, worker: Worker) -> str | None:
        """Where a worker is, if that is known."""
        return self.addresses.of(worker.url)


class PickedRequest(ResponseWriter):
    """A request between Envoy and its worker. It is the client and the carrier of its exchange.

    `send` takes messages for Envoy. After `refused` Envoy wants no more of them.
    """

    def __init__(self, state: PickerState, send: Callable[[bytes], None]) -> None:
        self.refused = False
        self._state = state
        self._send = send
        self._number = str(next(state.numbers))
        self._context: RequestContext | None = None
        self._proxied: ProxiedRequest | None = None
        self._late: asyncio.TimerHandle | None = None
        self._resolving: asyncio.Task[None] | None = None
        # The request.
        self._mode = _Mode.FULL_DUPLEX_STREAMED
        self._came: Headers = []
        self._path = ""
        self._subset: set[str] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._whole = self._has_body = self._has_trailers = False
        # The answer.
        self._answer_mode = _Mode.NONE
        self._address = ""
        self._answer: ResponseHandler | None = None  # who hears of it: the exchange, or its prefill and decode
        self._head: ResponseHead | None = None
        self._passing = False  # what the exchange says now is the worker's
        self._begun = False
        self._seen: list[tuple[bytes, bool]] = []  # observed before the head came
        self._observing = self._was_observed = False
        self._closed = False
        self._ending: asyncio.TimerHandle | None = None
        self._unseen: asyncio.TimerHandle | None = None

    def received(self, message: pb.ProcessingRequest) -> None:
        """Envoy tells something."""
        if self.refused:
            return
        match message.WhichOneof("request"):
            case "request_headers":
                self._request_head(message)
            case "request_body":
                self._request_body(message.request_body)
            case "request_trailers":
                self._request_trailers()
            case "response_headers":
                self._answer_head(message)
            case "response_body":
                self._answer_body(message.response_body)
            case "response_trailers":
                self._answer_trailers()

    def closed(self) -> None:
        """The stream is over: so is the request, however it went."""
        for timer in (self._late, self._unseen):
            if timer is not None:
                timer.cancel()
        if self._resolving is not None:
            self._resolving.cancel()
        self._closed = True
        expected = self._observing or (self._state.observed and not self._was_observed)
        if self._ends_unseen and expected:  # what is shown beside may come a bit later
            self._ending = asyncio.get_running_loop().call_later(_OBSERVED_SECONDS, self._end)
        else:
            self._end()

    @property
    def _ends_unseen(self) -> bool:
        """Whether the answer is under way, and Envoy would not say that it came to its end."""
        return self._proxied is not None and not self._proxied.over and self._begun and self._answer_mode == _Mode.NONE

    def _end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._ends_unseen and not self._observing:
            self._pass(b"", True)
        if self._proxied is not None:
            self._proxied.client_left()  # if there is anything left of it
        self._state.requests.pop(self._number, None)
        if self._context is not None:
            self._context.end()

    # The request

    def _request_head(self, message: pb.ProcessingRequest) -> None:
        state, head = self._state, message.request_headers
        pseudo, headers = messages.read_headers(head.headers)
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        method, target = pseudo.get(":method", "GET"), pseudo.get(":path", "/")
        path = target.partition("?")[0]
        self._came = headers
        request = RequestHead(method, path, target.encode("latin-1"), headers)
        self._context = context = state.proxy_context.contexts.begin(request)
        try:
            context.admit()
            if (own := state.own_answers.to(context)) is not None:
                self.begin(ResponseHead(200, [(b"content-type", b"application/json")]), None, own, True)
                return
            if context.admitted.route.own:
                raise _of_the_picker(path)
            if not head.end_of_stream:
                self._expect_body()
            self._subset = messages.read_subset(message)
        except RequestError as error:
            refusal, body = context.refusal(error)
            self.begin(ResponseHead(error.status, refusal), None, body, True)
            return
        self._path = target
        self._proxied = ProxiedRequest(state.proxy_context.services, context, self, self, self._outside())
        if head.end_of_stream:
            self._start()
            return
        self._has_body = True
        self._late = asyncio.get_running_loop().call_later(state.proxy_context.settings.body_timeout, self._too_slow)
        if self._mode == _Mode.BUFFERED:
            self._send(messages.KEEP_REQUEST_HEAD)

    def _expect_body(self) -> None:
        """Raise RequestError when no body will come that could be used."""
        settings = self._state.proxy_context.settings
        length = next((value for name, value in self._came if name == b"content-length"), b"")
        if length.isdigit() and int(length) > settings.max_body_bytes:
            raise too_large(settings)
        if self._mode not in (_Mode.FULL_DUPLEX_STREAMED, _Mode.BUFFERED):
            raise RequestError(
                f"Envoy's request_body_mode is {_Mode.BodySendMode.Name(self._mode)}. "
                "Set it to FULL_DUPLEX_STREAMED or BUFFERED.",
                status=500,
                type="internal_error",
            )

    def _outside(self) -> list[Worker]:
        """The workers that the request may not go to."""
        if self._subset is None:
            return []
        return [each for each in self._state.fleet.workers if self._state.address_of(each) not in self._subset]

    def _request_body(self, part: pb.HttpBody) -> None:
        if self._whole or self._proxied is None:
            return
        self._size += len(part.body)
        if self._size > self._state.proxy_context.settings.max_body_bytes:
            self._proxied.refuse(too_large(self._state.proxy_context.settings))
            return
        self._body.append(part.body)
        if part.end_of_stream or self._mode == _Mode.BUFFERED:  # then it is whole, whatever trailers follow
            self._start()

    def _request_trailers(self) -> None:
        if not self._whole and self._proxied is not None:
            self._has_trailers = True
            self._start()
        else:
            self._send(messages.KEEP_REQUEST_TRAILERS)

    def _too_slow(self) -> None:
        if self._proxied is not None and not self._whole:
            self._proxied.refuse(too_slow(self._state.proxy_context.settings))

    def _start(self) -> None:
        assert self._proxied is not None
        self._whole = True
        if self._late is not None:
            self._late.cancel()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = [body]
        self._proxied.start(body)

    # The carrier

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
            answer.failed(UnreachableError(f"{worker.url}: {error.strerror}"))
        else:
            self._route(worker, answer, address, headers, body)

    def _route(self, worker: Worker, answer: ResponseHandler, address: str, headers: Headers, body: bytes) -> None:
        """Tell Envoy where to send the request."""
        assert self._proxied is not None
        if self._subset is not None and address not in self._subset:
            self._proxied.refuse(_none_allowed())  # it was added while the request waited
            return
        self._address, self._answer = address, answer
        self._state.requests[self._number] = self
        endpoints = ",".join([address, *self._fallbacks(worker)])
        prefix = Origin.of(worker.url).path.decode("latin-1")
        if self._has_body:
            headers = [header for header in headers if header[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(body)))
        response = messages.routed(
            endpoints, self._number, self._came, headers, prefix + self._path if prefix else None
        )
        if self._has_body and self._mode == _Mode.BUFFERED:
            changed = None if body is self._body[0] else body
            self._send(messages.as_answer_to_body(response, changed).SerializeToString())
        else:
            self._send(response.SerializeToString())
            if self._has_body:
                for chunk in messages.request_chunks(body, ends=not self._has_trailers):
                    self._send(chunk)
        self._body = []
        if self._has_trailers:
            self._send(messages.KEEP_REQUEST_TRAILERS)

    def _fallbacks(self, first: Worker) -> list[str]:
        """Where else it may go when its worker does not take it, the best first."""
        most = self._state.settings.fallbacks
        assignment = self._proxied.assignment if self._proxied else None
        if not most or assignment is None or assignment.prefill is not None:
            return []  # a decode belongs to its prefill
        by_url = {worker.url: worker for worker in self._state.fleet.workers}
        found: dict[str, None] = {}
        for cost in sorted(assignment.decision.costs, key=lambda cost: cost.total):
            worker = by_url.get(cost.candidate.target.worker)
            if worker is not None and worker is not first and (address := self._state.address_of(worker)):
                found.setdefault(address)
        return list(found)[:most]

    def abort(self) -> None:
        """Nobody wants the answer: Envoy is told by the end of the stream."""

    def pause(self) -> None:
        """Envoy sees to it."""

    def resume(self) -> None:
        """Envoy sees to it."""

    # The answer

    def _answer_head(self, message: pb.ProcessingRequest) -> None:
        proxied, answer = self._proxied, self._answer
        if proxied is None or answer is None or proxied.over or proxied.assignment is None:
            self._send(messages.KEEP_HEAD)  # Envoy's own, before there was a worker
            return
        pseudo, headers = messages.read_headers(message.response_headers.headers)
        head = ResponseHead(int(pseudo.get(":status", "0")), headers)
        served, problem = messages.read_served(message), messages.read_problem(message)
        if served and served != self._address:
            self._served_by(proxied, served)
        if problem is not None:
            late = any(word in problem for word in _LATE)
            answer.failed(UpstreamTimeoutError(problem) if late else UnreachableError(problem))
            return
        self._head, self._passing = head, True
        answer.answered(head, b"", message.response_headers.end_of_stream)
        self._passing = False
        self._begun = True
        seen, self._seen = self._seen, []
        for data, ended in seen:
            self._pass(data, ended)
        if self._answer_mode == _Mode.NONE and not proxied.over and proxied.assignment is not None:
            reservation = proxied.assignment.reservation
            self._unseen = asyncio.get_running_loop().call_later(reservation.backlog, reservation.first_byte)

    def _served_by(self, proxied: ProxiedRequest, address: str) -> None:
        """Envoy went on to a fallback."""
        worker = next((each for each in self._state.fleet.workers if self._state.address_of(each) == address), None)
        if worker is None:
            return
        self._address = address
        try:
            proxied.moved(worker)
        except RequestError as error:
            log.warning("served by a worker that is not used", worker=worker.url, reason=str(error))

    def _pass(self, data: bytes, ended: bool) -> None:
        """The exchange learns of bytes that the worker sent."""
        if self._answer is not None and self._proxied is not None and not self._proxied.over and self._begun:
            self._passing = True
            self._answer.more(data, ended)
            self._passing = False

    def _answer_body(self, part: pb.HttpBody) -> None:
        self._pass(part.body, part.end_of_stream)
        if self._answer_mode == _Mode.NONE:  # an Envoy that did not say; the Inference Extension wants this one
            self._answer_mode = _Mode.FULL_DUPLEX_STREAMED
        if self._answer_mode == _Mode.FULL_DUPLEX_STREAMED:
            for chunk in messages.answer_chunks(part.body, part.end_of_stream):
                self._send(chunk)
        else:
            self._send(messages.KEEP_BODY)

    def _answer_trailers(self) -> None:
        self._pass(b"", True)
        self._send(messages.KEEP_TRAILERS)

    def observed(self, data: bytes, ended: bool) -> bool:
        """Bytes of the answer are shown beside. Whether more of them are wanted."""
        proxied = self._proxied
        if proxied is None or proxied.over or self._answer_mode != _Mode.NONE:
            return False
        first, self._was_observed = not self._was_observed, True
        self._observing = True
        if self._begun:
            self._pass(data, ended)
        else:
            self._seen.append((data, ended))
        if first and not ended and not self._wants_usage():
            self._observing = False
        wanted = self._observing and not ended
        if self._closed and not wanted:
            self._end()
        return wanted

    def _wants_usage(self) -> bool:
        """Whether an answer is looked at to its end."""
        streamed = self._head is not None and self._head.first(b"content-type").startswith(b"text/event-stream")
        limited = self._context is not None and self._context.tenant is not None
        return not streamed or limited or self._state.random.random() < self._state.settings.read_usage

    # The client

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:  # noqa: ARG002
        """The exchange passes on a worker's head, or answers itself."""
        assert self._context is not None
        said = ours.headers() if ours is not None else []
        self._context.answered(head.status, said)
        headers = with_id([*head.passed_on, *said], self._context.id)
        if self._passing:
            assert self._head is not None
            mode = None
            if self._answer_mode == _Mode.STREAMED and self._mode != _Mode.FULL_DUPLEX_STREAMED:
                mode = None if self._wants_usage() else _NO_BODY
            self._send(messages.answer_head(self._head.headers, headers, mode))
        else:
            self._refuse(head.status, headers, data)

    def more(self, data: bytes, ended: bool) -> None:  # noqa: ARG002
        """Envoy has these bytes already, unless they are the router's: then the answer ends here."""
        if self._passing:
            assert self._context is not None
            self._context.passed(len(data))
        elif self._begun and data:
            self.break_off()

    def break_off(self) -> None:
        """The answer will not be finished: Envoy resets the client's stream."""
        self._refuse(500, [], b"")

    def _refuse(self, status: int, headers: Headers, body: bytes) -> None:
        self.refused = True
        self._send(messages.immediate(status, headers, body, "kvrouter"))


def _of_the_picker(path: str) -> RequestError:
    return RequestError(
        f"{path} is not served here. Ask the picker's HTTP port, or Envoy's.", status=404, type="not_found_error"
    )


def _none_allowed() -> RequestError:
    return RequestError(
        "No worker of those that the gateway allows can be reached. Try again later.",
        status=503,
        type="service_unavailable",
        code="no_worker_available",
    )
