"""A request's body, as Envoy sends it in messages."""

from __future__ import annotations


class RequestBody:
    """Parts of a body, and in the end all of it. `trailers`: they follow it."""

    __slots__ = ("_parts", "size", "trailers")

    def __init__(self) -> None:
        self.size = 0
        self.trailers = False
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """More of it came."""
        self._parts.append(part)
        self.size += len(part)

    def whole(self) -> bytes:
        """All of it: the same object whenever it is asked for."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def drop(self) -> None:
        """It is sent."""
        self._parts = []
