"""Calls of sessions that wait for room beside the contexts of live sessions (`router.programs`).

Such a call is tried again after each event of the queue, and once a second, because idle sessions leave. At most
`ROOM_TRIES` calls are tried behind one that has no room, and none behind one that has waited for `OVERTAKING_SECONDS`.
After `ROOM_SECONDS` a session that has begun is held no more, and a new one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from router.admission.ticket import Ticket, WaitingRequest, WaitReason
from router.apis.requests import RoutedRequest
from router.programs import Call, Gate, RankCapacity
from router.routing.assignment import Assignment, Selection
from router.routing.ranks import RoutableRank

ROOM_TRIES = 8
OVERTAKING_SECONDS = 120.0
ROOM_SECONDS = 300.0
_INTERVAL = 1.0


class Room:
    """The waiting calls, and the gate that holds them. `wake`: lets the queue choose again."""

    def __init__(self, gate: Gate, wake: Callable[[], None]) -> None:
        self._gate = gate
        self._wake = wake
        self._waiting: set[WaitingRequest] = set()
        self._next: asyncio.TimerHandle | None = None

    def __contains__(self, request: WaitingRequest) -> bool:
        """Return whether a request waits for room."""
        return request in self._waiting

    def call_of(self, prompt: RoutedRequest, ticket: Ticket) -> Call | None:
        """Return a request as a call of its session; None for names of users, and where prompts are not known."""
        identity, hints = prompt.identity, prompt.hints
        if identity is None or identity.by_user or len(prompt.identities) != 1 or not prompt.reads_cache:
            return None
        key = (ticket.tenant, prompt.name, prompt.cache_salt, identity.session)
        return self._gate.call(key, prompt.tokens, hints is not None and bool(hints.final))

    def passes(self, call: Call, selection: Selection) -> bool:
        """Return whether a call may go to any target."""
        call.held = False
        if selection.disaggregation is not None or len(selection.hashes) != 1:
            return True
        return self._gate.passes(call, selection.best_overlap, bool(self._waiting))

    def closed(
        self, call: Call, selection: Selection, ranks: Collection[RoutableRank], arrives: bool
    ) -> Collection[tuple[str, int]] | None:
        """Return the workers and ranks without room for a call that does not pass; None if all have none: it waits.

        `arrives`: it did not wait yet, so that calls which wait are tried first.
        """
        call.held = True
        if arrives and self._waiting:
            return None
        sizes = [RankCapacity(rank.target, rank.worker.capacity_tokens) for rank in ranks]
        closed = self._gate.without_room(sizes, selection.hashes[0])
        call.held = len(closed) == len(sizes)
        return None if call.held else closed

    def sent(self, call: Call, assignment: Assignment) -> None:
        """Charge a call's session to the target that it is sent to, until the request ends."""
        hashes = assignment.selection.hashes
        if len(hashes) == 1:
            self._gate.sent(call, assignment.target, hashes[0])
            assignment.call = call
            assignment.on_release.append(call)

    def set_reason(self, request: WaitingRequest, reason: WaitReason) -> None:
        """Set why a request waits."""
        request.reason = reason
        if reason is not WaitReason.WORKING_SET:
            self._waiting.discard(request)
            return
        self._waiting.add(request)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(_INTERVAL, self._try_again)

    def left(self, request: WaitingRequest) -> None:
        """Forget a request that waits no more."""
        self._waiting.discard(request)

    def release(self, request: WaitingRequest) -> bool:
        """Hold a call no more that has waited for `ROOM_SECONDS`. Return False for a new session, which is refused."""
        call = request.ticket.call
        if call is None or not call.session.begun:
            return False
        call.exempt = True
        self.set_reason(request, WaitReason.LATE_BINDING)
        return True

    def _try_again(self) -> None:
        self._next = None
        if self._waiting:
            self._next = asyncio.get_running_loop().call_later(_INTERVAL, self._try_again)
            self._wake()
