"""What the fast lane serves, and by whom: requests for workers, and questions of the index API."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.questions import Questions
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.forwarding.asked_question import AskedQuestion
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext, RequestContexts
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.resumable_proxied_request import new_proxied_request
from router.forwarding.taken_request import TakenRequest
from router.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Lane:
    """What a server needs to serve requests where they arrive. `workers`: None where there are none, but an index."""

    contexts: RequestContexts
    settings: ServerSettings
    questions: Questions
    workers: ProxyServices | None = None

    def paths(self) -> frozenset[bytes]:
        """What POSTs are taken to.

        Where operators have a port of their own, questions are the application's: it knows where they came in.
        """
        served: list[str] = [] if self.workers is None else [*PROMPTED, *BY_LOAD]
        if self.settings.admin_port is None:
            served += self.questions.by_path
        return frozenset(path.encode() for path in served)

    def take(self, context: RequestContext, client: ResponseWriter) -> TakenRequest:
        """A request that was admitted, to be started."""
        if context.admitted.route.own:
            return AskedQuestion(context, client, self.questions.by_path[context.head.path])
        assert self.workers is not None
        return new_proxied_request(self.workers, context, client)
