"""The head of a request, and what is made of it: once for all requests of a connection that have the same."""

from __future__ import annotations

from router.admission.ticket import urgent
from router.apis.response_owners import is_about_stored
from router.apis.sessions import only_session_headers
from router.auth import Admitted
from router.http.headers import LENGTH, REQUEST_ID, Headers, forwarded_lines, given_id, with_id

_EXPLAIN = (b"x-kvrouter-explain", b"1")


class RequestHead:
    """What a head says. `path` is without the query, `target` with it; names of headers are in lower case.

    `id`: the client's own name for the request, if it has one. `urgency`: the headers that a ticket is made of;
    `session_headers`: those that may name a session. `about_stored`: it reads or creates stored objects. `admitted`:
    what it asks for and who asks, once that was checked. `lines`: the headers that a worker gets but for the id, as
    they are sent, once they were made.
    """

    __slots__ = (
        "about_stored",
        "admitted",
        "headers",
        "id",
        "lines",
        "method",
        "path",
        "session_headers",
        "target",
        "urgency",
        "wants_explanation",
    )

    def __init__(self, method: str, path: str, target: bytes, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.id = given_id(headers)
        self.urgency = urgent(headers)
        self.session_headers = only_session_headers(headers)
        self.wants_explanation = _EXPLAIN in headers
        self.about_stored = is_about_stored(path)
        self.admitted: Admitted | None = None
        self.lines: bytes | None = None

    def with_id(self, request_id: bytes) -> Headers:
        """The headers with this id and no other."""
        return with_id(self.headers, request_id)

    def without_length(self) -> RequestHead:
        """The same of any body that comes at once."""
        headers = [header for header in self.headers if header[0] != LENGTH]
        return RequestHead(self.method, self.path, self.target, headers)

    def make_lines(self, headers: Headers) -> bytes:
        """Keep these headers as a worker gets them: they are the same for all requests with this head."""
        self.lines = lines = forwarded_lines([header for header in headers if header[0] != REQUEST_ID])
        return lines
