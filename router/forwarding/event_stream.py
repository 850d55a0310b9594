"""The rest of a stream once nobody looks at it: the worker's chunks of events, passed on as they came.

Between two chunks of a stream nothing stays in the processor's caches, and each object that is touched costs more than
what is done with it. So there is one here for all of it, and it touches few.
"""

from __future__ import annotations

from collections.abc import Callable

from router.apis.asked_usage import HiddenUsage
from router.apis.usage import UsageTail
from router.fleet.health import Health
from router.upstream.connection import Passage


class EventStream(Passage):
    """A stream from a worker to a client."""

    __slots__ = ("_health", "_hidden", "_tail", "_write")

    def __init__(
        self, write: Callable[[bytes], object], health: Health, tail: UsageTail, hidden: HiddenUsage | None
    ) -> None:
        """`write` sends chunks to the client as they are, `health` hears that the worker lives, and `tail` gets those
        that tell of usage. What is `hidden` of the stream does not pass here."""
        self._write = write
        self._health = health
        self._tail = tail
        self._hidden = hidden

    def pass_on(self, chunks: bytes) -> bool:
        if self._hidden is not None and not self._hidden.lets_pass(chunks):
            return False
        self._health.heard()
        if b'"usage"' in chunks and b'"usage":null' not in chunks:
            self._tail.feed(chunks)
        self._write(chunks)
        return True
