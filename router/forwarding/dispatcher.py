"""Chooses what serves a request: a worker, the index, or the ASGI application.

              ┌─ inference, engines' routes ──▶ ProxiedRequest ─┐
connection ───┼─ /match, /query ──────────────▶ AskedQuestion ──┼──▶ ResponseWriter
              └─ the service's other routes ──▶ AsgiRequest ────┘
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Scope

from http_api.errors import RequestError
from indexer.api.questions import Answer, Questions
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.auth import Access
from router.forwarding.exchange import ResponseWriter, ServedRequest
from router.forwarding.failover.resumable_proxied_request import new_proxied_request
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.realtime import RealtimeSession
from router.forwarding.request_context import CONTEXT, RequestContext, RequestContexts
from router.http.headers import Cors, ResponseHead
from router.settings import ServerSettings

log = structlog.get_logger()

_HEAD: Final = "HEAD"
_POST: Final = "POST"
_JSON: Final = ResponseHead(200, [(b"content-type", b"application/json")])
# Methods of the requests that workers get.
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class AsgiRequest(ServedRequest):
    """A request to an ASGI application, from its whole body to the end of its response."""

    def __init__(self, context: RequestContext, client: ResponseWriter, app: ASGIApp) -> None:
        self._context = context
        self._client = client
        self._app = app
        self._body: bytes | None = None  # until the application has received it
        self._head: ResponseHead | None = None  # a response's head that waits for the first part of its body
        self._begun = False
        self._over = asyncio.Event()  # the response has ended, or the client has disconnected
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None

    def start(self, body: bytes) -> None:
        self._body = body
        with self._context.logging():  # the task copies the context
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self._check_body()
            await self._app(self._scope(), self._receive, self._send)
        except RequestError as error:
            self._fail(error)
        except Exception:
            log.exception("request failed")
            self._fail(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))
        else:
            self._fail(RequestError("The router did not answer. This is a bug.", status=500, type="internal_error"))

    async def _check_body(self) -> None:
        """Raise RequestError if the body may cause too much work (413), or if a hook refuses a tenant's request."""
        body, bodies = self._body, self._context.bodies
        assert body is not None
        if self._context.hooks is not None and self._context.admitted.route.access is Access.TENANT:
            self._body = body = await self._context.pass_hooks(body)
        if self._context.head.method == _POST and not bodies.clearly_within_limits(body):
            await asyncio.to_thread(bodies.check_amount, body)

    def _scope(self) -> Scope:
        head = self._context.head
        path, _, query = head.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "GET" if head.method == _HEAD else head.method,
            "path": head.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._context.headers,
            "client": None,
            "server": self._context.server,
            CONTEXT: self._context,
        }

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None and not self._over.is_set():
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._writable.wait()
        if self._over.is_set():
            return
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            self._head = head = ResponseHead(message["status"], headers)
            if self._context.head.method == _HEAD:
                self._write(b"", True)
            elif not head.length:  # a stream, whose first part may be late
                self._write(b"", False)
        else:
            self._write(message.get("body", b""), not message.get("more_body", False))

    def _write(self, data: bytes, ended: bool) -> None:
        if ended:
            self._over.set()
        head, self._head = self._head, None
        if head is None:
            self._client.more(data, ended)
        else:
            self._begun = True
            self._client.begin(head, None, data, ended)

    def _fail(self, error: RequestError) -> None:
        """Refuse the request, or break off its response, unless all of that was written."""
        if self._over.is_set():
            return
        self._over.set()
        if self._begun:
            self._client.break_off()
            return
        headers, body = self._context.refusal(error)
        self._client.begin(ResponseHead(error.status, headers), None, body, True)

    def client_disconnected(self) -> None:
        self._over.set()
        self._writable.set()

    def pause(self) -> None:
        self._writable.clear()

    def resume(self) -> None:
        self._writable.set()

    @property
    def answering(self) -> bool:
        return self._begun


class AskedQuestion(ServedRequest):
    """One request to the index API. Its response is written as a whole."""

    def __init__(self, context: RequestContext, client: ResponseWriter, answer: Answer) -> None:
        self._context = context
        self._client = client
        self._answer = answer
        self._later: asyncio.Future[bytes] | None = None  # an answer that is not ready yet

    def start(self, body: bytes) -> None:
        try:
            little = self._context.bodies.clearly_within_limits(body)
            answer = self._answer(body) if little else self._check_and_answer(body)
        except RequestError as error:
            self._refuse(error)
        except Exception:
            self._crash()
        else:
            if isinstance(answer, bytes):
                self._client.begin(_JSON, None, answer, True)
            else:
                with self._context.logging():  # the task copies the context
                    self._later = asyncio.ensure_future(answer)
                self._later.add_done_callback(self._answered)

    async def _check_and_answer(self, body: bytes) -> bytes:
        """Return the answer for a long body. Raises RequestError (413) if it has too many values."""
        await asyncio.to_thread(self._context.bodies.check_amount, body)
        answer = self._answer(body)
        return answer if isinstance(answer, bytes) else await answer

    def _answered(self, later: asyncio.Future[bytes]) -> None:
        if later.cancelled():  # the client disconnected
            return
        try:
            data = later.result()
        except RequestError as error:
            self._refuse(error)
        except Exception:
            self._crash()
        else:
            self._client.begin(_JSON, None, data, True)

    def _refuse(self, error: RequestError) -> None:
        headers, body = self._context.refusal(error)
        self._client.begin(ResponseHead(error.status, headers), None, body, True)

    def _crash(self) -> None:
        with self._context.logging():
            log.exception("question failed")
        self._refuse(RequestError("The router failed. This is a bug.", status=500, type="internal_error"))

    def client_disconnected(self) -> None:
        if self._later is not None:
            self._later.cancel()

    def pause(self) -> None:
        """Ignore it, because the response is written at once."""

    def resume(self) -> None:
        """Ignore it, because the response is written at once."""

    @property
    def answering(self) -> bool:
        return False


class Dispatcher:
    """The dispatch of requests: what a connection needs to serve them.

    - `cors`: the CORS rules; None if pages of other origins may not call.
    - `repeated_paths`: paths of POST requests whose heads are remembered, because clients repeat them.
    """

    __slots__ = ("_app", "_workers", "contexts", "cors", "questions", "repeated_paths", "settings")

    def __init__(
        self,
        app: ASGIApp,
        contexts: RequestContexts,
        settings: ServerSettings,
        questions: Questions,
        workers: ProxyServices | None = None,
    ) -> None:
        self._app = app
        self.questions = questions
        self._workers = workers
        self.contexts = contexts
        self.settings = settings
        self.cors = Cors(settings.cors_origins, _METHODS) if settings.cors_origins and workers is not None else None
        paths: list[str] = [] if workers is None else [*PROMPTED, *BY_LOAD]
        if settings.admin_port is None:  # otherwise the admission of a question depends on the port
            paths += self.questions.by_path
        self.repeated_paths = frozenset(path.encode() for path in paths)

    def serve(self, context: RequestContext, client: ResponseWriter) -> ServedRequest:
        """Return what serves an admitted request. The caller starts it."""
        if context.admitted.route.websocket and self._workers is not None:
            return RealtimeSession(self._workers, context, client)
        if not context.admitted.route.own and self._workers is not None and context.head.method in _METHODS:
            return new_proxied_request(self._workers, context, client)
        answer = self.questions.by_path.get(context.head.path)
        return AsgiRequest(context, client, self._app) if answer is None else AskedQuestion(context, client, answer)
