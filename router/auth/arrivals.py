"""The bodies that are arriving: bounds on the size and time of each, and on what all together hold."""

from __future__ import annotations

from http_api.errors import RequestError
from router.settings import ServerSettings


class Arrivals:
    """Counts the bytes of bodies that are not complete yet. Beyond `limit` bytes, those that have more than an equal
    share of it are refused: who sends little is not held up by who sends much."""

    __slots__ = ("_bodies", "_bytes", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._bodies = 0

    @property
    def bytes(self) -> int:
        """What is held now."""
        return self._bytes

    def add(self, before: int, more: int) -> None:
        """A body of which `before` bytes came has more of them. Raises RequestError (503), which adds nothing."""
        first = not before and more > 0
        bodies = self._bodies + first
        if self._bytes + more > self._limit and (before + more) * bodies > self._limit:
            raise RequestError(
                "Too many large bodies arrive at once. Try again in a second.",
                status=503,
                type="service_unavailable",
                code="too_many_bytes",
                retry_after=1,
            )
        self._bodies = bodies
        self._bytes += more

    def end(self, size: int) -> None:
        """A body of so many bytes is complete, or will not be."""
        if size:
            self._bodies -= 1
            self._bytes -= size


def too_large(settings: ServerSettings) -> RequestError:
    """What a body of too many bytes is refused with."""
    return RequestError(
        f"The body is larger than {settings.max_body_bytes} bytes. Send less, or raise server.max_body_bytes.",
        status=413,
    )


def too_slow(settings: ServerSettings) -> RequestError:
    """What a body that does not come is refused with."""
    return RequestError(
        f"The body did not come within {settings.body_timeout} s. Send it faster, or raise server.body_timeout.",
        status=408,
        type="timeout_error",
    )
