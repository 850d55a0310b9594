"""A worker's response on its way to the client: what is forwarded, and what is learned from it.

    head ──▶ first byte ──▶ more ──▶ end
                              └──▶ broken off

After a stream has begun, `EventStream` can forward its chunks unparsed, and `ProxiedResponse` does not see them.
"""

from __future__ import annotations

import time
from typing import Final

import structlog

from http_api.errors import RequestError
from router.apis.endpoints import error_event
from router.apis.requests import RoutedRequest
from router.apis.response_owners import SEARCHED_BYTES
from router.apis.response_turns import AnswerReader
from router.apis.stream_errors import is_refusal, stream_error
from router.apis.usage import HiddenUsage, Usage, UsageTail
from router.fleet.health import Health, Outcome
from router.forwarding.disaggregated_request import DisaggregatedRequest
from router.forwarding.exchange import ChunkWriter, ResponseWriter, RoutingHeaders
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.retries import OVERLOADED
from router.http.compression import Decompressor
from router.observability.gen_ai import describe_answer, describe_usage
from router.routing.assignment import Assignment
from router.upstream import ResponseHead, UpstreamRequest
from router.upstream.request import ChunkForwarder, SentRequest

_USAGE: Final = b'"usage"'
_NONE: Final = b":null"
log = structlog.get_logger()
_now: Final = time.monotonic
_OK: Final = 200
# Constants, because the lookup of an enumeration's member is slow.
_SUCCEEDED: Final = Outcome.SUCCEEDED
_FAILED: Final = Outcome.FAILED
_REFUSED: Final = Outcome.REFUSED
_GENERATE: Final = "/generate"
# Requests that change which models a worker serves.
_ADAPTER_CHANGES = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))


class EventStream(ChunkForwarder):
    """The rest of a stream from a worker to a client, forwarded unparsed.

    Between two chunks nothing stays in the processor's caches, and each object that is accessed costs more than the
    work. So one object does everything, and it accesses few others.
    """

    __slots__ = ("_client", "_health", "_hidden", "_tail")

    def __init__(self, client: ChunkWriter, health: Health, tail: UsageTail, hidden: HiddenUsage | None) -> None:
        """Create a stream to a client.

        - `tail`: receives the chunks with usage.
        - `hidden`: removes usage from the stream; None if the client asked for it.
        """
        self._client = client
        self._health = health
        self._tail = tail
        self._hidden = hidden

    def forward(self, chunks: bytes) -> bool:
        if self._hidden is not None and not self._hidden.can_forward(chunks):
            return False
        self._health.heard()
        place = chunks.rfind(_USAGE)  # faster than `in`, which first checks for a number
        if place >= 0:
            place += len(_USAGE)
            if chunks[place : place + len(_NONE)] != _NONE:
                self._tail.feed(chunks)
        self._client.write(chunks)
        return True


