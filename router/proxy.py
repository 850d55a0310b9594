"""Requests to workers and their answers back, byte for byte. A plain ASGI application; nothing is buffered.

A request goes to another worker when its own cannot be reached, refuses it as overloaded or hangs, as long as nothing
of an answer has been passed on and the retry budget lasts. Its load is released on every path: answered, failed, or
left by the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO

import aiohttp
import structlog
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from indexer.errors import RequestError, error_headers
from router.access import headers_for_workers, tenant_of
from router.admission import Admission
from router.asked_usage import UsageHidden, asking_for_usage
from router.endpoints import RESPONSES, Call, call_error_body, error_event, read_call
from router.explain import compact
from router.fleet import Fleet, Worker
from router.health import Attempt, Outcome
from router.metrics import RequestMetrics
from router.response_owners import SEARCHED_BYTES
from router.retry_budget import RetryBudget
from router.routing import Placement, RoutedPrompt, Router
from router.settings import ProxySettings, ServerSettings
from router.ticket import Ticket, deadline_error, read_ticket
from router.tracing import Tracing
from router.usage import UsageTail

log = structlog.get_logger()

RawHeaders = Iterable[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these are about one connection, not about the message.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_EXPLAIN = b"x-kvrouter-explain"
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", _EXPLAIN}
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
_RANK_HEADER = "X-data-parallel-rank"  # vLLM and SGLang read it


# A worker that answers so did not take the request.
_NOT_TAKEN = frozenset((HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT))


class TryElsewhereError(Exception):
    """A worker failed a request before anything of its answer was passed on."""


class WorkerUnreachableError(TryElsewhereError):
    """A worker could not be reached, or hung up before it answered."""


class WorkerHangsError(TryElsewhereError):
    """A worker was left out as hung while a request waited there."""


class _ClientGoneError(Exception):
    """The client left before its request was complete."""


@dataclass(frozen=True, slots=True)
class _Try:
    """One attempt at a request, counted from 1.

    `others`: there are other workers that could take it. `movable`: it may be called off when its worker hangs.
    """

    placement: Placement
    ticket: Ticket
    number: int
    others: bool
    movable: bool


class Proxy:
    """Forwards requests to the workers that `router` chooses."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        settings: ProxySettings,
        server: ServerSettings,
        metrics: RequestMetrics,
        tracing: Tracing,
    ) -> None:
        self._router = router
        self._admission = admission
        self._fleet = fleet
        self._session = session
        self._settings = settings
        self._server = server
        self._metrics = metrics
        self._tracing = tracing
        self._budget = RetryBudget(settings.retry_share, settings.retry_minimum)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout, sock_read=settings.idle_timeout
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive, self._server)
            await _unless_client_leaves(self._serve(scope, body, send), receive)
        except RequestError as error:
            self._metrics.refused.labels(str(error.status)).inc()
            await _send_error(send, error, scope["path"])
        except _ClientGoneError:
            self._metrics.abandoned.inc()

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send a request to one worker after the other, until one answers. Raises RequestError when none does."""
        arrived = time.monotonic()
        tenant = tenant_of(scope)
        if tenant is not None:
            body = tenant.isolated(scope["path"], body)
        if self._settings.ask_usage and (asking := asking_for_usage(scope["path"], body)):
            body, send = asking, UsageHidden(send)
        with self._tracing.span("tokenize") as span:
            prompt = await self._read_prompt(scope, body)
            span.set(model=prompt.name or "", prompt_tokens=prompt.tokens)
        ticket = read_ticket(
            scope["headers"],
            prompt.priority,
            tenant=tenant.name if tenant else "",
            best_priority=tenant.priority if tenant else None,
            tokens=prompt.tokens,
            size=len(body),
        )
        if tenant is not None:
            tenant.admit(prompt.name, prompt.tokens)
            body = tenant.with_priority(body, prompt.priority)
        self._budget.request()
        tried: list[Worker] = []
        hung = False
        while len(tried) < self._settings.attempts:
            with self._tracing.span("decide") as span:
                placement = self._admission.place(prompt, tried, ticket) or await self._admission.wait(
                    prompt, tried, ticket
                )
                span.set(worker=placement.worker.url, overlap_tokens=placement.overlap)
            self._metrics.placed(prompt.name or "", time.monotonic() - arrived, placement.decision)
            tried.append(placement.worker)
            others = len(tried) < self._settings.attempts and self._router.others(prompt, tried)
            # A request that hung one worker may be why; it does not get to hang them all.
            attempt = _Try(placement, ticket, len(tried), others, movable=others and not hung)
            try:
                with self._tracing.span("upstream", worker=placement.worker.url):
                    await self._exchange(scope, body, prompt, attempt, arrived, send)
            except TryElsewhereError as error:
                hung = hung or isinstance(error, WorkerHangsError)
                self._metrics.retried.labels(placement.worker.url).inc()
                if isinstance(error, WorkerUnreachableError):
                    self._fleet.report_failure(placement.worker, str(error))
                    if not self._budget.take():
                        break
            else:
                return
            finally:
                placement.release()
        raise RequestError(
            f"{len(tried)} workers could not be reached. Try again later.",
            status=503,
            type="service_unavailable",
            code="no_worker_available",
        )

    async def _read_prompt(self, scope: Scope, body: bytes) -> RoutedPrompt:
        call = Call(scope["method"], scope["path"], scope["headers"], body)
        return await self._router.read(read_call(call), len(body))

    async def _begin(self, scope: Scope, body: bytes, this: _Try) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a request and wait until its answer begins: its head, and of an event stream the first bytes.

        Engines send the head of a stream at once. It is worth nothing: until the first event the request can still go
        elsewhere. Raises TryElsewhereError, and RequestError on a timeout or at the client's deadline.
        """
        placement, attempt = this.placement, this.placement.attempt
        patience = asyncio.timeout(this.ticket.left(time.monotonic()))
        hung = False

        def give_up() -> None:
            nonlocal hung
            if self._budget.take():
                hung = True
                patience.reschedule(0)

        try:
            async with patience:
                attempt.give_up = give_up if this.movable else None
                response = await self._session.request(
                    scope["method"],
                    _upstream_url(placement.worker, scope),
                    headers=self._tracing.inject(_upstream_headers(headers_for_workers(scope), placement)),
                    data=BytesIO(body) if body else None,  # aiohttp writes it in pieces
                    timeout=self._timeout,
                    allow_redirects=False,
                )
                try:
                    is_stream = response.content_type == "text/event-stream"
                    first = await response.content.readany() if is_stream else b""
                    if response.status in _NOT_TAKEN and this.others and self._budget.take():
                        attempt.end(Outcome.FAILED, f"status {response.status}")
                        raise TryElsewhereError(f"status {response.status}")
                except BaseException:
                    response.close()
                    raise
                return response, first
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable(attempt, f"no connection within {self._settings.connect_timeout} s") from error
        except TimeoutError as error:
            if hung:
                raise WorkerHangsError from error
            if patience.expired():
                raise deadline_error() from error
            attempt.end(Outcome.FAILED, f"no answer within {self._settings.idle_timeout} s")
            raise RequestError(
                f"The worker did not answer within {self._settings.idle_timeout} s.", status=504, type="timeout_error"
            ) from error
        except aiohttp.ClientError as error:
            raise self._unreachable(attempt, str(error) or type(error).__name__) from error
        finally:
            attempt.give_up = None

    def _unreachable(self, attempt: Attempt, reason: str) -> WorkerUnreachableError:
        attempt.end(Outcome.FAILED, reason)
        return WorkerUnreachableError(reason)

    async def _exchange(
        self,
        scope: Scope,
        body: bytes,
        prompt: RoutedPrompt,
        this: _Try,
        arrived: float,
        send: Send,
    ) -> None:
        """One attempt. Raises TryElsewhereError while nothing of an answer was passed on, RequestError on a timeout."""
        response, first = await self._begin(scope, body, this)
        placement, attempt = this.placement, this.placement.attempt
        model = prompt.name or ""
        async with response:
            self._metrics.answered.labels(model, placement.worker.url, str(response.status)).inc()
            self._metrics.prompt_tokens.labels(model).inc(prompt.tokens)
            self._metrics.overlap_tokens.labels(model).inc(placement.overlap)
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": _client_headers(response.raw_headers, this, (_EXPLAIN, b"1") in scope["headers"]),
                }
            )
            tail = UsageTail()
            began = arrived
            unowned, beginning = scope["path"] == RESPONSES, b""
            limit = asyncio.timeout(this.ticket.left(time.monotonic()))
            try:
                async with limit:
                    async for chunk in _chunks(first, response.content):
                        attempt.heard()
                        if arrived:
                            placement.first_byte()
                            began = time.monotonic()
                            self._metrics.first_byte.labels(model).observe(began - arrived)
                            arrived = 0.0
                        if unowned:
                            beginning += chunk
                            learned = self._router.responses.learn(beginning, placement.worker.url)
                            unowned = not learned and len(beginning) < SEARCHED_BYTES
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        tail.feed(chunk)
            except (aiohttp.ClientError, TimeoutError) as error:
                if limit.expired():
                    await _end_unfinished(response, deadline_error(), scope["path"], send)
                    return
                attempt.end(Outcome.FAILED, f"answer broken off: {str(error) or type(error).__name__}")
                self._broken(placement.worker, error)
                failure = RequestError("The worker broke off its answer.", status=502, type="upstream_error")
                await _end_unfinished(response, failure, scope["path"], send)
                return
            attempt.end(_outcome(response.status), f"status {response.status}")
            if response.status == HTTPStatus.OK:
                usage = tail.usage()
                self._router.answered(placement, usage)
                if (tenant := tenant_of(scope)) is not None and usage is not None:
                    tenant.spend(usage.completion)
                if response.content_type == "text/event-stream":
                    self._metrics.streamed(model, time.monotonic() - began, usage)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _broken(self, worker: Worker, error: Exception) -> None:
        """A worker did not finish its answer."""
        self._metrics.broken.labels(worker.url).inc()
        log.warning("answer broken off", worker=worker.url, reason=str(error) or type(error).__name__)
        self._fleet.look_soon(worker)


