"""Where an answer is written for its client: what a proxied request asks of it."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from router.forwarding.event_stream import ChunkWriter
from router.forwarding.routing_headers import RoutingHeaders
from router.http.headers import ResponseHead


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseWriter:
    """Writes an answer to its client. It pauses and resumes the proxied request, and ends it when the client leaves."""

    __slots__ = ()

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        """The head of the answer, where it came from if that is a worker, and what of its body came with it.

        Names of headers are in lower case. Where all of an answer came, its length may be left to say.
        """
        raise NotImplementedError

    def more(self, data: bytes, ended: bool) -> None:
        """More of the body."""
        raise NotImplementedError

    def chunks(self) -> ChunkWriter | None:
        """Takes more of the body in whole chunks; None where that is not how it is sent."""
        return None

    def break_off(self) -> None:
        """The answer will not be finished."""
        raise NotImplementedError
