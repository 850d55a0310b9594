"""The head of a request, and what is made of it: once for all requests of a connection that have the same."""

from __future__ import annotations

from router.access import without_credentials
from router.admission.ticket import urgent
from router.apis.sessions import only_naming
from router.http.headers import Headers, forwarded_lines
from router.http.request_id import HEADER as REQUEST_ID
from router.http.request_id import given_id, with_id
from router.http.response_head import LENGTH

_EXPLAIN = (b"x-kvrouter-explain", b"1")


class RequestHead:
    """What a head says. `path` is without the query, `target` with it; names of headers are in lower case.

    `id`: the client's own name for the request, if it has one. `urgency`: the headers that a ticket is made of;
    `naming`: those that may name a session.
    """

    __slots__ = ("_lines", "headers", "id", "method", "naming", "path", "target", "urgency", "wants_explanation")

    def __init__(self, method: str, path: str, target: bytes, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.id = given_id(headers)
        self.urgency = urgent(headers)
        self.naming = only_naming(headers)
        self.wants_explanation = _EXPLAIN in headers
        self._lines: bytes | None = None

    def with_id(self, request_id: bytes) -> Headers:
        """The headers with this id and no other."""
        return with_id(self.headers, request_id)

    def without_length(self) -> RequestHead:
        """The same of any body that comes at once."""
        headers = [header for header in self.headers if header[0] != LENGTH]
        return RequestHead(self.method, self.path, self.target, headers)

    def lines(self, credentials: bool) -> bytes:
        """The headers that a worker gets but for the id, as they are sent. `credentials`: with the client's key, which
        is the same for all requests."""
        lines = self._lines
        if lines is None:
            headers = [header for header in self.headers if header[0] != REQUEST_ID]
            lines = self._lines = forwarded_lines(headers if credentials else without_credentials(headers))
        return lines
