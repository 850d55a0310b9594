"""A client's request as the parser reads it, before anything is done with it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from urllib.parse import unquote

from router.forwarding.request_head import RequestHead
from router.http.headers import LENGTH, Headers, length_of


class IncomingRequest:
    """A request, of which more may come. Names of headers are in lower case.

    `size`: bytes of its body that came, which `body` holds as long as they are not too many. `complete`: all of it
    came.
    """

    __slots__ = (
        "body",
        "complete",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "repeated_head",
        "size",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.version = ""
        self.headers: Headers = []
        self.body: list[bytes] = []
        self.size = 0
        self.keep_alive = False
        self.expects_continue = False
        self.complete = False
        self.repeated_head: RequestHead | None = None  # if its client is likely to send this head again

    def make_head(self, repeated_paths: AbstractSet[bytes]) -> RequestHead:
        """Return its head, which is kept in `repeated_head` if it is a POST to one of these paths."""
        path, _, query = self.target.partition(b"?")
        decoded = path.decode("latin-1")
        head = RequestHead(
            self.method.decode("latin-1"),
            unquote(decoded) if "%" in decoded else decoded,
            self.target if query else path,  # an empty query is dropped
            self.headers,
        )
        if self.method == b"POST" and path in repeated_paths:
            self.repeated_head = head
        return head

    @property
    def has_body(self) -> bool:
        """Whether its head announces a body."""
        return self.announced_size() > 0 or any(name == b"transfer-encoding" for name, _ in self.headers)

    def announced_size(self) -> int:
        """How long its head says that the body is, in bytes; 0 where it says nothing."""
        for name, value in self.headers:
            if name == LENGTH:
                return length_of(value)
        return 0

    def take_body(self) -> bytes:
        """All of the body that came. It is not kept here: the last request of a connection is known until the next."""
        parts, self.body = self.body, []
        return parts[0] if len(parts) == 1 else b"".join(parts)
