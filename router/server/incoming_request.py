"""A client's request as the parser reads it, before anything is done with it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from router.forwarding.request_head import RequestHead
from router.http.headers import Headers, length_of
from router.http.response_head import LENGTH


class IncomingRequest:
    """A request, of which more may come. Names of headers are in lower case.

    `size`: bytes of its body that came, which `body` holds as long as they are not too many. `complete`: all of it
    came. `upgrades`: it asks for another protocol. `asgi`: it was given to the application.
    """

    __slots__ = (
        "asgi",
        "body",
        "complete",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "served_head",
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
        self.asgi = False
        self.served_head: RequestHead | None = None  # of a request that is not for the application, once that is known

    def find_endpoint(self, paths: AbstractSet[bytes]) -> RequestHead | None:
        """Its head, when it is a POST to one of these; None when it is the application's."""
        path, _, query = self.target.partition(b"?")
        if self.method == b"POST" and path in paths:
            target = self.target if query else path  # ASGI does not tell an empty query from none
            self.served_head = RequestHead("POST", path.decode(), target, self.headers)
        return self.served_head

    def has_origin(self) -> bool:
        """Whether a browser sends it for a page, and says of which site."""
        return any(name == b"origin" for name, _ in self.headers)

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
