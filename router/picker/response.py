"""An answer on its way from a worker to a client, as far as Envoy tells of it.

`Process` tells of the head, and where it is configured to, of the body. Where it does not, an answer is over when the
stream is, also where nothing was told of its head; and a second filter of Envoy's may show the bytes beside:
`observed`. Without it the end of the prefill is taken to come when it was expected to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from router.forwarding.proxied_request import ProxiedRequest
from router.picker import ext_proc_pb2 as pb
from router.routing.assignment import Assignment
from router.upstream import ResponseHandler, ResponseHead

_Mode = pb.ProcessingMode


class Observation(Enum):
    """What has been shown of an answer by the second filter."""

    NOTHING = auto()
    SOME = auto()  # and more is wanted
    ENOUGH = auto()


class PickedResponse:
    """What is known of an answer. `handler` hears of it: the exchange, or its prefill and decode.

    `mode`: how Envoy sends its body here.
    """

    __slots__ = ("_early", "_unseen", "handler", "head", "mode", "observation", "proxied")

    def __init__(self, proxied: ProxiedRequest, mode: int) -> None:
        self.mode = mode
        self.handler: ResponseHandler | None = None
        self.head: ResponseHead | None = None
        self.observation = Observation.NOTHING
        self.proxied = proxied
        self._early: list[tuple[bytes, bool]] = []  # shown before the head came
        self._unseen: asyncio.TimerHandle | None = None

    @property
    def ends_unseen(self) -> bool:
        """Whether the answer is under way, and Envoy would not say that it came to its end."""
        return self.head is not None and self.mode == _Mode.NONE and not self.proxied.over

    def begin(self, head: ResponseHead, ended: bool) -> None:
        """The worker's head came."""
        assert self.handler is not None
        self.head = head
        self.handler.on_head(head, b"", ended)
        early, self._early = self._early, []
        for data, last in early:
            self.more(data, last)
        assignment = self.proxied.assignment
        if self.mode == _Mode.NONE and not self.proxied.over and assignment is not None:
            if head.is_stream:  # whose head may come before its first event
                self._expect_first_byte(assignment)
            else:
                assignment.reservation.first_byte()

    def untold(self) -> None:
        """Envoy will not tell of the head either: the end of the prefill is taken to come when it is expected to, and
        the worker is not judged by when it answers."""
        assignment = self.proxied.assignment
        if assignment is not None:
            assignment.attempt.waits_for_another()
            self._expect_first_byte(assignment)

    def _expect_first_byte(self, assignment: Assignment) -> None:
        self.forget_timer()
        reservation = assignment.reservation
        self._unseen = asyncio.get_running_loop().call_later(reservation.backlog, reservation.first_byte)

    def more(self, data: bytes, ended: bool) -> None:
        """Bytes of the body that the worker sent."""
        if self.handler is not None and self.head is not None and not self.proxied.over:
            self.handler.on_body(data, ended)

    def observed(self, data: bytes, ended: bool, wants_rest: Callable[[], bool]) -> bool:
        """Bytes are shown beside. Whether more of them are wanted; `wants_rest` is asked after the first."""
        if self.proxied.over or self.mode != _Mode.NONE:
            return False
        first, self.observation = self.observation is Observation.NOTHING, Observation.SOME
        if self.head is not None:
            self.more(data, ended)
        else:
            self._early.append((data, ended))
        if first and not ended and not wants_rest():
            self.observation = Observation.ENOUGH
        return self.observation is Observation.SOME and not ended

    def forget_timer(self) -> None:
        """Nothing is waited for."""
        if self._unseen is not None:
            self._unseen.cancel()
