"""An answer whose stream may go on at another worker: one for the client; each worker is learned from by itself."""

from __future__ import annotations

from http_api.errors import RequestError
from router.apis.endpoints import error_event
from router.apis.usage import HiddenUsage, UsageTail
from router.forwarding.failover.resumable_stream import ResumableStream
from router.forwarding.response import ProxiedResponse
from router.forwarding.routing_headers import RoutingHeaders
from router.upstream import ResponseHead
from router.upstream.transport import SentRequest


class ResumableResponse(ProxiedResponse):
    """What one worker tells of a stream."""

    stream: ResumableStream

    def follow(self, stream: ResumableStream) -> None:
        """This is the stream. Called once, before anything comes."""
        self.resumed = stream.begun
        self.stream = stream
        self._tail = UsageTail()

    @staticmethod
    def fits(head: ResponseHead) -> bool:
        """Whether an answer with this head is a stream that can be read."""
        return head.status == 200 and HiddenUsage.applies_to(head.headers)

    def start(
        self,
        headers: RoutingHeaders,
        hidden: HiddenUsage | None,  # noqa: ARG002 - the stream hides what the client did not ask for
        recorded: bool,  # noqa: ARG002
        data: bytes,
        ended: bool,
    ) -> None:
        passed = self.stream.passed(data, ended)
        ended = ended and self.stream.problem is None
        if self.resumed:
            self._client.more(passed, ended)
        else:
            self._client.begin(self.head, headers, passed, ended)
            self._count()
        self._learn(data, ended)

    def pass_on(self, data: bytes, ended: bool) -> None:
        passed = self.stream.passed(data, ended)
        ended = ended and self.stream.problem is None
        self._client.more(passed, ended)
        self._learn(data, ended)

    def forward_chunks(self, sent: SentRequest | None) -> None:
        """Every event is looked at."""

    def break_off(self, error: RequestError) -> None:
        self._client.more(self.stream.error or error_event(self._context.head.path, error), True)
