"""A disaggregated request: the prefill on one worker and the decode on another, sent and cancelled together.

    (query) ──▶ prefill and decode at once            ──▶ the decode's response is forwarded
            └─▶ prefill ──answered──▶ decode          ──┘

Only the decode's response is forwarded. The prefill's response is discarded, or read for parameters of the decode.
Until the decode's first byte, a failing prefill ends both requests. If the prefill worker refuses the request as
invalid, the client receives that error.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from router.apis.stream_errors import is_refusal, stream_error
from router.fleet.health import Outcome
from router.forwarding.collected_response import CollectedResponse
from router.http.headers import RANK_HEADER, UNCOMPRESSED, Headers, forwarded_lines, lines_of
from router.routing.assignment import Assignment
from router.routing.disaggregation.adapters import Adapter, AnsweredError, PreparedRequest, WorkerEndpoint
from router.upstream import ResponseHandler, ResponseHead, UpstreamError, UpstreamRequest, Upstreams
from router.upstream.request import SentRequest, Transport


class PrefillFailedError(UpstreamError):
    """The prefill worker failed, and the decode worker did not.

    - `answered`: it was reachable and answered with an error.
    - `together`: both requests ran at once, so the decode worker may be the cause.
    - `full`: it is full, so the request can be queued again.
    """

    def __init__(self, problem: str, answered: bool, together: bool, full: bool = False) -> None:
        super().__init__(problem)
        self.full = full
        self.answered = answered
        self.together = together


class DisaggregatedRequest(ResponseHandler):
    """The requests to the two workers of an assignment, which act as one request with one `handler`."""

    def __init__(
        self,
        handler: ResponseHandler,
        upstreams: Upstreams,
        assignment: Assignment,
        adapter: Adapter,
        target: bytes,
        headers: Headers,
        on_prefilled: Callable[[], None],
        returns_to_queue: Callable[[Assignment, int, bytes], bool],
        add_worker_key: bool = True,
        transport: Transport | None = None,
    ) -> None:
        """Prepare both requests.

        - `on_prefilled`: called when the prefill is done and the decode is awaited.
        - `returns_to_queue`: called when the prefill worker answers with an error status; see `Attempts`.
        - `add_worker_key`: add each worker's own key, unless the headers have an `authorization`.
        """
        assert assignment.prefill is not None
        self._handler: ResponseHandler | None = handler
        self._upstreams = upstreams
        self._adapter = adapter
        self._target = target
        self._headers = headers
        self._on_prefilled = on_prefilled
        self._returns_to_queue = returns_to_queue
        self._add_worker_key = add_worker_key
        self._transport = transport
        self._decode_worker = assignment.worker
        self._prefill_assignment = assignment.prefill
        self._prefill: UpstreamRequest | None = None
        self._decode: SentRequest | None = None
        self._query: UpstreamRequest | None = None  # a query that the adapter needs first
        self._decoding = False  # a part of the decode's response was received
        self._paused = False
        self.prefill_refused = False  # the prefill worker answered in place of the decode worker

    def start(self) -> None:
        """Send the first request or requests. Raises RequestError if the body cannot be changed."""
        if url := self._adapter.query_url:
            self._send_query(url)
        else:
            self._send_first()

    def pause(self) -> None:
        """Stop reading the response."""
        self._paused = True
        if self._decode is not None:
            self._decode.pause()

    def resume(self) -> None:
        """Continue reading the response."""
        self._paused = False
        if self._decode is not None:
            self._decode.resume()

    @property
    def answering(self) -> SentRequest | None:
        """The request whose response the client receives; None without one."""
        return self._decode

    def abort(self) -> None:
        """Cancel both requests, without calling the handler any more."""
        self._handler = None
        ended = [
            url
            for url, sent in (
                (self._prefill_assignment.worker.url, self._prefill),
                (self._decode_worker.url, self._decode),
            )
            if sent is not None
        ]
        self._close()
        if ended and (part := self._adapter.abort) is not None:
            lines = forwarded_lines(part.headers)
            for url in ended:
                self._upstreams.get(url).send(_Ignored(), "POST", b"/abort_request", lines, part.body)

    def _send_query(self, url: str) -> None:
        parts = urlsplit(url)
        upstream = self._upstreams.get(f"{parts.scheme}://{parts.netloc}")

        def on_answer(head: ResponseHead, body: bytes) -> None:
            self._query = None
            if head.status != 200:
                self._prefill_failed(f"{url} answers {head.status}")
                return
            try:
                self._adapter.read_query(body)
            except ValueError as error:
                self._prefill_failed(f"{url}: invalid answer: {error}")
                return
            self._send_first()

        def on_failed(error: UpstreamError) -> None:
            self._query = None
            self._prefill_failed(f"{url}: {error}")

        lines = lines_of([UNCOMPRESSED])
        self._query = upstream.send(CollectedResponse(on_answer, on_failed), "GET", parts.path.encode(), lines, b"")

    def _send_first(self) -> None:
        adapter = self._adapter
        if adapter.prefills:
            self._prefill = self._send(
                self._prefill_assignment.worker.url,
                self._ranked(adapter.prefill(), adapter.prefill_worker),
                CollectedResponse(
                    self._prefill_answered,
                    lambda error: self._prefill_failed(str(error)),
                    keep_body=not adapter.concurrent,
                ),
            )
        if adapter.concurrent:
            self._send_decode(b"")

    def _send_decode(self, prefilled: bytes) -> None:
        part = self._ranked(self._adapter.decode(prefilled), self._adapter.decode_worker)
        if self._transport is None:
            self._decode = self._send(self._decode_worker.url, part, self)
        else:
            self._decode = self._transport.send(self._decode_worker, self, self._headers_of(part), part.body)
        if self._paused:
            self._decode.pause()

    def _send(self, url: str, part: PreparedRequest, handler: ResponseHandler) -> UpstreamRequest:
        lines = forwarded_lines(self._headers_of(part))
        return self._upstreams.get(url).send(
            handler, "POST", self._target, lines, part.body, add_worker_key=self._add_worker_key
        )

    def _headers_of(self, part: PreparedRequest) -> Headers:
        replaced = {RANK_HEADER, *(name for name, _ in part.headers)}
        return [each for each in self._headers if each[0] not in replaced] + part.headers

    def _ranked(self, part: PreparedRequest, end: WorkerEndpoint) -> PreparedRequest:
        """Return a part with the header of its worker's DP rank, if there are several ranks."""
        if end.dp_size == 1 or any(name == RANK_HEADER for name, _ in part.headers):
            return part
        return PreparedRequest(part.body, [*part.headers, (RANK_HEADER, b"%d" % end.dp_rank)])

    # Called with the prefill's response

    def _prefill_answered(self, head: ResponseHead, body: bytes) -> None:
        self._prefill = None
        assignment = self._prefill_assignment
        error = head.status if head.status >= 400 else stream_error(body) if head.is_stream else None
        if error is None:
            assignment.attempt.heard()
        elif self._returns_to_queue(assignment, error, head.first(b"retry-after")):
            self._prefill_failed(f"status {error}", answered=True, full=True)
            return
        if head.status >= 500:
            if self._adapter.concurrent:  # the decode worker may be the cause
                assignment.attempt.end(Outcome.NEITHER, f"status {head.status}")
            self._prefill_failed(f"status {head.status}", answered=True)
            return
        # Some engines begin a stream before they check its request.
        outcome = Outcome.SUCCEEDED if error is None else Outcome.REFUSED if is_refusal(error) else Outcome.FAILED
        assignment.attempt.end(outcome, f"status {error or head.status}")
        assignment.first_byte()
        assignment.release()
        if self._handler is None or self._decoding:
            return
        if head.status >= 400:
            self.prefill_refused = True
            self._answer(head, body)
            return
        self._on_prefilled()
        if not self._adapter.concurrent:
            try:
                self._send_decode(body)
            except AnsweredError as answered:
                self._answer(ResponseHead(200, [(b"content-type", answered.content_type)]), answered.body)
            except ValueError as error:
                self._prefill_failed(f"invalid answer: {error}")

    def _prefill_failed(self, reason: str, answered: bool = False, full: bool = False) -> None:
        self._prefill = None
        self._prefill_assignment.attempt.end(Outcome.FAILED, reason)
        if self._decoding:
            return  # the decode has received what it needs
        handler, self._handler = self._handler, None
        self._close()
        if handler is not None:
            problem = f"prefill on {self._prefill_assignment.worker.name}: {reason}"
            handler.on_failed(PrefillFailedError(problem, answered, self._adapter.concurrent, full))

    def _answer(self, head: ResponseHead, body: bytes) -> None:
        handler, self._handler = self._handler, None
        self._close()
        if handler is not None:
            handler.on_head(head, body, True)

    # Called with the decode's response

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        if 400 <= head.status < 500:
            self._prefill_assignment.attempt.end(Outcome.REFUSED, f"decode: status {head.status}")
        self._note_decode(data, ended)
        if self._handler is not None:
            self._handler.on_head(head, data, ended)

    def on_body(self, data: bytes, ended: bool) -> None:
        self._note_decode(data, ended)
        if self._handler is not None:
            self._handler.on_body(data, ended)

    def on_failed(self, error: UpstreamError) -> None:
        """Called when the decode worker fails: cancel the prefill, too."""
        self._decode = None
        handler, self._handler = self._handler, None
        self._close()
        if handler is not None:
            handler.on_failed(error)

    def _note_decode(self, data: bytes, ended: bool) -> None:
        if not self._decoding and (data or ended):
            self._decoding = True
            if (error := stream_error(data)) is not None and is_refusal(error):
                self._prefill_assignment.attempt.end(Outcome.REFUSED, f"decode: error event {error}")
            self._prefill_assignment.first_byte()
        if ended:
            self._decode = None
            self._close()

    def _close(self) -> None:
        for sent in (self._query, self._prefill, self._decode):
            if sent is not None:
                sent.abort()
        self._query = self._prefill = self._decode = None


class _Ignored(ResponseHandler):
    """Handler of a response that is not needed."""

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Ignore the head."""

    def on_body(self, data: bytes, ended: bool) -> None:
        """Ignore the body."""

    def on_failed(self, error: UpstreamError) -> None:
        """Ignore the failure."""
