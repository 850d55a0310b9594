"""What the fast lane serves, and by whom: requests for workers, and questions of the index API."""

from __future__ import annotations

from indexer.questions import Questions
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.forwarding.asked_question import AskedQuestion
from router.forwarding.failover.resumable_proxied_request import new_proxied_request
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext, RequestContexts
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.taken_request import TakenRequest
from router.settings import ServerSettings


class Lane:
    """What a server needs to serve requests where they arrive. `workers`: None where there are none, but an index.

    `paths`: what POSTs are taken to. Where operators have a port of their own, questions are the application's, which
    knows where they came in.
    """

    __slots__ = ("contexts", "paths", "questions", "settings", "workers")

    def __init__(
        self,
        contexts: RequestContexts,
        settings: ServerSettings,
        questions: Questions,
        workers: ProxyServices | None = None,
    ) -> None:
        self.contexts = contexts
        self.settings = settings
        self.questions = questions
        self.workers = workers
        served: list[str] = [] if workers is None else [*PROMPTED, *BY_LOAD]
        if settings.admin_port is None:
            served += questions.by_path
        self.paths = frozenset(path.encode() for path in served)

    def take(self, context: RequestContext, client: ResponseWriter) -> TakenRequest:
        """A request that was admitted, to be started."""
        if context.admitted.route.own:
            return AskedQuestion(context, client, self.questions.by_path[context.head.path])
        assert self.workers is not None
        return new_proxied_request(self.workers, context, client)
