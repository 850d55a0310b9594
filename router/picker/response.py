"""A worker's response on its way to a client, as far as Envoy shows it.

Envoy's settings decide what the picker receives of a response:

- The head and the body, in the request's own call.
- Only the head, or nothing. Then the response ends with the call, and the end of its prefill is estimated.
- A copy of the body from a second filter, in another call (`observed`).
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
    """The part of a response that the second filter has shown."""

    NOTHING = auto()
    SOME = auto()  # more is wanted
    ENOUGH = auto()  # no more is wanted


class PickedResponse:
    """The known part of a response. `handler` receives it; `mode` is Envoy's mode for its body."""

    __slots__ = ("_early", "_unseen", "handler", "head", "mode", "observation", "proxied")

    def __init__(self, proxied: ProxiedRequest, mode: int) -> None:
        self.mode = mode
        self.handler: ResponseHandler | None = None
        self.head: ResponseHead | None = None
        self.observation = Observation.NOTHING
        self.proxied = proxied
        self._early: list[tuple[bytes, bool]] = []  # observed before the head arrived
        self._unseen: asyncio.TimerHandle | None = None

    @property
    def ends_unseen(self) -> bool:
        """True while a response is being sent whose end Envoy does not report."""
        return self.head is not None and self.mode == _Mode.NONE and not self.proxied.over

    def begin(self, head: ResponseHead, ended: bool) -> None:
        """Receive the worker's head."""
        assert self.handler is not None
        self.head = head
        self.handler.on_head(head, b"", ended)
        early, self._early = self._early, []
        for data, last in early:
            self.more(data, last)
        assignment = self.proxied.assignment
        if self.mode == _Mode.NONE and not self.proxied.over and assignment is not None:
            if head.is_stream:  # a stream's head may precede its first token
                self._expect_first_byte(assignment)
            else:
                assignment.reservation.first_byte()

    def expect_no_head(self) -> None:
        """Prepare for a response without a head: prefills end as expected, and no response time is measured."""
        assignment = self.proxied.assignment
        if assignment is not None:
            assignment.attempt.waits_for_another()
            self._expect_first_byte(assignment)

    def _expect_first_byte(self, assignment: Assignment) -> None:
        self.forget_timer()
        reservation = assignment.reservation
        self._unseen = asyncio.get_running_loop().call_later(reservation.backlog, reservation.first_byte)

    def more(self, data: bytes, ended: bool) -> None:
        """Receive bytes of the worker's body."""
        if self.handler is not None and self.head is not None and not self.proxied.over:
            self.handler.on_body(data, ended)

    def observed(self, data: bytes, ended: bool, wants_rest: Callable[[], bool]) -> bool:
        """Receive bytes from the second filter. Return whether more are wanted; `wants_rest` decides at the first."""
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
        """Cancel the timer for the estimated end of the prefill."""
        if self._unseen is not None:
            self._unseen.cancel()
