"""The rest of a stream once it need not be read: the worker's chunks of events, forwarded as they came.

Between two chunks of a stream nothing stays in the processor's caches, and each object that is touched costs more than
what is done with it. So there is one here for all of it, and it touches few.
"""

from __future__ import annotations

from typing import Final, Protocol

from router.apis.usage import HiddenUsage, UsageTail
from router.fleet.health import Health
from router.upstream.response_handler import ChunkForwarder

_USAGE: Final = b'"usage"'
_NONE: Final = b":null"


class ChunkWriter(Protocol):
    """Where whole chunks are written, as HTTP/1.1 frames them."""

    def write(self, data: bytes) -> object:
        """Send these on."""


class EventStream(ChunkForwarder):
    """A stream from a worker to a client."""

    __slots__ = ("_client", "_health", "_hidden", "_tail")

    def __init__(self, client: ChunkWriter, health: Health, tail: UsageTail, hidden: HiddenUsage | None) -> None:
        """`health` hears that the worker lives, and `tail` gets the chunks that tell of usage. What is `hidden` of the
        stream does not pass here."""
        self._client = client
        self._health = health
        self._tail = tail
        self._hidden = hidden

    def forward(self, chunks: bytes) -> bool:
        if self._hidden is not None and not self._hidden.can_forward(chunks):
            return False
        self._health.heard()
        place = chunks.rfind(_USAGE)  # `in` would first look whether it is asked for a number
        if place >= 0:
            place += len(_USAGE)
            if chunks[place : place + len(_NONE)] != _NONE:
                self._tail.feed(chunks)
        self._client.write(chunks)
        return True
