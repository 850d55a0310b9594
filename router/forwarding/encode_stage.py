"""The encode stage of a chat: encode workers encode its images, audio and video before the chat is sent.

    start ──▶ items, side by side ──▶ every item is encoded, or left to the chat's worker ──▶ on_encoded
                 ▲        │
                 └────────┘ another encode worker, after one failed

The answers of encode workers (vLLM's `ec_transfer_params`, an object by the engines' names of items) are merged without
a look at their values. The worker that computes the prompt receives them, and fetches the encoded items by them.

The stage belongs to the request, so what was encoded is not encoded again when the chat is sent to another worker.
Items that the chat's worker has cached are not encoded at all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
import structlog

from http_api.errors import RequestError
from router.apis.media_items import MediaChat, MediaItem
from router.apis.requests import RoutedRequest
from router.fleet.discovery import Engine
from router.fleet.health import Attempt, Outcome
from router.fleet.worker import Worker
from router.forwarding.collected_response import CollectedResponse
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.retries import OVERLOADED, requested_pause
from router.http.headers import Headers
from router.routing.assignment import Assignment
from router.routing.disaggregation.adapters import WorkerEndpoint
from router.routing.disaggregation.bodies import Fields, answered_field, fields_of, with_fields
from router.routing.encoders import EncodeTurn
from router.routing.target_directory import unavailable
from router.upstream import ResponseHead, UnreachableError, UpstreamError, UpstreamRequest

log = structlog.get_logger()

_now: Final = time.monotonic
_PARAMS: Final = "ec_transfer_params"
# The header by which llm-d's sidecar finds encode workers: one for each item, in their order.
_SIDECAR_HEADER: Final = b"x-encoder-hosts-ports"
# At most this many encode workers may break off over one item, because the item may be the cause.
_MOST_BROKEN: Final = 2
# The most items of one chat that are encoded at once.
_AT_ONCE: Final = 8
# Bytes of an item that count as one unit of work, where the times of encode workers are compared.
_WORK_BYTES: Final = 1024
# Statuses that say something about the encode worker, and nothing about the item.
_MISCONFIGURED: Final = frozenset({401, 403, 404})
_NULL: Final = msgspec.Raw(b"null")


class EncodeHandler(Protocol):
    """The owner of a chat, which sends it after its encode stage."""

    def on_encoded(self, problem: RequestError | None) -> None:
        """Called when the chat can be sent, or with the reason why it cannot."""


class EncodeStage:
    """The encode stage of one request, of which each attempt may encode what the attempt's worker needs.

    - `paused`: the client does not read, so the chat's response must not be read either.
    """

    def __init__(
        self, services: ProxyServices, context: RequestContext, prompt: RoutedRequest, chat: MediaChat
    ) -> None:
        assert prompt.name is not None
        self.paused = False
        self._sidecar_header: Headers = []
        self.services = services
        self.context = context
        self.chat = chat
        self.name: str = prompt.name
        self.model = services.fleet.model_of(prompt.name)
        self._prompt = prompt
        self._params: Fields = {}
        self._workers: dict[str, None] = {}  # the names of those that encoded an item
        self._encoded: set[int] = set()
        self._left: dict[int, RequestError | None] = {}  # to the chat's worker; with the error of a refused item
        self._charged: set[int] = set()
        self._todo: deque[int] = deque()
        self._running: set[_EncodedItem] = set()
        self._handler: EncodeHandler | None = None
        self._began = 0.0

    def seconds(self) -> float:
        """Return the predicted duration of the whole stage."""
        return self.services.encoders.seconds(self.name, [item.key for item in self.chat.items])

    @property
    def workers(self) -> list[str]:
        """The names of the workers that encoded items, in the order of their answers."""
        return list(self._workers)

    def body(self, body: bytes) -> bytes:
        """Return the chat's body with the answers of the encode workers. Raises RequestError."""
        if not self._params:
            return body
        given = fields_of(body).get(_PARAMS, _NULL)
        before = {} if given == _NULL else fields_of(bytes(given))
        return with_fields(body, **{_PARAMS: before | self._params})

    def with_headers(self, headers: Headers) -> Headers:
        """Return a request's headers with the one that names encode workers, if the sidecar sends the items."""
        return [header for header in headers if header[0] != _SIDECAR_HEADER] + self._sidecar_header

    # The stage of one attempt

    def start(self, handler: EncodeHandler, assignment: Assignment) -> bool:
        """Encode what the assignment's worker lacks. Return false if the chat can be sent at once.

        Raises RequestError if an item can be encoded nowhere.
        """
        computing = assignment.prefill or assignment
        self._todo.extend(self._lacking(computing))
        if self.services.sidecar_encodes:
            self._sidecar_header = self._named_encoders(assignment) if self._todo else []
            self._todo.clear()
            return False
        self._began = _now()
        self._send_more()
        if self._running:
            computing.attempt.waits_for_another()
            self._handler = handler
            return True
        if (problem := self._problem()) is not None:
            raise problem
        return False

    def abort(self) -> None:
        """Stop encoding. What is encoded stays so."""
        self._handler = None
        for running in self._running:
            running.abort()
        self._running.clear()
        self._todo.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def _lacking(self, computing: Assignment) -> Iterator[int]:
        """Yield the numbers of the items that are neither encoded nor cached at the worker that computes the prompt."""
        description = computing.worker.description
        if description is not None and description.engine is Engine.SGLANG:
            return  # it sends its items itself
        spans = self._prompt.token_ids[0].media if len(self._prompt.token_ids) == 1 else ()
        known = self.services.encoding.workers_encode and len(spans) == self.chat.total
        cached = computing.decision.chosen.reused
        for number, item in enumerate(self.chat.items):
            if number in self._encoded or number in self._left:
                continue
            if known and all(spans[place].end <= cached for place in item.places):
                self._count("cached")
            else:
                yield number

    def _named_encoders(self, assignment: Assignment) -> Headers:
        """Return the header with the encode worker of each item, whose load counts until the chat's end."""
        encoders, named = self.services.encoders, []
        for number, item in enumerate(self.chat.items):
            worker = encoders.choose(self.name, item.key)
            if worker is not None:
                turn = encoders.place(worker)
                self._charge(number)
                assignment.on_release.append(turn.end)
                endpoint = WorkerEndpoint.of(worker, 0)
                named.append(f"{endpoint.address}:{endpoint.port}")
                self._workers[worker.name] = None
        return [(_SIDECAR_HEADER, ",".join(named).encode())] if named else []

    def _send_more(self) -> None:
        while self._todo and len(self._running) < _AT_ONCE:
            number = self._todo.popleft()
            item = _EncodedItem(self, number, self.chat.items[number])
            self._running.add(item)
            if item.send_next():
                self._charge(number)
            else:
                self._running.discard(item)
                self._leave(number, None)

    def _charge(self, number: int) -> None:
        """Count an item for an encode worker as a request of the tenant, once."""
        if number not in self._charged:
            self._charged.add(number)
            if self.context.tenant is not None:
                self.context.tenant.spend(requests=1)

    # Called by items

    def encoded(self, item: _EncodedItem, params: Fields, worker: str) -> None:
        """Keep the answer for an item. Equal items have equal names, and any of their answers will do."""
        self._encoded.add(item.number)
        self._params = params | self._params
        self._workers[worker] = None
        self._count("encoded")
        self._ended(item)

    def leave(self, item: _EncodedItem, refusal: RequestError | None = None) -> None:
        """Leave an item to the chat's worker, because no encode worker is left, or one refused it."""
        self._leave(item.number, refusal)
        self._ended(item)

    def _leave(self, number: int, refusal: RequestError | None) -> None:
        self._left[number] = refusal
        self._count("left")

    def _ended(self, item: _EncodedItem) -> None:
        self._running.discard(item)
        if self._handler is None:
            return
        self._send_more()
        if not self._running:
            handler, self._handler = self._handler, None
            self.services.metrics.encoded(self.name, _now() - self._began)
            handler.on_encoded(self._problem())

    def _problem(self) -> RequestError | None:
        """Return why the chat cannot be sent; None if it can."""
        if not self._left or self.services.encoding.workers_encode:
            return None
        refused = [refusal for refusal in self._left.values() if refusal is not None]
        if refused:
            return refused[0]
        return unavailable("No encode worker takes the media of this chat, and its workers have no encoder.")

    def _count(self, result: str) -> None:
        self.services.metrics.media_items.labels(result).amount += 1


