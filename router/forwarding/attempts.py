"""The attempts of one request: workers are tried one after the other until one answers.

    send_next ──▶ the worker answers
       ▲  │
    leave ◀┘   it is unreachable, fails, or hangs

A worker that refuses the request because it is full does not count as one of the attempts: the request is queued again.

If another worker computes the request's prompt, both are sent one request each (`disaggregated_request`). Before a chat
with media is sent, encode workers encode them (`encode_stage`).

One file, because each rule of a retry depends on the attempts before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final

from http_api.errors import RequestError
from router.admission.ticket import Ticket
from router.apis.abilities import needed_abilities, refused_abilities
from router.apis.endpoints import CHAT, COMPLETIONS, RESPONSES
from router.apis.generate import with_adapter
from router.apis.requests import RoutedRequest
from router.apis.response_owners import asks_to_store, stored_in_path
from router.auth.routes import Access
from router.fleet.health import Attempt, Outcome
from router.fleet.worker import Worker
from router.forwarding.disaggregated_request import DisaggregatedRequest, PrefillFailedError
from router.forwarding.encode_stage import EncodeStage
from router.forwarding.exchange import RoutingHeaders
from router.forwarding.proxy_services import LONG_BODY, ProxyServices
from router.forwarding.request_context import RequestContext
from router.forwarding.retries import (
    OVERLOADED,
    broken_off,
    is_handover_refused,
    is_model_missing,
    is_route_missing,
    not_reached,
    requested_pause,
)
from router.forwarding.token_forwarding import TokenOffer
from router.http.headers import RANK_HEADER, Headers, forwarded_lines
from router.observability.spans import Span
from router.routing.assignment import Assignment
from router.routing.disaggregation.adapters import WorkerEndpoint
from router.routing.pulls import PullEndpoint
from router.upstream import ResponseHandler
from router.upstream.request import SentRequest, Transport

_now: Final = time.monotonic
_INVALID: Final = 400
_NOT_FOUND: Final = 404
_NO_METHOD: Final = 405
_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500
_AT_FAULT: Final = (_INVALID, 422, _SERVER_ERROR)  # answers of a second worker that show that a request is at fault
_EVERYWHERE: Final = (CHAT, COMPLETIONS)  # paths that every engine has
# At most this many workers may break off over one request, because the request may be the cause.
_MOST_BROKEN: Final = 2
# Engines name the rank in the error for a request to a rank that they do not have.
RANK_ERROR: Final = b"rank"


class AttemptHandler(ResponseHandler):
    """The owner of a request, which receives the response and learns when the worker is ejected as hung."""

    def on_encoded(self, problem: RequestError | None) -> None:
        """Called when the media of a chat are encoded, or with the reason why it cannot be sent."""
        raise NotImplementedError

    def give_up(self) -> bool:
        """Called while the worker hangs. Return whether the request is sent to another one."""
        raise NotImplementedError

    def give_up_prefill(self) -> bool:
        """Called while the worker of the prefill hangs. Return whether the request is sent to another pair."""
        raise NotImplementedError


class Attempts:
    """The attempts of one request.

    - `assignment`: the current target; None before the first attempt, between attempts and at the end.
    - `others`: another worker may be sent the request later, also one that does not exist yet.
    - `encoding`: the encode stage of a chat with media; None if no encode worker exists.
    - `offer`: the prompt's token ids, which are sent to workers that may receive them; None if they are not sent.
    """

    # Defaults on the class, because most requests never change them.
    assignment: Assignment | None = None
    others = False
    encoding: EncodeStage | None = None
    offer: TokenOffer | None = None
    _span: Span | None = None  # of the current step: the choice, or the request to the worker
    _many_ranks = False
    _hung = False  # a worker hung with this request
    _sends = 0  # number of workers that may have received it
    _broken = 0  # number of them that broke off before they answered
    _asked_at = 0.0  # when the current choice of a worker began
    _waited = False  # no worker had capacity then
    _excludes = True  # the worker of a failed attempt may not receive the request again
    _disputed: Attempt | None = None  # an attempt that ended with an error, which another worker may answer, too
    _not_stored = False  # it is a response that the worker does not store

    def __init__(
        self,
        services: ProxyServices,
        context: RequestContext,
        prompt: RoutedRequest,
        ticket: Ticket,
        body: bytes,
        transport: Transport | None,
        without: Collection[Worker],
    ) -> None:
        self._services = services
        self._context = context
        self.prompt = prompt
        self._ticket = ticket
        self._body = body
        self._transport = transport
        self._without = without
        self._most = services.attempts if transport is None else 1
        self.tried: list[Worker] = []
        self._left: dict[Worker, int] = {}  # the workers that failed, and how often each had started then
        self.sent: SentRequest | None = None  # not on the class: mypyc does not support defaults of Protocols
        if context.head.path == RESPONSES:
            self._not_stored = not asks_to_store(body)

    def for_rest(self, prompt: RoutedRequest, body: bytes) -> Attempts:
        """Return the attempts for the rest of a stream, which exclude the workers that failed."""
        rest = Attempts(self._services, self._context, prompt, self._ticket, body, self._transport, self._without)
        rest._left = self._left
        rest.encoding = self.encoding
        prompt.needs = self.prompt.needs
        return rest

    @property
    def _repeatable(self) -> bool:
        """True if another worker may be sent the request after one was."""
        return self._context.admitted.route.generates or self._not_stored

    @property
    def _once(self) -> bool:
        """True if a worker may not be sent the request twice."""
        return not (self._context.admitted.route.pure or self._not_stored)

    # The next attempt

    def send_next(self, handler: AttemptHandler, arrived: float, now: float | None = None) -> bool:
        """Send the request to the next worker. Return false if it must `wait` for one. Raises RequestError."""
        if self._sends >= self._most:
            raise self.exhausted()
        self._asked_at, self._waited = _now() if now is None else now, False
        self._span = span = self._context.trace and self._context.trace.span("decide")
        excluded = self._excluded() if self._left or self._without else ()
        try:
            assignment = self._services.admission.place(self.prompt, excluded, self._ticket, now)
        except RequestError as error:
            if span is not None:
                span.end(type(error).__name__)
            raise
        if assignment is None:
            self._waited = True
            return False
        self.send(assignment, handler, arrived)
        return True

    async def wait(self) -> Assignment:
        """Wait for a worker and return the assignment to `send`. Raises RequestError if none has capacity in time."""
        try:
            return await self._services.admission.wait(self.prompt, self._excluded(), self._ticket)
        except RequestError as error:
            if self._span is not None:
                self._span.end(type(error).__name__)
            raise

    def _excluded(self, again: bool = False) -> Collection[Worker]:
        """Return the workers that may not receive the request. A worker that failed may if it started again since.

        A worker that asked for a pause may not receive a retry, because workers may share the limit that it met.
        `again`: it is sent now, so that the next one is a retry.
        """
        if not (again or self._left):
            return self._without
        failed = [worker for worker, starts in self._left.items() if worker.starts == starts]
        paused = [worker for worker in self._services.fleet.full() if worker.health.paused]
        return [*failed, *self._without, *paused]

    @property
    def has_other(self) -> bool:
        """True if another worker may be sent the request now, and did not ask for a pause."""
        if not self.others or self.assignment is None:
            return False
        excluded = [*self._excluded(again=True), self.assignment.worker]
        return self._services.selector.has_others(self.prompt, excluded)

    def exhausted(self) -> RequestError:
        """Return the error for a client when no further attempt is allowed."""
        return not_reached(len(self.tried)) if self._repeatable else broken_off()

    def send(self, assignment: Assignment, handler: AttemptHandler, arrived: float) -> None:
        """Send the request to this worker. Raises RequestError if its body cannot be changed for a pair of workers."""
        services, prompt, tried, worker = self._services, self.prompt, self.tried, assignment.worker
        context = self._context
        self.assignment = assignment
        self._many_ranks = assignment.selection.rank.one_of_many
        if (span := self._span) is not None:
            span.set(worker=worker.name, overlap_tokens=assignment.overlap)
            if loadable := assignment.loadable:
                span.set(loadable_tokens=loadable)
            span.end()
        now = _now()
        tried.append(worker)
        self._sends += 1
        self._span = span = context.trace and context.trace.span("upstream")
        if span is not None:
            span.set(worker=worker.name)
        if self.encoding is not None and self.encoding.start(handler, assignment):
            self.sent = self.encoding  # `send_encoded` follows
        else:
            self._forward(assignment, handler, now)
        if assignment is not self.assignment:
            return  # it failed at once
        # The following steps must not delay the request.
        services.placement.record_in_flight(prompt, assignment, now)
        services.metrics.chosen(prompt.name or "", now - self._asked_at, self._waited)
        services.metrics.placed(prompt.name or "", now - arrived, assignment.decision, assignment.cache_prediction)
        self.others = self._sends < self._most and self._repeatable
        if self.sent is not self.encoding:
            self._move_if_hung(assignment, handler)

    def send_encoded(self, handler: AttemptHandler) -> None:
        """Send the request, because its media are encoded. Raises RequestError as `send` does."""
        assignment, encoding = self.assignment, self.encoding
        assert assignment is not None
        assert encoding is not None
        (assignment.prefill or assignment).encoded()
        self._forward(assignment, handler, _now())
        if encoding.paused and self.sent is not None:
            self.sent.pause()
        self._move_if_hung(assignment, handler)

    def _move_if_hung(self, assignment: Assignment, handler: AttemptHandler) -> None:
        """Let the request be moved while it waits for its worker's first byte."""
        # A request that hung one worker may be the cause, so it is not sent to a second one for that reason.
        if self.others and not self._hung and assignment.prefill is None:
            assignment.attempt.give_up = handler.give_up

    def _forward(self, assignment: Assignment, handler: AttemptHandler, now: float) -> None:
        """Send the request to the worker or the workers of an assignment."""
        services, context, worker, encoding = self._services, self._context, assignment.worker, self.encoding
        body = self._body if encoding is None else encoding.body(self._body)
        pull = None if assignment.pull is None else assignment.peer_to_name(services.pulls)
        if assignment.prefill is not None:
            self._send_to_pair(assignment, assignment.prefill, handler, body)
        elif self._transport is not None:
            headers = self._headers_to(assignment, pull)
            self.sent = self._transport.send(worker, handler, headers, self._body_to(assignment, body, pull))
        else:
            head = context.head
            if self._span is not None or self._many_ranks or pull is not None or encoding is not None:
                lines, request_id = forwarded_lines(self._headers_to(assignment, pull)), b""
            else:
                lines, request_id = head.lines or context.lines_for_workers(), context.id
            body = self._body_to(assignment, body, pull)
            add_worker_key = context.admitted.add_worker_key
            # A retry opens a connection: a kept one to another worker that stopped would count as a second break.
            once = bool(self._left) or self._once
            self.sent = services.upstreams.get(worker.url).send(
                handler, head.method, head.target, lines, body, request_id, now, once, add_worker_key
            )

    def _body_to(self, assignment: Assignment, body: bytes, pull: PullEndpoint | None) -> bytes:
        body = self._naming_adapter(assignment, body)
        body = body if self.offer is None else self.offer.body_to(assignment.worker, body)
        return body if pull is None else pull.body(body)

    def _naming_adapter(self, assignment: Assignment, body: bytes) -> bytes:
        """Return the body with the adapter as the worker's engine needs it."""
        name = self.prompt.name
        if name is None or assignment.selection.rank.served.adapter is None:
            return body
        served = assignment.worker.served(name)
        if served is None or served.adapter is None or served.sent_as is None:
            return body
        return with_adapter(self._context.head.path, body, served.adapter, served.sent_as)

    def _headers_to(self, assignment: Assignment, pull: PullEndpoint | None = None) -> Headers:
        headers = self._context.headers_for_workers()
        if self.encoding is not None:
            headers = self.encoding.with_headers(headers)
        if pull is not None:
            headers = pull.with_headers(headers)
        if self._many_ranks:
            headers = [header for header in headers if header[0] != RANK_HEADER]
            headers.append((RANK_HEADER, b"%d" % assignment.worker.rank_in_requests(assignment.target.dp_rank)))
        return headers if self._span is None else self._span.inject(headers)

    def _send_to_pair(
        self, assignment: Assignment, prefill: Assignment, handler: AttemptHandler, prompt_body: bytes
    ) -> None:
        """Send the prompt to one worker and the request to another. Raises RequestError."""
        services, head = self._services, self._context.head
        adapter = services.selector.adapter_of(assignment.worker)
        assert adapter is not None
        first, second = (WorkerEndpoint.of(each.worker, each.target.dp_rank) for each in (prefill, assignment))
        ids = None if self.offer is None else self.offer.ids_for_pair(adapter, prefill.worker, assignment.worker)
        requests = adapter.of(head.path, self._naming_adapter(assignment, self._body), first, second, ids)
        requests.prompt_body = self._naming_adapter(prefill, prompt_body)
        requests.pull = prefill.peer_to_name(services.pulls)
        others = self._repeatable and services.selector.has_others(
            self.prompt, [*self._excluded(), assignment.worker, prefill.worker], prefill=True
        )
        if others and not self._hung:
            prefill.attempt.give_up = handler.give_up_prefill

        def on_prefilled() -> None:
            assignment.prefilled()
            if self.others and not self._hung:
                assignment.attempt.give_up = handler.give_up

        self.sent = pair = DisaggregatedRequest(
            handler,
            services.upstreams,
            assignment,
            requests,
            head.target,
            self._headers_to(assignment),
            on_prefilled,
            self.returns_to_queue,
            self._context.admitted.add_worker_key,
            self._transport,
        )
        pair.start()

    def moved(self, worker: Worker) -> None:
        """Record that the transport sent the request to this worker; the first refused it. Raises RequestError."""
        assignment, services = self.assignment, self._services
        assert assignment is not None
        assignment.attempt.end(Outcome.FAILED, "not taken")
        assignment.release()
        services.metrics.retried.labels(assignment.worker.name).inc()
        services.fleet.probe_soon(assignment.worker)
        self.tried.append(worker)
        if self.offer is not None:
            self.offer.moved(worker)
        others = [each for each in services.fleet.workers if each is not worker]
        self.assignment = assignment = services.placement.place(self.prompt, others)
        assignment.pull = None  # the request was sent with the peer of the first worker, if with any
        self._many_ranks = assignment.selection.rank.one_of_many

    def routing_headers(self) -> RoutingHeaders:
        """Return the routing headers of the response."""
        assignment = self.assignment
        assert assignment is not None
        headers = RoutingHeaders(assignment.worker, assignment.overlap)
        if len(self.tried) > 1:
            headers.add(b"x-kvrouter-attempts", b"%d" % len(self.tried))
        if self._ticket.waited:
            headers.add(b"x-kvrouter-waited-ms", b"%d" % (1000 * self._ticket.waited))
        if assignment.decision.chosen.source is not None:
            headers.add(b"x-kvrouter-loadable-tokens", b"%d" % assignment.loadable)
        if assignment.prefill is not None:
            headers.add(b"x-kvrouter-prefill-worker", assignment.prefill.worker.name.encode())
        if self.encoding is not None and (names := self.encoding.workers):
            headers.add(b"x-kvrouter-encode-workers", ",".join(names).encode())
        if self._many_ranks:
            headers.add(b"x-kvrouter-dp-rank", b"%d" % assignment.target.dp_rank)
        if self._context.head.wants_explanation:
            headers.add(b"x-kvrouter-explain", assignment.decision.summary().encode())
        return headers

    # The end of an attempt

    def returns_to_queue(self, assignment: Assignment, status: int, retry_after: bytes) -> bool:
        """Close the worker of an assignment, and end its attempt, if this status says that the worker is full.

        Return whether the request can be queued again. A request of another transport cannot.
        """
        if status not in OVERLOADED:
            return False
        pause = requested_pause(status, retry_after)
        full = self._services.fleet.refused(assignment.worker, assignment.attempt, status, pause)
        return full and self._transport is None and self._repeatable

    def leave_full(self, problem: str) -> None:
        """Release the worker of an attempt that a full worker refused. It counts as no attempt."""
        self._release(problem)
        self._services.admission.returned(self.prompt, self._ticket)
        self._sends -= 1
        self.tried.pop()

    def retries_status(self, status: int, data: bytes, closes: bool = False) -> Outcome | None:
        """Return the outcome of an attempt that this status ends with a retry, else None.

        - `data`: the body's beginning.
        - `closes`: the worker closes the connection.

        A retry takes from the retry budget, unless the worker does not have the model and so computed nothing.
        A 500 counts as a break, because the request may be its cause. That of a worker that leaves is one. Before a 500
        ejects a worker, another one is asked.
        """
        budget = self._services.budget
        if status == _SERVER_ERROR and self.may_break and (closes or self._leaves):
            assert self.assignment is not None
            self._count_break(self.assignment.worker)
            self._services.fleet.probe_soon(self.assignment.worker)
            return Outcome.FAILED
        if status >= _SERVER_ERROR and status not in OVERLOADED:
            self._note_pair(f"decode: status {status}")
        if status == _SERVER_ERROR:
            if self.assignment is not None and self._disputes(self.assignment.attempt):
                self._broken += 1
                self._disputed = self.assignment.attempt
                return Outcome.NEITHER
        elif status in self._services.elsewhere and self.has_other:
            if budget.take():
                return Outcome.REFUSED if status == _TOO_MANY else Outcome.FAILED
            return None
        if status < _SERVER_ERROR:
            return Outcome.REFUSED if self._tries_other(status, data) else None
        if self._repeatable and self._exclude_pair() and budget.take():
            return Outcome.NEITHER
        return None

    def settle(self, status: int) -> None:
        """Settle by a worker's answer whether the worker before it failed, or the request is at fault for its error."""
        if self._disputed is None or self.assignment is None:
            return
        at_fault = status in _AT_FAULT
        if status < 400 or at_fault:
            self._disputed.settle(at_fault, "status 500, but not elsewhere")
            self._disputed = None
        if at_fault:
            self.assignment.attempt.end(Outcome.REFUSED, f"status {status}, and an error elsewhere")

    def _disputes(self, attempt: Attempt) -> bool:
        """Return whether another worker is asked because of a 500, for which the request may be at fault."""
        if not self.has_other or self._breaks_again:
            return False
        if _SERVER_ERROR not in self._services.elsewhere:
            if self._by_pair or not attempt.at_risk:
                return False
            if attempt.health.excused:
                attempt.end(Outcome.REFUSED, "status 500, as elsewhere")
                return False
        return self._services.budget.take()

    @property
    def may_break(self) -> bool:
        """True if a 500 is retried as a break if its worker leaves or closes the connection."""
        if self._transport is not None or not self.has_other or self._by_pair:
            return False
        assert self.assignment is not None
        return not self._breaks_again or self._is_withdrawn(self.assignment.worker)

    @property
    def _by_pair(self) -> bool:
        return self.assignment is not None and self.assignment.prefill is not None

    @property
    def _leaves(self) -> bool:
        """True if the worker was removed, or may receive no new requests."""
        assert self.assignment is not None
        worker = self.assignment.worker
        return not worker.takes_work or self._is_withdrawn(worker)

    def _is_withdrawn(self, worker: Worker) -> bool:
        """Return whether a worker was removed or drained, as a deleted pod is: it ends for that reason."""
        return worker.draining or self._services.fleet.at(worker.url) is not worker

    def _tries_other(self, status: int, data: bytes) -> bool:
        """Return whether another worker may accept a refused request, for its models, routes or longer context."""
        assignment, prompt, services = self.assignment, self.prompt, self._services
        if assignment is None or prompt.stored is not None:
            return False
        if self._misses_route(status, data):
            return self._lacks_route(assignment, data)
        if not self._context.admitted.route.json:
            return False
        unable: list[Worker] = []
        if assignment.prefill is not None and is_handover_refused(status, data):
            services.fleet.handover_refused(self._refusing(assignment), self._context.head.path)
            self._excludes = self._sends >= self._most
            return not self._excludes
        if is_model_missing(status, data) or (status == _NOT_FOUND and self._unseen_at_known_path(data)):
            prefill = assignment.prefill
            if prefill is not None and self._refusing(assignment) is prefill.worker:
                services.fleet.name_refused(prefill.worker, prompt.name)
                return self._repeatable and self._exclude_refusing_prefill(assignment, prefill.worker)
            services.fleet.name_refused(assignment.worker, prompt.name)
            if prefill is not None:
                return self.has_other
        elif status == _INVALID and assignment.prefill is None:
            unable = self._unable(assignment.worker, data)
            if not unable:
                return False
        else:
            return False
        excluded = {*self._excluded(again=True), assignment.worker, *unable}
        if self._sends >= self._most or not services.selector.has_others(prompt, excluded):
            return False
        self._without = [*self._without, *unable]
        return True

    def _body_unseen(self, data: bytes) -> bool:
        """Return whether a transport shows only an error's head."""
        return self._transport is not None and not data

    def _unseen_at_known_path(self, data: bytes) -> bool:
        return self._body_unseen(data) and self._context.head.path in _EVERYWHERE

    def _misses_route(self, status: int, data: bytes) -> bool:
        """Return whether a refusal says that the worker's engine lacks the route.

        On a path that every engine has it says nothing. The head of a 404 alone is taken for one on all other paths.
        """
        head, route = self._context.head, self._context.admitted.route
        if head.method != "POST" or head.path in _EVERYWHERE or route.access is Access.ENGINE:
            return False
        return is_route_missing(status, data) and stored_in_path(head.path) is None

    def _lacks_route(self, assignment: Assignment, data: bytes) -> bool:
        """Record that a worker lacks the request's path. Return whether another worker may have it."""
        path, name, fleet = self._context.head.path, self.prompt.name, self._services.fleet
        worker = self._refusing(assignment)
        fleet.route_missing(worker, path, name if self._body_unseen(data) else None)
        prefills = assignment.prefill is not None and worker is assignment.prefill.worker
        excluded = {*self._excluded(again=True), worker}
        others = [each for each in fleet.able(name, prefills) if each not in excluded]
        return self._sends < self._most and any(not each.lacks_route(path, name) for each in others)

    def _refusing(self, assignment: Assignment) -> Worker:
        """Return the worker whose refusal was received: of a pair, the prefill worker may answer for both."""
        prefill = assignment.prefill
        refused = isinstance(self.sent, DisaggregatedRequest) and self.sent.prefill_refused
        return prefill.worker if prefill is not None and refused else assignment.worker

    def _unable(self, worker: Worker, error: bytes) -> list[Worker]:
        """Return the workers that would refuse a request as this worker did: for an ability, or for its length."""
        prompt, services = self.prompt, self._services
        needs = prompt.needs if len(self._body) > LONG_BODY else needed_abilities(self._body)
        if lacks := refused_abilities(error, needs):
            services.fleet.abilities_refused(worker, lacks)
            prompt.needs |= lacks
            return services.selector.lacking(prompt)
        return [] if prompt.exact else services.selector.not_longer(prompt, worker)  # its length is an estimate

    def may_lack_rank(self, status: int) -> bool:
        """Return whether a response may mean that the worker no longer has the DP rank that the request named."""
        return status == _INVALID and (self._many_ranks or self._by_pair) and self._may_send_again

    def needs_error(self, status: int) -> bool:
        """Return whether the text of an error may lead to a retry."""
        if not self._may_send_again:
            return False
        if status in (_NOT_FOUND, _NO_METHOD):
            return True
        if status == _SERVER_ERROR:
            return self.may_break
        if status != _INVALID:
            return False
        return self.may_lack_rank(status) or self._services.selector.has_others(self.prompt, self.tried)

    @property
    def _may_send_again(self) -> bool:
        return self._transport is None and self._sends < self._most

    async def lacks_rank(self) -> bool:
        """Probe the workers again. Return whether one of them no longer has the DP rank that the request named."""
        current = self.assignment
        assert current is not None
        parts = [current] if current.prefill is None else [current, current.prefill]
        await asyncio.gather(*(self._services.fleet.probe_again(part.worker) for part in parts))
        return any(part.target.dp_rank not in part.worker.ranks() for part in parts)

    def allow_again(self) -> None:
        """Let the worker that the request left receive it again."""
        self._left.pop(self.tried[-1], None)

    def not_reached(self) -> None:
        """Record that no connection could be opened. Transports count their own attempts."""
        if self._transport is None:
            self._sends -= 1

    def ends_with_break(self, worker: Worker) -> bool:
        """Record that a worker broke off. Return whether no other worker may be sent the request, a possible cause."""
        last = self._breaks_again and not self._is_withdrawn(worker)
        self._count_break(worker)
        return not self._repeatable or last

    def _count_break(self, worker: Worker) -> None:
        """Count a break. That of a withdrawn worker is no attempt: in a rollout, all workers may end one by one."""
        if self._transport is None and self._is_withdrawn(worker):
            self._sends -= 1
        else:
            self._broken += 1

    @property
    def _breaks_again(self) -> bool:
        """True if one more break is the last one that the request may cause."""
        return self._broken + 1 >= _MOST_BROKEN

    def exclude_prefill(self, error: PrefillFailedError) -> None:
        """Exclude the failed prefill worker or the whole pair from the next attempt."""
        assignment = self.assignment
        assert assignment is not None
        assert assignment.prefill is not None
        if error.answered and error.together:
            self._note_pair(str(error))
        if not (error.answered and error.together and self._exclude_pair()):
            self.tried[-1] = assignment.prefill.worker  # the decode worker is not to blame

    def answered_by_pair(self) -> None:
        """Record that the pair of the current assignment answers, if it is one."""
        assignment = self.assignment
        if assignment is not None and assignment.prefill is not None:
            self._services.selector.pairs.worked(assignment.prefill.worker, assignment.worker)

    def _note_pair(self, problem: str) -> None:
        """Record that the pair of the current assignment failed, if it is one."""
        assignment = self.assignment
        if assignment is not None and assignment.prefill is not None:
            self._services.selector.pairs.failed(assignment.prefill.worker, assignment.worker, problem)

    def exclude_hung(self, prefill_hangs: bool) -> None:
        """Exclude the worker that hangs: the prefill worker if `prefill_hangs`, else the current one."""
        assignment = self.assignment
        self._hung = True
        if prefill_hangs and assignment is not None and assignment.prefill is not None:
            self.tried[-1] = assignment.prefill.worker  # the decode worker is not to blame

    def _exclude_pair(self) -> bool:
        """Exclude both workers of a failed pair, as far as others exist; the prefill worker alone if the other can
        prefill.

        Return false, without a change, if there is no alternative or no pair.
        """
        assignment = self.assignment
        if assignment is None or assignment.prefill is None:
            return False
        prefill = assignment.prefill.worker
        other_prefill = self._has_other_prefill(assignment, prefill)
        # The decode worker may have failed to fetch the prefill's blocks. Then it computes the prompt itself.
        others = self.has_other
        other_way = other_prefill or (not others and self._sends < self._most and self._decodes_alone(assignment))
        if other_way:
            self._without = [*self._without, prefill]
            if not others:
                self.tried[-1] = prefill
        return others or other_way

    def _exclude_refusing_prefill(self, assignment: Assignment, prefill: Worker) -> bool:
        """Exclude a prefill worker that lacks the model. Return false if neither another one nor the decode worker
        can compute the prompt.
        """
        alone = self._sends < self._most and self._decodes_alone(assignment)
        if not (alone or self._has_other_prefill(assignment, prefill)):
            return False
        self.tried[-1] = prefill
        return True

    def _has_other_prefill(self, assignment: Assignment, prefill: Worker) -> bool:
        known = [*self._excluded(again=True), assignment.worker, prefill]
        return self._sends < self._most and self._services.selector.has_others(self.prompt, known, prefill=True)

    def _decodes_alone(self, assignment: Assignment) -> bool:
        adapter = self._services.selector.adapter_of(assignment.worker)
        return adapter is not None and adapter.decodes_alone

    def leave(self, problem: str) -> None:
        """Release the worker of an attempt that failed before any byte was forwarded."""
        if self._excludes:
            self._left[self.tried[-1]] = self.tried[-1].starts
        self._excludes = True
        assignment = self._release(problem)
        self._services.metrics.retried.labels(assignment.worker.name).inc()

    def _release(self, problem: str) -> Assignment:
        """Release the worker of an attempt, and return the assignment."""
        assignment, sent = self.assignment, self.sent
        assert assignment is not None
        self.assignment = self.sent = None
        if sent is not None:
            sent.abort()
        assignment.release()
        if self._span is not None:
            self._span.end(problem)
        return assignment

    def end(self, problem: str | None) -> None:
        """Release everything at the end of the request. `problem` is the reason of a failure; None after success."""
        assignment, sent = self.assignment, self.sent
        self.assignment = self.sent = None
        if sent is not None:
            sent.abort()
        if assignment is not None:
            assignment.attempt.give_up = None
            assignment.release()
        if self._span is not None:
            self._span.end(problem)
