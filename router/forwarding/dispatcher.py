"""Chooses what serves a request: a worker, the index, or the ASGI application.

              ┌─ inference, engines' routes ──▶ ProxiedRequest ─┐
connection ───┼─ /match, /query ──────────────▶ AskedQuestion ──┼──▶ ResponseWriter
              └─ the service's other routes ──▶ AsgiRequest ────┘
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp

from indexer.api.questions import Questions
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.forwarding.exchange import ResponseWriter, ServedRequest
from router.forwarding.failover.resumable_proxied_request import new_proxied_request
from router.forwarding.local_requests import AsgiRequest, AskedQuestion
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext, RequestContexts
from router.http.headers import Cors
from router.settings import ServerSettings

# Methods of the requests that workers get.
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


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
        if not context.admitted.route.own and self._workers is not None and context.head.method in _METHODS:
            return new_proxied_request(self._workers, context, client)
        answer = self.questions.by_path.get(context.head.path)
        return AsgiRequest(context, client, self._app) if answer is None else AskedQuestion(context, client, answer)