async def _end_unfinished(response: aiohttp.ClientResponse, failure: RequestError, path: str, send: Send) -> None:
    """Tell a client that its answer will not be finished."""
    if response.content_type != "text/event-stream":
        return  # returning before the end of the body makes the server close the connection
    event = b"\n\n" + error_event(path, failure)  # what came last may have been half an event
    await send({"type": "http.response.body", "body": event, "more_body": False})


async def _chunks(first: bytes, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The first bytes of a body, if there are any yet, and those that follow as they come."""
    if first:
        yield first
    async for chunk in rest.iter_any():
        yield chunk


def _outcome(status: int) -> Outcome:
    """What a whole answer says of its worker."""
    if status < 400:
        return Outcome.SUCCEEDED
    return Outcome.FAILED if status >= 500 else Outcome.NEITHER


async def _read_body(receive: Receive, settings: ServerSettings) -> bytes:
    """The whole body. Raises RequestError: 413 when it is too large, 408 when it takes too long."""
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(settings.body_timeout):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGoneError
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                if size > settings.max_body_bytes:
                    raise RequestError(
                        f"The body is larger than {settings.max_body_bytes} bytes. "
                        "Send less, or raise server.max_body_bytes.",
                        status=413,
                    )
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise RequestError(
            f"The body did not come within {settings.body_timeout} s. Send it faster, or raise server.body_timeout.",
            status=408,
            type="timeout_error",
        ) from error
    return b"".join(chunks)


async def _unless_client_leaves(work: Coroutine[None, None, None], receive: Receive) -> None:
    """Do the work, but cancel it when the client disconnects: then raise _ClientGoneError."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientGoneError
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, error: RequestError, path: str) -> None:
    body = call_error_body(path, error)
    await send({"type": "http.response.start", "status": error.status, "headers": error_headers(error, body)})
    await send({"type": "http.response.body", "body": body})