class _EncodedItem:
    """One media item, sent to one encode worker after the other until one answers."""

    def __init__(self, stage: EncodeStage, number: int, item: MediaItem) -> None:
        self.number = number
        self._stage = stage
        self._item = item
        self._tried: list[Worker] = []
        self._broken = 0
        self._turn: EncodeTurn | None = None
        self._attempt: Attempt | None = None
        self._sent: UpstreamRequest | None = None

    def send_next(self, first: bool = False) -> bool:
        """Send the item to the next encode worker, or let it wait there. Return false if none is left.

        - `first`: it waits before other items, because a full worker refused it.
        """
        stage = self._stage
        worker = stage.services.encoders.choose(stage.name, self._item.key, self._tried)
        if worker is None:
            return False
        self._tried.append(worker)
        self._turn = turn = stage.services.encoders.place(worker)
        turn.wait(self._send, first)
        return True

    def abort(self) -> None:
        """Release everything."""
        self._release(Outcome.NEITHER)

    def _send(self) -> None:
        stage, turn = self._stage, self._turn
        assert turn is not None
        worker = turn.worker
        name = worker.encodes_as(stage.name, stage.model)
        if name is None:  # it was stopped while the item waited
            self._send_elsewhere()
            return
        context = stage.context
        self._attempt = attempt = worker.health.begin(len(self._item.part) // _WORK_BYTES)
        attempt.give_up = self._give_up
        self._sent = stage.services.upstreams.get(worker.url).send(
            CollectedResponse(self._answered, self._failed),
            "POST",
            context.head.target,
            context.lines_for_workers(),
            stage.chat.request(self._item, name),
            b"%b-encode-%d" % (context.id, self.number),
            once=len(self._tried) > 1,
            add_worker_key=context.admitted.add_worker_key,
        )

    def _give_up(self) -> bool:
        """Called while the encode worker hangs. Return whether the item is sent elsewhere."""
        services = self._stage.services
        if not services.budget.take():
            return False
        services.loop.call_soon(self._leave_hung, self._attempt)
        return True

    def _leave_hung(self, attempt: Attempt | None) -> None:
        if attempt is not None and attempt is self._attempt:
            self._send_elsewhere()

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        services, turn, attempt, status = self._stage.services, self._turn, self._attempt, head.status
        assert turn is not None
        assert attempt is not None
        attempt.heard()
        self._sent = None
        services.metrics.encoder_answered(turn.worker.name, status)
        if status < 400:
            try:
                params = _params(body)
            except (ValueError, RequestError) as error:
                self._fail(Outcome.FAILED, f"invalid answer: {error}")
                return
            turn.encoded()
            self._release(Outcome.SUCCEEDED)
            self._stage.encoded(self, params, turn.worker.name)
        elif status in OVERLOADED and services.fleet.refused(
            turn.worker, attempt, status, requested_pause(status, head.first(b"retry-after"))
        ):
            self._release(Outcome.FULL)
            self._tried.pop()
            if not self.send_next(first=True):
                self._stage.leave(self)
        elif status >= 500 or status in services.elsewhere or status in _MISCONFIGURED:
            self._fail(Outcome.FAILED if status >= 500 else Outcome.REFUSED, f"status {status}")
        else:
            self._release(Outcome.REFUSED, f"status {status}")
            shown = body[:1000].decode(errors="replace")
            refusal = RequestError(f"An encode worker refuses a media item: {shown}", param="messages")
            self._stage.leave(self, refusal)

    def _failed(self, error: UpstreamError) -> None:
        services, turn = self._stage.services, self._turn
        assert turn is not None
        services.metrics.encoder_answered(turn.worker.name, 0)
        if isinstance(error, UnreachableError):
            turn.worker.note_refusal()
        services.fleet.report_failure(turn.worker, str(error))
        self._fail(Outcome.FAILED, str(error), reached=not isinstance(error, UnreachableError))

    def _fail(self, outcome: Outcome, reason: str, reached: bool = True) -> None:
        """Try another encode worker, within the retry budget if this one was reached."""
        services, turn = self._stage.services, self._turn
        assert turn is not None
        log.info("media item not encoded", worker=turn.worker.name, reason=reason)
        self._release(outcome, reason)
        self._broken += reached
        may_retry = not reached or (self._broken < _MOST_BROKEN and services.budget.take())
        if not may_retry or not self.send_next():
            self._stage.leave(self)

    def _send_elsewhere(self) -> None:
        self._release(Outcome.NEITHER)
        if not self.send_next():
            self._stage.leave(self)

    def _release(self, outcome: Outcome, reason: str = "") -> None:
        sent, self._sent = self._sent, None
        attempt, self._attempt = self._attempt, None
        if sent is not None:
            sent.abort()
        if attempt is not None:
            attempt.give_up = None
            attempt.end(outcome, reason)
        if self._turn is not None:
            self._turn.end()


def _params(body: bytes) -> Fields:
    """Return the parameters in the answer of an encode worker, by item; empty if its connector needs none.

    Raises ValueError or RequestError for an answer that is not as an engine's.
    """
    given = answered_field(body, _PARAMS)
    params = {} if given is None else fields_of(bytes(given))
    return {name: value for name, value in params.items() if value != _NULL}
