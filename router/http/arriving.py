"""One account of the bytes that clients and workers have begun to send: bodies of requests, messages of WebSockets."""

from __future__ import annotations

from mypy_extensions import trait

from http_api.errors import RequestError


@trait
class ArrivingMessage:
    """A WebSocket whose unfinished message is counted."""

    def refuse(self) -> None:
        """Release the message and close the WebSocket, because too many bytes arrive at once."""
        raise NotImplementedError


class ArrivingBytes:
    """The bytes of bodies and messages that are being received, within a limit.

    Beyond `limit` bytes, what is larger than an equal share of the limit is refused, so that large bodies do not block
    small ones: a body when it grows, and the largest messages when anything grows.
    """

    __slots__ = ("_bodies", "_bytes", "_limit", "_messages")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._bodies = 0
        self._messages: dict[ArrivingMessage, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes that are held now."""
        return self._bytes

    def add(self, before: int, more: int) -> None:
        """Count `more` bytes of a body, after `before`. Raises RequestError (503) and then counts nothing."""
        first = not before and more > 0
        bodies = self._bodies + first
        beyond = self._bytes + more > self._limit
        if beyond and (before + more) * (bodies + len(self._messages)) > self._limit:
            raise RequestError(
                "Too many large bodies are being received. Retry in one second.",
                status=503,
                type="service_unavailable",
                code="too_many_bytes",
                retry_after=1,
            )
        self._bodies = bodies
        self._bytes += more
        if beyond and self._messages:
            self._refuse_largest()

    def end(self, size: int) -> None:
        """Release the `size` bytes of a body that is complete or was aborted."""
        if size:
            self._bodies -= 1
            self._bytes -= size

    def hold(self, message: ArrivingMessage, size: int) -> None:
        """Count a message with `size` bytes now; 0: it is complete or was aborted. The largest may be refused."""
        self._bytes += size - self._messages.pop(message, 0)
        if size:
            self._messages[message] = size
            if self._bytes > self._limit:
                self._refuse_largest()

    def _refuse_largest(self) -> None:
        """Refuse the largest messages, until the limit holds or bodies alone exceed their share."""
        while self._bytes > self._limit and self._messages:
            largest = max(self._messages, key=self._messages.__getitem__)
            size = self._messages[largest]
            if size * (self._bodies + len(self._messages)) <= self._limit:
                return
            self.hold(largest, 0)
            largest.refuse()