def _upstream_url(worker: Worker, scope: Scope) -> URL:
    query = scope["query_string"]
    path = scope["raw_path"] + (b"?" + query if query else b"")
    return URL(worker.url + path.decode("latin-1"), encoded=True)


def _upstream_headers(headers: RawHeaders, placement: Placement) -> CIMultiDict[str]:
    # aiohttp writes names and values in UTF-8
    end_to_end = _end_to_end(headers, _NOT_FORWARDED)
    forwarded = CIMultiDict(
        (name.decode(errors="replace"), value.decode(errors="replace")) for name, value in end_to_end
    )
    if len(placement.worker.ranks()) > 1:
        forwarded[_RANK_HEADER] = str(placement.target.dp_rank)
    return forwarded


def _client_headers(headers: RawHeaders, this: _Try, explained: bool) -> list[tuple[bytes, bytes]]:
    placement, target = this.placement, this.placement.target
    returned = _end_to_end(headers, _NOT_RETURNED)
    returned.append((b"x-kvrouter-worker", target.worker.encode()))
    returned.append((b"x-kvrouter-overlap-tokens", str(placement.overlap).encode()))
    if this.number > 1:
        returned.append((b"x-kvrouter-attempts", str(this.number).encode()))
    if len(placement.worker.ranks()) > 1:
        returned.append((b"x-kvrouter-dp-rank", str(target.dp_rank).encode()))
    if explained:
        returned.append((_EXPLAIN, compact(placement.decision).encode()))
    return returned


def _end_to_end(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that are about the message, with their names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lowered if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped and name not in named]