class ProxiedResponse:
    """A worker's response. `first_byte_at`: by `time.monotonic`; 0 before. `usage`: after its end, if it is needed."""

    # Defaults on the class, because most responses never change them.
    usage: Usage | None = None
    first_byte_at = 0.0
    resumed = False  # another worker began the stream
    _hidden: HiddenUsage | None = None
    _tail: UsageTail | None = None
    _decompressor: Decompressor | None = None  # if a proxy compressed the body
    _searched: bytes | None = None  # the beginning of the body, while the response's id is searched for
    _answer: AnswerReader | None = None  # if later requests may continue its conversation

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        client: ResponseWriter,
        assignment: Assignment,
        prompt: RoutedRequest,
        head: ResponseHead,
        arrived: float,
    ) -> None:
        """Create a response; `arrived` is when the request was complete, by `time.monotonic`."""
        self.head = head
        self._services = services
        self._context = context
        self._client = client
        self._assignment = assignment
        self._prompt = prompt
        self._arrived = arrived

    def start(
        self, headers: RoutingHeaders, hidden: HiddenUsage | None, recorded: bool, data: bytes, ended: bool
    ) -> None:
        """Forward the head and first bytes. `hidden` removes usage from the stream; if `recorded`, usage is kept."""
        head, context, assignment = self.head, self._context, self._assignment
        if 400 <= head.status < 500:  # The worker computes nothing, even if the rest of its response is late.
            assignment.attempt.end(_REFUSED, f"status {head.status}")
            assignment.release()
        if hidden is not None and HiddenUsage.applies_to(head.headers):
            self._hidden = hidden
            self._client.begin(head, headers, hidden.filter(data, ended), ended)
        else:
            self._client.begin(head, headers, data, ended)
        # The client does not wait for the following steps.
        observed = context.tenant is not None or context.trace is not None
        if head.is_stream or recorded or observed or assignment.wants_usage:
            self._tail = UsageTail()
        if context.head.about_stored and head.status < 400:
            self._searched = b""
        if self._prompt.turn is not None and head.status == _OK:
            self._answer = AnswerReader(self._prompt.turn, head.is_stream)
        if head.compressed:
            self._decompressor = Decompressor()
        self._count()
        self._learn(data, ended)

    def _count(self) -> None:
        prompt, assignment, context = self._prompt, self._assignment, self._context
        if context.trace is not None:
            describe_answer(context.trace, context.head.path, assignment.worker, self.head.status)
        self._services.metrics.begun(
            prompt.name or "", assignment.worker.name, self.head.status, prompt.tokens, assignment.overlap
        )

    def pass_on(self, data: bytes, ended: bool) -> None:
        """Forward more of the body."""
        self._client.more(data if self._hidden is None else self._hidden.filter(data, ended), ended)
        self._learn(data, ended)

    def forward_chunks(self, sent: SentRequest | None) -> None:
        """Let chunks of a stream bypass this object, unless its id is searched for or its content is kept."""
        tail = self._tail
        if not self.head.is_stream or self._searched is not None or tail is None or self._decompressor is not None:
            return
        if self._answer is not None or (self._context.tenant is not None and self._context.head.path == _GENERATE):
            return  # a tenant's tokens are in `meta_info` there
        request = sent.answering if isinstance(sent, DisaggregatedRequest) else sent
        writer = self._client.chunks()
        if isinstance(request, UpstreamRequest) and writer is not None:
            request.forwarder = EventStream(writer, self._assignment.attempt.health, tail, self._hidden)

    def _learn(self, data: bytes, ended: bool) -> None:
        assignment, now = self._assignment, _now()
        if data:
            assignment.attempt.heard(now)
            plain = data if self._decompressor is None else self._decompressor.read(data)
            if not self.first_byte_at:
                self.first_byte_at = now
                if self.head.is_stream and (error := stream_error(plain)) is not None:
                    # Some engines begin a stream before they check its request.
                    if error in OVERLOADED and not assignment.attempt.ended:
                        self._services.fleet.refused(assignment.worker, assignment.attempt, error, 0.0)
                    assignment.attempt.end(_REFUSED if is_refusal(error) else _FAILED, f"error event {error}", now)
                    assignment.release(now)
                if not assignment.attempt.failed:
                    assignment.first_byte(now)
                if not self.resumed:
                    self._services.metrics.first_byte_of(self._prompt.name or "", now - self._arrived)
                    if self._services.gen_ai is not None and self.head.is_stream and not assignment.attempt.failed:
                        path, seconds = self._context.head.path, now - self._arrived
                        self._services.gen_ai.first_token(path, self._prompt.name, assignment.worker, seconds)
            if self._searched is not None:
                self._searched += plain
                learned = self._services.responses.learn(self._searched, assignment.worker.url)
                if learned or len(self._searched) >= SEARCHED_BYTES:
                    self._searched = None
            if self._tail is not None:
                self._tail.feed(plain)
            if self._answer is not None:
                self._answer.feed(plain)
        if ended:
            self._end(now)

    def _end(self, now: float) -> None:
        assignment, status, tenant = self._assignment, self.head.status, self._context.tenant
        if status < 400:
            assignment.attempt.end(_SUCCEEDED, now=now)
        else:
            assignment.attempt.end(_FAILED, f"status {status}", now)
        failed = assignment.attempt.failed
        self._record_duration(now, str(status) if status >= 400 else "error event" if failed else None)
        if status != _OK or assignment.attempt.failed:
            return
        if self._context.head.path in _ADAPTER_CHANGES or self._prompt.unknown_name:
            self._services.fleet.probe_soon(assignment.worker)
        if self._answer is not None:
            self._services.turns.remember(self._answer.turn, self._answer.answer())
        self.usage = usage = self._tail.usage() if self._tail is not None else None
        self._services.placement.answered(assignment, usage)
        if self._prompt.billing_line:
            self._services.billing_lines.answered(assignment.worker, assignment.cache_prediction, usage)
        if usage is not None:
            self._services.metrics.completed(self._prompt.name or "", usage)
            if self._context.trace is not None:
                describe_usage(self._context.trace, self._context.head.path, usage)
        if tenant is not None and usage is not None:
            # The known tokens of the prompt were charged before.
            tenant.spend(usage.completion + max(usage.prompt - self._prompt.tokens, 0))
        if self.head.is_stream:
            seconds = now - (self.first_byte_at or self._arrived)
            self._services.metrics.streamed(self._prompt.name or "", seconds, usage)
            if self._services.gen_ai is not None and usage is not None and usage.completion > 1:
                path, each = self._context.head.path, seconds / (usage.completion - 1)
                self._services.gen_ai.output_tokens(path, self._prompt.name, assignment.worker, each)

    def _record_duration(self, now: float, error: str | None) -> None:
        if self._services.gen_ai is not None:
            path, worker = self._context.head.path, self._assignment.worker
            self._services.gen_ai.ended(path, self._prompt.name, worker, now - self._arrived, error)

    def failed(self, reason: str) -> None:
        """Record that the worker broke off its response."""
        assignment, services = self._assignment, self._services
        assignment.attempt.end(_FAILED, f"answer broken off: {reason}")
        self._record_duration(_now(), "broken off")
        services.metrics.broken.labels(assignment.worker.name).inc()
        with self._context.logging():
            log.warning("answer broken off", worker=assignment.worker.name, reason=reason)
        services.fleet.probe_soon(assignment.worker)

    def break_off(self, error: RequestError) -> None:
        """Report to the client that its response will not be completed: in the stream, or by closing the connection."""
        head = self.head
        if not head.is_stream or head.length:
            self._client.break_off()
            return
        # The last bytes may be an incomplete event.
        data = b"\n\n" + error_event(self._context.head.path, error)
        self._client.more(data if self._hidden is None else self._hidden.filter(data, True), True)
