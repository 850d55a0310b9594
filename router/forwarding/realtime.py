"""WebSockets of `/v1/realtime`: placed on a worker like a session, and relayed frame by frame in both directions.

    handshake ──▶ placed ──▶ the worker's handshake ──▶ 101 ──▶ relayed ──▶ closed by either side, or by a limit
                    └────── the next worker, if one was not reached

A side that does not read stops the reading of the other one. The session counts as one request in flight while it is
open. A worker that answers the handshake with another status than 101 has its answer forwarded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final
from urllib.parse import parse_qsl, urlencode

import structlog
from websockets.frames import CloseCode, Frame, Opcode

from http_api.errors import RequestError
from router.admission.ticket import Ticket, read_ticket
from router.apis.endpoints import read_request
from router.apis.requests import RoutedRequest
from router.apis.usage import UsageTail
from router.auth import Tenant
from router.auth.tenants import KEY_SUBPROTOCOL
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.forwarding.client_routing import follow_client
from router.forwarding.exchange import ResponseWriter, RoutingHeaders, ServedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.realtime_events import with_served_models
from router.forwarding.request_context import RequestContext
from router.forwarding.retries import OVERLOADED, not_reached, requested_pause
from router.http.headers import RANK_HEADER, Headers, ResponseHead, forwarded_lines
from router.http.websocket import WebSocketPeer, WebSocketRelay
from router.http.websocket_handshake import PREFIX, SWITCHING, accept_value, handshake_key, new_key
from router.routing.assignment import Assignment
from router.upstream import UnreachableError

log = structlog.get_logger()

_now: Final = time.monotonic
_SUBPROTOCOLS: Final = b"sec-websocket-protocol"
# Longest time that a session is open, in seconds.
_SESSION_SECONDS: Final = 3600.0
_MOST_OF_A_REASON: Final = 123  # bytes of a reason in a frame that closes
# Codes that say that there was no code, and cannot be sent.
_NO_CODES: Final = (None, CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE)


class RealtimeSession(WebSocketRelay, ServedRequest):
    """A WebSocket of a client, and that of its worker."""

    def __init__(self, services: ProxyServices, context: RequestContext, client: ResponseWriter) -> None:
        self._services = services
        self._context = context
        self._writer = client
        self._client: WebSocketPeer | None = None  # after the client's handshake
        self._worker: WebSocketPeer | None = None
        self._assignment: Assignment | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._usage: UsageTail | None = None  # of a text message of the worker, with a tenant's budget
        self._opened = self._heard = 0.0
        self._model: str | None = None

    # The handshake

    def start(self, body: bytes) -> None:  # noqa: ARG002 - a handshake has none
        try:
            key = handshake_key(self._context.head.headers)
        except RequestError as error:
            self._refuse(error)
            return
        self._task = self._services.loop.create_task(self._open(key))

    async def _open(self, key: bytes) -> None:
        try:
            with self._context.logging():
                await self._place_and_connect(key)
        except RequestError as error:
            self._release(Outcome.NEITHER)
            self._refuse(error)
        except Exception:
            log.exception("request failed")
            self._release(Outcome.NEITHER)
            self._refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))
        finally:
            if self._client is None:
                self._release(Outcome.NEITHER)

    async def _place_and_connect(self, key: bytes) -> None:
        services, context = self._services, self._context
        if context.hooks is not None:
            await context.pass_hooks(b"")
        prompt, ticket, without = self._admit()
        tried: list[Worker] = []
        while True:
            excluded = [*without, *services.fleet.declared, *tried]
            placed = services.admission.place(prompt, excluded, ticket)
            assignment = placed or await services.admission.wait(prompt, excluded, ticket)
            self._assignment = assignment
            services.metrics.placed(prompt.name or "", _now() - ticket.arrived, assignment.decision, None)
            try:
                head = await self._connect(assignment)
                break
            except (UnreachableError, ConnectionError, ValueError) as error:
                self._release(Outcome.FAILED, str(error))
                services.fleet.report_failure(assignment.worker, str(error))
                tried.append(assignment.worker)
                if len(tried) >= services.attempts:
                    raise not_reached(len(tried)) from error
        headers = RoutingHeaders(assignment.worker, 0)
        services.metrics.begun(prompt.name or "", assignment.worker.name, head.status, 0, 0)
        assert self._worker is not None
        if head.status != SWITCHING:
            refusal = self._worker.refusal
            self._worker.abort()
            if head.status in OVERLOADED:
                pause = requested_pause(head.status, head.first(b"retry-after"))
                services.fleet.refused(assignment.worker, assignment.attempt, head.status, pause)
            self._release(Outcome.REFUSED if head.status < 500 else Outcome.FAILED, f"status {head.status}")
            self._writer.begin(head.without_length(), headers, refusal, True)
            return
        assignment.first_byte()
        assignment.attempt.heard(_now())
        lines = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept_value(key))]
        if chosen := head.first(_SUBPROTOCOLS):
            lines.append((_SUBPROTOCOLS, chosen))
        self._opened = self._heard = services.loop.time()
        self._client = peer = WebSocketPeer(self, False, services.websockets)
        self._writer.switch(lines, headers, peer, self._stopping, context.end)
        self._worker.hold_back(False)
        self._check_limits()

    def _admit(self) -> tuple[RoutedRequest, Ticket, Collection[Worker]]:
        """Return the prompt and the ticket of the session, and the workers that it may not use. Raises RequestError."""
        services, context = self._services, self._context
        head, tenant = context.head, context.tenant
        prompt = read_request("", head.path, head.headers, b"", context.identity_headers)
        services.shared_users.check(prompt)
        models = [value for name, value in _query(head.target) if name == "model"]
        if len(models) > 1:
            raise RequestError("The query names several models. Name one.", param="model")
        given = models[0] if models and models[0] else None
        prompt.name = self._model = None if given is None else services.fleet.aliases.get(given, given)
        ticket = read_ticket(
            head.urgency,
            0,
            tenant=tenant.name if tenant else "",
            best_priority=tenant.priority if tenant else None,
            service_levels=services.service_levels,
            model=prompt.name,
        )
        ticket.deadline = None  # the session has a limit of its own
        if tenant is not None:
            tenant.admit(prompt.name, 0)
        services.budget.request(ticket.arrived)
        if services.settings.client_routing and tenant is None:
            return prompt, ticket, follow_client(prompt, head.headers, services.fleet)
        return prompt, ticket, ()

    async def _connect(self, assignment: Assignment) -> ResponseHead:
        """Connect to a worker. Raises UnreachableError, ConnectionError or ValueError, and RequestError when late."""
        services, worker = self._services, assignment.worker
        peer = WebSocketPeer(self, True, services.websockets)
        upstream = services.upstreams.get(worker.url)
        await upstream.open(lambda: peer)  # type: ignore[arg-type, return-value]  # it has a protocol's methods
        self._worker, key = peer, new_key()
        headers = self._forwarded(assignment)
        lines = forwarded_lines(headers) + (
            b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: %b\r\n" % key
        )
        opening = upstream.beginning("GET", self._target(), lines, self._context.admitted.add_worker_key)
        try:
            async with asyncio.timeout(services.settings.idle_timeout):
                return await peer.handshake(opening + b"\r\n", key)
        except TimeoutError as error:
            peer.abort()
            self._release(Outcome.FAILED, "no answer to the handshake")
            message = "The worker did not answer the handshake in time."
            raise RequestError(message, status=504, type="timeout_error") from error

    def _forwarded(self, assignment: Assignment) -> Headers:
        """Return the headers for the worker, without the client's handshake."""
        admitted, worker = self._context.admitted, assignment.worker
        headers = [each for each in self._context.headers_for_workers() if not each[0].startswith(PREFIX)]
        offered = [value for name, value in self._context.head.headers if name == _SUBPROTOCOLS]
        names = [name.strip() for value in offered for name in value.split(b",")]
        if not admitted.keeps_credentials:
            names = [name for name in names if not name.startswith(KEY_SUBPROTOCOL)]
        if names:
            headers.append((_SUBPROTOCOLS, b", ".join(names)))
        if len(worker.ranks()) > 1:
            headers = [each for each in headers if each[0] != RANK_HEADER]
            headers.append((RANK_HEADER, b"%d" % worker.rank_in_requests(assignment.target.dp_rank)))
        return headers

    def _target(self) -> bytes:
        """Return the target for the worker, with the served name of an alias."""
        target = self._context.head.target
        path, question_mark, _ = target.partition(b"?")
        if not question_mark:
            return target
        # Written again, so that a worker cannot read another model in it.
        served = [(name, self._model or "" if name == "model" else value) for name, value in _query(target)]
        return path + b"?" + urlencode(served, encoding="latin-1").encode()

    def _refuse(self, error: RequestError) -> None:
        headers, body = self._context.refusal(error)
        self._writer.begin(ResponseHead(error.status, headers), None, body, True)

    # The relay

    def received(self, peer: WebSocketPeer, frames: list[Frame]) -> None:
        self._heard = self._services.loop.time()
        worker, client = self._worker, self._client
        assert worker is not None
        assert client is not None
        if peer is client:
            try:
                worker.send([self._checked(frame) for frame in frames])
            except RequestError as error:
                client.fail(CloseCode.POLICY_VIOLATION, str(error).encode()[:_MOST_OF_A_REASON].decode(errors="ignore"))
            return
        client.send(frames)
        if self._assignment is not None:
            self._assignment.attempt.heard(_now())
        if self._context.tenant is not None:
            for frame in frames:
                self._charge(self._context.tenant, frame)

    def _checked(self, frame: Frame) -> Frame:
        """Return a client's message with served models. Raises RequestError if it names one that is not allowed."""
        data = bytes(frame.data)
        checked = with_served_models(data, self._served_model)
        return frame if checked is data else Frame(frame.opcode, checked)

    def _served_model(self, asked: str) -> str:
        """Return the served name of a model. Raises RequestError if the tenant may not use it."""
        model, tenant = self._services.fleet.aliases.get(asked, asked), self._context.tenant
        if tenant is not None:
            tenant.check_model(model)
        return model

    def _charge(self, tenant: Tenant, frame: Frame) -> None:
        """Charge the usage that a text message of the worker reports, at its end."""
        if frame.opcode is not Opcode.CONT:
            self._usage = UsageTail() if frame.opcode is Opcode.TEXT else None
        if self._usage is None:
            return
        self._usage.feed(bytes(frame.data))
        if frame.fin:
            usage, self._usage = self._usage.usage(), None
            if usage is not None:
                tenant.spend(usage.prompt + usage.completion)

    def ended(self, peer: WebSocketPeer, code: int | None, reason: str) -> None:
        by_worker = peer is self._worker
        broken = code == CloseCode.ABNORMAL_CLOSURE
        if by_worker and broken and self._assignment is not None:
            self._release(Outcome.FAILED, "the worker closed the connection")
        self._release(Outcome.SUCCEEDED)
        if self._timer is not None:
            self._timer.cancel()
        other = self._other(peer)
        if other is None:
            return
        if broken:
            code = CloseCode.INTERNAL_ERROR if by_worker else CloseCode.GOING_AWAY
            reason = "the worker closed the connection" if by_worker else ""
        other.close(None if code in _NO_CODES else code, reason)

    def paused(self, peer: WebSocketPeer, is_paused: bool) -> None:
        other = self._other(peer)
        if other is not None:
            other.hold_back(is_paused)

    def _other(self, peer: WebSocketPeer) -> WebSocketPeer | None:
        return self._worker if peer is self._client else self._client

    def _check_limits(self) -> None:
        """Close a session that is idle or old, or check again when it may be."""
        loop, settings = self._services.loop, self._services.settings
        now, idle_at = loop.time(), self._heard + settings.idle_timeout
        old_at = self._opened + _SESSION_SECONDS
        if now >= old_at:
            self._close("the session is as old as a session may be")
        elif now >= idle_at:
            self._close("the session was idle for proxy.idle_timeout")
        else:
            self._timer = loop.call_at(min(idle_at, old_at), self._check_limits)

    def _stopping(self) -> None:
        """Close the session, because the service stops."""
        self._close("the service stops")

    def _close(self, reason: str) -> None:
        self._release(Outcome.SUCCEEDED)
        for peer in (self._client, self._worker):
            if peer is not None:
                peer.close(CloseCode.GOING_AWAY, reason)

    def _release(self, outcome: Outcome, problem: str = "") -> None:
        assignment, self._assignment = self._assignment, None
        if assignment is not None:
            assignment.attempt.end(outcome, problem)
            assignment.release()

    # The client's connection before its handshake ends

    def client_disconnected(self) -> None:
        self._services.metrics.abandoned.inc()
        if self._task is not None:
            self._task.cancel()
        if self._worker is not None:
            self._worker.abort()

    def pause(self) -> None:
        """Ignore it, because nothing is written before the handshake ends."""

    def resume(self) -> None:
        """Ignore it, because nothing is written before the handshake ends."""

    @property
    def answering(self) -> bool:
        return self._client is not None


def _query(target: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a target's query."""
    return parse_qsl(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True)
