"""The bodies that are arriving: bounds on the size and time of each, and on what all together hold."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from http_api.errors import RequestError
from router.auth.bodies import BodyCheck
from router.http.headers import Headers, length_of
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


class ArrivingBody:
    """ASGI's `receive` of one request, with the bounds that hold for its body."""

    def __init__(self, receive: Receive, headers: Headers, settings: ServerSettings, arrivals: Arrivals) -> None:
        announced = [value for name, value in headers if name == b"content-length"]
        self.complete = not announced and all(name != b"transfer-encoding" for name, _ in headers)
        self._announced = max(map(length_of, announced), default=0)
        self._receive = receive
        self._settings = settings
        self._arrivals = arrivals
        self._size = 0
        self._deadline: float | None = None

    async def __call__(self) -> Message:
        """The next message. Raises RequestError: 413 for too large a body, 408 for too slow a one, 503."""
        if self.complete:
            return await self._receive()
        settings = self._settings
        if self._announced > settings.max_body_bytes:
            raise too_large(settings)
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + settings.body_timeout
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            raise too_slow(settings) from error
        if message["type"] == "http.request":
            more = len(message.get("body", b""))
            if self._size + more > settings.max_body_bytes:
                raise too_large(settings)
            self._arrivals.add(self._size, more)
            self._size += more
            if not message.get("more_body", False):
                self.complete = True
                self.end()
        return message

    def end(self) -> None:
        """It is complete, or nothing more of it is wanted."""
        self._arrivals.end(self._size)
        self._size = 0


class WholeBody:
    """ASGI's `receive` of a request that the service answers itself: its body at once, when it makes not too much work.

    A body of which `bodies` does not see that at a glance is checked in a thread. `wanted`: without it the answer may
    have begun, and one whose body is refused is over.
    """

    def __init__(self, receive: Receive, bodies: BodyCheck, wanted: bool) -> None:
        self._receive = receive
        self._bodies = bodies
        self._wanted = wanted
        self._given = False

    async def __call__(self) -> Message:
        """The next message. Raises RequestError as `receive` does, and 413."""
        if not self._wanted:
            try:
                return await self._receive()
            except RequestError:
                return {"type": "http.disconnect"}
        if self._given:
            return await self._receive()
        parts: list[bytes] = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        self._given = True
        body = b"".join(parts)
        if not self._bodies.seems_little(body):
            await asyncio.to_thread(self._bodies.check_amount, body)
        return {"type": "http.request", "body": body, "more_body": False}


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
